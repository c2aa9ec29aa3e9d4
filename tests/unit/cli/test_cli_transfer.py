"""export, import and diff as a user types them: streams, passphrases on a terminal, exit codes,
words.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest
from support import checkpoints as kit
from support.program import CRIUCTL, clean_environment

from criuctl.checkpoint.repository import Repository
from criuctl.store.local import LocalStore

Run = Callable[..., subprocess.CompletedProcess[str]]


class Host:
    """A store in a folder and the configuration with which criuctl uses it."""

    def __init__(self, run: Run, path: Path) -> None:
        self.run, self.path = run, path
        self.env = {
            f"CRIUCTL_{n}": str(path / n.lower())
            for n in ("STORE", "STATE_DIR", "CACHE_DIR", "KEY_DIR")
        }

    def __call__(
        self, *args: str, code: int = 0, **streams: object
    ) -> subprocess.CompletedProcess[str]:
        done = self.run(*args, env=self.env, **streams)
        assert done.returncode == code, (done.stdout, done.stderr)
        return done

    def type(self, *args: str, answers: tuple[str, ...], code: int = 0) -> str:
        """On a terminal, with an answer to every question."""
        child = pexpect.spawn(
            CRIUCTL[0],
            [*CRIUCTL[1:], *args],
            env=clean_environment(**self.env),
            timeout=120,
            encoding="utf-8",
        )
        seen = ""
        try:
            for answer in answers:
                child.expect("Passphrase of the file|Once more")
                seen += f"{child.before}{child.after}"
                child.expect(": ")
                child.sendline(answer)
            child.expect(pexpect.EOF)
            child.wait()
            assert child.exitstatus == code, child.before
            return f"{seen}{child.before}"
        finally:
            child.close(force=True)


@pytest.fixture
def source(criuctl: Run, tmp_path: Path) -> Host:
    """A host whose encrypted store has two checkpoints of one session."""
    host = Host(criuctl, tmp_path / "source")
    config = kit.config(host.path)
    store = LocalStore(host.env["CRIUCTL_STORE"])
    host.env["CRIUCTL_KEY_DIR"], host.env["CRIUCTL_CACHE_DIR"] = config.key_dir, config.cache_dir
    with Repository.init(store, encryption=True, config=config) as repository:
        kit.write(repository)
        kit.write(repository, kit.Content(kit.SMALL.memory, kit.SMALL.images, b"other"))
    return host


@pytest.fixture
def target(criuctl: Run, tmp_path: Path) -> Host:
    """A host that has nothing yet."""
    return Host(criuctl, tmp_path / "target")


def test_a_passphrase_is_typed_and_the_other_host_needs_nothing_else(
    source: Host, target: Host, tmp_path: Path
) -> None:
    file = str(tmp_path / "web.criuctl")
    seen = source.type(
        "export", "web@1", file, "--passphrase", answers=("s3cret words", "s3cret words")
    )
    assert "exported to" in seen
    assert "Its passphrase opens it." in seen
    assert "s3cret" not in seen
    assert "exists" in source("export", "web", file, code=9).stderr
    done = target("import", file, "--json", code=7)
    assert json.loads(done.stdout)["error"]["code"] == "key-missing"
    target.type("import", file, answers=("wrong",), code=8)
    assert "web@1" in target.type("import", file, answers=("s3cret words",))
    again = json.loads(
        target(
            "import", file, "--json", "--passphrase-file", str(_secret(tmp_path, "s3cret words"))
        ).stdout
    )
    assert (again["imported"], again["session"], again["number"]) == (False, "web", 1)
    shown = target("show", "web")
    assert f"it was web@1 of store {again['origin']['store'][:12]}" in shown.stdout


def _exported(source: Host, tmp_path: Path) -> str:
    file = str(tmp_path / "web.criuctl")
    source("export", "web@1", file, "--no-encrypt")
    return file


@pytest.mark.parametrize("more", [(), ("-q",), ("--json",)])
def test_the_first_use_of_a_store_makes_its_key_and_says_where(
    source: Host, target: Host, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """Once, on standard error, whatever the output is; later commands find it."""
    file = _exported(source, tmp_path)
    done = target("import", file, *more)
    (key,) = Path(target.env["CRIUCTL_KEY_DIR"]).iterdir()
    assert key.stat().st_mode & 0o777 == 0o600
    assert done.stderr.count(f"encrypted by the key in {key}") == 1
    assert "store key --export" in done.stderr
    assert key.read_text().split()[-1] not in done.stdout + done.stderr
    again = target("import", file, *more)
    assert str(key) not in again.stderr
    assert str(key) in target("store", "key").stdout
    key.unlink()
    lost = target("list", code=7)
    assert str(key) in lost.stderr and "criuctl help key-lost" in lost.stderr


def test_a_first_use_without_encryption(source: Host, target: Host, tmp_path: Path) -> None:
    file = _exported(source, tmp_path)
    done = target("import", file, "--no-encrypt")
    assert "not encrypted" in done.stderr and not Path(target.env["CRIUCTL_KEY_DIR"]).exists()
    assert "not encrypted" in target("store", "info").stdout
    refused = source("import", file, "--no-encrypt", code=9).stderr
    assert f"the store in {source.env['CRIUCTL_STORE']} exists and is encrypted" in refused


def _secret(folder: Path, text: str) -> Path:
    path = folder / "phrase"
    path.write_text(text + "\n")
    path.chmod(0o600)
    return path


def test_from_one_host_to_the_other_through_a_pipe(source: Host, target: Host) -> None:
    with subprocess.Popen(
        [*CRIUCTL, "export", "web", "-", "--no-encrypt"],
        env=clean_environment(**source.env),
        stdout=subprocess.PIPE,
    ) as sender:
        done = target(
            "import",
            "-",
            "--json",
            stdin=sender.stdout,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    assert sender.returncode == 0
    body = json.loads(done.stdout)
    assert (body["imported"], body["number"], body["origin"]["number"], body["file"]) == (
        True,
        1,
        2,
        "standard input",
    )
    reading, writing = os.pipe()
    os.close(writing)
    with open(reading) as empty:
        done = target("import", "-", code=8, stdin=empty)
    assert "standard input is not an exported checkpoint" in done.stderr


def test_diff_tells_people(source: Host) -> None:
    done = source("diff", "web@1", "web@2")
    assert done.stdout.startswith("web@1 -> web@2: ")
    assert "processes: none changed, 2 the same" in done.stdout
    assert (
        "  ~ /srv/canary-path (carried, 5 B): size 11988 -> 5, contents changed (5 B)\n"
        in done.stdout
    )
    assert done.stdout.endswith(
        "memory: 520 KiB -> 520 KiB; 0 B changed, 0 B new, 0 B gone, by windows of 256 KiB\n"
    )
    assert source("diff", "web@1", "web@2", "-q").stdout == "web@1 web@2\n"
    done = source("diff", "web", "web@2")
    assert "web@2 -> web@2: the same checkpoint\nno difference: 2 processes" in done.stdout
    assert source("diff", "web", "web", "-q").stdout == ""
    assert source("diff", "web", "nobody", code=3).stdout == ""


def test_what_makes_no_sense_is_2(source: Host) -> None:
    for args in (
        ("export", "web", "-", "--json"),
        ("export", "web", "x", "--no-encrypt", "--key-file", "y"),
        ("export", "web", "x", "--passphrase"),  # no terminal to ask on
        ("import", "x", "--key-file", "y", "--passphrase"),
        ("import", "/proc/nonexistent/x"),
        ("import", str(source.path)),
    ):
        source(*args, code=2)
