"""One client of a holder: what was received from it, and what waits to be sent to it.

Nothing here blocks.  A client is sent, in this order: answers, and the rest of a frame that did not
fit; then, as there is room, the output that it attached to, with events at the places in the log
where they happened; then the bytes that it asked to `read`.  Output is not queued: a client has a
position in the log, and a client so slow that the log has dropped what it needs next gets a gap
marker.  What is queued is bounded: while a client does not read its answers, its requests are not
read either, and a client that lets thousands of events accumulate is cut off.
"""

from __future__ import annotations

import base64
import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .. import protocol
from .operators import Operator
from .output_log import OutputLog

_MAX_OUT = 256 << 10  # unsent bytes above which no more requests are read
_MAX_EVENTS = 20_000
_ROUND = 2 << 20  # bytes sent to one client before it is the others' turn
_SEND_BUFFER = 1 << 20


@dataclass(slots=True)
class Transfer:
    """The rest of an answer to `read`."""

    request: int
    start: int
    position: int
    end: int


@dataclass(eq=False)
class Connection:
    """A client; `lost` is called once, when it is gone."""

    sock: socket.socket
    log: OutputLog
    pid: int
    lost: Callable[[Connection, str], None]
    want: Callable[[Connection], None]  # the events to wait for may have changed
    decoder: protocol.Decoder = field(default_factory=protocol.Decoder)
    uid: int = -1  # of the client's user; -1: unknown
    operator: Operator | None = None
    position: int | None = None  # of the attached output
    answers: bool = False  # a terminal is shown that output, and its answers are typed
    within: str = ""  # id of the session in whose terminal that output is shown
    subscribed: bool = False
    closing: bool = False  # close when all is sent
    dead: bool = False
    blocked: bool = False  # the socket takes no more
    interest: int = -1  # the events that are waited for
    out: bytearray = field(default_factory=bytearray)
    events: deque[tuple[int, bytes]] = field(default_factory=deque)
    transfers: deque[Transfer] = field(default_factory=deque)
    fds: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sock.setblocking(False)
        with suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)

    # -- what comes in ----------------------------------------------------------------------------

    @property
    def reading(self) -> bool:
        """Whether requests are read now."""
        return not self.closing and len(self.out) < _MAX_OUT

    def receive(self) -> bool:
        """Read once; False if there was nothing, or the client is gone."""
        try:
            data, fds, _flags, _address = socket.recv_fds(
                self.sock, 1 << 16, protocol.MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except OSError as error:
            self.close(str(error))
            return False
        self.fds += fds
        if not data or len(self.fds) > protocol.MAX_FDS:
            self.close("closed" if not data else "too many descriptors")
            return False
        self.decoder.feed(data)
        return True

    def take_fds(self) -> list[int]:
        """Return the descriptors that came with the present frame; the caller owns them."""
        fds, self.fds = self.fds, []
        return fds

    def drop_fds(self) -> None:
        """Close descriptors that no request has taken."""
        for fd in self.take_fds():
            os.close(fd)

    # -- what goes out ----------------------------------------------------------------------------

    def send(self, message: dict[str, Any]) -> None:
        """Send an answer, or another message that must not wait for output."""
        if not self.dead:
            self.out += protocol.json_frame(message)
            self.pump()

    def event(self, frame: bytes, anchor: int) -> None:
        """Send an event that happened when the log's end was `anchor`."""
        self.events.append((anchor, frame))
        if len(self.events) > _MAX_EVENTS:
            self.close("too slow for events")
        else:
            self.pump()

    def pump(self) -> None:
        """Send what the socket takes."""
        left = _ROUND
        try:
            while not self.dead and left > 0:
                if self.out:
                    with memoryview(self.out) as view:
                        sent = self.sock.send(view[:_ROUND])
                    del self.out[:sent]
                elif not (sent := self._next()):
                    break
                left -= sent
            self.blocked = left <= 0
        except BlockingIOError:
            self.blocked = True
        except OSError as error:
            self.close(str(error))
            return
        if self.closing and not self.out and not self.dead:
            self.close("bye")
        elif not self.dead:
            self.want(self)

    def _next(self) -> int:
        """Send or queue the next piece; return its size, 0: there is none."""
        if self.events and (self.position is None or self.events[0][0] <= self.position):
            frame = self.events.popleft()[1]
            self.out += frame
            return len(frame)
        if self.position is not None:
            if self.position < self.log.base:
                self._gap()
                return 1
            end = self.events[0][0] if self.events else self.log.end
            if self.position < end:
                piece = self.log.view(
                    self.position, min(end - self.position, protocol.OUTPUT_PIECE)
                )
                head = protocol.output_head(self.position, len(piece))
                sent = self._send_piece(head, piece)
                self.position += len(piece)
                return sent
        if self.transfers:
            return self._transfer(self.transfers[0])
        return 0

    def _gap(self) -> None:
        assert self.position is not None
        to = self.log.after_gap()
        self.out += protocol.json_frame(
            {"event": "gap", "sequence": 0, "from": self.position, "to": to}
        )
        self.position = to

    def _transfer(self, transfer: Transfer) -> int:
        position = max(transfer.position, self.log.base)
        if position > transfer.position:
            transfer.start = position  # what was sent is no longer next to what follows
        if position >= transfer.end:
            self.transfers.popleft()
            answer = {
                "from": transfer.start,
                "to": max(transfer.end, transfer.start),
                "base": self.log.base,
                "end": self.log.end,
            }
            self.out += protocol.json_frame({"id": transfer.request, "ok": True, **answer})
            return 1
        piece = self.log.view(position, min(transfer.end - position, protocol.OUTPUT_PIECE))
        head = protocol.data_head(transfer.request, position, len(piece))
        sent = self._send_piece(head, piece)
        transfer.position = position + len(piece)
        return sent

    def _send_piece(self, head: bytes, piece: memoryview | bytes) -> int:
        """Send a frame out of the log's own memory.

        What the socket does not take is copied: the log will overwrite it.
        """
        try:
            sent = self.sock.sendmsg([head, piece])
        except BlockingIOError:
            sent = 0
        if sent < len(head):
            self.out += head[sent:]
            self.out += piece
        elif sent < len(head) + len(piece):
            self.out += piece[sent - len(head) :]
        return max(sent, 1)

    # -- the end ----------------------------------------------------------------------------------

    def close(self, why: str) -> None:
        """Close the connection."""
        if not self.dead:
            self.dead = True
            self.lost(self, why)
            self.drop_fds()
            self.sock.close()

    # -- re-exec ----------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return all of it, for the next program of this holder."""
        return {
            "fd": self.sock.fileno(),
            "pid": self.pid,
            "version": self.decoder.version,
            "held": base64.b64encode(self.decoder.held).decode(),
            "operator": self.operator.id if self.operator is not None else "",
            "position": self.position,
            "answers": self.answers,
            "within": self.within,
            "subscribed": self.subscribed,
            "out": base64.b64encode(self.out).decode(),
            "events": [[anchor, base64.b64encode(frame).decode()] for anchor, frame in self.events],
            "transfers": [[t.request, t.start, t.position, t.end] for t in self.transfers],
        }

    def restore(self, state: dict[str, Any], operators: dict[str, Operator]) -> None:
        """Take over what `to_state` returned."""
        self.decoder.version = state["version"]
        self.decoder.feed(base64.b64decode(state["held"]))
        self.operator = operators.get(state["operator"])
        self.position, self.subscribed = state["position"], state["subscribed"]
        self.answers, self.within = state.get("answers", False), state.get("within", "")
        self.out += base64.b64decode(state["out"])
        self.events.extend((anchor, base64.b64decode(frame)) for anchor, frame in state["events"])
        self.transfers.extend(Transfer(*values) for values in state["transfers"])
