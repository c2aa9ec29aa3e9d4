"""What is stored first when a machine is taken away: the rules, and where their facts come from."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from criuctl.config import Config
from criuctl.host import latest_checkpoints
from criuctl.host.journal.event_log import EventLog
from criuctl.host.latest_checkpoints import Latest
from criuctl.ops.scheduling.subjects import Subject
from criuctl.ops.spot.plan import SPARE, Worth, plan, too_slow
from criuctl.ops.spot.worth import priority_of, worths
from criuctl.proc.tree import ProcessIdentity
from criuctl.report import Reporter, utc_text

NAMES = st.integers(0, 999).map(str)
WORTHS = st.lists(
    st.builds(
        Worth,
        NAMES,
        order=st.integers(0, 3),
        priority=st.integers(-1, 2),
        cpu=st.floats(0, 8),
        age=st.floats(0, 1e5),
        seconds=st.floats(0.01, 100),
    ),
    max_size=12,
    unique_by=lambda w: w.name,
)


def test_what_fits_is_stored_by_order_and_within_it_by_value() -> None:
    found = plan(
        [
            Worth("db", order=10, cpu=8, age=100),
            Worth("idle", age=9),
            Worth("busy", cpu=1, age=9),
            Worth("named", priority=1),
        ],
        10.0,
        1,
    )
    assert found.groups == (("named", "busy", "idle"), ("db",))
    assert (found.late, found.needs) == ((), 4.0)


def test_what_does_not_fit_is_told_and_stored_last() -> None:
    """The order of dependencies gives way to value; what cannot be stored at all waits."""
    found = plan(
        [
            Worth("huge", priority=9, seconds=99),
            Worth("db", order=10, cpu=8, age=100, seconds=6),
            Worth("busy", cpu=1, age=9, seconds=6),
            Worth("idle", age=9, seconds=6),
        ],
        13.0,
        1,
    )
    assert found.groups == (("db", "busy", "idle", "huge"),)
    assert found.late == ("idle", "huge")


@given(WORTHS, st.floats(0.1, 300), st.integers(1, 4))
def test_every_plan(found: list[Worth], left: float, jobs: int) -> None:
    made = plan(found, left, jobs)
    planned = [name for group in made.groups for name in group]
    assert sorted(planned) == sorted(w.name for w in found), "nothing is forgotten"
    assert (made.needs <= left) == (not made.late)
    assert {w.name for w in too_slow(found, left)} <= set(made.late)
    if not made.late:
        return
    ranks = {w.name: (w.seconds > left, w.rank) for w in found}
    assert [ranks[name] for name in planned] == sorted(ranks.values())


def test_priorities() -> None:
    assert [priority_of({"priority": text}) for text in ("7", "-1", "high")] == [7, -1, 0]
    assert priority_of({}) == 0


def test_where_the_facts_come_from(tmp_path: Path) -> None:
    """CPU time of the tree, the last checkpoint that was noted, the last dump that was done."""
    config = Config(state_dir=str(tmp_path / "state"))
    own = ProcessIdentity.of(os.getpid())
    subjects = [
        Subject("known", {"priority": "3"}, 20, own),
        Subject("never", root=own),
        Subject("broken"),  # it could not be identified
    ]
    made = time.time() - 0.5
    latest = Latest("known", "00", "11", 1, 1, str(utc_text(made)), "/store")
    latest_checkpoints.note(config, latest, Reporter())
    EventLog(config.state_dir).append(
        [
            {"operation": operation, "session": "known", "outcome": outcome, "seconds": seconds}
            for operation, outcome, seconds in (
                ("dump", "done", 3.0),
                ("snapshot", "done", 5.0),
                ("snapshot", "failed", 99.0),
                ("restore", "done", 99.0),
            )
        ]
    )
    known, never = worths(config, subjects)
    assert (known.name, known.priority, known.order) == ("known", 3, 20)
    assert known.seconds == 5.0 * SPARE
    assert 0.4 < known.age < never.age
    assert never.seconds > 1.0 and never.cpu > 0
