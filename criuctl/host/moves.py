"""Sessions on their way from host to host, as either end has written it down.

A move is decided in one place only, the home that it leaves: the tree may run on the other host
when it is known to be gone here, never before.  So what is written here is all that is needed to
tell, after any interruption, what to do:

out  ``sending``     the tree is here, and goes on here whatever became of the other end
     ``handed-over`` the other end holds it and this end lets CRIU end it: whether it did, the
     processes tell
     ``ended``       the tree is gone here: the other end may run, and must be told
in   ``receiving``   the checkpoint arrives, or is being restored
     ``held``        restored, not running; waits for the word
     ``running``     it runs here
     ``given-up``    nothing of it runs here; its checkpoint is in the inbox

A record is written before what it tells of is done, durably.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from ..config import Config
from ..errors import Conflict, Damaged, NoSuchProcess
from ..proc.tree import ProcessIdentity, read_process
from ..quoting import quoted
from .registry import boot_id, write_record

_ID = re.compile(r"[0-9a-f]{32}")


class _Timed(Struct, frozen=True, kw_only=True):
    updated: float = 0.0


class Move(_Timed, frozen=True):
    """A session on its way."""

    id: str
    session: str
    session_id: str


class Outgoing(Move, frozen=True):
    """A session that leaves this host."""

    to: str  # the other host, as the user named it
    host: str = ""  # its own name
    url: str = ""  # ssh:// of the session there
    checkpoint: str = ""
    state: str = "sending"
    tree: tuple[tuple[int, int], ...] = ()  # (PID, start time) of each process
    boot_id: str = ""
    addresses: tuple[dict[str, Any], ...] = ()  # taken away here, to be put back if the tree stays
    options: dict[str, Any] = field(default_factory=dict)  # of the restore there

    def alive(self) -> bool:
        """Whether any process of the tree still runs here."""
        return self.boot_id == boot_id() and any(
            ProcessIdentity(pid, start).alive() for pid, start in self.tree
        )

    def doomed(self) -> bool:
        """Whether what still runs of it has been killed, and only takes its time to end."""
        return all(ProcessIdentity(pid, start).doomed() for pid, start in self.tree)

    def traced(self) -> bool:
        """Whether CRIU has its hands on any of them."""
        for pid, start in self.tree:
            with suppress(NoSuchProcess):
                if ProcessIdentity(pid, start).alive() and read_process(pid).tracer_pid:
                    return True
        return False


class Incoming(Move, frozen=True):
    """A session that comes to this host."""

    origin: str  # name of the host that it leaves
    checkpoint: str = ""
    state: str = "receiving"
    receiver: tuple[int, int] = (0, 0)  # (PID, start time) of the criuctl that holds it
    boot_id: str = ""
    result: dict[str, Any] = field(default_factory=dict)  # of the restore

    def attended(self) -> bool:
        """Whether the criuctl that receives it is there."""
        return self.boot_id == boot_id() and ProcessIdentity(*self.receiver).alive()


M = TypeVar("M", bound=Move)


class Moves(Generic[M]):
    """The records of one direction."""

    def __init__(self, config: Config, kind: type[M]) -> None:
        self._kind: type[M] = kind
        self.folder = Path(config.state_dir) / "moves" / ("out" if kind is Outgoing else "in")

    def put(self, move: M) -> M:
        """Write a record, durably, and return it with its time."""
        move = replace(move, updated=time.time())
        write_record(self.folder, check_id(move.id), asdict(move))
        return move

    def get(self, identity: str) -> M | None:
        """The record of the move `identity`."""
        try:
            return self._read(self.folder / f"{check_id(identity)}.json")
        except FileNotFoundError:
            return None

    def forget(self, identity: str) -> None:
        """Remove a record; absent is fine."""
        (self.folder / f"{check_id(identity)}.json").unlink(missing_ok=True)

    def of(self, session: str) -> M | None:
        """The newest move of the session called `session`."""
        return max(
            (m for m in self.all() if m.session == session), key=lambda m: m.updated, default=None
        )

    def all(self) -> Iterator[M]:
        """Every record that can be understood."""
        for path in sorted(self.folder.glob("*.json")):
            try:
                yield self._read(path)
            except (FileNotFoundError, Damaged):
                continue

    def _read(self, path: Path) -> M:
        try:
            loaded = json.loads(path.read_text())
            known = self._kind.__struct_fields__
            values: dict[str, Any] = {
                k: tuple(map(_frozen, v)) if isinstance(v, list) else v
                for k, v in loaded.items()
                if k in known
            }
            return self._kind(**values)
        except (ValueError, TypeError, AttributeError) as error:
            raise Damaged(
                f"{path} cannot be understood: {error}",
                hint="Remove it when you know where the session runs.",
            ) from error


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def check_at_home(config: Config, session: str, *, take_over: bool) -> None:
    """A session that has left, and whose other end was not told yet, is not restored here:
    `Conflict`.

    With `take_over`, a person's decision that the other end is lost, it will not be told any more.
    """
    moves = Moves(config, Outgoing)
    move = moves.of(session)
    if move is None or move.state not in ("handed-over", "ended") or move.alive():
        return
    if not take_over:
        raise Conflict(
            f"session {session!r} has left for {move.host or move.to}, which could not be told "
            "to let it run yet",
            hint=f"`criuctl migrate --resolve {quoted(session)}` tells it;"
            " --take-over if that host is lost for good; or --as NEW-NAME.",
            host=move.host or move.to,
        )
    moves.forget(move.id)


def new_id() -> str:
    """A name for a move."""
    return os.urandom(16).hex()


def check_id(identity: Any) -> str:
    """`identity` itself, if it is one: it comes from another host and becomes a file's name."""
    if not isinstance(identity, str) or not _ID.fullmatch(identity):
        raise Damaged(f"{str(identity)[:40]!r} is no id of a move")
    return identity
