"""DBOS: a step that runs a command as a session.

    @DBOS.workflow()
    def build() -> int:
        return run_in_session(Program(["make", "all"]))

The run is the workflow, the task the number of the step in it. When DBOS recovers the workflow
after its process was killed, the step finds the session again. `DBOS.cancel_workflow` ends the
session within a few seconds: the step asks for the workflow's status with each heartbeat.
"""

from __future__ import annotations

from functools import partial

from dbos import DBOS, error

from .task_session import Program, Task, end, run

INTERVAL = 2.0  # seconds between two looks at the workflow's status


@DBOS.step(name="criuctl.run_in_session")
def run_in_session(program: Program, check: bool = False) -> int:
    """Return the command's exit code, which DBOS records; with `check`, fail if it is not 0.

    It has to be called by a workflow, whose event ``criuctl`` has the offset of the output.
    """
    workflow = DBOS.workflow_id or ""
    task = Task(workflow, f"step-{DBOS.step_id}")
    try:
        return run(task, program, check=check, beat=partial(_beat, workflow), interval=INTERVAL)
    except error.DBOSWorkflowCancelledError:
        end(task)
        raise


def _beat(workflow: str, offset: int) -> None:
    """Record the offset; raise `DBOSWorkflowCancelledError` if the workflow was cancelled."""
    status = DBOS.get_workflow_status(workflow)
    if status is not None and status.status == "CANCELLED":
        raise error.DBOSWorkflowCancelledError(f"workflow {workflow} was cancelled")
    DBOS.set_event("criuctl", offset)
