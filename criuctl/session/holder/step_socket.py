"""The socket through which a session's own processes reach the journal of steps.

It is the file ``steps`` in the folder that the tree sees as CRIUCTL_SESSION_DIR. A connection
carries one request, a line of JSON, and its answer, another line; then it is closed. It accepts the
operations on steps, and those of `inside_operations`, and gives none of an operator's rights.

The peer must be a process of the session's tree, as the kernel says at connect(2): its PID is
looked up among the tree's processes, and a pidfd shows that it is still that process. What it may
do with a step depends on its user (`steps`).

A unix connection between tree and holder would make a dump impossible. So before the tree is seized
the socket is closed, with all connections (`shut`), and clients that find it closed ask again when
it is open. Requests can be repeated: an attempt has a token.

A peer may be hostile or slow. Requests are bounded, a connection lives a few seconds, and one user
has a bounded number of them.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ...errors import CriuctlError
from ...proc.tree import ProcessIdentity
from ...steps.states import StepRefused
from .. import names
from .event_loop import READ, Loop, Timer
from .processes import Tree
from .session_files import SessionFiles
from .step_replication import Replication
from .steps import Again, Message, Peer, Steps

MAX_REQUEST = 96 << 10  # bytes of a line
_SECONDS = 5.0  # that a connection may live
_MAX_CONNECTIONS, _MAX_OF_ONE_USER = 128, 64
_SEND_BUFFER = 512 << 10  # an answer is sent at once, or never
_SO_PEERPIDFD = 77  # Linux 6.5; not in the socket module
_BACKLOG = 64


@dataclass(eq=False, slots=True)
class _Caller:
    """One connection."""

    sock: socket.socket
    peer: Peer
    timer: Timer
    data: bytearray = field(default_factory=bytearray)
    answer: Callable[[], None] | None = None  # waits for the store


class StepSocket:
    """The listening socket of one session, and its connections."""

    def __init__(
        self,
        loop: Loop,
        files: SessionFiles,
        tree: Tree,
        steps: Steps,
        replication: Replication,
        more: Mapping[str, Callable[[Peer, Message], Message]],
    ) -> None:
        self._loop, self._files, self._tree = loop, files, tree
        self._replication = replication
        self._listener: socket.socket | None = None
        self._callers: dict[int, _Caller] = {}
        self._operations: dict[str, Callable[[Peer, Message], Message]] = {
            "step-begin": steps.begin,
            "step-done": steps.done,
            "step-failed": steps.failed,
            "step-progress": steps.progress,
            "step-show": steps.show,
            **more,
        }

    # -- open and shut ----------------------------------------------------------------------------

    def open(self) -> None:
        """Listen, if it does not already and the tree can see the folder."""
        path = self._files.run_folder / "inside" / names.STEPS
        if self._listener is not None or not path.parent.is_dir():
            return
        kind = socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        listener = socket.socket(socket.AF_UNIX, kind)
        before = os.umask(0o111)  # a program may have given up its user
        try:
            path.unlink(missing_ok=True)
            with names.socket_address(path) as address:
                listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:  # a full disk: the session goes on, and its programs wait
            listener.close()
            return
        finally:
            os.umask(before)
        self._listener = listener
        self._loop.watch(listener.fileno(), READ, self._on_accept)

    def shut(self) -> None:
        """Close the socket and every connection: the tree is about to be dumped."""
        if self._listener is not None:
            self._loop.unwatch(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for caller in list(self._callers.values()):
            self._reply(caller, {"again": True})

    # -- callers ----------------------------------------------------------------------------------

    def _on_accept(self, events: int) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # gone again, or no descriptors: the next event tries again
        peer = self._peer(sock)
        of_this_user = sum(
            peer is not None and caller.peer.uid == peer.uid for caller in self._callers.values()
        )
        if (
            peer is None
            or of_this_user >= _MAX_OF_ONE_USER
            or len(self._callers) >= _MAX_CONNECTIONS
        ):
            sock.close()
            return
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        fd = sock.fileno()
        timer = self._loop.after(_SECONDS, lambda: self._late(fd))
        self._callers[fd] = _Caller(sock, peer, timer)
        self._loop.watch(fd, READ, lambda got: self._on_ready(fd))

    def _peer(self, sock: socket.socket) -> Peer | None:
        """Return the process at the other end; None: it does not belong to the session."""
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, _gid = struct.unpack("iII", credentials)
        pidfd = -1
        try:
            pidfd = _pidfd(sock, pid)
            if not self._tree.contains(pid) or select.select([pidfd], [], [], 0)[0]:
                return None
        except (OSError, CriuctlError):
            return None
        finally:
            if pidfd >= 0:
                os.close(pidfd)
        return Peer(uid, pid, True, {"pid": pid, "uid": uid})

    def _on_ready(self, fd: int) -> None:
        caller = self._callers[fd]
        try:
            piece = caller.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece or caller.answer is not None:
            self._close(caller)  # gone, or it says more than one line
            return
        caller.data += piece
        line, end, _rest = caller.data.partition(b"\n")
        if end:
            self._serve(caller, bytes(line))
        elif len(caller.data) > MAX_REQUEST:
            text = f"a request has at most {MAX_REQUEST} bytes"
            self._reply(caller, _error(StepRefused("protocol", text)))

    def _late(self, fd: int) -> None:
        caller = self._callers.get(fd)
        if caller is not None and caller.answer is not None:
            self._reply(caller, {"again": True})  # it still waits for the store
        elif caller is not None:
            self._close(caller)

    def _serve(self, caller: _Caller, line: bytes) -> None:
        """Do what a line asks, and answer, now or when the store has it."""
        try:
            message = _parsed(line)
            action = self._operations.get(str(message.get("op")))
            if action is None:
                raise StepRefused("unknown-operation", "no operation of this name")
            body = action(caller.peer, message)
            needed = self._replication.needed(str(message["step"])) if "step" in message else 0
        except Again:
            self._reply(caller, {"again": True})
        except StepRefused as refused:
            self._reply(caller, _error(refused))
        except OSError as error:
            self._reply(caller, _error(StepRefused("failed", error.strerror or str(error))))
        except Exception as error:
            self._loop.bug()
            text = f"a bug in the holder: {type(error).__name__}"
            self._reply(caller, _error(StepRefused("failed", text)))
        else:
            if not needed:
                self._reply(caller, {"ok": True, **body})
                return
            caller.answer = lambda: self._reply(caller, {"ok": True, **body})
            self._replication.wait(needed, caller.answer)

    def _reply(self, caller: _Caller, body: Message) -> None:
        data = json.dumps(body, separators=(",", ":")).encode() + b"\n"
        with suppress(OSError):
            # One that does not take it, although the buffer is larger than any answer, asks again.
            caller.sock.send(data)
        self._close(caller)

    def _close(self, caller: _Caller) -> None:
        fd = caller.sock.fileno()
        if self._callers.pop(fd, None) is None:
            return
        caller.timer.cancel()
        if caller.answer is not None:
            self._replication.forget(caller.answer)
        self._loop.unwatch(fd)
        caller.sock.close()


def _pidfd(sock: socket.socket, pid: int) -> int:
    """Return a pidfd of the process that has connected; `OSError` if it is gone."""
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:  # else an older kernel
            raise
        return ProcessIdentity.of(pid).open_pidfd()
    return int(struct.unpack("i", data)[0])


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise StepRefused("protocol", "a request is one JSON object on one line")
    return message


def _error(refused: StepRefused) -> Message:
    error: Message = {"code": refused.code, "message": str(refused)}
    if refused.hint:
        error["hint"] = refused.hint
    if refused.details:
        error["details"] = refused.details
    return {"error": error}
