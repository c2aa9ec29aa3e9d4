"""An attempt of Temporal's activity, by Temporal's SDK without a server; see test_engines.py.

    python temporal_worker.py RUN ATTEMPT COMMAND...

It prints each heartbeat, and the exit code. SIGINT cancels the activity as its workflow would,
SIGTERM as a worker that shuts down does.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import replace
from datetime import timedelta

from temporalio.activity import ActivityCancellationDetails
from temporalio.testing import ActivityEnvironment

from criuctl.adapters.task_session import Program
from criuctl.adapters.temporal import run_in_session


async def main(run: str, attempt: str, argv: list[str]) -> None:
    """Run the activity."""
    environment = ActivityEnvironment()
    environment.info = replace(
        environment.info,
        workflow_run_id=run,
        activity_id="1",
        attempt=int(attempt),
        heartbeat_timeout=timedelta(seconds=1),
    )
    environment.on_heartbeat = lambda *details: print("heartbeat", json.dumps(details), flush=True)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, environment.cancel)
    shutdown = ActivityCancellationDetails(worker_shutdown=True)
    loop.add_signal_handler(signal.SIGTERM, environment.cancel, shutdown)
    print("exit code", await environment.run(run_in_session, Program(argv)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
