"""A hook that is handed a socket: what it gets, what it is believed, and what is left of the
socket's state.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from support.hooking import HookFolder

from criuctl.config import Config
from criuctl.errors import ConfigError
from criuctl.hooks.reconnect import _secret_pipe, run_reconnect

PREAMBLE = (
    "import json, os, socket, sys\nrequest = json.load(sys.stdin)\nsock = socket.socket(fileno=3)\n"
)
CONNECT = (
    'host, _, port = request["connection"]["peer"].rpartition(":")\n'
    "sock.connect((host, int(port)))\n"
)
DONE = (
    'data = {"as": request["options"].get("user")}\n'
    'print(json.dumps({"outcome": "reconnected", "data": data}))\n'
)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A server that listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(20)
        yield listening


@pytest.fixture
def program() -> Iterator[socket.socket]:
    """The program's socket."""
    with socket.socket() as sock:
        yield sock


def call(
    config: Config,
    program: socket.socket,
    server: socket.socket,
    seconds: float = 20.0,
    **more: Any,
) -> dict[str, Any]:
    host, port = server.getsockname()
    record = {"pid": 1, "fd": 5, "family": "inet", "peer": f"{host}:{port}"}
    return run_reconnect(
        config, "hook", program.fileno(), record, deadline=time.monotonic() + seconds, **more
    )


def test_the_socket_is_connected_and_its_state_is_its_own(
    hooks: HookFolder, config: Config, program: socket.socket, server: socket.socket
) -> None:
    speak = 'sock.sendall(b"hello\\n"); assert sock.recv(3) == b"hi\\n"; sock.setblocking(False)\n'
    hooks.python("reconnect", "hook", PREAMBLE + CONNECT + speak + DONE)
    flags = fcntl.fcntl(program, fcntl.F_GETFL)
    server.setblocking(True)
    pid = os.fork()
    if pid == 0:  # the peer, for the hook waits for its answer
        try:
            peer, _ = server.accept()
            peer.sendall(b"hi\n" if peer.recv(6) == b"hello\n" else b"no\n")
            peer.recv(1)
        finally:
            os._exit(0)
    answer = call(config, program, server, options={"user": "me"})
    assert (answer["outcome"], answer["data"], answer["reason"]) == (
        "reconnected",
        {"as": "me"},
        "",
    )
    assert program.getpeername() == server.getsockname()
    assert fcntl.fcntl(program, fcntl.F_GETFL) == flags
    program.shutdown(socket.SHUT_RDWR)
    os.waitpid(pid, 0)


def test_the_secret_is_on_descriptor_4_and_nowhere_else(
    hooks: HookFolder, config: Config, program: socket.socket, server: socket.socket
) -> None:
    secret = 'quite "secret" ü\n'
    look = """
secret = open(4).read()
seen = (json.dumps(request, ensure_ascii=False), *sys.argv, *os.environ.values())
spread = [text for text in seen if "quite" in text]
parent = open(f"/proc/{os.getppid()}/cmdline").read()
parent += open(f"/proc/{os.getppid()}/environ", errors="replace").read()
data = {"length": len(secret), "spread": spread, "parent": "quite" in parent, "mine": secret}
print("here: " + secret, file=sys.stderr)
print(json.dumps({"outcome": "reconnected", "data": data}))
"""
    hooks.python("reconnect", "hook", PREAMBLE + CONNECT + look)
    answer = call(config, program, server, secret=secret)
    assert answer["data"] == {"length": len(secret), "spread": [], "parent": False, "mine": "***\n"}
    assert "quite" not in str(answer)
    hooks.python(
        "reconnect",
        "hook",
        PREAMBLE + "import os\nassert not os.path.exists('/proc/self/fd/4')\n" + CONNECT + DONE,
    )
    with socket.socket() as other:
        assert call(config, other, server)["outcome"] == "reconnected"


def test_a_secret_that_is_larger_than_a_pipe() -> None:
    """A token from a command, say: the peer would refuse half of one, and the cause would be hard
    to find.
    """
    secret = "".join(f"{number:08}" for number in range(20_000))
    reading = _secret_pipe(secret)
    with open(reading) as pipe:
        assert pipe.read() == secret


LIES = {
    "not connected": (DONE, "but it is not connected", True),
    "failed try": (
        "assert sock.connect_ex(('127.0.0.1', 1)) == 111\n" + DONE,
        "but it is not connected",
        True,
    ),
    "closed again": (CONNECT + "sock.shutdown(socket.SHUT_RDWR)\n" + DONE, "", True),
    "dies": (CONNECT + "os.kill(os.getpid(), 11)\n", "ended by signal 11", False),
    "fails": ("sys.exit('the peer is away')\n", "exit code 1", False),
    "says failed": (
        'print(json.dumps({"outcome": "failed", "retry": True, "reason": "away"}))\n',
        "away",
        True,
    ),
    "hangs": ("import time\ntime.sleep(1000)\n", "ended after 1 s", False),
    "writes garbage": (CONNECT + "print('done')\n", "not JSON", False),
    "writes nothing": (CONNECT, "did not answer with an outcome", False),
    "wrong kinds": (
        CONNECT + 'print(json.dumps({"outcome": "reconnected", "data": 3}))\n',
        "wrong kind",
        False,
    ),
    "too much": (CONNECT + "print('x' * 3000000)\n", "more than 1 MiB", False),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=list(LIES))
def test_what_is_no_connection_is_found_out(
    lie: tuple[str, str, bool],
    hooks: HookFolder,
    config: Config,
    program: socket.socket,
    server: socket.socket,
) -> None:
    text, reason, retry = lie
    hooks.python("reconnect", "hook", PREAMBLE + text)
    answer = call(replace(config, hook_timeout=1.0 if "sleep" in text else 20.0), program, server)
    assert (answer["outcome"], answer["retry"]) == ("failed", retry)
    assert reason in answer["reason"]
    assert answer["reason"]


def test_unix_sockets_work_too(hooks: HookFolder, config: Config, server: socket.socket) -> None:
    path = str(hooks.path / "s")
    hooks.python("reconnect", "hook", PREAMBLE + f"sock.connect({path!r})\n" + DONE)
    with socket.socket(socket.AF_UNIX) as program, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        assert call(config, program, server)["outcome"] == "reconnected"
        assert program.getpeername() == path


def test_no_such_hook_a_refused_one_and_no_time(
    hooks: HookFolder, config: Config, program: socket.socket, server: socket.socket
) -> None:
    with pytest.raises(ConfigError, match="no reconnect hook 'hook'"):
        call(config, program, server)
    hooks.python("reconnect", "hook", PREAMBLE + CONNECT + DONE).chmod(0o777)
    assert "can be written by others" in call(config, program, server)["reason"]
    (hooks.path / "reconnect" / "hook").chmod(0o755)
    answer = call(config, program, server, seconds=-1)
    assert (answer["outcome"], answer["retry"]) == ("failed", True)
    with pytest.raises(OSError) as caught:
        program.getpeername()
    assert caught.value.errno == errno.ENOTCONN
