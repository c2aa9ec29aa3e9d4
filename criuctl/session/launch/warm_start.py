"""A process that has loaded the program of a holder, and forks one for each session.

Loading takes longer than all else that a new holder does, so when many sessions are made at once it
is done once. Requests come on a SOCK_SEQPACKET socket from `daemon.WarmHolders`: JSON, with the
descriptors for the holder: first the launcher's socket, as `fresh_start` takes it, then those that
it is to have under the numbers in the request. The process ends with the socket; the holders do
not.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from . import fresh_start

MOST_FDS = 16
_REQUEST = 4096  # bytes
_ABOVE = 512  # of all numbers that are asked for


def serve(channel: int) -> None:
    """Fork a holder for each request; return when the socket has ended."""
    gc.collect()
    gc.freeze()  # the holders share these pages
    with socket.socket(fileno=channel) as requests:
        while True:
            data, fds, _flags, _address = socket.recv_fds(requests, _REQUEST, MOST_FDS)
            if not data:
                return
            child = os.fork()
            if child == 0:
                _become_holder(json.loads(data), fds)
            for fd in fds:
                os.close(fd)
            os.waitpid(child, 0)


def _become_holder(request: dict[str, Any], fds: Sequence[int]) -> NoReturn:
    """Fork again, in the child, so that nothing waits for the holder; it keeps only its own
    descriptors.
    """
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        kept = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for fd in fds]
        log = Path(request["run_folder"]) / "holder.log"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        kept.append(fcntl.fcntl(os.open(log, flags, 0o600), fcntl.F_DUPFD_CLOEXEC, _ABOVE))
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in kept:
                with suppress(OSError):  # the listing's own descriptor
                    os.close(int(name))
        channel, *others, log_fd = kept
        os.dup2(log_fd, 2)
        os.close(log_fd)
        for fd, number in zip(others, request["fds"], strict=True):
            os.dup2(fd, number)
            os.close(fd)
        fresh_start.start(channel)
    finally:
        os._exit(0)
