"""Members of a group that proceed together, each in a process of its own."""

from __future__ import annotations

import mmap
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

from criuctl.errors import DumpFailed
from criuctl.host.group_member import BROKEN, GroupMember
from criuctl.ops.linked.meeting import Together
from criuctl.report import Reporter

NAMES = ("a", "b", "c")
Does = Callable[[GroupMember], dict[str, Any]]


def together(does: Does, *, at: Callable[..., Any] = lambda _p, _f: {}, decisive: str = "") -> Any:
    """Run `does` in each member."""

    def work(
        name: str, channel: socket.socket, decided: mmap.mmap, _reporter: Reporter
    ) -> dict[str, Any]:
        return does(GroupMember("group", name, channel, decided, DumpFailed))

    made = Together(NAMES, work, at, Reporter(), DumpFailed, decisive)
    return made, made.run()


def test_all_meet() -> None:
    seen = []

    def at(point: str, facts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        seen.append((point, {name: said["n"] for name, said in facts.items()}))
        return {name: {"sum": sum(said["n"] for said in facts.values())} for name in facts}

    def does(member: GroupMember) -> dict[str, Any]:
        first = member.meet("first", n=ord(member.session))
        return {"sum": first["sum"], "then": member.meet("second", n=1)["sum"]}

    made, outcomes = together(does, at=at)
    assert made.error is None
    assert seen == [("first", {n: ord(n) for n in NAMES}), ("second", dict.fromkeys(NAMES, 1))]
    assert [outcomes[n].answer for n in NAMES] == [{"sum": 294, "then": 3}] * 3


@pytest.mark.parametrize("how", ["raises", "is killed", "ends"])
def test_one_that_fails_breaks_it_off_for_all(how: str) -> None:
    def does(member: GroupMember) -> dict[str, Any]:
        member.meet("first")
        if member.session == "b" and how == "raises":
            raise DumpFailed("no room")
        if member.session == "b" and how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if member.session == "b" and how == "ends":
            raise ValueError("a bug")
        member.meet("second")
        return {}

    made, outcomes = together(does)
    assert made.error is not None and made.error.message.startswith("session 'b': ")
    for name in ("a", "c"):
        error = outcomes[name].error
        assert error is not None and error.code == BROKEN and "session 'b'" in error.message


def test_the_coordinator_s_own_failure() -> None:
    def at(point: str, _facts: Any) -> dict[str, Any]:
        raise DumpFailed(f"not at {point}")

    made, outcomes = together(lambda member: member.meet("first"), at=at)
    assert made.error is not None and made.error.message == "not at first"
    assert all(outcomes[name].error is not None for name in NAMES)


def test_a_member_that_loses_the_coordinator_looks_at_the_decision() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, mmap.mmap(-1, 1) as decided:
        member = GroupMember("group", "a", theirs, decided, DumpFailed)
        ours.close()
        for decisive, byte, fails in ((False, 1, True), (True, 0, True), (True, 1, False)):
            decided[0] = byte
            if fails:
                with pytest.raises(DumpFailed, match="has ended"):
                    member.meet("running", decisive=decisive)
            else:
                assert member.meet("running", decisive=decisive) == {}


def test_what_is_decided_is_known_before_the_first_goes_on() -> None:
    def does(member: GroupMember) -> dict[str, Any]:
        before = member._decided[0]
        member.meet("running", decisive=True)
        return {"before": before, "after": member._decided[0]}

    made, outcomes = together(does, decisive="running")
    assert made.decided
    assert [one.answer for one in outcomes.values()] == [{"before": 0, "after": 1}] * 3
