"""Whether a process and its descendants make progress."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from support.keeper import wait_until

from criuctl.criu import hang_detection, rpc
from criuctl.criu.binary import CriuBinary
from criuctl.proc.tree import Process, read_tree

BUSY = "import os, time\nif os.fork() == 0:\n while True: sum(range(99999))\ntime.sleep(1000)"


@pytest.mark.parametrize(
    ("code", "works"), [(BUSY, True), ("import time; time.sleep(1000)", False)]
)
def test_work_anywhere_below_counts(code: str, works: bool) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", code]) as process:
        try:
            wait_until(lambda: len(read_tree(process.pid)) == 1 + works, 20, "it is there")
            time.sleep(0.3)
            watch = hang_detection.Watch(process.pid)
            watch.idle()
            time.sleep(0.5)
            assert (watch.idle() < 0.1) is works
        finally:
            below = read_tree(process.pid)
            hang_detection.end(process.pid)
            process.wait()
    wait_until(
        lambda: not any(each.identity.alive() for each in below), 20, "all of them are ended"
    )


@pytest.mark.usefixtures("no_features")
def test_a_criu_that_does_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LOOK", 0.05), ("PATIENCE", 0.3), ("ROLLBACK", 0.3)):
        monkeypatch.setattr(hang_detection, name, seconds)
    silent = CriuBinary(("sh", "-c", "sleep 1000 & wait"), "a test")
    below: list[Process] = []

    def ask() -> None:
        with silent.swrk() as swrk:
            swrk.expendable = True
            below.extend(read_tree(swrk.pid))
            swrk.call("RESTORE")

    with pytest.raises(rpc.CriuGone, match="has done nothing for"):
        ask()
    wait_until(
        lambda: not any(each.identity.alive() for each in below), 20, "all of them are ended"
    )


@pytest.mark.usefixtures("no_features")
@pytest.mark.parametrize("expendable", [True, False])
def test_a_killed_criu_whose_child_keeps_the_conversation(expendable: bool) -> None:
    """CRIU makes processes that try out the kernel, and kills them: see kerndat.c,
    kerndat_has_ptrace_get_rseq_conf.
    """
    killed = CriuBinary(("sh", "-c", "sleep 1000 & kill -STOP $$"), "a test")
    below: list[Process] = []

    def ask() -> None:
        with killed.swrk() as swrk:
            swrk.expendable = expendable
            wait_until(lambda: len(read_tree(swrk.pid)) == 2, 20, "it has made its process")
            below.extend(read_tree(swrk.pid))
            threading.Timer(0.3, os.kill, (swrk.pid, signal.SIGKILL)).start()
            swrk.call("DUMP")

    with pytest.raises(rpc.CriuGone, match="ended without an answer"):
        ask()
    wait_until(
        lambda: not any(each.identity.alive() for each in below), 20, "all of them are ended"
    )
