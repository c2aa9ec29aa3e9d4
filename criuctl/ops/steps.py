"""Durable steps from outside their programs: run a command as a step, list, show and resolve steps.

`run` speaks to the journal of the session in which it runs, as any program inside does, or, with a
session's name, to that session's holder. It holds no connection while the command runs, so the
session can be dumped meanwhile. `steps` and `resolve` also work for a session without a holder:
they use the journal that its last holder has left.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from .. import inside
from ..config import Config
from ..errors import (
    CommandFailed,
    Conflict,
    CriuctlError,
    Damaged,
    Forbidden,
    NotFound,
    SessionGone,
    TimedOut,
    UsageError,
    WrongState,
    of_the_host,
)
from ..host.registry import exclusive_session
from ..proc import terminal_command
from ..quoting import quoted
from ..report import utc_text
from ..session import names
from ..session.sessions import state_of
from ..steps import journal, states
from ..steps.journal import Journal
from ..steps.states import Step, StepRefused
from .sessions import connect

_FILE = "CRIUCTL_STEPS_FILE"
_PAUSE = 0.1  # seconds before a request is repeated
_KINDS: dict[str, type[CriuctlError]] = {
    "bad-request": UsageError,
    "busy": Conflict,
    "forbidden": Forbidden,
    "not-found": NotFound,
    "state": WrongState,
}
_LISTED = (
    *("id", "kind", "state", "key", "session", "incarnation", "began", "ended", "result"),
    *("progress", "cursor", "attempts", "error"),
)

Ask = Callable[..., dict[str, Any]]


class Done(Struct, frozen=True):
    """The outcome of `run`."""

    step: dict[str, Any]
    ran: bool  # in this call
    exit_code: int

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of ``criuctl step run``."""
        return {**self.step, "ran": self.ran, "exit_code": self.exit_code}


# -- running


def run(
    config: Config,
    step: str,
    argv: Sequence[str],
    *,
    session: str | None,
    kind: str,
    verify: str | None,
    by_key: bool,
    quiet: bool,
) -> Done:
    """Run a command as the step `step`, unless it is done. A command that fails had no effect; one
    that a signal has ended may have had one.

    `verify` is a line of shell that finds out whether the effect of an earlier attempt, which was
    lost, has happened: exit code 0 yes, 1 no. With `by_key` the command runs again, by the same
    key. Else a lost attempt of a once step is a `Conflict`.
    """
    ask = _asker(config, step, session)
    answer = ask("step-begin", kind=kind)
    if answer["state"] == "unknown":
        answer = _resolved(ask, step, answer["key"], kind, verify, by_key, session)
    if answer["state"] == "done":
        code = answer["result"].get("exit_code", 0) if isinstance(answer["result"], dict) else 0
        return Done(_described(answer, step, session), False, code)
    env = os.environ | {"CRIUCTL_STEP": step, "CRIUCTL_STEP_KEY": answer["key"]}
    try:
        status = terminal_command.run(argv, env, quiet=quiet)
    except OSError as error:
        ask("step-failed", error=f"{argv[0]}: {error.strerror}", unknown=False)
        raise NotFound(f"{argv[0]}: {error.strerror}") from error
    except BaseException:
        ask("step-failed", error="interrupted", unknown=True)
        raise
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        answer = ask("step-done", result={"exit_code": 0})
    elif code > 0:
        answer = ask("step-failed", error=f"exit code {code}", unknown=False)
    else:
        name = signal.Signals(-code).name
        answer = ask("step-failed", error=f"ended by {name}", unknown=True)
    return Done(_described(answer, step, session), True, code if code >= 0 else 128 - code)


def _resolved(
    ask: Ask,
    step: str,
    key: str,
    kind: str,
    verify: str | None,
    by_key: bool,
    session: str | None,
) -> dict[str, Any]:
    """Find out whether a lost attempt had its effect; return the step as it is then."""
    if verify is None and not by_key:
        raise Conflict(
            f"step {step!r} is unknown: an earlier attempt was lost between its effect and its "
            "record",
            hint=(
                "Give --verify, or --by-key if the receiver recognises the key; or find out, and "
                f"`criuctl step resolve {quoted(session or 'NAME')} {quoted(step)} done|failed`."
            ),
            key=key,
        )
    if verify is not None:
        env = os.environ | {"CRIUCTL_STEP": step, "CRIUCTL_STEP_KEY": key}
        code = os.waitstatus_to_exitcode(
            terminal_command.run(["/bin/sh", "-c", verify], env, quiet=True)
        )
        if code == 0:
            return ask("step-done", result={"exit_code": 0, "verified": True}, verified=True)
        if code != 1:
            how = f"exit code {code}" if code > 0 else f"signal {-code}"
            raise Conflict(
                f"step {step!r} is still unknown: --verify ended with {how}",
                hint="0 says that the effect has happened, 1 that it has not.",
                key=key,
            )
    return ask("step-begin", kind=kind, again=True)


