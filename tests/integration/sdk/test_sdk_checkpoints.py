"""Snapshots, dumps, restores and forks by the API; and what an object is worth afterwards."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.api import BASH, Shell
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators

from criuctl import Session
from criuctl.errors import (
    Conflict,
    NoSuchCheckpoint,
    NotFound,
    SessionGone,
    UsageError,
    Vetoed,
    WrongState,
)

pytestmark = pytest.mark.integration


def test_snapshots_and_a_fork(shell: Shell, operators: Operators) -> None:
    s = shell("work")
    operators("store", "init")
    assert s.checkpoints() == []
    s.exec("x=42")
    with pytest.raises(UsageError):
        s.snapshot(labels={"why": 1})  # type: ignore[dict-item]
    first = s.snapshot(labels={"why": "before"})
    assert (first.session, first.number, first.ref) == ("work", 1, "work@1")
    assert first.frozen_ms is not None and first.frozen_ms > 0 and not first.degraded
    assert first.store == str(operators.store) and first.bytes["memory"] > 0
    second = s.snapshot()
    listed = s.checkpoints()
    assert [one.id for one in listed] == [first.id, second.id]
    assert [dict(one.labels) for one in listed] == [{"why": "before"}, {}]
    forks = s.fork(2, prefix="copy")
    assert [one.name for one in forks] == ["copy-1", "copy-2"]
    for number, fork in enumerate(forks):
        assert fork.exec(f"x=$((x + {number})); echo $x").output == f"{42 + number}\n"
        assert fork.restored["session"] == fork.name and fork.id != s.id
    assert s.exec("echo $x").output == "42\n"
    s.wait_prompt(timeout=TIMEOUT)
    [third] = s.fork(prefix="copy")
    assert third.name == "copy-3"  # the next free one
    assert third.exec("echo $x").output == "42\n"
    for fork in (*forks, third):
        fork.kill(0)
        fork.close()


def test_a_failed_fork_leaves_none(shell: Shell, operators: Operators) -> None:
    s = shell("work")
    operators("store", "init")
    hook = operators.home.path / "hooks" / "pre-restore" / "10-no"
    hook.parent.mkdir(parents=True)
    hook.write_text('#!/bin/sh\ncase "$CRIUCTL_HOOK_SESSION" in *-2) exit 10;; esac\n')
    hook.chmod(0o700)
    with pytest.raises(Vetoed):
        s.fork(2)
    assert {one.name: one.state for one in Session.list()} == {"work": "running"}
    assert s.checkpoints() == []


def test_an_object_works_on_after_a_dump_and_a_restore(shell: Shell) -> None:
    """The holder waits for the restore, and the connection lasts."""
    s = shell("work")
    s.exec("x=42")
    checkpoint = s.dump(labels={"why": "end"})
    assert not checkpoint.degraded and "encrypted by the key in" in " ".join(checkpoint.warnings)
    assert s.status().state == "checkpointed"
    with pytest.raises(WrongState) as gone:
        s.exec("echo no")
    assert gone.value.exit_code == 9
    with pytest.raises(WrongState):
        s.send("x")
    with Session.restore(checkpoint) as again:
        assert (again.id, again.restored["number"]) == (s.id, 1)
        assert again.exec("echo $x").output == s.exec("echo $x").output == "42\n"
        assert s.status().incarnation == again.status().incarnation == 2
        with pytest.raises(Conflict) as running:
            Session.restore("work")
        assert running.value.exit_code == 9


def test_an_object_whose_holder_is_gone(shell: Shell, operators: Operators) -> None:
    """It says so, also after a restore under another holder, until it is resumed."""
    s = shell("work")
    s.exec("x=42")
    s.dump()
    holder = s.status().facts["holder_pid"]
    os.kill(holder, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{holder}").exists(), TIMEOUT, "the holder has ended")
    for call in (lambda: s.exec("true"), lambda: s.send("x"), s.reconnect):
        with pytest.raises(SessionGone) as gone:
            call()
        assert gone.value.exit_code == 3
    with pytest.raises(SessionGone):
        Session.connect("work", kind="agent")
    Session.restore("work").close()
    with pytest.raises(SessionGone) as lost:
        s.exec("echo $x")
    assert "reconnect" in lost.value.hint
    s.reconnect()
    assert (s.exec("echo $x").output, s.status().incarnation) == ("42\n", 2)


def test_an_object_of_a_session_that_has_ended(shell: Shell) -> None:
    """Another session of its name is not taken for it."""
    s = shell("work")
    s.kill(0)
    with pytest.raises(WrongState):
        s.send("x")
    s.wait_exit(timeout=TIMEOUT)
    with Session.run(BASH, name="work") as other:
        other.wait_prompt(timeout=TIMEOUT)
        calls: list[Any] = [s.screen, s.snapshot, s.kill, s.status, lambda: s.exec("true")]
        for call in calls:
            with pytest.raises(NotFound) as gone:
                call()
            assert gone.value.exit_code == 3
        assert other.exec("echo fine").output == "fine\n"
        s.reconnect()
        assert s.id == other.id


def test_what_there_is_not(operators: Operators) -> None:
    with pytest.raises(SessionGone) as gone:
        Session.connect("no-such", kind="agent")
    assert gone.value.exit_code == 3
    operators("store", "init")
    with pytest.raises((NoSuchCheckpoint, NotFound)) as missing:
        Session.restore("no-such")
    assert missing.value.exit_code == 3
