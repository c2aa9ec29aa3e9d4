"""Temporal: an activity that runs a command as a session.

    await workflow.execute_activity(
        run_in_session,
        Program(["make", "all"]),
        start_to_close_timeout=timedelta(hours=8),
        heartbeat_timeout=timedelta(seconds=30),
    )

An attempt of the activity is one attempt of the task: the run is the workflow's run, the task the
activity's id. Heartbeats have the offset of the output. When the workflow cancels the activity,
which needs a heartbeat timeout, the session is ended. It is not when a worker shuts down, or when
an attempt was late: the next one goes on.
"""

from __future__ import annotations

from temporalio import activity

from .task_session import INTERVAL, Program, Task, run_async


@activity.defn(name="criuctl.run_in_session")
async def run_in_session(program: Program, check: bool = False) -> int:
    """Return the command's exit code; with `check`, fail the attempt if it is not 0.

    An attempt that has failed in this way is followed by one that starts the command again.
    """
    timeout = activity.info().heartbeat_timeout
    interval = INTERVAL if timeout is None else min(INTERVAL, timeout.total_seconds() / 3)
    return await run_async(
        task_of(activity.info()),
        program,
        check=check,
        beat=activity.heartbeat,
        interval=interval,
        ends=_is_cancelled,
    )


def task_of(info: activity.Info) -> Task:
    """Return the task of an activity; the id of a workflow's run is `Task.run`, for `end_run`."""
    return Task(info.workflow_run_id or info.activity_run_id or "", info.activity_id)


def _is_cancelled() -> bool:
    """Return whether the workflow has cancelled the activity."""
    details = activity.cancellation_details()
    return details is not None and details.cancel_requested
