"""Messages between a job and the node's service: one JSON object each, with descriptors.

The socket is a unix socket of sequenced packets, so a message is whole or is not there. The service
reads at most `LONGEST` bytes and `DESCRIPTORS` descriptors of one. The first message of either side
is a request of the job:

    {"op": "hello"}                            -> job, name, checkpoint, warnings
    {"op": "start"}     pidfd, stdout, stderr  -> warnings: the program, which waits for the answer
    {"op": "restore"}   stdout, stderr         -> pid, number, age_s, warnings; a pidfd comes along
    {"op": "checkpoint", "end": true|false}    -> number, frozen_ms, warnings
    {"op": "ended", "code": N}                 -> nothing: the started program has ended

An answer has ``ok``; one that is false has ``error`` and ``exit_code``. Between answers the service
sends events: ``exited`` (with the ``code`` of a restored program) and ``fenced`` (with a
``reason``: the job runs on another node now, and what ran here was ended).
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import CriuctlError, DataError

SOCKET = "/run/criuctl-slurm/socket"
LONGEST = 65536  # bytes
DESCRIPTORS = 3
_TEXT, _WARNINGS = 1000, 6  # characters; with escapes, a message of them fits


class BadMessage(DataError):
    """A message of the other side is none of the protocol."""

    code = "bad-message"


def send(sock: socket.socket, body: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message; `OSError` if the other side is gone."""
    data = json.dumps(body).encode()
    socket.send_fds(sock, [data], list(fds))


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next message and its descriptors, which are close-on-exec; None at the end.

    `BadMessage` for one that is too long, is no object or brings too many descriptors; its
    descriptors are closed.
    """
    room = socket.CMSG_SPACE(DESCRIPTORS * array.array("i").itemsize)
    data, ancillary, flags, _ = sock.recvmsg(LONGEST, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(value[: len(value) - len(value) % fds.itemsize])
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise BadMessage("a message is too long, or brings too many descriptors")
        if not data:
            close(fds)
            return None
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            raise BadMessage("a message is no JSON") from None
        if not isinstance(body, dict):
            raise BadMessage("a message is no object")
    except BaseException:
        close(fds)
        raise
    return body, list(fds)


def close(fds: Sequence[int] | array.array[int]) -> None:
    """Close descriptors that came along."""
    for fd in fds:
        os.close(fd)


def failure(error: CriuctlError) -> dict[str, Any]:
    """Return the answer for an error, cut to what a message may hold."""
    body = {
        "code": error.code,
        "message": error.message[:_TEXT],
        "hint": error.hint[:_TEXT],
        "exit_code": error.exit_code,
    }
    return {"ok": False, "error": body, "exit_code": error.exit_code}


def texts(warnings: Sequence[str]) -> list[str]:
    """Return the first of these warnings, cut to what a message may hold."""
    return [text[:_TEXT] for text in warnings[:_WARNINGS]]
