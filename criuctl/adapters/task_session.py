"""The session of one task of one run: begin it or find it, wait for it, end it.

An engine's worker may be killed at any moment, and the engine then tries the task again, in another
process. The command must not run twice, so it is not the worker's child: it is a session, whose
name depends on the ids of the run and the task alone. An attempt

- starts it, if there is none of that name;
- attaches to it, if it runs;
- restores it, if it is checkpointed, or was lost and has a checkpoint;
- gets its exit code, if it has ended: this host keeps that until `criuctl forget`.

So a command that has ended is not run again, with two exceptions: a failure that is reported as one
(`checked`), because an engine that tries again after it wants that; and a session that was ended by
`end`. An attempt that ends, however it does, leaves the session running; only `end` ends it, which
each adapter calls when its engine cancels the run.

Sessions belong to a host: all attempts of a task have to come to the same one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from ..config import load
from ..errors import CommandFailed, Conflict, NotFound, SessionGone, TimedOut
from ..quoting import harmless
from ..sdk import AsyncSession, Session, SessionInfo
from ..sdk.operator import Operator
from ..store import settled

Beat = Callable[[int], None]
"""Takes the offset of the session's output: how much it has printed."""

INTERVAL = 5.0  # seconds between two heartbeats
_log = logging.getLogger(__name__)
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_PATIENCE = 10.0  # seconds for another attempt, which does the same at this moment
_LOOK = 0.1
KIND: Final = "service"  # of operator


@dataclass(frozen=True)
class Program:
    """What a task runs, as the arguments of `Session.run`; any engine can pass it on as JSON."""

    argv: Sequence[str]
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    workspace: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A task of a run, by the engine's ids, which are the same for every attempt."""

    run: str
    task: str

    @property
    def session(self) -> str:
        """The name of its session: readable, and another one for any other task."""
        both = f"{len(self.run)}:{self.run}:{self.task}"
        readable = re.sub(r"[^A-Za-z0-9]+", "-", self.task).strip("-")[:40]
        return f"task-{readable}-{hashlib.sha256(both.encode()).hexdigest()[:16]}"


def begin(task: Task, program: Program) -> Session | int:
    """Return the task's session, which is started if there is none; or its exit code.

    `SessionGone` if it has ended and its exit code is unknown, and what `Session.run` raises.
    """

    def start_or_find() -> Session | int:
        known = _known(task)
        if known is not None and (known.state != "lost" or known.facts["checkpoint"]):
            return _found(task, known)
        return Session.run(
            program.argv,
            name=task.session,
            cwd=program.cwd,
            env=program.env,
            workspace=program.workspace,
            labels={**program.labels, "run": task.run, "task": task.task},
            kind=KIND,
        )

    return _patiently(start_or_find)


def find(task: Task) -> Session | int:
    """Return a session that was begun, or its exit code; `NotFound` without one."""

    def look() -> Session | int:
        known = _known(task)
        if known is None:
            raise NotFound(f"session {task.session!r} is not known to this host")
        return _found(task, known)

    return _patiently(look)


def _patiently(look: Callable[[], Session | int]) -> Session | int:
    """Return what `look` returns. It fails when another attempt starts or restores the session at
    this moment, or when that ends: then look again.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return look()
        except (Conflict, SessionGone):
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK)


def _known(task: Task) -> SessionInfo | None:
    """Return what this host knows of the task's session."""
    return next((one for one in Session.list() if one.name == task.session), None)


def _found(task: Task, known: SessionInfo) -> Session | int:
    """Return a session that was begun, attached or restored; or its exit code."""
    held = known.facts["holder"]
    if known.state == "exited" and not held:
        return _code(task, known.exit_code)
    if known.state in ("checkpointed", "lost") and not held and not known.facts["moved_to"]:
        return Session.restore(task.session, kind=KIND)
    return Session.connect(task.session, kind=KIND)


def _code(task: Task, code: int | None) -> int:
    if code is None:
        raise SessionGone(f"session {task.session!r} has ended, and its exit code is unknown")
    return code


