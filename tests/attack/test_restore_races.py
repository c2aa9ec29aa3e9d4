"""A user swaps a folder while the restore is under way: between the look at a path and its use
there is nothing to win.
"""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from attack.test_restored_paths import link_to, listening, secret, shadow
from support.laboratory import USER, Laboratory
from support.pauses import paused

pytestmark = pytest.mark.integration
__all__ = ["secret", "shadow"]

SWAPPER = """
import ctypes, os, sys
folder = os.open(sys.argv[1], os.O_RDONLY)
libc = ctypes.CDLL(None)
print("ready", flush=True)
while True:
    libc.renameat2(folder, b"d", folder, b"evil", 2)  # RENAME_EXCHANGE
"""


def restored_with_swap(lab: Laboratory, report: Any, step: str, folder: Path) -> Any:
    """Restore, and have the user's folder `d` become a link when `step` is reached."""
    with paused(lab.criuctl, step, "restore", report["checkpoint"]) as pause:
        link_to(lab, folder)
        pause.go_on()
        code = pause.command.process.wait(120)
    return {"exit_code": code, **pause.command.json()}


def test_right_before_criu(lab: Laboratory, secret: Path, shadow: Path) -> None:
    """CRIU was handed descriptors: the tree has its own files, wherever their paths lead by now."""
    lab.as_user("printf ghost > d/ghost; printf two > d/two; mkdir d/w; mkfifo d/fifo")
    (secret / "fifo").touch(0o600)
    names = ("shadow", "ghost", "two", "fifo")
    pid = lab.start(*[(shadow.with_name(name), os.O_RDWR) for name in names])
    lab.ask(pid, "opened.append(__import__('mmap').mmap(opened[0], 0, 2, 1))")
    lab.ask(pid, f"os.chdir({str(shadow.with_name('w'))!r}), os.write(opened[3], b'unread')")
    lab.as_user("rm d/ghost; ln d/two third; rm d/two")
    report = lab.dump(pid)
    own = {fd: os.stat(shadow.parent / name).st_ino for fd, name in ((0, "shadow"), (3, "fifo"))}
    answer = restored_with_swap(lab, report, "restore", secret)
    assert answer["exit_code"] == 0, answer
    pid = answer["pid"]
    for number, inode in own.items():
        assert lab.ask(pid, f"os.fstat(opened[{number}]).st_ino") == str(inode)
    assert lab.ask(pid, "opened[4][:]") == "b'the hashes'"
    read = "os.pread(opened[1], 9, 0), os.pread(opened[2], 9, 0), os.read(opened[3], 9)"
    assert lab.ask(pid, read) == "(b'ghost', b'two', b'unread')"
    assert os.readlink(f"/proc/{pid}/cwd") == str(lab.folder / "d.old/w")
    assert (secret / "fifo").read_bytes() == b""
    (secret / "fifo").unlink()


def test_between_the_plan_and_criu(lab: Laboratory, secret: Path, shadow: Path) -> None:
    """It is judged again on what CRIU is about to open."""
    report = lab.dump(lab.start((shadow, os.O_RDWR)))
    answer = restored_with_swap(lab, report, "claim", secret)
    assert answer["exit_code"] == 6, answer
    assert str(lab.folder / "d") in answer["error"]["message"]
    assert lab.processes() == []


@pytest.mark.parametrize("step", ["claim", "restore", "post-restore"])
def test_a_socket(lab: Laboratory, secret: Path, shadow: Path, step: str) -> None:
    """The process binds it with its own rights, so that none appears where only root may write."""
    pid = lab.start()
    lab.ask(pid, listening(shadow.with_name("sock")))
    report = lab.dump(pid)
    answer = restored_with_swap(lab, report, step, secret)
    assert answer["exit_code"] == 6, answer
    assert lab.processes() == []


def test_what_root_changes_is_noticed(lab: Laboratory) -> None:
    """Where root alone controls the path CRIU opens it by name; what it has opened is compared."""
    roots = lab.folder.parent / "program"
    roots.mkdir()
    (roots / "data").write_text("as it was")
    report = lab.dump(lab.start((roots / "data", os.O_RDONLY)))
    with paused(lab.criuctl, "restore", "restore", report["checkpoint"]) as pause:
        (roots / "data").rename(roots / "data.old")
        (roots / "data").write_text("otherwise")
        pause.go_on()
        code = pause.command.process.wait(120)
    answer = pause.command.json()
    assert code == 6, answer
    assert str(roots / "data") in answer["error"]["message"]
    assert lab.processes() == []


@contextmanager
def swapping(lab: Laboratory, folder: Path) -> Iterator[None]:
    """Meanwhile the user exchanges `d` and a link to `folder`, over and over."""
    lab.as_user(f"ln -s {folder} evil")
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", SWAPPER, str(lab.folder)],
        user=USER,
        group=USER,
        extra_groups=[],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None and process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()


def test_swapped_all_the_time(lab: Laboratory, secret: Path, shadow: Path) -> None:
    """Whatever comes of it, the process never has a file of root's, and nothing is left there."""
    lab.as_user("printf ghost > d/ghost; printf two > d/two")
    names = ("shadow", "ghost", "two")
    pid = lab.start(*[(shadow.with_name(name), os.O_RDWR) for name in names])
    lab.ask(pid, listening(shadow.with_name("sock")))
    lab.as_user("rm d/ghost; ln d/two third; rm d/two")
    report = lab.dump(pid)
    hidden = (secret / "shadow").stat()
    output = (lab.folder / "output").stat()  # root gave it to the program
    with swapping(lab, secret):
        for _ in range(6):
            answer = lab.restore(report["checkpoint"], check=False)
            assert answer["exit_code"] in (0, 4, 6), answer
            for pid in lab.processes():
                for fd in os.listdir(f"/proc/{pid}/fd"):
                    held = os.stat(f"/proc/{pid}/fd/{fd}")
                    assert not os.path.samestat(held, hidden)
                    assert (
                        not stat.S_ISREG(held.st_mode)
                        or held.st_uid == USER
                        or os.path.samestat(held, output)
                    )
                lab.end(pid)


def test_the_swapper_swaps(lab: Laboratory, shadow: Path) -> None:
    """The race above is one."""
    assert ctypes.CDLL(None).renameat2
    with swapping(lab, lab.folder):
        seen = {os.path.islink(shadow.parent) for _ in range(10000)}
    assert seen == {True, False}
