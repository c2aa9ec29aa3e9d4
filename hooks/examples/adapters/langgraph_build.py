"""LangGraph: run a command as a session, in a graph that goes on when this program was killed.

    pip install '/path/to/clone/of/criuctl[langgraph]' langgraph-checkpoint-sqlite
    python langgraph_build.py build-1 make all

Kill it at any moment and start it again: it finds the command, and prints its exit code. ``^C``
ends the command.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph

from criuctl.adapters.langgraph import session_node
from criuctl.adapters.task_session import Program


class State(TypedDict):
    """What the graph knows."""

    exit_code: int | None


async def main(thread: str, argv: list[str]) -> None:
    """Start the graph, or go on with it."""
    graph = StateGraph(State)
    graph.add_node("build", session_node(Program(argv)))
    graph.add_edge(START, "build")
    graph.add_edge("build", END)
    config: RunnableConfig = {"configurable": {"thread_id": thread}}
    async with AsyncSqliteSaver.from_conn_string("build.sqlite") as saver:
        compiled = graph.compile(checkpointer=saver)
        under_way = (await compiled.aget_state(config)).next
        given: State | None = None if under_way else {"exit_code": None}
        done = await compiled.ainvoke(given, config, durability="sync")
        print("exit code", done["exit_code"])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
