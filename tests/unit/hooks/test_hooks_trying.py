"""A hook that is run by hand gets the request that the contract describes, as far as it can be
known.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.hooking import HookFolder

from criuctl.config import Config
from criuctl.hooks.contract import PHASES
from criuctl.ops.hook_trial import try_hooks

ALWAYS = {
    "version",
    "phase",
    "session",
    "incarnation",
    "checkpoint",
    "pid",
    "inner_pid",
    "store",
    "labels",
    "leave_running",
}
MORE = {
    "snapshot-failed": {"target", "error"},
    "dump-failed": {"error"},
    "restore-failed": {"error"},
    "loss-exceeded": {"loss_s", "max_loss_s"},
    "recovered": {"recovered_ms", "lost_s", "from_host", "passed_over"},
    "gave-up": {"failures", "error"},
    "reconnect": {"connection", "options"},
}


@pytest.mark.parametrize("phase", PHASES)
def test_the_request_of_a_hook(
    hooks: HookFolder, config: Config, tmp_path: Path, phase: str
) -> None:
    config = replace(config, state_dir=str(tmp_path / "state"), run_dir=str(tmp_path / "run"))
    hooks.noting(phase, more='echo \'{"outcome": "failed"}\'')
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sock,
        listener.accept()[0],
    ):
        tree = subprocess.Popen(
            [sys.executable, "-IS", "-c", "import signal; signal.pause()"], pass_fds=[sock.fileno()]
        )
        try:
            fd = (None, sock.fileno()) if phase == "reconnect" else None
            trial = try_hooks(config, phase, "note", target=str(tree.pid), fd=fd)
        finally:
            os.kill(tree.pid, signal.SIGKILL)
            tree.wait()
    (request,) = hooks.requests(phase)
    assert ALWAYS | MORE.get(phase, set()) | {"trial"} <= set(request)
    assert request["pid"] == tree.pid
    if phase == "snapshot-failed":
        assert request["target"] == str(tree.pid)
    assert set(request) <= set(trial.requests[0])
