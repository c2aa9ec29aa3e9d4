"""The operations of every operator on output: attach, detach, read, screen.

They change nothing of the session, except that `attach` may ask for the lease in the same step, so
that a terminal has its size before anything is drawn.
"""

from __future__ import annotations

from ..screen.modes import Modes
from .connection import Connection, Transfer
from .event_loop import Loop
from .kept_screen import KeptScreen
from .lifetime import Lifetime
from .master import Master
from .operators import Operator, Refused
from .output_log import OutputLog
from .request_values import FAR, LATER, Message, Operations, boolean, integer, text, window_size
from .session_state import SessionState
from .write_operations import WriteOperations

_MAX_READS = 64  # of one connection
_MAX_ATTACHED = 256  # operators that are remembered


class OutputOperations:
    """What every role may do with output."""

    def __init__(
        self,
        loop: Loop,
        session: SessionState,
        log: OutputLog,
        modes: Modes,
        master: Master,
        lifetime: Lifetime,
        writing: WriteOperations,
        kept_screen: KeptScreen,
    ) -> None:
        self._loop, self._session, self._log, self._modes = loop, session, log, modes
        self._master, self._lifetime, self._writing = master, lifetime, writing
        self._kept_screen = kept_screen
        self._attached = set[tuple[int, str, str]]()  # the identities that have attached before
        self.operations: Operations = {
            "attach": ("observe", self._attach),
            "detach": ("observe", self._detach),
            "read": ("observe", self._read),
            "screen": ("observe", self._screen),
        }

    def _position(self, message: Message, default: int | str) -> int:
        log, start = self._log, message.get("from", default)
        if start == "start":
            return log.base
        if start == "now":
            return log.end
        if not isinstance(start, int) or isinstance(start, bool) or not -FAR < start < FAR:
            raise Refused("bad-request", "'from' must be an offset, 'start', 'now' or -N")
        return max(log.end + start, log.base) if start < 0 else min(start, log.end)

    def _attach(self, connection: Connection, by: Operator, message: Message) -> Message:
        position, size = self._position(message, "now"), message.get("size")
        wanted = window_size(size) if isinstance(size, dict) else None
        if boolean(message, "write") and by.may("write"):
            self._writing.attach(by, wanted)
        if self._session.over:
            self._lifetime.collect()
        connection.subscribed = True
        connection.position = position
        shows = boolean(message, "answers") if "answers" in message else by.kind == "human"
        connection.answers = shows
        connection.within = text(message, "within", 64) if "within" in message else ""
        self._loop.soon(connection.pump)  # behind the answer
        log, master = self._log, self._master
        return {
            "offset": position,
            "base": log.base,
            "end": log.end,
            "modes": self._modes.to_dict(),
            "rows": master.rows,
            "cols": master.cols,
            "state": self._session.state,
            "first": self._is_first(by),
            **self._writing.lease(),
        }

    def _is_first(self, by: Operator) -> bool:
        """Return whether an operator of this user, kind and name attaches for the first time."""
        known = by.identity in self._attached
        if not known and len(self._attached) < _MAX_ATTACHED:
            self._attached.add(by.identity)
        return not known

    def _detach(self, connection: Connection, by: Operator, message: Message) -> Message:
        position, connection.position = connection.position, None
        return {"offset": self._log.end if position is None else position}

    def _screen(self, connection: Connection, by: Operator, message: Message) -> Message:
        return {"screen": self._kept_screen.to_dict()}

    def _read(self, connection: Connection, by: Operator, message: Message) -> Message:
        log = self._log
        start = max(self._position(message, "start"), log.base)
        end = min(integer(message, "to", 0, FAR, log.end), log.end)
        if message.get("max") is not None:
            end = min(end, start + integer(message, "max", 0, FAR))
        if len(connection.transfers) >= _MAX_READS:
            raise Refused("busy", "too many reads at once")
        connection.transfers.append(Transfer(message["id"], start, start, end))
        connection.pump()
        return LATER
