"""PID 1 of a host: it builds the root, starts what the tests ask for, and reaps.

Requests come over a SOCK_SEQPACKET socket from the tests, one JSON object each, with a pipe to tell
the end of the process by and the descriptors that are to be its stdin, stdout and stderr (those
that are not given are ``/dev/null`` or a file of this host: a descriptor that was opened in another
mount namespace cannot be dumped).  The answer carries the credentials of the new process, so that
the kernel itself translates its PID for the tests.

When the socket or the supervisor's lifeline closes, PID 1 ends, and with it the kernel ends every
process of the host, drops its mounts and takes its link down: there is nothing to clean up.
"""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import struct
import subprocess
from typing import Any

from . import root

MAX_REQUEST = 1 << 20
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def main(plan: dict[str, Any], requests: socket.socket, lifeline: int) -> None:
    """Be the host of `plan`; never returns to the caller's business."""
    signal.set_wakeup_fd(-1)
    root.build(plan["name"], plan["addresses"], plan["keep"])
    socket.sethostname(plan["name"])
    os.umask(0o022)
    if not os.read(lifeline, 1):  # the link is there, or the supervisor is gone
        return
    _network(plan)
    _next_pid(plan["first_pid"])
    serve(requests, lifeline)


def _network(plan: dict[str, Any]) -> None:
    lines = ["link set lo up", "link set eth0 up", f"address add {plan['address']}/24 dev eth0"]
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines).encode(), check=True, timeout=60)


def _next_pid(pid: int) -> None:
    """Let the next process have this PID: hosts that hand out the same ones meet nowhere by
    chance.
    """
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(str(pid - 1))


def serve(requests: socket.socket, lifeline: int) -> None:
    """Answer requests until the tests or the supervisor are gone."""
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    pipes: dict[int, int] = {}
    requests.send(b'{"ready": true}')
    while True:
        ready, _, _ = select.select([requests.fileno(), wake_read, lifeline], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
        _reap(pipes)
        if lifeline in ready:
            return
        if requests.fileno() in ready:
            data, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST, 8)
            if not data:
                return
            _answer(requests, json.loads(data), fds, pipes)


def _answer(
    requests: socket.socket, request: dict[str, Any], fds: list[int], pipes: dict[int, int]
) -> None:
    for fd in fds:
        os.set_inheritable(fd, False)
    end, given = fds[0], fds[1:]
    try:
        pid = _start(request, dict(zip(request["given"], given, strict=True)))
    except OSError as error:
        os.close(end)
        requests.send(json.dumps({"error": str(error)}).encode())
    else:
        pipes[pid] = end
        credentials = struct.pack("iII", pid, 0, 0)
        requests.sendmsg(
            [json.dumps({"pid": pid}).encode()],
            [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, array.array("B", credentials))],
        )
    finally:
        for fd in given:
            os.close(fd)


def _start(request: dict[str, Any], given: dict[str, int]) -> int:
    """Start a process of this host as a daemon of it would be: in a session of its own, our
    child.
    """
    opened: dict[str, int] = {}
    try:
        for stream in ("stdin", "stdout", "stderr"):
            if stream not in given:
                path = request["files"].get(stream, "/dev/null")
                opened[stream] = os.open(
                    path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
                )
        streams = opened | given
        process = subprocess.Popen(
            request["argv"],
            env=request["env"],
            cwd=request["cwd"],
            stdin=streams["stdin"],
            stdout=streams["stdout"],
            stderr=streams["stderr"],
            start_new_session=True,
        )
    finally:
        for fd in opened.values():
            os.close(fd)
    process.returncode = 0  # reaped by `_reap`; subprocess is not to wait for it as well
    return process.pid


def _reap(pipes: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        pipe = pipes.pop(pid, None)
        if pipe is not None:
            try:
                os.write(pipe, str(status).encode())
            except BrokenPipeError:
                pass  # the test does not care any more
            os.close(pipe)
