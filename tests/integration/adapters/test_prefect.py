"""The adapter of Prefect: a flow that a process serves, with a real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers.common import free_ports
from support.command import Command
from support.engines import EXAMPLES, Job
from support.keeper import wait_until

pytestmark = pytest.mark.integration

PATIENCE = 180  # seconds for the server, which takes ten on an idle machine
QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_CLI_COLORS": "false",
    "PREFECT_RUNNER_POLL_FREQUENCY": "1",
}


class Server:
    """Prefect's server."""

    def __init__(self, folder: Path) -> None:
        [port] = free_ports(1)
        self.url = f"http://127.0.0.1:{port}/api"
        self.env = QUIET | {"PREFECT_HOME": str(folder), "PREFECT_API_URL": self.url}
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "uvicorn", "--factory"),
                *("prefect.server.api.server:create_app", "--host", "127.0.0.1"),
                *("--port", str(port), "--log-level", "warning"),
            ],
            env=os.environ | QUIET | {"PREFECT_HOME": str(folder)},
            start_new_session=True,
        )
        wait_until(lambda: self._answers("/health"), PATIENCE, "Prefect's server answers")

    def _answers(self, path: str) -> bool:
        assert self._process.poll() is None, "Prefect's server has ended"
        try:
            self.call(path)
        except OSError:
            return False
        return True

    def call(self, path: str, body: Any = None) -> Any:
        """Ask it, by POST if there is a body."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def run(self, argv: list[str]) -> str:
        """Start a run of the flow that is served; its id."""
        deployments: Callable[[], Any] = lambda: self.call("/deployments/filter", {})  # noqa: E731
        [deployment] = wait_until(deployments, PATIENCE, "the flow is served")
        path = f"/deployments/{deployment['id']}/create_flow_run"
        return str(self.call(path, {"parameters": {"argv": argv}})["id"])

    def set_state(self, run: str, **state: str) -> None:
        """Set the state of a flow run, as `prefect flow-run retry` and `cancel` do."""
        answer = self.call(f"/flow_runs/{run}/set_state", {"state": state, "force": True})
        assert answer["status"] == "ACCEPT"

    def wait(self, run: str, state: str) -> None:
        """Wait until a flow run is in that state."""
        path = f"/flow_runs/{run}"
        wait_until(lambda: self.call(path)["state_name"] == state, PATIENCE, f"it is {state}")

    def close(self) -> None:
        """End it."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests."""
    server = Server(tmp_path_factory.mktemp("prefect"))
    yield server
    server.close()


def serve(job: Job, server: Server) -> Command:
    """A process that serves the flow."""
    return job.worker(EXAMPLES / "prefect_build.py", env=server.env)


def test_a_killed_worker_s_retry_finds_the_same_process_and_cancelling_ends_it(
    job: Job, server: Server
) -> None:
    first = serve(job, server)
    run = server.run([str(job.program)])
    session = job.running()
    job.attached(session)
    job.kill(first)
    job.check_same(session)
    second = serve(job, server)
    server.set_state(run, type="SCHEDULED", name="AwaitingRetry")
    job.attached(session)
    job.check_same(session)
    job.finish()
    server.wait(run, "Completed")
    wait_until(lambda: "exit code 3" in second.output(), PATIENCE, "the flow has the exit code")
    assert job.times("begun") == 1 and job.times("ended") == 0

    (job.folder / "go").unlink()
    (job.folder / "begun").unlink()
    run = server.run([str(job.program)])
    session = job.running()
    job.attached(session)
    server.set_state(run, type="CANCELLING")
    server.wait(run, "Cancelled")
    job.check_ended(session)
