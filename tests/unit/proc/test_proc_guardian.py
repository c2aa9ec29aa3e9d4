"""A process that outlives a keeper with its descriptors, and ends what depends on it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable

import pytest
from support.keeper import wait_until

from criuctl.proc import syscalls
from criuctl.proc.guardian import Guardian, end_tree
from criuctl.proc.tree import ProcessIdentity

_PATIENCE = 60.0


def _in_child(work: Callable[[], None]) -> int:
    """Run `work` in a process of one thread that ends with SIGKILL."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    return child


def _sleeper() -> tuple[subprocess.Popen[bytes], ProcessIdentity]:
    process = subprocess.Popen(["sleep", "1000"])
    return process, ProcessIdentity.of(process.pid)


def test_descriptors_are_shared_both_ways() -> None:
    ours, theirs = os.pipe()

    def work() -> None:
        opened, told = os.pipe()
        child = syscalls.fork_sharing_descriptors()
        if child == 0:
            late = os.memfd_create("late")  # the parent has it, too
            os.write(told, b"%d" % late)
            os._exit(0)
        late = int(os.read(opened, 16))
        os.waitpid(child, 0)
        os.write(late, b"x")
        os.write(theirs, os.pread(late, 1, 0))

    os.waitpid(_in_child(work), 0)
    assert os.read(ours, 1) == b"x"
    os.close(ours)
    os.close(theirs)


def test_a_killed_keeper_ends_what_needs_it() -> None:
    """Not what it has let go of; and its descriptors stay open until then."""
    needs, no_more = _sleeper(), _sleeper()
    reading, writing = os.pipe()
    reported, report = os.pipe()

    def work() -> None:
        os.close(reading)
        guardian = Guardian(lambda trees: (os.write(report, b"%d" % trees[0].pid), None)[1])
        guardian.add(needs[1])
        guardian.add(no_more[1])
        guardian.remove(no_more[1])

    child = _in_child(work)
    os.close(writing)
    os.waitpid(child, 0)
    assert needs[0].wait(_PATIENCE) == -signal.SIGKILL
    assert int(os.read(reported, 16)) == needs[0].pid
    assert select.select([reading], [], [], _PATIENCE)[0]  # only now the last copy was closed
    assert no_more[0].poll() is None
    end_tree(no_more[1])
    assert no_more[0].wait(_PATIENCE) == -signal.SIGKILL
    for fd in (reading, reported, report):
        os.close(fd)


@pytest.mark.parametrize("again", [False, True])
def test_a_keeper_that_is_done_leaves_all_alone(again: bool) -> None:
    process, identity = _sleeper()
    reading, writing = os.pipe()

    def work() -> None:
        os.close(reading)
        guardian = Guardian(lambda _trees: None)
        guardian.add(identity)
        if again:
            signal.pidfd_send_signal(guardian.pidfd, signal.SIGKILL)
            os.waitid(os.P_PIDFD, guardian.pidfd, os.WEXITED)
            guardian.start()
        guardian.dismiss()

    child = _in_child(work)
    os.close(writing)
    os.waitpid(child, 0)
    assert select.select([reading], [], [], _PATIENCE)[0], "no guardian is left"
    os.close(reading)
    assert process.poll() is None
    end_tree(identity)
    wait_until(lambda: process.poll() is not None, _PATIENCE, "it has ended")
    end_tree(identity)  # it need not be there
