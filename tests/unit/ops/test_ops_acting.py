"""Work on behalf of others: a client's role, the operator that comes back, the call that is
cancelled.
"""

from __future__ import annotations

from typing import Any

import pytest

from criuctl.errors import NotFound, SessionGone
from criuctl.ops import acting
from criuctl.ops.acting import Call, Client


class Connection:
    """A connection to a holder, as far as a call knows it."""

    def __init__(self, operator: str) -> None:
        self.operator, self.token = operator, f"token of {operator}"
        self.closed = self.broken = self.comes_back = False

    def close(self) -> None:
        self.closed = True

    def break_off(self) -> None:
        self.broken = True


class Holder:
    """Opens connections, and forgets operators."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.forgotten: set[str] = set()

    def open(self, role: str, resume: Any) -> Any:
        self.asked.append((role, resume))
        if resume is not None and resume[0] in self.forgotten:
            raise NotFound("there was no such operator")
        return Connection(resume[0] if resume is not None else f"op-{len(self.asked)}")


def test_a_role_is_never_exceeded() -> None:
    holder = Holder()
    with Call(Client("agent", "write")) as call:
        for role in ("observe", "write", "admin"):
            call.connect("work", role, None, holder.open)
    assert [role for role, _resume in holder.asked] == ["observe", "write", "write"]


def test_the_same_operator_comes_back_and_two_calls_are_two() -> None:
    holder, client = Holder(), Client("agent", "admin")
    with Call(client) as call:
        first = call.connect("work", "write", None, holder.open)
        assert first.comes_back
        first.close()
        assert call.connect("work", "write", None, holder.open).operator == first.operator
    with Call(client) as one, Call(client) as two:
        assert one.connect("work", "write", None, holder.open).operator == first.operator
        assert two.connect("work", "write", None, holder.open).operator != first.operator
        assert two.connect("other", "write", None, holder.open).operator != first.operator
    holder.forgotten.add(first.operator)
    with Call(client) as call:
        operators = {call.connect("work", "write", None, holder.open).operator for _ in range(2)}
    assert first.operator not in operators


def test_a_cancelled_call_breaks_its_connections() -> None:
    holder, call = Holder(), Call(Client("agent", "write"))
    with call:
        before: Any = call.connect("work", "write", None, holder.open)
        call.cancel()
        after: Any = call.connect("work", "write", None, holder.open)
        assert before.broken and after.broken
    assert before.closed and after.closed


def test_a_call_is_that_of_its_thread_while_it_lasts() -> None:
    assert acting.current() is None
    with Call(Client("agent", "write")) as call:
        assert acting.current() is call
    assert acting.current() is None


def test_a_session_without_a_holder_stays_an_error() -> None:
    def refuse(role: str, resume: Any) -> Any:
        raise SessionGone("no holder")

    with Call(Client("agent", "write")) as call, pytest.raises(SessionGone):
        call.connect("work", "write", None, refuse)
