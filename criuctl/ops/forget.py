"""Removing this host's records of ended sessions: output, audit log, and the line in ``criuctl
ls``.

Checkpoints are not removed. A session stays if it runs, left processes behind, or can come back
from a checkpoint, unless it was named and given up.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..config import Config
from ..errors import Conflict, CriuctlError, NotFound, UsageError
from ..host import latest_checkpoints, rights
from ..host.holders import end_holder
from ..host.journal import events, operation_facts
from ..host.moves import Moves, Outgoing
from ..host.registry import (
    Registry,
    SessionRecord,
    check_outside,
    exclusive_session,
    restore_command,
)
from ..quoting import quoted
from ..session import names, sessions
from . import kill
from .sessions import known_of
from .sessions import sessions as all_sessions


class Forgotten(Struct, frozen=True):
    """The outcome for one session."""

    session: str
    state: str = "lost"  # as of `criuctl ls`
    since: str | None = None
    bytes: int = 0  # on the disk and in the run folder
    leases_kept: tuple[str, ...] = ()  # stores in which the end could not be recorded
    error: CriuctlError | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return ``ok`` and the session, or ``error``."""
        return {
            "session": self.session,
            "ok": self.error is None,
            "state": self.state,
            "since": self.since,
            "bytes": self.bytes,
            "leases_kept": list(self.leases_kept),
            "error": None if self.error is None else self.error.to_dict(),
        }


def _forgetting(arguments: Mapping[str, Any]) -> str:
    return "" if arguments.get("dry_run") else "forget"


@events.recorded(_forgetting, operation_facts.forgotten)
def forget(
    config: Config, chosen: Sequence[str], *, older: float | None = None, dry_run: bool = False
) -> list[Forgotten]:
    """Forget the sessions of these names, or, without names, all that ended more than `older`
    seconds ago.

    A named one that must stay is returned with its error, and the others are still processed.
    """
    if not chosen and older is None:
        raise UsageError(
            "no session to forget is named",
            hint="Name them, or give --ended-before 7d for all that ended longer ago.",
        )
    check_outside(config)
    before = time.time() - older if older is not None else None
    if not chosen:
        return [
            done
            for name in _over(config)
            if (done := _one(config, name, before, dry_run)) and done.error is None
        ]
    found = (
        _one(config, names.check_name(name), before, dry_run) for name in dict.fromkeys(chosen)
    )
    return [done for done in found if done is not None]


def _over(config: Config) -> list[str]:
    """Return the ended sessions that cannot come back: exited, lost without a checkpoint, or of an
    earlier boot.
    """
    known = all_sessions(config)
    bare = [
        body
        for body in known
        if body["state"] == "exited" or (body["state"] == "lost" and not body["checkpoint"])
    ]
    over = {body["session"] for body in bare}
    try:
        folders = os.listdir(Path(config.state_dir) / "holders")
    except FileNotFoundError:
        folders = []
    return sorted(
        over
        | (
            {name for name in folders if names.valid_name(name)}
            - {body["session"] for body in known}
        )
    )


def _one(config: Config, name: str, before: float | None, dry_run: bool) -> Forgotten | None:
    """Forget one session; return None if it has not ended before that time."""
    about = Forgotten(name)
    try:
        with exclusive_session(config, name):
            state, record = sessions.state_of(config, name), Registry(config).get(name)
            size, ended = _weight(
                names.run_folder(config.run_dir, name), names.state_folder(config.state_dir, name)
            )
            if state is not None or record is not None:
                known = known_of(state, record)
                about = Forgotten(name, known["state"], known["since"])
                ended = datetime.fromisoformat(about.since).timestamp() if about.since else ended
            elif not ended and latest_checkpoints.known(config, name) is None:
                raise NotFound(
                    f"no session {name!r} is known to this host",
                    hint="`criuctl ls` shows those that are.",
                )
            if before is not None and ended > before:
                return None
            rights.check(config, "forget", name)
            _check(config, name, about.state, state, record)
            if dry_run:
                return replace(about, bytes=size)
            if state is not None and state["holder_alive"]:
                end_holder(config, name, state)
            kept = kill.forget(config, name)
            latest_checkpoints.forget(config, name)
            sessions.forget(config, name)
            return replace(about, bytes=size, leases_kept=tuple(kept))
    except CriuctlError as error:
        return replace(about, bytes=0, error=error)


def _check(
    config: Config,
    name: str,
    now: str,
    state: Mapping[str, Any] | None,
    record: SessionRecord | None,
) -> None:
    """Raise `Conflict` unless the session is over for this host."""
    if now in ("running", "paused"):
        raise Conflict(f"session {name!r} is {now}", hint=f"`criuctl kill {quoted(name)}` ends it.")
    if (
        record is not None
        and record.state == "checkpointed"
        and not record.moved_to
        and now == "checkpointed"
    ):
        back = restore_command(config, name, record.store)
        raise Conflict(
            f"session {name!r} is checkpointed",
            hint=(f"{back} brings it back; `criuctl kill {quoted(name)}` gives it up."),
        )
    if Moves(config, Outgoing).of(name) is not None:
        raise Conflict(
            f"session {name!r} is on its way to another host",
            hint=f"`criuctl migrate --resolve {quoted(name)}` ends that.",
        )
    if state is not None and not state["holder_alive"] and (left := sessions.leftovers(state)):
        raise Conflict(
            f"processes of session {name!r} live on without its holder: PID "
            f"{', '.join(str(p.pid) for p in left[:5])}",
            hint=f"`criuctl kill {quoted(name)}` ends them.",
        )


def _weight(*folders: Path) -> tuple[int, float]:
    """Return the bytes of the files there, and when the last of them was written; 0.0: there are
    none.
    """
    size, written = 0, 0.0
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            with suppress(OSError):  # a holder that ends removes its socket
                found = path.lstat()
                size += found.st_size if stat.S_ISREG(found.st_mode) else 0
                written = max(written, found.st_mtime)
    return size, written
