"""Names of files and processes that are bytes, and no text in any encoding that criuctl knows
of.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.command import Criuctl
from support.obstacles import running

pytestmark = pytest.mark.integration

NO_TEXT = """
folder = os.fsencode(TMP) + b"/d\\xff (deleted)\\n)x"
os.mkdir(folder); os.chdir(folder)
log = os.open(b"log\\xfe", os.O_CREAT | os.O_WRONLY | os.O_APPEND); os.write(log, b"1")
mapped = os.open(b"mapped\\xfe", os.O_CREAT | os.O_RDWR); os.ftruncate(mapped, 4096); map_fd(mapped)
fcntl.flock(mapped, fcntl.LOCK_EX)
os.mkfifo(b"fifo\\xfd"); fifo = os.open(b"fifo\\xfd", os.O_RDWR)
s = socket.socket(socket.AF_UNIX); s.bind(b"sock\\xfc"); s.listen()
libc.prctl(15, b"na)m\\xff\\n (", 0, 0, 0)
"""
DELETED = """
os.link(b"log\\xfe", b"other\\xfe")
other = os.open(b"other\\xfe", os.O_RDONLY); os.unlink(b"other\\xfe")
gone = os.open(b"gone\\xfe", os.O_CREAT | os.O_RDWR); os.unlink(b"gone\\xfe")
"""


@pytest.mark.parametrize("more", ["", DELETED], ids=["named", "deleted"])
def test_names_that_are_no_text(more: str, criuctl: Criuctl, tmp_path: Path) -> None:
    """The kernel's names are bytes: a tree with Latin-1 in the names of its files and processes
    goes there and back.
    """
    with running(NO_TEXT + more, tmp_path) as program:
        assert criuctl("check", program.pid)["ok"]
        report = criuctl("dump", program.pid, "--name", "bytes")
    shown = criuctl("show", "bytes")
    assert [process["command"] for process in shown["processes"]] == ["na)m\udcff\n ("]
    answer = criuctl("restore", "bytes", "--pids", "private")
    assert os.readlink(f"/proc/{answer['pid']}/cwd").endswith("d\udcff (deleted)\n)x")
    criuctl("dump", answer["pid"], "--leave-running")
    assert criuctl("diff", report["checkpoint"], "bytes")
    assert criuctl("kill", "bytes")["killed"] >= 1


def test_a_hint_says_which_store_has_the_checkpoint(criuctl: Criuctl, tmp_path: Path) -> None:
    """Its command can be copied as it is, also where another store is configured by then."""
    store = str(tmp_path / "the other one")
    criuctl("store", "init", "--store", store)
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    with running("", first) as program:
        report = criuctl("dump", program.pid, "--name", "web", "--store", store)
    with running("", second) as program:
        (warning,) = criuctl("dump", program.pid, "--name", "web", "--leave-running")["warnings"]
        assert (
            f"`criuctl restore {report['checkpoint'][:12]} --as NAME --store '{store}'`" in warning
        )
        criuctl("dump", program.pid, "--name", "web", "--store", store)
    refused = criuctl("run", "-d", "--name", "web", "--", "true", check=False)
    assert f"`criuctl restore web --store '{store}'`" in refused["stderr"]
