"""The facts for a recovery: how an ended tree has ended, what is left of it, and the checkpoints
for its restore.

Only an unwanted end is recovered from. A tree that a person has dumped, moved or killed was meant
to end: the registry says so (a dump and a move record it before the tree is ended, a kill forgets
the session), and for a kill that is still under way the session's audit log.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from typing import Any, Literal

from msgspec import Struct

from ...checkpoint.repository import Repository
from ...checkpoint.summary import CheckpointSummary
from ...config import Config
from ...errors import DataError, TimedOut
from ...host.audit_log import killed_by_operator
from ...host.moves import Moves, Outgoing
from ...host.registry import Registry, SessionRecord, boot_id
from ...proc.tree import ProcessIdentity, wait_ended
from ...session.holder.processes import Tree
from ...session.sessions import leftovers, state_of
from .decisions import End

Word = Literal["checkpointed", "moved", "killed", "fenced"]

_PATIENCE = 20.0  # seconds that processes may take to end after SIGKILL
_RECORDED = 30.0  # seconds in which a live holder records how its tree has ended
_FORGOTTEN = 1.0  # seconds in which a kill of a tree without a holder forgets it
_LOOK = 0.02


class Wanted(Struct, frozen=True):
    """An end that was requested."""

    what: Word
    reason: str = ""

    @property
    def text(self) -> str:
        """Return the end in words."""
        return f"it was {self.what}" + (f": {self.reason}" if self.reason else "")


def fate(config: Config, record: SessionRecord) -> End | Wanted:
    """Return how the tree of `record`, which has ended, has done so."""
    wanted = _wanted(config, record)
    if wanted is not None:
        return wanted
    if record.boot_id != boot_id():
        return End()  # it ended with its host
    end, holder = _holder_record(config, record)
    if end.code is None:
        deadline = time.monotonic() + (0.0 if holder else _FORGOTTEN)
        while (wanted := _wanted(config, record)) is None and time.monotonic() < deadline:
            time.sleep(_LOOK)
        if wanted is None and holder and killed_by_operator(config, record):
            wanted = Wanted("killed")
    return wanted or end


def _wanted(config: Config, record: SessionRecord) -> Wanted | None:
    """Return the requested end that the registry, and the records of moves, contain."""
    known = Registry(config).get(record.name)
    if known is None or known.id != record.id:
        return Wanted("killed")
    # recorded before a stale copy is ended
    if known.state == "lost" or (known.state == "running" and known.reason):
        return Wanted("fenced", known.reason)
    if known.state != "checkpointed" or _exited(config, record):
        return None
    move = Moves(config, Outgoing).of(record.name)
    return (
        Wanted("moved", known.moved_to)
        if known.moved_to or move is not None
        else Wanted("checkpointed")
    )


def _exited(config: Config, record: SessionRecord) -> bool:
    """Return the exit status if the holder has seen this very tree end by itself; a tree that a
    dump ended is marked so.
    """
    state = state_of(config, record.name)
    return state is not None and state["state"] == "exited" and _same(state, record)


def _same(state: dict[str, Any], record: SessionRecord) -> bool:
    return (state["id"], state["pid"], state["start_time"]) == (
        record.id,
        record.pid,
        record.start_time,
    )


def _holder_record(config: Config, record: SessionRecord) -> tuple[End, bool]:
    """Return the holder's final record, waiting for it if it may be about to be written; and
    whether there was a holder.
    """
    deadline = time.monotonic() + _RECORDED
    while True:
        state = state_of(config, record.name)
        if state is None or not _same(state, record):
            return End(), False
        if state["state"] not in ("running", "paused"):
            number = state.get("exit_signal")
            return End(state["exit_code"] if number is None else None, number), True
        if time.monotonic() > deadline:
            return End(), True
        time.sleep(_LOOK)


def end_strays(config: Config, record: SessionRecord, known: Iterable[ProcessIdentity]) -> int:
    """End the rest of a tree whose root has ended, so that it does not run next to the restored
    one; return how many there were.
    """
    strays = [identity for identity in known if identity.alive()]
    state = state_of(config, record.name)
    if state is not None and state["id"] == record.id and state.get("boot_id") == boot_id():
        strays += [identity for identity in leftovers(state) if identity not in strays]
    Tree(None).signal(signal.SIGKILL, strays)
    if left := wait_ended(strays, _PATIENCE):
        pids = ", ".join(str(identity.pid) for identity in left)
        raise TimedOut(
            f"session {record.name!r}: processes survive SIGKILL: PID {pids}",
            hint="They are stuck in the kernel.",
        )
    return len(strays)


def candidates(
    repository: Repository, name: str, session_id: str | None, unreadable: list[DataError]
) -> list[CheckpointSummary]:
    """Return the checkpoints of the session, the newest first; without an id, of the session that
    was stored last by this name.
    """
    found = sorted(
        repository.list(name, unreadable=unreadable, hidden=unreadable),
        key=lambda s: s.number,
        reverse=True,
    )
    wanted = session_id or (found[0].session_id if found else "")
    return [summary for summary in found if summary.session_id == wanted]
