"""What a message advises on a host without CRIU, by distribution; the program is tested where it
runs (integration/test_wheel.py).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.program import CRIUCTL, ROOT, run_program

from criuctl import preparation

DEBIAN = "ID=debian\nVERSION_CODENAME=bookworm\nPRETTY_NAME='Debian GNU/Linux 12 (bookworm)'\n"
SYSTEMS = {
    "fedora": ("ID=fedora\n", "dnf install python3 criu"),
    "a relative of fedora": ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', "dnf install"),
    "a relative of ubuntu": ("ID=pop\nID_LIKE='ubuntu debian'\n", "ppa:criu/ppa"),
    "arch": ("ID=arch\n", "pacman -S"),
    "suse": ('ID="opensuse-leap"\nID_LIKE="suse opensuse"\n', "zypper install"),
    "an unknown one": ("ID=void\n", "nft (nftables)"),
    "no file": (None, "nft (nftables)"),
}


def _environ(tmp_path: Path, text: str | None) -> dict[str, str]:
    file = tmp_path / "os-release"
    if text is not None:
        file.write_text(text)
    return {preparation.OS_RELEASE: str(file)}


@pytest.mark.parametrize(("text", "wanted"), SYSTEMS.values(), ids=SYSTEMS)
def test_the_command_for_a_system(tmp_path: Path, text: str | None, wanted: str) -> None:
    environ = _environ(tmp_path, text)
    assert wanted in preparation.advice(environ)
    assert "doctor --fix" not in preparation.advice(environ)


@pytest.mark.parametrize(("text", "wanted"), SYSTEMS.values(), ids=SYSTEMS)
def test_set_up_advises_the_same(tmp_path: Path, text: str | None, wanted: str) -> None:
    """By the same list."""
    done = subprocess.run(
        [ROOT / "scripts/prepare", "--prefix", str(tmp_path / "prefix")],
        env=os.environ | _environ(tmp_path, text),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 13
    assert preparation.by_hand(_environ(tmp_path, text)) in done.stderr
    assert not (tmp_path / "prefix").exists()


def test_on_debian_it_is_this_criuctl_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = _environ(tmp_path, DEBIAN)
    own = tmp_path / "a b/criuctl"
    monkeypatch.setattr(sys, "argv", [str(own)])
    assert f"`'{own}' doctor --fix`" in preparation.advice(environ)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert f"`{sys.executable} -m criuctl doctor --fix`" in preparation.advice(environ)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "`sudo " in preparation.advice(environ)


NOT_ROOT = ("setpriv", "--reuid=65534", "--clear-groups")
REFUSALS: dict[str, tuple[tuple[str, ...], str, list[str], int, str]] = {
    "no terminal to ask at": ((), DEBIAN, ["--fix"], 2, "--fix --yes"),
    "not root": (NOT_ROOT, DEBIAN, ["--fix", "--yes"], 13, "sudo "),
    "another system": ((), "ID=fedora\n", ["--fix", "--yes"], 13, "dnf install"),
    "--yes alone": ((), DEBIAN, ["--yes"], 2, ""),
}


@pytest.mark.parametrize(
    ("prefix", "text", "words", "code", "hint"), REFUSALS.values(), ids=REFUSALS
)
def test_it_refuses_and_names_the_way(
    tmp_path: Path, prefix: tuple[str, ...], text: str, words: list[str], code: int, hint: str
) -> None:
    tmp_path.chmod(0o755)
    environ = _environ(tmp_path, text)
    done = run_program((*prefix, *CRIUCTL), "doctor", *words, "--json", env=environ)
    assert done.returncode == code
    assert hint in json.loads(done.stdout)["error"]["hint"]


@pytest.fixture
def bare(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """criuctl on a host that has no CRIU but what is put into the folder `bin`."""
    (tmp_path / "bin").mkdir()
    program = (
        "import sys; from pathlib import Path; from criuctl.criu import binary; "
        "binary.SETUP_PREFIXES = (); import shutil; which = shutil.which; "
        "shutil.which = lambda name, mode=1, path=None: "
        f"which(name, mode, {str(tmp_path / 'bin')!r}) if name == 'criu' else which(name); "
        "from criuctl.cli.main import program; sys.argv[0] = '/x/criuctl'; program()"
    )
    own = {f"CRIUCTL_{n}_DIR": str(tmp_path / n) for n in ("STATE", "CACHE", "KEY", "RUN")}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        env = own | _environ(tmp_path, DEBIAN) | {"CRIUCTL_STORE": str(tmp_path / "store")}
        done: subprocess.CompletedProcess[str] = run_program(
            (sys.executable, "-c", program), *words, env=env
        )
        return done

    return run


def test_without_criu_a_dump_names_the_command(
    bare: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    with subprocess.Popen(["sleep", "60"]) as target:
        done = bare("dump", str(target.pid))
        target.kill()
    assert done.returncode == 13
    assert "CRIU was not found" in done.stderr and "`/x/criuctl doctor --fix`" in done.stderr


def test_a_criu_that_is_too_old_is_not_used(
    bare: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """It answers by CRIU's own protocol."""
    criu = tmp_path / "bin/criu"
    criu.write_text(
        f"#!{sys.executable}\nimport socket, sys\nfrom criuctl.criu import schema\n"
        "answer = schema.rpc().criu_resp(type=schema.rpc().VERSION, success=True)\n"
        "answer.version.major_number, answer.version.minor_number = 3, 17\n"
        "peer = socket.socket(fileno=int(sys.argv[-1]))\npeer.recv(4096)\n"
        "peer.send(answer.SerializeToString())\n"
    )
    criu.chmod(0o755)
    found = json.loads(bare("doctor", "--json").stdout)["findings"]
    (error,) = [one for one in found if "too old" in one["text"]]
    assert "CRIU 3.17" in error["text"] and "`/x/criuctl doctor --fix`" in error["hint"]
    criu.write_text("#!/bin/sh\nexit 1\n")
    found = json.loads(bare("doctor", "--json").stdout)["findings"]
    assert any("does not answer" in one["text"] for one in found)


def test_the_package_ships_all_parts_of_the_program() -> None:
    """What `prepare` sources, and what its parts read, is in the list of the wheel's files."""
    text = (ROOT / "pyproject.toml").read_text()
    shipped = set(re.findall(r'"scripts/(\S+)" = "criuctl/shipped/\1"', text))
    todo, needed = ["prepare"], set()
    while todo:
        name = todo.pop()
        needed.add(name)
        found = re.findall(r'\$parts/([\w.]+)"?', (ROOT / "scripts" / name).read_text())
        todo += [f"lib/{one}" for one in found if f"lib/{one}" not in needed]
    assert shipped == needed
