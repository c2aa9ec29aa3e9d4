"""LangGraph: a node that runs a command as a session, and a checkpointer that keeps a session.

    class Saver(SessionCheckpoints, SqliteSaver):
        "Keeps the graph in SQLite, and its session in criuctl's store."

    graph.add_node("build", session_node(Program(["make", "all"])))
    graph.compile(checkpointer=Saver(connection)).invoke(state, config, durability="sync")

A node's run is the graph's thread, its task LangGraph's task, whose id is the same when the graph
goes on from its last checkpoint after its process was killed. Cancelling ``ainvoke`` ends the
session; the end of the process, ``^C`` in ``invoke`` too, does not.

The other session is the thread's own, `thread_session`: a shell that all nodes work in. With
`SessionCheckpoints`, every checkpoint of the graph goes along with a snapshot of it, so that going
back in the graph can bring the session back, too (`bring_back`). ``durability="sync"`` is required:
otherwise LangGraph stores a checkpoint while the next nodes run already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
)
from langgraph.config import get_stream_writer
from langgraph.runtime import get_runtime

from ..errors import NotFound, SessionGone, UsageError
from ..sdk import Session
from .task_session import INTERVAL, KIND, Program, Task, begin, end, run, run_async

KEY = "criuctl"  # of a checkpoint's metadata: {thread, checkpoint, store}


def session_node(
    program: Program, *, result: str = "exit_code", check: bool = False
) -> RunnableLambda[Any, dict[str, int]]:
    """Return a node that sets the state's `result` to the command's exit code.

    With `check`, the node fails if that is not 0, and LangGraph's retry starts the command again.
    The offset of the output is streamed as ``{"session": ..., "offset": ...}`` (stream mode
    ``custom``).
    """

    def node(_state: Any) -> dict[str, int]:
        task, beat = _task(), _beat(_task())
        return {result: run(task, program, check=check, beat=beat, interval=INTERVAL)}

    async def async_node(_state: Any) -> dict[str, int]:
        task, beat = _task(), _beat(_task())
        return {result: await run_async(task, program, check=check, beat=beat, interval=INTERVAL)}

    return RunnableLambda(node, afunc=async_node, name="run_in_session")


def _task() -> Task:
    info = get_runtime().execution_info
    if info is None or info.thread_id is None:
        raise UsageError(
            "a graph without a checkpointer has no thread, and would not find its session again",
            hint="Compile it with checkpointer=..., and give a thread_id in the configuration.",
        )
    return Task(info.thread_id, info.task_id)


def _beat(task: Task) -> Any:
    write = get_stream_writer()
    return lambda offset: write({"session": task.session, "offset": offset})


def thread_session(thread_id: str, argv: Sequence[str] = ("bash",), **more: Any) -> Session:
    """Return the session of a thread of the graph: started, or found again; `more` as `Program`."""
    found = begin(_of_thread(thread_id), Program(argv, **more))
    if isinstance(found, int):
        raise SessionGone(f"the session of thread {thread_id!r} has ended with exit code {found}")
    return found


def _of_thread(thread_id: str) -> Task:
    return Task(thread_id, "thread")


class SessionCheckpoints(BaseCheckpointSaver[Any]):
    """A part of a checkpointer, named before its base: each checkpoint has a snapshot of the
    thread's session, if that runs. A snapshot that fails is the failure of the checkpoint.
    """

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Take the snapshot, and store the checkpoint with its reference in the metadata."""
        return super().put(config, checkpoint, _with_snapshot(config, metadata), new_versions)

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """As `put`."""
        more = await asyncio.to_thread(_with_snapshot, config, metadata)
        return await super().aput(config, checkpoint, more, new_versions)


def _with_snapshot(config: RunnableConfig, metadata: CheckpointMetadata) -> CheckpointMetadata:
    place = config["configurable"]
    if place.get("checkpoint_ns"):  # of a graph inside of this one
        return metadata
    thread = place["thread_id"]
    try:
        with Session.connect(_of_thread(thread).session, kind=KIND) as session:
            if session.status().state not in ("running", "paused"):
                return metadata
            stored = session.snapshot(labels={"step": str(metadata.get("step"))})
    except NotFound:  # it was not begun, or has ended
        return metadata
    about = {"thread": thread, "checkpoint": stored.id, "store": stored.store}
    return cast("CheckpointMetadata", {**metadata, KEY: about})


def bring_back(metadata: Mapping[str, Any] | None) -> Session:
    """Restore the session as it was at a checkpoint of the graph, whose metadata this is
    (``graph.get_state(config).metadata``), in the place of the one that runs, which is ended.

    `NotFound` if the checkpoint has none. Steps that were done since stay done (`criuctl.inside`).
    """
    about = (metadata or {}).get(KEY)
    if about is None:
        raise NotFound("this checkpoint of the graph has no snapshot of a session")
    end(_of_thread(about["thread"]))
    return Session.restore(about["checkpoint"], store=about["store"], older=True, kind=KIND)