def run(
    task: Task,
    program: Program,
    *,
    check: bool = False,
    beat: Beat | None = None,
    interval: float = INTERVAL,
) -> int:
    """Return the exit code of the task's command, which is started if it was not yet.

    Until it has ended, `beat` gets the offset of its output every `interval` seconds; what it
    raises ends this call and not the session. With `check` see `checked`.
    """
    begun = begin(task, program)
    code = begun if isinstance(begun, int) else _wait(task, begun, beat, interval)
    return checked(task, code) if check else code


def _wait(task: Task, session: Session, beat: Beat | None, interval: float) -> int:
    with session:
        while True:
            _report(beat, session.status())
            with suppress(TimedOut):
                return _code(task, session.wait_exit(timeout=interval).exit_code)


async def run_async(
    task: Task,
    program: Program,
    *,
    check: bool = False,
    beat: Beat | None = None,
    interval: float = INTERVAL,
    ends: Callable[[], bool] = lambda: True,
) -> int:
    """Do as `run`, as a coroutine. Cancelling it ends the session if `ends` returns True then."""
    begun = asyncio.ensure_future(asyncio.to_thread(begin, task, program))
    try:
        code = await _wait_async(task, await asyncio.shield(begun), beat, interval)
    except asyncio.CancelledError:
        if ends():
            await asyncio.wait([begun])  # one that is just being started is ended as well
            await asyncio.shield(asyncio.to_thread(end, task))
        raise
    return await asyncio.to_thread(checked, task, code) if check else code


async def follow(task: Task, *, beat: Beat | None = None, interval: float = INTERVAL) -> int:
    """Wait for a session that was begun, and return its exit code; `NotFound` without one."""
    return await _wait_async(task, await asyncio.to_thread(find, task), beat, interval)


async def _wait_async(task: Task, found: Session | int, beat: Beat | None, interval: float) -> int:
    if isinstance(found, int):
        return found
    async with AsyncSession(found) as session:
        while True:
            _report(beat, await session.status())
            with suppress(TimedOut):
                return _code(task, (await session.wait_exit(timeout=interval)).exit_code)


def _report(beat: Beat | None, info: SessionInfo) -> None:
    if info.state == "checkpointed":
        _log.warning(
            "session %s was checkpointed here, and its task waits: `criuctl restore %s`",
            *(info.name, info.name),
        )
    if beat is not None and "offset" in info.facts:  # it has ended without one
        beat(info.facts["offset"])


def checked(task: Task, code: int) -> int:
    """Return the code if it is 0; otherwise forget the session, and raise `CommandFailed`.

    The error has the last screen of the output. The engine's next attempt starts the command again,
    also if the error was lost with this attempt.
    """
    if code == 0:
        return code
    session = _unconnected(task)
    text = f"the command of task {task.task!r} ended with exit code {code}"
    with suppress(NotFound):  # another attempt has forgotten it
        text += "\n" + harmless(session.screen().text)
    _forget(session)
    raise CommandFailed(text, status=code)


def end(task: Task) -> bool:
    """End the task's session, a checkpointed one too, and forget it; return False if there is none
    that runs.

    Its program gets one SIGTERM, however many attempts call this. A later attempt starts it again.
    """
    session = _unconnected(task)
    try:
        killed = session.kill(_GRACE)["killed"]
    except NotFound:
        return False
    _forget(session)
    return bool(killed)


def _forget(session: Session) -> None:
    """Forget a session that has ended, unless another attempt does, or has begun it again."""
    with suppress(NotFound, Conflict):
        session.forget()


def end_run(run: str) -> list[str]:
    """End the sessions of all tasks of a run; return the names of those that ran."""
    tasks = (Task(run, one.labels["task"]) for one in Session.list() if _is_of(one, run))
    return [task.session for task in tasks if end(task)]


def _is_of(known: SessionInfo, run: str) -> bool:
    """Return whether it is a session of that run, and not one with such labels."""
    return known.name == Task(run, known.labels.get("task", "")).session


def _unconnected(task: Task) -> Session:
    """Return the session as an object that connects when it has to: it may have ended."""
    return Session(Operator(settled(load()), task.session, KIND, "", "admin"))
