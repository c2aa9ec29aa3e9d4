"""A tree of many threads stands still while a tracer seizes one after the other."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from support.command import Home
from support.holding import TIMEOUT, Holders
from support.keeper import Keeper, wait_until

from criuctl.proc.tree import ProcessIdentity, read_tree
from criuctl.session.client.session import Session
from criuctl.session.holder.cgroup import SessionGroup
from criuctl.session.holder.processes import Tree

pytestmark = pytest.mark.integration

CROWD = "for i in $(seq 20); do sleep 1000 & done; echo ready; wait"


def _many(holders: Holders) -> Session:
    holders.start("sh", "-c", CROWD)
    client = holders.connect()
    client.wait_match("ready", since="start", timeout=TIMEOUT)
    if client.status()["freezer"] != "freezer-v2":
        pytest.skip("no freezer-v2 here")
    wait_until(lambda: len(read_tree(client.status()["pid"])) > 20, TIMEOUT, "the tree is complete")
    return client


def _frozen(group: str) -> bool:
    return "frozen 1" in Path(group, "cgroup.events").read_text()


@pytest.mark.parametrize("how", ["seized", "begin", "abort", "lost"])
def test_it_is_held_until_the_tracer_has_it_or_gives_up(how: str, holders: Holders) -> None:
    """Busy threads are seized one after the other as each is scheduled; more than a hundred took
    longer than CRIU is patient.
    """
    operator = _many(holders)
    dumper = holders.connect()
    prepared = dumper.request("checkpoint-prepare", hold=True)
    assert prepared["freezer"] is None and _frozen(prepared["held"])
    assert operator.status()["state"] == "running"
    if how == "lost":
        dumper.close()
    else:
        dumper.request(f"checkpoint-{how}")
    wait_until(lambda: not _frozen(prepared["held"]), TIMEOUT, "it goes on")
    if how == "seized":  # a pause of after the dump is not undone by what comes late
        dumper.request("checkpoint-abort")
        operator.pause()
        dumper.request("checkpoint-seized")
        assert _frozen(prepared["held"])


def test_it_is_not_held_for_who_does_not_ask_nor_for_a_few(holders: Holders) -> None:
    """One that does not know of it would never thaw it; a small tree is seized as fast."""
    _many(holders)
    dumper = holders.connect()
    assert dumper.request("checkpoint-prepare")["held"] is None
    dumper.request("checkpoint-abort")
    holders.start("sleep", "1000", name="few")
    assert holders.connect("few").request("checkpoint-prepare", hold=True)["held"] is None


def test_it_is_not_held_for_one_of_its_own(holders: Holders) -> None:
    """Who stands still himself never tells that it may go on."""
    operator = _many(holders)
    group = SessionGroup(str(operator.request("checkpoint-prepare", hold=True)["held"]), 2)
    operator.request("checkpoint-abort")
    assert group.has(operator.status()["pid"]) and not group.has(os.getpid())
    member = read_tree(operator.status()["pid"])[-1].pid
    assert Tree(group=group).hold(member) is None


# A thread that is not its process's first waits for the child of its vfork, which waits for ever;
# its stack is its own.
VFORK = """import ctypes, mmap, os, threading
libc = ctypes.CDLL(None)
libc.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
libc.mmap.restype = ctypes.c_void_p
stack = libc.mmap(None, 65536, 3, 0x22, -1, 0) + 65536
pause = ctypes.cast(libc.pause, ctypes.c_void_p)
arguments = pause, stack, 0x100 | 0x400 | 0x4000 | 17, None
threading.Thread(target=libc.clone, args=arguments, daemon=True).start()
threading.Event().wait()"""


def test_it_is_not_held_in_the_middle_of_a_thread_s_vfork(holders: Holders) -> None:
    """The child stands still, and the thread that waits for it cannot be seized: a dump gave up
    after half a minute.
    """
    holders.start("sh", "-c", f'"$0" -I -S -c "$1" & {CROWD}', sys.executable, VFORK)
    client = holders.connect()
    wait_until(
        lambda: len(read_tree(client.status()["pid"])) > 22,
        TIMEOUT,
        "the tree is complete, with the child",
    )
    assert holders.connect().request("checkpoint-prepare", hold=True)["held"] is None


class _Pair(Tree):
    """Two processes of a test; a holder's tree is all of its children, which here are
    everybody's.
    """

    def __init__(self, *pair: ProcessIdentity) -> None:
        super().__init__(group=None)
        self.pair = pair

    def members(self) -> list[ProcessIdentity]:
        return list(self.pair)


def test_who_was_stopped_before_looks_awake_for_a_moment_when_a_tracer_lets_go(
    keeper: Keeper, home: Home
) -> None:
    """CRIU lets go of a stopped process by stopping it again; a holder that looked just then took
    it for one that it had stopped.
    """
    first, other = (
        keeper.spawn(["sleep", "1000"], env={"CZOO_TOKEN": home.token}) for _ in range(2)
    )
    awake, job = ProcessIdentity.of(first.pid), ProcessIdentity.of(other.pid)
    pair = _Pair(awake, job)
    pair.signal(signal.SIGSTOP, [job])
    wait_until(lambda: job.state() == "T", TIMEOUT, "one is stopped")
    pair.freeze()
    wait_until(lambda: awake.state() == "T", TIMEOUT, "both stand still")
    pair.signal(signal.SIGCONT, [job])  # awake as it is then, but for longer
    wait_until(lambda: job.state() == "S", TIMEOUT, "one looks awake")
    pair.freeze()
    assert pair.stopped == [awake]
    pair.signal(signal.SIGSTOP, [job])
    pair.thaw()
    wait_until(
        lambda: (awake.state(), job.state()) == ("S", "T"), TIMEOUT, "only the other goes on"
    )
    for launched in (first, other):
        launched.kill()
        launched.wait(TIMEOUT)
