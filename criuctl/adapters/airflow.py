"""Airflow 3: a deferrable operator that runs a command as a session, and its trigger.

    build = SessionOperator(task_id="build", argv=["make", "all"])

The run is the DAG and its run, the task the task's id with its map index. The operator starts the
session on a worker, or finds it, and defers; `SessionTrigger` waits for it in the triggerer. So a
worker or a triggerer that is killed does not matter: the next one finds the session. A command that
ends with another exit code than 0 fails the task, and the next try starts it again. A user who
marks the running task, or clears it, ends the session.

Workers and triggerers have to be on the session's host, as the same user.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.definitions.context import Context
from airflow.sdk.exceptions import TaskDeferred
from airflow.triggers.base import BaseTrigger, TriggerEvent

from ..errors import CriuctlError
from ..sdk import Session
from .task_session import INTERVAL, Program, Task, begin, checked, end, follow


class SessionOperator(BaseOperator):
    """Run `argv` as a session, in `cwd` or `workspace`, with `env` added; return its exit code,
    which is 0.
    """

    template_fields: Sequence[str] = ("argv", "cwd", "env", "workspace")

    def __init__(
        self,
        *,
        argv: Sequence[str],
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        workspace: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.argv, self.cwd, self.env, self.workspace = argv, cwd, env, workspace
        self._task: Task | None = None

    def execute(self, context: Context) -> int:
        """Start the session, or find it, and wait for it in the triggerer.

        Return the exit code only if the command has ended already; otherwise raise what defers.
        """
        task = self._task = task_of(context)
        begun = begin(task, Program(self.argv, self.cwd, self.env, self.workspace))
        if isinstance(begun, Session):
            begun.close()
            self.log.info("session %s", task.session)
            raise TaskDeferred(
                trigger=SessionTrigger(task.run, task.task), method_name=self.ended.__name__
            )
        return checked(task, begun)

    def ended(self, context: Context, event: Mapping[str, Any]) -> int:
        """Return the exit code, or fail."""
        if "error" in event:
            raise CriuctlError(event["error"])
        return checked(task_of(context), event["exit_code"])

    def on_kill(self) -> None:
        """End the session: the task was stopped before it deferred."""
        if self._task is not None:
            end(self._task)


class SessionTrigger(BaseTrigger):
    """Fires when the session of a task has ended."""

    def __init__(self, run: str, task: str) -> None:
        super().__init__()
        self.run_key, self.task_key = run, task

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return what another triggerer makes the trigger of."""
        path = f"{type(self).__module__}.{type(self).__qualname__}"
        return path, {"run": self.run_key, "task": self.task_key}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield the exit code, or why there is none."""
        task = Task(self.run_key, self.task_key)

        def beat(offset: int) -> None:
            self.log.debug("session %s has printed %d bytes", task.session, offset)

        try:
            code = await follow(task, beat=beat, interval=INTERVAL)
        except CriuctlError as error:
            yield TriggerEvent({"error": error.message})
        else:
            yield TriggerEvent({"exit_code": code})

    async def on_kill(self) -> None:
        """End the session: a user has marked the task, or cleared it. A shutdown does not."""
        await asyncio.to_thread(end, Task(self.run_key, self.task_key))


def task_of(context: Context) -> Task:
    """Return the task of a task instance."""
    instance = context["ti"]
    index = "" if instance.map_index in (None, -1) else f"-{instance.map_index}"
    return Task(f"{instance.dag_id}/{instance.run_id}", f"{instance.task_id}{index}")
