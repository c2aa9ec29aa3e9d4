"""What a dump makes ready before the tree stands still, and what it writes down at its end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from criuctl.config import Config
from criuctl.criu import driver
from criuctl.dump import criu_failures, subject
from criuctl.host.registry import Registry, SessionRecord
from criuctl.proc.tree import ProcessIdentity
from criuctl.session.names import state_folder


@pytest.mark.parametrize(("doomed", "state"), [(True, "checkpointed"), (False, "running")])
def test_a_tree_that_takes_its_time_to_end_is_checkpointed(
    doomed: bool, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it were reported as running, it would count as lost as soon as it is gone."""
    me = ProcessIdentity.of(os.getpid())
    config = Config(state_dir=str(tmp_path), run_dir=str(tmp_path / "run"))
    registry = Registry(config)
    monkeypatch.setattr(ProcessIdentity, "doomed", lambda _identity: doomed)
    record = SessionRecord("web", checkpoint="c" * 32)
    subject.remember(config, registry, record, me, leave_running=False, lock=None)
    assert [(record.state, record.checkpoint) for record in registry.all()] == [(state, "c" * 32)]


@pytest.mark.parametrize(("killed", "known"), [(True, []), (False, ["running"])])
def test_a_session_that_is_killed_while_its_snapshot_is_stored_does_not_come_back(
    killed: bool, known: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written down as running, the next boot would restore it."""
    me = ProcessIdentity.of(os.getpid())
    config = Config(state_dir=str(tmp_path), run_dir=str(tmp_path / "run"))
    registry = Registry(config)
    monkeypatch.setattr(ProcessIdentity, "doomed", lambda _identity: True)
    audit = [{"what": "kill", "incarnation": 3}] if killed else [{"what": "kill", "incarnation": 2}]
    folder = state_folder(config.state_dir, "web")
    folder.mkdir(parents=True)
    (folder / "audit.jsonl").write_text(
        "".join(json.dumps(entry | {"sequence": 1}) + "\n" for entry in audit)
    )
    record = SessionRecord("web", incarnation=3)
    subject.remember(config, registry, record, me, leave_running=True, lock=None)
    assert [record.state for record in registry.all()] == known


def test_a_tree_that_ends_before_it_is_frozen_is_no_failed_dump(tmp_path: Path) -> None:
    """CRIU, which runs in its PID namespace, ends with it and answers nothing."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    config = Config(state_dir=str(tmp_path), run_dir=str(tmp_path / "run"))
    silent = driver.CriuFailed("CRIU ended without an answer", "")
    gone = criu_failures.explain(config, silent, "web", child, [])
    assert (gone.exit_code, gone.message) == (3, f"PID {child} has ended before it was frozen")
    frozen: Any = SimpleNamespace(identity=SimpleNamespace(alive=lambda: False))
    assert criu_failures.explain(config, silent, "web", child, [frozen]).exit_code == 5


def test_what_ended_and_is_not_reaped_yet_does_not_run_on(tmp_path: Path) -> None:
    """CRIU may not interrupt it, as if it were traced."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    try:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        config = Config(state_dir=str(tmp_path), run_dir=str(tmp_path / "run"))
        log = (
            f"(00.01) Error (compel/src/lib/infect.c:150): Unable to interrupt task: {child} "
            "(Operation not permitted)\n"
        )
        gone = criu_failures.explain(
            config, driver.CriuFailed("", log, undone=True), "web", child, []
        )
        assert (gone.exit_code, gone.message) == (3, f"PID {child} has ended before it was frozen")
    finally:
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("undone", "more", "passes"), [(True, "", True), (False, "", False), (True, "not cured", False)]
)
def test_only_what_left_the_tree_as_it_was_is_tried_again(
    undone: bool, more: str, passes: bool
) -> None:
    """A CRIU that was killed, or left something of its own in a process, has not said how the tree
    is now.
    """
    log = (
        "(00.04) Error (compel/src/lib/infect.c:323): Can't dump the 17482 thread with a pending "
        "SIGTRAP.\n"
    )
    if more:
        log += "(00.05) Error (criu/cr-dump.c:1795): Can't cure (pid: 17482) from parasite\n"
    assert bool(criu_failures.passing(driver.CriuFailed("", log, undone=undone), 4)) == passes


def test_an_unknown_error_is_tried_once_more() -> None:
    log = (
        "(00.01) Warn  (compel/src/lib/infect.c:132): Unable to interrupt task: 77 (No such "
        "process)\n"
    )
    log += "(00.02) Error (criu/new.c:1): Nobody has seen this before\n"
    failed = driver.CriuFailed("", log, undone=True)
    assert criu_failures.passing(failed, 1) and not criu_failures.passing(failed, 2)