def _asker(config: Config, step: str, session: str | None) -> Ask:
    """Return what sends requests on this step, for one attempt."""
    token = os.urandom(12).hex()
    if session is None and not (inside._session_folder() or os.environ.get(_FILE)):
        raise UsageError(
            "this command runs in no session",
            hint=f"Name one by --session; or set {_FILE} to a file that is to keep the steps.",
        )

    def ask_inside(op: str, **facts: Any) -> dict[str, Any]:
        try:
            return inside._ask(op, step, token, **facts)
        except inside.StepError as error:
            kind = _KINDS.get(error.code, CommandFailed)
            raise kind(str(error)) from error

    def ask_holder(op: str, **facts: Any) -> dict[str, Any]:
        assert session is not None
        while True:
            try:
                with connect(config, session, role="write") as holder:
                    return holder.request(op, step=step, attempt=token, **facts)
            except Conflict as error:
                if not error.details.get("again"):
                    raise
            except TimedOut:
                pass  # it waits for the store
            time.sleep(_PAUSE)

    return ask_inside if session is None else ask_holder


def _described(answer: dict[str, Any], step: str, session: str | None) -> dict[str, Any]:
    """Return a step from an answer, as the commands print it."""
    name = session or os.environ.get("CRIUCTL_SESSION") or None
    body = {**answer, "id": step, "session": name, "error": answer.get("failure") or ""}
    return {key: body[key] for key in _LISTED if key in body}


# -- looking, resolving


def steps(config: Config, name: str) -> list[dict[str, Any]]:
    """Return the steps of the session, in the order in which they began."""
    found: list[dict[str, Any]] = []
    try:
        with connect(config, name, role="observe") as holder:
            since, more = 0, True
            while more:
                answer = holder.request("step-list", since=since)
                found += answer["steps"]
                since, more = answer["steps"][-1]["sequence"] if found else 0, answer["more"]
    except SessionGone as gone:
        left = _left(config, name, gone)
        try:
            found = [{**step.to_dict(), "session": name} for _, step in left.steps()]
        finally:
            left.close()
    return [_shown(step) for step in sorted(found, key=lambda one: one["began"])]


def step(config: Config, name: str, id: str) -> dict[str, Any]:
    """Return one step of the session; `NotFound`."""
    for one in steps(config, name):
        if one["id"] == id:
            return one
    raise NotFound(f"session {name!r} has no step {id!r}", hint="`criuctl step list` has them.")


def resolve(config: Config, name: str, id: str, outcome: str, result: Any) -> dict[str, Any]:
    """State how an unknown step has ended; return it as it is then."""
    facts = {"step": id, "outcome": outcome, "result": result}
    try:
        with connect(config, name, role="write", operator="criuctl-step") as holder:
            return _shown(holder.request("step-resolve", timeout=None, **facts)["step"])
    except SessionGone as gone:
        with exclusive_session(config, name):
            left = _left(config, name, gone)
            try:
                known = left.get(states.check_id(id))
                if known is None:
                    raise NotFound(f"session {name!r} has no step {id!r}") from None
                new = _resolve_left(left, known, outcome, result)
            except StepRefused as refused:
                raise _KINDS.get(refused.code, CommandFailed)(str(refused)) from None
            finally:
                left.close()
        return _shown({**new.to_dict(), "session": name})


def _resolve_left(left: Journal, known: Step, outcome: str, result: Any) -> Step:
    """Resolve a step of a session that runs nowhere: none of its attempts lives."""
    states.check_size("result", result, states.MAX_RESULT)
    now = round(time.time(), 3)
    new = states.resolve(states.lost(known), outcome, result, lives=False, now=now)
    return left.put("resolved", new) if new is not known else new


def _left(config: Config, name: str, gone: SessionGone) -> Journal:
    """Open the journal of a session without a holder; raise `gone` if it has left none."""
    state = state_of(config, name)
    path = names.state_folder(config.state_dir, name) / names.STEPS
    try:
        whose = journal.owner(path)
        if not whose or (state is not None and state["holder_alive"]):
            raise gone
        return Journal(path, whose)
    except journal.JournalDamaged as error:
        raise Damaged(str(error), hint="Bring the file back from a backup of this host.") from error
    except OSError as error:
        raise of_the_host(error) or CommandFailed(str(error)) from error


def _shown(step: dict[str, Any]) -> dict[str, Any]:
    """Return a step as the commands print it."""
    times = {key: utc_text(step[key]) if step[key] else None for key in ("began", "ended")}
    return {key: {**step, **times}[key] for key in _LISTED}
