"""The states of a step, and what may happen to it: pure functions, without files and clocks.

    kind        an attempt that was lost             its effect
    safe        runs again                           may happen again
    once        is `unknown`, until it is resolved   must not happen again
    resumable   runs again, with the last cursor     may happen again from the cursor on

    state       began     an attempt runs, or was lost and may run again (safe, resumable)
                done      for good, with a result: no later event changes it
                failed    its program has reported that the effect did not happen; may run again
                unknown   the attempt was lost between effect and record (once only)

An attempt has a token, which the program chooses. A request that is repeated with the same token,
because its answer was lost, gets the same answer. Time, tokens and whether the process of an
attempt still lives are arguments.

A restore brings back older memory, never an older journal. `merge` joins two records of one step
and loses neither: ``done`` wins, then the higher number of attempts.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

try:
    from _blake2 import blake2b  # hashlib loads libcrypto, which costs each holder megabytes
except ImportError:
    from hashlib import blake2b

KINDS = ("safe", "once", "resumable")
STATES = ("began", "done", "failed", "unknown")
ENDS = ("done", "failed")

MAX_RESULT = 64 << 10  # bytes of a result as JSON
MAX_CURSOR = 4 << 10  # bytes of a cursor as JSON
MAX_ERROR = 2000  # characters
MAX_TOKEN = 64
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+=,-]{0,199}")
_TOKEN = re.compile(r"[A-Za-z0-9-]{1,64}")
_RANK = {"began": 0, "unknown": 1, "failed": 2, "done": 3}


class StepRefused(Exception):
    """An event is not possible; `code` is an error code of the holder's protocol."""

    def __init__(self, code: str, message: str, hint: str = "", **details: Any) -> None:
        super().__init__(message)
        self.code, self.message, self.hint, self.details = code, message, hint, details


@dataclass(frozen=True, slots=True)
class Owner:
    """The process of an attempt: PID and start time on its host, and its PID in the tree."""

    pid: int = 0
    start_time: int = 0
    inner: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One step as the journal remembers it. Times are UNIX seconds."""

    id: str
    kind: str
    state: str
    key: str
    attempt: str  # token of the present or last attempt
    attempts: int = 1
    incarnation: int = 1
    uid: int = 0  # of the user whose step it is
    owner: Owner | None = None  # None: the attempt is known to be lost, or has ended
    began: float = 0.0
    ended: float | None = None
    result: Any = None
    error: str = ""
    progress: float | None = None
    cursor: Any = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Step:
        """Return the step that `to_dict` described; `ValueError` for anything else."""
        known = {field.name for field in fields(cls)}
        try:
            found = {key: value for key, value in values.items() if key in known}
            owner = found.get("owner")
            found["owner"] = Owner(**owner) if owner is not None else None
            step = cls(**found)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"no step: {error}") from None
        _check(step)
        return step


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request to begin a step."""

    kind: str
    token: str
    uid: int
    incarnation: int
    owner: Owner | None = None
    cursor: Any = None
    again: bool = False  # the caller knows that an unknown attempt had no effect, or uses the key


def key_of(session: str, step: str) -> str:
    """Return the key of the step `step` of the session with this id.

    It depends on nothing else: so a restore on another host, even one from a checkpoint that is
    older than the step, keeps it, and a fork, which is another session, gets another one.
    """
    return digest(f"{session}\0{step}".encode(), b"criuctl-step-key")


def digest(data: bytes, person: bytes = b"") -> str:
    """Return BLAKE2b of `data`, 32 hexadecimal digits."""
    return blake2b(data, digest_size=16, person=person).hexdigest()


def check_id(step: object) -> str:
    """Return the id if a step may have it."""
    if not isinstance(step, str) or _ID.fullmatch(step) is None:
        raise StepRefused(
            "bad-request",
            "a step's id is 1 to 200 of A-Za-z0-9._:/@+=,- and begins with a letter or digit",
        )
    return step


def check_token(token: object) -> str:
    """Return the token of an attempt if it is one."""
    if not isinstance(token, str) or _TOKEN.fullmatch(token) is None:
        raise StepRefused("bad-request", "'attempt' must be 1 to 64 letters, digits or '-'")
    return token


def check_size(what: str, value: Any, most: int) -> Any:
    """Return a JSON value of at most `most` bytes."""
    try:
        size = len(json.dumps(value, separators=(",", ":"), allow_nan=False))
    except (TypeError, ValueError):
        raise StepRefused("bad-request", f"{what!r} is no JSON value") from None
    if size > most:
        raise StepRefused("bad-request", f"{what!r} has {size} bytes as JSON, of at most {most}")
    return value


# -- events: each returns the step as it is afterwards; the same object if nothing changes


