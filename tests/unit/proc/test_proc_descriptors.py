"""Open descriptors, read while the program runs."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

from criuctl.proc.descriptors import descriptors

SWAPS = """
import os, sys
null, file = os.open("/dev/null", os.O_RDWR), os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.dup2(null, 100)
print(flush=True)
while True:
    for fd in (file, null):
        os.dup2(fd, 100)
        for _ in range(10_000):
            pass
"""


def test_one_that_becomes_another_file_again_and_again(tmp_path: Path) -> None:
    """As those of a shell that redirects what it runs: name and kind are those of one of the
    files.
    """
    file = str(tmp_path / "file")
    with subprocess.Popen(
        [sys.executable, "-S", "-c", SWAPS, file], stdout=subprocess.PIPE
    ) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            seen = {
                (d.target, d.kind, d.rdev)
                for _ in range(3000)
                for d in descriptors(child.pid)
                if d.fd == 100
            }
        finally:
            child.kill()
    assert seen <= {("/dev/null", "device", os.makedev(1, 3)), (file, "file", 0)}


def test_of_a_process_that_stands_still(tmp_path: Path) -> None:
    """The shorter way shows the same, and the special ones are those that are not plain files."""
    with (
        (tmp_path / "deleted").open("w") as file,
        subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE, stdout=file) as child,
    ):
        os.unlink(file.name)
        try:
            seen = descriptors(child.pid)
            assert [d.kind for d in seen[:2]] == ["pipe", "file"]
            assert seen[1].deleted
            assert descriptors(child.pid, still=True) == seen
            special = [d for d in seen if not (stat.S_ISREG(d.mode) or stat.S_ISDIR(d.mode))]
            assert descriptors(child.pid, still=True, special=True) == special
        finally:
            child.kill()
