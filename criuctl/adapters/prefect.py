"""Prefect 3: a task that runs a command as a session.

    @flow(on_cancellation=[end_sessions])
    def build() -> int:
        return run_in_session(Program(["make", "all"]))

The run is the flow run, the task `key`, or without one the program: when the flow run is executed
again, after its process was killed or by ``prefect flow-run retry``, the same call finds the same
session. As with Prefect's default cache policy, two calls with one program in one flow run are the
same call; give them keys to run it twice.

Prefect cancels a flow run by ending its process, which looks like any other end of it. So sessions
are ended by `end_sessions`, a hook that Prefect calls when the flow run was cancelled.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from typing import Any

from prefect import Flow, task
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger

from ..errors import UsageError
from .task_session import Program, Task, end_run, run

INTERVAL = 30.0  # seconds between two lines in the log


@task(name="run-in-session")
def run_in_session(program: Program, check: bool = False, key: str = "") -> int:
    """Return the command's exit code; with `check`, fail if it is not 0.

    A task that has failed in this way, and has ``retries``, starts the command again. The log has
    the offset of the output. `UsageError` outside of a flow: nothing would find the session again.
    """
    here, logger = task_of(program, key), get_run_logger()

    def beat(offset: int) -> None:
        logger.info("session %s has printed %d bytes", here.session, offset)

    return run(here, program, check=check, beat=beat, interval=INTERVAL)


def task_of(program: Program, key: str = "") -> Task:
    """Return the task of a call, by the task run in which this is called."""
    context = TaskRunContext.get()
    if context is None or context.task_run.flow_run_id is None:
        raise UsageError("a session needs a flow run", hint="Call run_in_session in a flow.")
    text = json.dumps(asdict(program), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    default = f"{os.path.basename(program.argv[0])}-{digest}"
    return Task(str(context.task_run.flow_run_id), key or default)


def end_sessions(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """End the sessions of a flow run: a hook for ``on_cancellation`` of a flow."""
    end_run(str(flow_run.id))
