"""The example of Temporal with a server. Run it by its name:

    scripts/test tests/integration/adapters/temporal_with_server.py

TEMPORAL_ADDRESS is a server's; without it Temporal's SDK downloads one. It is no part of the other
tests, which have no server.
"""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Iterator

import pytest
from support.engines import EXAMPLES, Job
from support.keeper import wait_until
from support.operating import TIMEOUT
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

pytestmark = pytest.mark.integration

EXAMPLE = EXAMPLES / "temporal_build.py"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a server."""
    if given := os.environ.get("TEMPORAL_ADDRESS"):
        yield given
        return
    with asyncio.Runner() as runner:
        server = runner.run(WorkflowEnvironment.start_local())
        yield server.client.service_client.config.target_host
        runner.run(server.shutdown())


def test_a_killed_worker_s_retry_finds_the_same_process(job: Job, address: str) -> None:
    env, name = {"TEMPORAL_ADDRESS": address}, f"build-{uuid.uuid4()}"
    first = job.worker(EXAMPLE, "worker", env=env)
    client = job.worker(EXAMPLE, name, job.program, env=env)
    session = job.running()
    job.attached(session)
    job.kill(first)
    job.check_same(session)
    job.worker(EXAMPLE, "worker", env=env)
    job.attached(session)
    job.finish()
    assert client.process.wait(TIMEOUT) == 0, client.output()
    assert "exit code 3" in client.out.read_text() and job.times("begun") == 1


def test_a_cancelled_workflow_ends_its_command_once(job: Job, address: str) -> None:
    env, name = {"TEMPORAL_ADDRESS": address}, f"build-{uuid.uuid4()}"
    worker = job.worker(EXAMPLE, "worker", env=env)
    client = job.worker(EXAMPLE, name, job.program, env=env)
    session = job.running()
    job.attached(session)

    async def cancel() -> None:
        connected = await Client.connect(address)
        await connected.get_workflow_handle(name).cancel()

    asyncio.run(cancel())
    job.check_ended(session)
    wait_until(lambda: client.process.poll() is not None, TIMEOUT, "the workflow has ended")
    worker.process.kill(signal.SIGTERM)
