"""How long a home may run after it has renewed its lease: never so long that a standby may have
taken over.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from criuctl.config import Config
from criuctl.errors import PreflightRefused, SessionGone, WrongState
from criuctl.ops.supervising import self_fence
from criuctl.ops.supervising.self_fence import SelfFence


class Holder:
    """Notes until when the tree may run."""

    def __init__(self) -> None:
        self.until: list[float | None] = []
        self.gone = False

    def request(self, op: str, *, seconds: float, timeout: float = 1.0) -> None:
        if self.gone:
            raise SessionGone("no holder")
        assert op == "self-fence"
        self.until.append(self_fence.clock() + seconds if seconds else None)

    def status(self) -> dict[str, bool]:
        return {"self_fence": bool(self.until) and self.until[-1] is not None}

    def close(self) -> None: ...


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(self_fence, "clock", lambda: now[0])
    return now


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50
)
@given(ttl=st.floats(1, 3600), took=st.lists(st.floats(0, 2), min_size=1, max_size=20))
def test_the_tree_stops_before_anybody_may_take_over(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], ttl: float, took: list[float]
) -> None:
    """A renewal may be seen as soon as it is begun, and its answer may come late, or too late."""
    holder = Holder()
    monkeypatch.setattr(self_fence, "_connect", lambda _config, _name: holder)
    fence = SelfFence(Config(), "web", ttl)
    for share in took:
        began = clock[0]
        clock[0] += share * ttl
        fence.renewed(began)
        assert all(until is not None and until <= began + 0.76 * ttl for until in holder.until[-1:])
        assert fence.holds == (clock[0] >= began + ttl * self_fence.SHARE)
    fence.lifted()
    assert holder.until[-1] is None and not fence.holds


def test_an_unreachable_holder_is_an_error_only_at_the_beginning(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], tmp_path: Path
) -> None:
    holder, made = Holder(), list[str]()

    def connect(_config: Config, name: str) -> Holder:
        made.append(name)
        return holder

    monkeypatch.setattr(self_fence, "_connect", connect)
    fence = SelfFence(Config(), "web", 8)
    fence.renewed(clock[0])
    holder.gone = True
    fence.renewed(clock[0])
    with pytest.raises(PreflightRefused, match="no holder"):
        fence.check()
    holder.gone = False
    fence.check()
    fence.renewed(clock[0])
    assert holder.until == [clock[0] + 6] * 3 and len(made) == 3
    other = SelfFence(Config(), "web", 8)
    other.unknown()
    # an earlier supervisor has set how long it may run
    assert len(holder.until) == 3 and other.holds
    other.lifted()
    other.unknown()
    assert holder.until[3:] == [None, clock[0] + 0.001]
    monkeypatch.undo()
    unknown = SelfFence(Config(run_dir=str(tmp_path), state_dir=str(tmp_path)), "web", 8)
    with pytest.raises(PreflightRefused, match="'web'"):
        unknown.check()


def test_a_tree_that_has_just_died_is_no_reason_to_refuse(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """In a crash loop: that is for its supervisor to count, who would have ended for good."""
    holder = Holder()
    monkeypatch.setattr(self_fence, "_connect", lambda _config, _name: holder)
    fence = SelfFence(Config(), "web", 8)
    fence.renewed(clock[0])

    def over(_op: str, **_arguments: float) -> None:
        raise WrongState("the session is exited", state="exited")

    monkeypatch.setattr(holder, "request", over)
    fence.check()


def test_a_holder_that_cannot_be_looked_for_stops_no_heart(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    def scarce(_config: Config, _name: str) -> Holder:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(self_fence, "_connect", scarce)
    fence = SelfFence(Config(), "web", 30)
    fence.unknown()
    fence.renewed(clock[0])
    fence.lifted()
    self_fence.lift(Config(), "web")
