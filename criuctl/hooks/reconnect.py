"""Handing one connection to an executable: phase ``reconnect``, found by the name that a rule gives
as its protocol.

The hook gets the program's own socket, unconnected, as descriptor 3, the connection's record on
standard input, and the rule's secret, if it has one, on descriptor 4: a pipe with nothing else in
it, so that the secret is in no environment, no argument list and no file. It connects the socket,
sets up the session with the peer, and answers ``{"outcome": "reconnected" | "failed", "retry":
bool, "reason": text, "data": {...}}``.

The answer is verified where possible: a socket that is not connected afterwards counts as failed.
The file status flags of the socket belong to the program; changes by the hook (such as a library
that makes it non-blocking) are undone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from ..config import Config
from .contract import RECONNECT, STDERR_TAIL, BadAnswer, decode
from .runner import execute, find_hook, request

SOCKET_FD = 3
SECRET_FD = 4
_TCP_ESTABLISHED = 1


def run_reconnect(
    config: Config,
    name: str,
    sock_fd: int,
    record: Mapping[str, Any],
    *,
    options: Mapping[str, Any] | None = None,
    secret: str | None = None,
    deadline: float,
    facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run the hook `name` to connect the socket `sock_fd`; return ``outcome``, ``retry``,
    ``reason``, ``data`` and ``seconds``.

    `record` is the connection's record as JSON, `options` are those of its rule, `facts` are more
    keys for the hook. `deadline` is of `time.monotonic`; the hook's own time-out ends it before
    that. An error of the hook never raises; `ConfigError` means that there is no such hook.
    """
    hook = find_hook(config, RECONNECT, name)
    if hook.refused:
        return _failed(f"the hook {name!r} was not run: {hook.refused}", hint=hook.hint)
    timeout = min(config.hook_timeout, deadline - time.monotonic())
    if timeout <= 0:
        return _failed(f"no time is left for the hook {name!r}", retry=True)
    known = {key: value for key, value in (facts or {}).items() if key != "connections"}
    body = request(
        RECONNECT, known | {"connection": dict(record), "options": dict(options or {})}, name
    )
    flags = fcntl.fcntl(sock_fd, fcntl.F_GETFL)
    fds = {SOCKET_FD: sock_fd}
    if secret is not None:
        fds[SECRET_FD] = _secret_pipe(secret)
    try:
        ended = execute(config, hook, body, timeout, fds)
    finally:
        fcntl.fcntl(sock_fd, fcntl.F_SETFL, flags)
        if secret is not None:
            os.close(fds[SECRET_FD])
    answer = _answer(f"the hook {name!r}", ended.stdout, ended.error)
    if answer["outcome"] == "reconnected":
        lie = _not_connected(sock_fd)
        if lie:
            answer = _failed(
                f"the hook {name!r} says that it has connected the socket, but {lie}", retry=True
            )
    if answer["outcome"] == "failed" and not answer["reason"]:
        answer["reason"] = ended.stderr.strip().rpartition("\n")[2][:300] or "no reason given"
    answer |= {"seconds": round(ended.seconds, 3), "stderr": ended.stderr}
    return _without(answer, secret)


def _failed(reason: str, *, retry: bool = False, hint: str = "") -> dict[str, Any]:
    return {"outcome": "failed", "retry": retry, "reason": reason, "data": {}, "hint": hint}


def _answer(who: str, stdout: bytes, error: str) -> dict[str, Any]:
    """Return the hook's answer in a uniform shape; a crash or a time-out overrides it."""
    try:
        body = decode(stdout)
    except BadAnswer as bad:
        return _failed(f"{who}: {error or bad.message}")
    reason, data = body.get("reason", ""), body.get("data", {})
    retry, outcome = body.get("retry", False), body.get("outcome")
    if not isinstance(reason, str) or not isinstance(data, dict) or not isinstance(retry, bool):
        return _failed(f"{who}: its answer has a value of the wrong kind")
    if error:
        return _failed(f"{who}: {error}: {reason}" if reason else f"{who}: {error}", retry=retry)
    if outcome not in ("reconnected", "failed"):
        return _failed(f"{who}: it did not answer with an outcome (reconnected or failed)")
    return {"outcome": outcome, "retry": retry, "reason": reason, "data": data, "hint": ""}


def _not_connected(sock_fd: int) -> str:
    """Return why the socket is not connected; "" if it is."""
    with socket.socket(fileno=os.dup(sock_fd)) as sock:
        pending = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if pending:
            return f"it has an error: {os.strerror(pending)}"
        try:
            sock.getpeername()
        except OSError as error:
            return (
                "it is not connected"
                if error.errno == errno.ENOTCONN
                else f"its peer is unknown: {error.strerror}"
            )
        if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
            if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _TCP_ESTABLISHED:
                return "the connection is closed already"
    return ""


def _secret_pipe(secret: str) -> int:
    """Return the reading end of a pipe that holds only the secret."""
    data = secret.encode()
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        # of a variable or a command; a file's is at most 64 KiB
        if len(data) > fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ):
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, len(data))
        os.set_blocking(writing, False)
        os.write(writing, data)
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return reading


def _without(answer: dict[str, Any], secret: str | None) -> dict[str, Any]:
    """Return the answer with the secret removed from its texts, in case the hook repeated it."""
    secret = (secret or "").strip()
    if secret and len(answer["stderr"]) == STDERR_TAIL:
        answer["stderr"] = answer["stderr"][len(secret) :]  # it may begin in the middle of one

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(secret, "***") if secret else value
        if isinstance(value, dict):
            return {clean(key): clean(one) for key, one in value.items()}
        return [clean(one) for one in value] if isinstance(value, list) else value

    return {key: value if key == "outcome" else clean(value) for key, value in answer.items()}
