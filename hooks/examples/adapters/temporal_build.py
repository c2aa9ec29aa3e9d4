"""Temporal: a workflow that runs a command as a session.

    pip install '/path/to/clone/of/criuctl[temporal]'
    python temporal_build.py worker &
    python temporal_build.py build-1 make all

Kill the worker at any moment and start it again: the command runs on, and the workflow gets its
exit code. Cancelling the workflow ends the command. TEMPORAL_ADDRESS is the server's.
"""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import timedelta

from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import Worker

with workflow.unsafe.imports_passed_through():
    from criuctl.adapters.task_session import Program
    from criuctl.adapters.temporal import run_in_session

QUEUE = "build"  # of the workers on the session's host


@workflow.defn
class Build:
    """Runs a command."""

    @workflow.run
    async def run(self, argv: list[str]) -> int:
        """Return its exit code."""
        return await workflow.execute_activity(
            run_in_session,
            Program(argv),
            start_to_close_timeout=timedelta(hours=8),
            heartbeat_timeout=timedelta(seconds=6),
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        )


async def main(name: str, argv: list[str]) -> None:
    """Serve, or run one workflow."""
    client = await Client.connect(os.environ.get("TEMPORAL_ADDRESS", "localhost:7233"))
    if name == "worker":
        await Worker(client, task_queue=QUEUE, workflows=[Build], activities=[run_in_session]).run()
    else:
        code = await client.execute_workflow(Build.run, argv, id=name, task_queue=QUEUE)
        print("exit code", code)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
