"""Which packages of a newer Debian suite set-up accepts: the pinned ones, or newer ones that an
index signs which has not expired.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.program import ROOT

LIB = ROOT / "scripts/lib"


def _package(folder: Path, version: str, content: str = "") -> Path:
    control = folder / "tree/DEBIAN/control"
    control.parent.mkdir(parents=True, exist_ok=True)
    control.write_text(
        f"Package: criu\nVersion: {version}\nArchitecture: amd64\n"
        f"Maintainer: test <test@localhost>\nDescription: test {content}\n"
    )
    path = folder / "criu.deb"
    build = ["dpkg-deb", "--root-owner-group", "-b", str(folder / "tree"), str(path)]
    subprocess.run(build, check=True, capture_output=True, timeout=60)
    return path


@pytest.mark.parametrize(
    ("version", "content", "expiry", "unpinned", "accepted"),
    [
        ("4.2.1-1", "", "2001-01-01", "", True),  # the pinned one, in an index of any age
        ("4.2.1-1", "altered", "2999-01-01", "", False),
        ("4.1-1", "", "2999-01-01", "", False),
        ("4.3-1", "", "2999-01-01", "", True),
        ("4.3-1", "", "2001-01-01", "", False),  # an old signed index again
        ("4.3-1", "", "", "", False),
        ("4.1-1", "", "2001-01-01", "1", True),
    ],
)
def test_which_packages_are_accepted(
    tmp_path: Path, version: str, content: str, expiry: str, unpinned: str, accepted: bool
) -> None:
    pinned = hashlib.sha256(_package(tmp_path, "4.2.1-1").read_bytes()).hexdigest()
    (tmp_path / "criu.pins").write_text(f"{pinned} criu amd64 4.2.1-1\n")
    if (version, content) != ("4.2.1-1", ""):
        _package(tmp_path, version, content)
    lists = tmp_path / "work/state/lists"
    lists.mkdir(parents=True)
    until = f"Valid-Until: {expiry}\n" if expiry else ""
    (lists / "mirror_dists_forky_InRelease").write_text(f"Date: today\n{until}")
    program = (
        f'set -eu; . "{LIB}/common.sh"; . "{LIB}/private_apt.sh"; parts=$1 work=$1/work\n'
        'accept_packages forky "$1/criu.deb"; echo accepted'
    )
    done = subprocess.run(
        ["sh", "-c", program, "sh", str(tmp_path)],
        env=os.environ | {"CRIUCTL_UNPINNED": unpinned},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode == 0, "accepted\n" in done.stdout) == (accepted, accepted), done.stderr
    assert accepted or "CRIUCTL_UNPINNED=1" in done.stderr


def test_every_package_is_pinned_by_a_digest() -> None:
    lines = (LIB / "criu.pins").read_text().splitlines()[1:]
    pins = {tuple(line.split()[1:3]): line.split()[0] for line in lines}
    assert all(len(digest) == 64 for digest in pins.values())
    assert {("criu", "amd64"), ("criu", "arm64"), ("python3-pycriu", "all")} <= set(pins)
    assert len(pins) == len(lines)


def _wheel(path: Path, content: str) -> None:
    information = "pinned-1.dist-info"
    files = {
        "pinned.py": content,
        f"{information}/METADATA": "Metadata-Version: 2.1\nName: pinned\nVersion: 1\n",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{information}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


def test_a_python_package_with_another_digest_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "pinned-1-py3-none-any.whl"
    _wheel(wheel, "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / "python.lock").write_text(f"pinned==1 --hash=sha256:{digest}\n")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=120)
    program = f'set -eu; . "{LIB}/common.sh"; . "{LIB}/python.sh"; parts=$1; pip_locked "$1/venv"'
    for content, code in (("altered = True", 1), ("", 0)):
        _wheel(wheel, content)
        if not content:  # the archive holds the time of its files
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            (tmp_path / "python.lock").write_text(f"pinned==1 --hash=sha256:{digest}\n")
        done = subprocess.run(
            ["sh", "-c", program, "sh", str(tmp_path)],
            env=os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == code, done.stderr
        assert not code or "DO NOT MATCH THE HASHES" in done.stderr
