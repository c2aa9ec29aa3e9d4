"""What becomes an event: operations on many things, that end, are cut off, or have nothing to
do.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from criuctl.checkpoint.gc_result import Collected
from criuctl.config import Config
from criuctl.errors import Conflict, CriuctlError, NotFound
from criuctl.host.journal import events, operation_facts
from criuctl.host.journal.event_log import EventLog
from criuctl.host.maintenance import Item
from criuctl.ops.pause import Steered, _steered


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(state_dir=str(tmp_path))


def logged(config: Config) -> list[dict[str, Any]]:
    kept = (
        "operation",
        "exit_code",
        "outcome",
        "error",
        "how",
        "schedule",
        "sessions",
        "states",
        "removed",
    )
    return [
        {key: event[key] for key in kept if key in event}
        for event in EventLog(config.state_dir).read()
    ]


@events.recorded_each(
    "maintenance-begin", operation_facts.maintained, about=operation_facts.of_maintenance
)
def begin(config: Config, how: str, items: list[Any]) -> Iterator[Item]:
    for item in items:
        if isinstance(item, BaseException):
            raise item
        yield item


def item(name: str, error: CriuctlError | None = None, **facts: Any) -> Item:
    return Item(
        name,
        50,
        state="stored" if error is None else "failed",
        error=error.to_dict() if error else None,
        **facts,
    )


def test_one_event_when_all_is_done(config: Config) -> None:
    each = begin(
        config,
        "dump",
        [item("a"), item("b", NotFound("b")), item("c", Conflict("c")), item("d", degraded=True)],
    )
    assert next(each).session == "a" and logged(config) == []
    assert [one.session for one in each] == ["b", "c", "d"]
    assert (
        list(begin(config, "snapshot", [item("d", degraded=True)]))
        and list(begin(config, "dump", [])) == []
    )
    done = {
        "operation": "maintenance-begin",
        "exit_code": 9,
        "outcome": "failed",
        "error": "conflict",
        "how": "dump",
    }
    assert logged(config) == [
        done | {"sessions": ["a", "b", "c", "d"], "states": {"stored": 2, "failed": 2}},
        {
            "operation": "maintenance-begin",
            "exit_code": 11,
            "outcome": "degraded",
            "how": "snapshot",
            "sessions": ["d"],
            "states": {"stored": 1},
        },
        {"operation": "maintenance-begin", "exit_code": 0, "outcome": "done", "how": "dump"},
    ]


def test_what_is_cut_off_tells_how_far_it_came(config: Config) -> None:
    each = begin(config, "dump", [item("a"), item("b")])
    next(each)
    each.close()  # type: ignore[attr-defined]
    for error in (Conflict("busy"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            list(begin(config, "dump", [item("a"), error]))
    found = [
        (event["exit_code"], event["outcome"], event["error"], event["sessions"])
        for event in logged(config)
    ]
    assert found == [
        (130, "interrupted", "interrupted", ["a"]),
        (9, "failed", "conflict", ["a"]),
        (130, "interrupted", "interrupted", ["a"]),
    ]


def test_a_killed_command_is_recorded_once_by_the_next(config: Config, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    @events.recorded("dump", operation_facts.nothing_more, about=events.target)
    def killed(_config: Config, _target: str) -> None:
        theirs.send("under way")
        signal.pause()

    EventLog(tmp_path).append([{"operation": "first", "exit_code": 0}])
    process = fork.Process(target=killed, args=(config, "web"), daemon=True)
    process.start()
    try:
        assert ours.poll(60) and ours.recv() == "under way"
        list(begin(config, "dump", []))
        assert len(logged(config)) == 2
    finally:
        process.kill()
        process.join(60)
    (tmp_path / "events.begun.0-0.1.1.1").write_text("")  # of another boot, not written to its end
    list(begin(config, "dump", []))
    list(begin(config, "dump", []))
    found = list(EventLog(tmp_path).read())
    assert [event["operation"] for event in found] == [
        "first",
        "maintenance-begin",
        "dump",
        *["maintenance-begin"] * 2,
    ]
    recorded = {key: found[2][key] for key in ("session", "exit_code", "outcome", "error")}
    assert recorded == {
        "session": "web",
        "exit_code": 137,
        "outcome": "interrupted",
        "error": "killed",
    }
    assert found[2]["began"] <= found[1]["time"] and not list(tmp_path.glob("events.begun.*"))


def test_what_had_nothing_to_do_is_none(config: Config) -> None:
    assert operation_facts.recovered([]) == [] and operation_facts.recovered([item("a")])
    assert _steered(Steered("web", "paused", changed=False)) == [] and _steered(
        Steered("web", "paused")
    )


@pytest.mark.parametrize("what", ["refused", "refused_others", "lost"])
def test_a_collection_that_is_not_all_done_ends_as_its_command_does(what: str) -> None:
    done = Collected()
    assert operation_facts.collected(done)[0]["exit_code"] == 0
    setattr(done, what, 1)
    assert operation_facts.collected(done)[0]["exit_code"] == 11


def test_a_run_of_a_schedule(config: Config) -> None:
    targets = [
        SimpleNamespace(target="a", error=None),
        SimpleNamespace(target="b", error=NotFound("b")),
    ]
    run = events.recorded(
        "schedule-run", operation_facts.scheduled, about=operation_facts.of_schedule
    )(lambda _config, _schedule: (SimpleNamespace(outcomes=targets, pruned=2, error=None), 3))
    run(config, SimpleNamespace(name="hourly"))
    facts = {
        "schedule": "hourly",
        "sessions": ["a", "b"],
        "states": {"stored": 1, "failed": 1},
        "removed": 2,
    }
    assert logged(config) == [
        {
            "operation": "schedule-run",
            "exit_code": 3,
            "outcome": "failed",
            "error": "not-found",
            **facts,
        }
    ]
    assert operation_facts.of_schedule((config, "../x"), {}) == {} and operation_facts.of_name(
        (config, "web"), {}
    ) == {"session": "web"}
    assert [
        one["exit_code"]
        for one in [*operation_facts.supervised(True), *operation_facts.supervised(False)]
    ] == [
        0,
        11,
    ]
