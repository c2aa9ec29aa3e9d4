"""A parent and its child that each want a signal when their parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading

from animal import Check, libc, serve

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2


def wish(number: int) -> None:
    libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def wished() -> int:
    found = ctypes.c_int()
    libc.prctl(PR_GET_PDEATHSIG, ctypes.byref(found), 0, 0, 0)
    return found.value


ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
wish(signal.SIGKILL)
if not os.fork():
    ours.close()
    wish(signal.SIGUSR2)
    while theirs.recv(1):
        theirs.send(bytes([wished()]))
    os._exit(0)
theirs.close()


def waits() -> None:
    wish(40)  # each thread has its own; one without a name
    threading.Event().wait()


threading.Thread(target=waits, daemon=True).start()


def check(found: Check) -> None:
    ours.send(b"?")
    found.equal("the child's wish", ours.recv(1)[0], int(signal.SIGUSR2))


serve(check)
