"""Records of sessions on their way from host to host, as each end has written them.

A move is decided in one place only, the home that the session leaves: the tree may run on the other
host when it is known to be gone here, never before.  So these records are all that is needed to
decide, after any interruption, what to do:

out  ``sending``     the tree is here, and goes on here, independently of the other end
     ``handed-over`` the other end holds it and this end lets CRIU end it: the processes show
                     whether CRIU did
     ``ended``       the tree is gone here: the other end may run it, and must be informed
in   ``receiving``   the checkpoint arrives, or is being restored
     ``held``        restored, not running; waits for the permission to run
     ``running``     it runs here
     ``given-up``    nothing of it runs here; its checkpoint is in the inbox

A record is written durably before the action that it describes.
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
    """A session on its way between hosts."""

    id: str
    session: str
    session_id: str


class Outgoing(Move, frozen=True):
    """A session that leaves this host."""

    to: str  # the other host, as the user named it
    host: str = ""  # the name that it calls itself
    url: str = ""  # ssh:// of the session there
    checkpoint: str = ""
    state: str = "sending"
    tree: tuple[tuple[int, int], ...] = ()  # (PID, start time) of each process
    boot_id: str = ""
    addresses: tuple[dict[str, Any], ...] = ()  # taken away here, to be put back if the tree stays
    options: dict[str, Any] = field(default_factory=dict)  # of the restore there
    proof: dict[str, str] = field(default_factory=dict)  # shows there that this host began the move

    def alive(self) -> bool:
        """Return whether any process of the tree still runs here."""
        return self.boot_id == boot_id() and any(
            ProcessIdentity(pid, start).alive() for pid, start in self.tree
        )

    def doomed(self) -> bool:
        """Return whether what still runs of it has been killed, and only takes time to end."""
        return all(ProcessIdentity(pid, start).doomed() for pid, start in self.tree)

    def traced(self) -> bool:
        """Return whether CRIU traces any of them."""
        for pid, start in self.tree:
            with suppress(NoSuchProcess):
                if ProcessIdentity(pid, start).alive() and read_process(pid).tracer_pid:
                    return True
        return False


class Incoming(Move, frozen=True):
    """A session that comes to this host."""

    origin: str  # name of the host that it leaves
    writer: str = ""  # id of the key by which that host writes to the inbox
    leases: tuple[str, ...] = ()  # that host's proofs of having the stores of the session's lease
    checkpoint: str = ""
    state: str = "receiving"
    receiver: tuple[int, int] = (0, 0)  # (PID, start time) of the criuctl that holds it
    boot_id: str = ""
    result: dict[str, Any] = field(default_factory=dict)  # of the restore

    def attended(self) -> bool:
        """Return whether the criuctl that receives it is running."""
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
        """Return the record of the move `identity`."""
        try:
            return self._read(self.folder / f"{check_id(identity)}.json")
        except FileNotFoundError:
            return None

    def forget(self, identity: str) -> None:
        """Remove a record; a missing file is no error."""
        (self.folder / f"{check_id(identity)}.json").unlink(missing_ok=True)

    def of(self, session: str) -> M | None:
        """Return the newest move of the session called `session`."""
        return max(
            (m for m in self.all() if m.session == session), key=lambda m: m.updated, default=None
        )

    def all(self) -> Iterator[M]:
        """Return every record that can be read."""
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
    """Raise `Conflict` for a session that has left, as long as the other end has not been informed.

    With `take_over`, a person's decision that the other end is lost, it will never be informed.
    """
    moves = Moves(config, Outgoing)
    move = moves.of(session)
    if move is None or move.state not in ("handed-over", "ended") or move.alive():
        return
    if not take_over:
        raise Conflict(
            f"session {session!r} has left for {move.host or move.to}, which has not been "
            "informed yet that it may run it",
            hint=f"`criuctl migrate --resolve {quoted(session)}` informs it;"
            " --take-over if that host is lost for good; or --as NEW-NAME.",
            host=move.host or move.to,
        )
    moves.forget(move.id)


def new_id() -> str:
    """Return a name for a move."""
    return os.urandom(16).hex()


def check_id(identity: Any) -> str:
    """Return `identity`, if it is a valid id: it comes from another host and becomes a file's
    name.
    """
    if not isinstance(identity, str) or not _ID.fullmatch(identity):
        raise Damaged(f"{str(identity)[:40]!r} is no id of a move")
    return identity
