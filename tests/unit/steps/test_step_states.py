"""The rules of steps: kind by event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from criuctl.steps import states
from criuctl.steps.states import Attempt, Owner, Step, StepRefused

SESSION = "ab" * 16
OWNER = Owner(100, 5, 7)


def asked(kind: str = "once", token: str = "t1", **more: object) -> Attempt:
    return Attempt(kind, token, 0, 1, OWNER, **more)  # type: ignore[arg-type]


def begin(step: Step | None, attempt: Attempt, *, lives: bool = False) -> tuple[Step, str]:
    return states.begin(step, "x", states.key_of(SESSION, "x"), attempt, lives=lives, now=10.0)


def begun(kind: str = "once") -> Step:
    step, word = begin(None, asked(kind))
    assert word == "run"
    return step


def test_a_key_depends_on_session_and_id_alone() -> None:
    assert states.key_of(SESSION, "x") == states.key_of(SESSION, "x")
    assert len({states.key_of(s, i) for s in (SESSION, "cd" * 16) for i in ("x", "y")}) == 4


@pytest.mark.parametrize("kind", states.KINDS)
def test_what_is_done_is_never_run_again(kind: str) -> None:
    step = states.done(begun(kind), "t1", {"paid": 42}, verified=False, now=11.0)
    assert (step.state, step.result, step.ended, step.owner) == ("done", {"paid": 42}, 11.0, None)
    events: list[Callable[[], Step]] = [
        lambda: begin(step, asked(kind, "t2", again=True))[0],
        lambda: states.done(step, "t2", "other", verified=False, now=12.0),
        lambda: states.failed(step, "t2", "no", unknown=True, now=12.0),
        lambda: states.progressed(step, 0.5, None),
        lambda: states.lost(step),
    ]
    for event in events:
        assert event() is step
    assert begin(step, asked(kind, "t2"))[1] == "done"


@pytest.mark.parametrize("kind", states.KINDS)
def test_a_repeated_request_gets_the_same_answer(kind: str) -> None:
    step = begun(kind)
    assert begin(step, asked(kind), lives=True) == (step, "run")


@pytest.mark.parametrize("kind", states.KINDS)
def test_two_attempts_do_not_run_at_once(kind: str) -> None:
    with pytest.raises(StepRefused, match="under way in PID 7") as refused:
        begin(begun(kind), asked(kind, "t2", again=True), lives=True)
    assert refused.value.code == "busy"


@pytest.mark.parametrize("kind", ["safe", "resumable"])
def test_a_lost_attempt_runs_again_with_its_cursor(kind: str) -> None:
    step = states.progressed(begun(kind), 0.4, 1200)
    again, word = begin(step, asked(kind, "t2"))
    assert (word, again.state, again.attempts, again.attempt) == ("run", "began", 2, "t2")
    assert (again.cursor, again.progress, again.key) == (1200, 0.4, step.key)
    assert states.lost(step) == replace(step, owner=None)


def test_a_lost_attempt_of_a_once_step_is_unknown() -> None:
    step, word = begin(begun(), asked(token="t2"))
    assert (word, step.state, step.attempts) == ("unknown", "unknown", 1)
    assert begin(step, asked(token="t3")) == (step, "unknown")


def test_an_unknown_step_is_resolved_by_the_program() -> None:
    step = states.lost(begun())
    found = states.done(step, "t2", 1, verified=True, now=12.0)
    assert (found.state, found.result) == ("done", 1)
    again, word = begin(step, asked(token="t2", again=True))
    assert (word, again.state, again.attempts, again.key) == ("run", "began", 2, step.key)


def test_an_unknown_step_is_resolved_by_an_operator() -> None:
    step = states.lost(begun())
    assert states.resolve(step, "done", "r", lives=False, now=1.0).state == "done"
    failed = states.resolve(step, "failed", "r", lives=False, now=1.0)
    assert (failed.state, failed.result) == ("failed", None)
    assert begin(failed, asked(token="t2"))[1] == "run"
    with pytest.raises(StepRefused):
        states.resolve(begun(), "done", None, lives=True, now=1.0)
    with pytest.raises(StepRefused):
        states.resolve(
            states.resolve(step, "done", 1, lives=False, now=1.0),
            "failed",
            None,
            lives=False,
            now=1,
        )


def test_the_word_of_an_attempt_that_was_taken_for_lost_counts() -> None:
    assert states.done(states.lost(begun()), "t1", 5, verified=False, now=1.0).result == 5


def test_the_word_of_another_attempt_does_not() -> None:
    events: list[Callable[[], Step]] = [
        lambda: states.done(begun(), "t9", 5, verified=True, now=1.0),
        lambda: states.done(states.lost(begun()), "t9", 5, verified=False, now=1.0),
        lambda: states.failed(begun(), "t9", "no", unknown=False, now=1.0),
    ]
    for event in events:
        with pytest.raises(StepRefused):
            event()


@pytest.mark.parametrize(
    ("kind", "unknown", "state"),
    [
        ("once", True, "unknown"),
        ("once", False, "failed"),
        ("safe", True, "failed"),
        ("resumable", True, "failed"),
    ],
)
def test_a_failure(kind: str, unknown: bool, state: str) -> None:
    step = states.failed(begun(kind), "t1", "e" * 5000, unknown=unknown, now=1.0)
    assert (step.state, len(step.error)) == (state, states.MAX_ERROR)
    assert states.failed(step, "t1", "again", unknown=unknown, now=2.0).state == state


def test_progress_is_not_set_back() -> None:
    step = states.progressed(begun("resumable"), 0.5, "b")
    assert states.progressed(step, 0.4, "a") is step
    assert states.progressed(step, 0.5, "b") is step
    assert states.progressed(step, 0.5, "c").cursor == "c"


def test_another_kind_is_refused() -> None:
    with pytest.raises(StepRefused, match="of the kind 'once'"):
        begin(begun(), asked("safe", "t2"))
    with pytest.raises(StepRefused, match="must be one of"):
        begin(None, asked("often"))


def test_merging_loses_nothing() -> None:
    step = begun()
    unknown, failed = states.lost(step), states.failed(step, "t1", "no", unknown=False, now=1.0)
    done = states.done(step, "t1", 1, verified=False, now=1.0)
    second, _ = begin(unknown, asked(token="t2", again=True))
    for low, high in ((step, unknown), (unknown, second), (second, done), (step, failed)):
        assert states.merge(low, high) is high
        assert states.merge(high, low) is high
    assert states.merge(None, step) is step
    assert states.merge(step, replace(step, began=9.0)) is step


@pytest.mark.parametrize("id", ["", "-x", "a b", "a\n", "x" * 201, "é", 5, None, "../x"])
def test_ids_that_no_step_may_have(id: object) -> None:
    with pytest.raises(StepRefused):
        states.check_id(id)
    assert states.check_id("charge-42/a:b@c") == "charge-42/a:b@c"


def test_sizes_are_bounded() -> None:
    states.check_size("result", "x" * 100, 102)
    for value in ("x" * 101, float("nan"), object()):
        with pytest.raises(StepRefused):
            states.check_size("result", value, 102)


def test_a_record_that_is_none() -> None:
    good = begun().to_dict()
    assert Step.from_dict({**good, "unheard": 1}) == begun()
    for bad in (
        {"state": "gone"}, {"kind": 1}, {"id": "a b"}, {"attempts": "x"}, {"owner": {"a": 1}},
        {"progress": "x"}, {"began": None}, {"error": "x" * 3000},
    ):  # fmt: skip
        with pytest.raises(ValueError):
            Step.from_dict({**good, **bad})
    with pytest.raises(ValueError):
        Step.from_dict({})
