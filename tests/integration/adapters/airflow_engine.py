"""The adapter of Airflow, with all of Airflow's programs. Run it by its name:

    scripts/setup --dev --adapters
    scripts/test tests/integration/adapters/airflow_engine.py

It is no part of the other tests because Airflow's packages exclude Prefect's, and it takes two
minutes. It fails where Airflow is not installed.
"""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from servers.common import free_ports
from support.command import PROJECT, Command
from support.engines import EXAMPLES, Job
from support.keeper import wait_until

from criuctl import Session

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

PYTHON = Path(os.environ.get("CRIUCTL_TEST_AIRFLOW", PROJECT / ".venv-airflow")) / "bin/python"
PATIENCE = 300  # seconds for what takes Airflow half a minute on an idle machine


class Airflow:
    """Airflow's programs, with folders of their own."""

    def __init__(self, job: Job) -> None:
        self._job = job
        [port] = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        dags = job.folder / "airflow" / "dags"
        dags.mkdir(parents=True)
        example = (EXAMPLES / "airflow_build.py").read_text()
        (dags / "build.py").write_text(example.replace("/srv/build", str(job.folder)))
        self._env = {
            "PATH": f"{PYTHON.parent}:{os.environ['PATH']}",
            "AIRFLOW_HOME": str(dags.parent),
            "AIRFLOW__API__BASE_URL": self._url,
            "AIRFLOW__API__PORT": str(port),
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self._url}/execution/",
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__PARALLELISM": "1",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        }
        self._token = ""

    def start(self) -> Command:
        """Start scheduler, worker, triggerer and server; wait until the DAG is there."""
        worker = self._job.worker("-m", "airflow", "standalone", python=str(PYTHON), env=self._env)

        def answers() -> bool:
            assert worker.process.poll() is None, worker.output()
            try:
                self._token = self.call("/auth/token")["access_token"]
                health = self.call("/api/v2/monitor/health")
                self.call("/api/v2/dags/build")
            except OSError:
                return False
            return all(health[one]["status"] == "healthy" for one in ("scheduler", "triggerer"))

        wait_until(answers, PATIENCE, "Airflow serves the DAG")
        return worker

    def call(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """Ask its server, by POST if there is a body."""
        headers = {"content-type": "application/json", "authorization": f"Bearer {self._token}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def run(self, name: str) -> None:
        """Start a run of the DAG."""
        conf = {"command": [str(self._job.program)]}
        body = {"dag_run_id": name, "logical_date": None, "conf": conf}
        self.call("/api/v2/dags/build/dagRuns", body)

    def wait(self, run: str, state: str) -> None:
        """Wait until the task of a run is in that state."""
        wait_until(lambda: self.call(task(run))["state"] == state, PATIENCE, f"it is {state}")


def task(run: str) -> str:
    """The path of the task of a run."""
    return f"/api/v2/dags/build/dagRuns/{run}/taskInstances/build"


def test_killed_programs_find_the_same_process_and_marking_the_task_ends_it(job: Job) -> None:
    assert PYTHON.exists(), "Airflow is not installed: run scripts/setup --dev --adapters"
    airflow = Airflow(job)
    first = airflow.start()
    airflow.run("killed")
    session = job.running()
    airflow.wait("killed", "deferred")
    job.attached(session)
    job.kill(first)
    job.check_same(session)
    second = airflow.start()
    job.attached(session)
    job.check_same(session)
    job.finish()
    airflow.wait("killed", "failed")
    wait_until(
        lambda: "ended with exit code 3" in second.output(), PATIENCE, "it has the exit code"
    )
    assert (job.times("begun"), job.times("ended"), len(Session.list())) == (1, 0, 0)

    (job.folder / "go").unlink()
    (job.folder / "begun").unlink()
    airflow.run("marked")
    session = job.running()
    airflow.wait("marked", "deferred")
    job.attached(session)
    airflow.call(task("marked"), {"new_state": "failed"}, "PATCH")
    job.check_ended(session)
    airflow.wait("marked", "failed")