def begin(
    step: Step | None, id: str, key: str, asked: Attempt, *, lives: bool, now: float
) -> tuple[Step, str]:
    """Begin an attempt; return the step, and what the caller has to do.

    ``run``: do the work. ``done``: it is done already. ``unknown``: find out whether it is done.
    `lives`: the process of the attempt under way lives.
    """
    if asked.kind not in KINDS:
        raise StepRefused("bad-request", f"'kind' must be one of {', '.join(KINDS)}")
    fresh = Step(
        id, asked.kind, "began", key, asked.token, 1, asked.incarnation, asked.uid, asked.owner, now
    )
    fresh = replace(fresh, cursor=asked.cursor)
    if step is None:
        return fresh, "run"
    if step.state == "done":
        return step, "done"
    if step.kind != asked.kind:
        raise StepRefused("state", f"step {id!r} is of the kind {step.kind!r}", state=step.state)
    if step.attempt == asked.token and step.state == "began":
        return step, "run"  # the answer to it was lost
    if step.state == "began" and lives:
        pid = step.owner.inner or step.owner.pid if step.owner is not None else 0
        raise StepRefused("busy", f"step {id!r} is under way in PID {pid}", state="began", pid=pid)
    if step.kind == "once" and step.state != "failed" and not asked.again:
        return lost(step), "unknown"
    kept = step.cursor if asked.cursor is None else asked.cursor
    again = replace(fresh, attempts=step.attempts + 1, cursor=kept, progress=step.progress)
    return again, "run"


def done(step: Step, token: str, result: Any, *, verified: bool, now: float) -> Step:
    """The work of this attempt is done; `verified`: its effect was found, without an attempt."""
    if step.state == "done":
        return step
    mine = step.attempt == token and step.state in ("began", "unknown")
    if not mine and not (verified and step.state == "unknown"):
        raise StepRefused(
            "state",
            f"this is not the attempt of step {step.id!r} that is under way; it is {step.state}",
            state=step.state,
        )
    full = None if step.kind != "resumable" else 1.0
    return replace(
        step,
        state="done",
        result=result,
        error="",
        ended=now,
        owner=None,
        progress=full if step.progress is None else 1.0,
    )


def failed(step: Step, token: str, error: str, *, unknown: bool, now: float) -> Step:
    """The attempt has failed; `unknown`: it is not known whether its effect has happened."""
    if step.state == "done":
        return step
    if step.attempt != token or step.state == "failed":
        if step.attempt == token:
            return step
        raise StepRefused("state", f"another attempt of step {step.id!r} is under way")
    state = "unknown" if unknown and step.kind == "once" else "failed"
    return replace(step, state=state, error=error[:MAX_ERROR], ended=now, owner=None)


def progressed(step: Step, fraction: float, cursor: Any) -> Step:
    """The work has come so far. An older memory that comes back does not set it back."""
    if step.state != "began":
        return step
    if step.progress is not None and fraction < step.progress:
        return step
    if (fraction, cursor) == (step.progress, step.cursor):
        return step
    return replace(step, progress=fraction, cursor=cursor)


def lost(step: Step) -> Step:
    """The process of the attempt is gone without a word."""
    if step.state != "began":
        return step
    if step.kind == "once":
        return replace(step, state="unknown", owner=None)
    return step if step.owner is None else replace(step, owner=None)


def continued(step: Step, owner: Owner, incarnation: int) -> Step:
    """A restore has brought the process of the attempt back, in the middle of it."""
    return replace(step, state="began", ended=None, owner=owner, incarnation=incarnation)


def resolve(step: Step, outcome: str, result: Any, *, lives: bool, now: float) -> Step:
    """An operator states how the step has ended."""
    if outcome not in ENDS:
        raise StepRefused("bad-request", "a step is resolved as done or failed")
    if step.state == outcome:
        return step
    if step.state == "began" and lives:
        raise StepRefused("busy", f"step {step.id!r} is under way", state="began")
    if step.state not in ("began", "unknown"):
        raise StepRefused("state", f"step {step.id!r} is {step.state}", state=step.state)
    value = result if outcome == "done" else None
    return replace(step, state=outcome, result=value, ended=now, owner=None)


def merge(mine: Step | None, other: Step) -> Step:
    """Return the record of a step that knows more: nothing that is done is ever undone."""
    if mine is None:
        return other
    return other if _weight(other) > _weight(mine) else mine


def _weight(step: Step) -> tuple[bool, int, int, float]:
    progress = -1.0 if step.progress is None else step.progress
    return (step.state == "done", step.attempts, _RANK[step.state], progress)


def _check(step: Step) -> None:
    """Refuse a record that this program has not written."""
    number = isinstance(step.attempts, int) and isinstance(step.incarnation, int)
    texts = (step.id, step.kind, step.state, step.key, step.attempt, step.error)
    if (
        not all(isinstance(text, str) for text in texts)
        or not number
        or step.kind not in KINDS
        or step.state not in STATES
        or _ID.fullmatch(step.id) is None
        or len(step.key) > MAX_TOKEN
        or len(step.attempt) > MAX_TOKEN
        or len(step.error) > MAX_ERROR
        or not isinstance(step.uid, int)
        or not all(isinstance(at, int | float) for at in (step.began, step.ended or 0.0))
        or not isinstance(step.progress, int | float | None)
    ):
        raise ValueError("no step")
