"""CRIU's findings about the kernel are cached where CRIU does not, and mislead no other program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BEGINNING = """
import os, subprocess, sys
from pathlib import Path
from criuctl.config import Config
from criuctl.criu import binary, features

argv = binary.find(Config()).argv
cache = Path("/run/criu.kdat")

def loads(fds=()):
    ask = [*argv, "--no-default-config", "check", "--feature", "uffd-noncoop", "-v4"]
    into = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(ask, pass_fds=fds, text=True, check=True, **into)
    return "Loaded kdat cache" in done.stdout

def kept():
    return sorted(os.listdir(features.FOLDER))
"""


def _with(kind: str, code: str, cwd: Path) -> None:
    """Run it in a mount namespace in which ``/run`` is an empty file system of this kind."""
    script = f'mount -t {kind} none /run && exec "$@"'
    command = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        script,
        "sh",
        sys.executable,
        "-c",
        BEGINNING + code,
    ]
    done = subprocess.run(command, cwd=cwd, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_it_is_for_who_has_been_given_it(tmp_path: Path) -> None:
    code = """
with features.cache_descriptors(argv) as fds:
    assert len(fds) == 1 and loads(fds)
    assert not loads()  # and it has removed the link
with features.cache_descriptors(argv) as fds:
    assert loads(fds)
    with features.cache_descriptors(argv) as more:
        assert loads(more) and not loads(fds)
assert features.known(argv)
assert len(kept()) == 1
"""
    _with("ramfs", code, tmp_path)


def test_where_criu_keeps_it_itself_it_is_left_to_it(tmp_path: Path) -> None:
    code = """
with features.cache_descriptors(argv) as fds:
    assert fds == [] and not features.known(argv)
    loads()
    assert loads() and features.known(argv)
assert cache.is_file() and not cache.is_symlink() and not features.FOLDER.exists()
"""
    _with("tmpfs", code, tmp_path)


def test_what_is_not_of_this_boot_or_criu_is_not_used(tmp_path: Path) -> None:
    code = """
(features.FOLDER / "of-another-boot").mkdir(parents=True)
script = Path("criu")
script.write_text("#!/bin/sh\\nexec " + " ".join(argv) + ' "$@"\\n')
script.chmod(0o755)
argv = [str(script.absolute())]
with features.cache_descriptors(argv) as fds:
    assert loads(fds)
first = kept()
assert len(first) == 1
script.write_text(script.read_text() + "# another one")
with features.cache_descriptors(argv) as fds:
    assert loads(fds)
assert len(kept()) == 2 and set(first) < set(kept())
for number in range(10):  # as many wrappers: the oldest go
    script.write_text(f"#!/bin/sh\\n# {number}")
    with features.cache_descriptors(argv) as fds:
        assert fds == []
assert len(kept()) == 8 and not set(first) & set(kept())
"""
    _with("ramfs", code, tmp_path)


@pytest.mark.parametrize("broken", ["exit 1", "kill -9 $$", "rm -f /run/criu.kdat"])
def test_a_criu_that_says_nothing_is_asked_once(broken: str, tmp_path: Path) -> None:
    code = f"""
script = Path("criu")
script.write_text("#!/bin/sh\\necho x >>asked\\n{broken}\\n")
script.chmod(0o755)
for _ in range(2):
    with features.cache_descriptors([str(script.absolute())]) as fds:
        assert fds == []
assert Path("asked").read_text() == "x\\n"
assert not os.path.lexists(cache)
"""
    _with("ramfs", code, tmp_path)


def test_where_nothing_can_be_kept_criu_finds_out_for_itself(tmp_path: Path) -> None:
    code = """
script = Path("criu")
script.write_text("#!/bin/sh\\necho x >>asked\\nexec " + " ".join(argv) + ' "$@"\\n')
script.chmod(0o755)
subprocess.run(["mount", "-o", "remount,bind,ro", "/run"], check=True)
with features.cache_descriptors([str(script.absolute())]) as fds:
    assert fds == [] and not loads()
assert not Path("asked").exists()  # which would take longer than what it does for itself
assert not features.known(argv) and not os.path.lexists(cache)
"""
    _with("ramfs", code, tmp_path)


def test_few_descriptors(tmp_path: Path) -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
with features.cache_descriptors(argv) as fds:
    assert len(fds) == 1 and fds[0] < 240  # a holder has to move them about when it starts CRIU
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
with features.cache_descriptors(argv) as fds:
    assert fds == []
"""
    _with("ramfs", code, tmp_path)
