"""Adapters with the real engines: a worker that is killed, and a run that is cancelled.

Temporal's activity runs by Temporal's SDK without a server, which temporal_with_server.py has;
Airflow, whose packages exclude Prefect's, is in airflow_engine.py, and Prefect in test_prefect.py.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command import Command
from support.engines import EXAMPLES, Job
from support.keeper import wait_until
from support.operating import TIMEOUT

pytestmark = pytest.mark.integration

TEMPORAL = Path(__file__).with_name("temporal_worker.py")
CANCEL = """
import sys
from dbos import DBOSClient
DBOSClient(system_database_url="sqlite:///build.sqlite").cancel_workflow(sys.argv[1])
"""


def dbos(job: Job) -> Command:
    """A process with a DBOS workflow, which it starts or recovers."""
    return job.worker(EXAMPLES / "dbos_build.py", "build-1", job.program)


def langgraph(job: Job) -> Command:
    """A process with a graph, which it starts or resumes."""
    return job.worker(EXAMPLES / "langgraph_build.py", "build-1", job.program)


def temporal(job: Job) -> Command:
    """A process with an attempt of an activity."""
    return job.worker(TEMPORAL, "run-1", "1", job.program)


def cancel_dbos(job: Job, worker: Command) -> None:
    """Cancel the workflow from another process."""
    subprocess.run(
        [sys.executable, "-c", CANCEL, "build-1"], cwd=job.folder, check=True, timeout=TIMEOUT
    )


def interrupt(job: Job, worker: Command) -> None:
    """Cancel by ^C: asyncio cancels the graph; the program of the activity cancels that."""
    worker.process.kill(signal.SIGINT)


Start = Callable[[Job], Command]
Cancel = Callable[[Job, Command], None]
ENGINES: list[tuple[Start, Cancel]] = [
    (dbos, cancel_dbos),
    (langgraph, interrupt),
    (temporal, interrupt),
]


@pytest.mark.parametrize("start", [start for start, _ in ENGINES])
def test_a_killed_worker_s_retry_finds_the_same_process(job: Job, start: Start) -> None:
    first = start(job)
    session = job.running()
    job.attached(session)
    job.kill(first)
    job.check_same(session)
    second = start(job)
    job.attached(session)
    job.check_same(session)
    job.finish()
    assert second.process.wait(TIMEOUT) == 0, second.output()
    assert "exit code 3" in second.out.read_text()
    assert job.times("begun") == 1 and job.times("ended") == 0


@pytest.mark.parametrize(("start", "cancel"), ENGINES)
def test_a_cancelled_run_ends_its_command_once(job: Job, start: Start, cancel: Cancel) -> None:
    worker = start(job)
    session = job.running()
    job.attached(session)
    cancel(job, worker)
    assert worker.process.wait(TIMEOUT) != 0
    job.check_ended(session)


def test_a_temporal_worker_that_shuts_down_leaves_the_command(job: Job) -> None:
    worker = temporal(job)
    session = job.running()
    job.attached(session)
    wait_until(lambda: "heartbeat [9]" in worker.out.read_text(), TIMEOUT, "it reports the offset")
    worker.process.kill(signal.SIGTERM)
    assert worker.process.wait(TIMEOUT) != 0
    job.check_same(session)
