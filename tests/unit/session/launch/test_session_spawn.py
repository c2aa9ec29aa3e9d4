"""A session's command itself reports that it may begin, and no other process can."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from criuctl.proc.tree import ProcessIdentity
from criuctl.session.launch import spawn
from criuctl.session.launch.plain_spawn import SpawnRequest

CALL = (
    "import os, socket, sys; os.setresuid(65534, 65534, 65534); "
    "socket.socket(socket.AF_UNIX).connect('\\0' + sys.argv[1])"
)


def test_another_user_who_calls_first_is_not_taken_for_the_command() -> None:
    name = f"criuctl-test-{os.urandom(16).hex()}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as command:
        listener.bind(f"\0{name}")
        listener.listen(1)
        subprocess.run([sys.executable, "-I", "-c", CALL, name], check=True, timeout=60)
        command.settimeout(30)
        command.connect(f"\0{name}")
        command.shutdown(socket.SHUT_WR)  # it is executed
        started = spawn._await_command(listener, os.getpid(), SpawnRequest(("true",), {}))
        assert started == ProcessIdentity.of(os.getpid()).start_time
        assert command.recv(2) == b"!"
