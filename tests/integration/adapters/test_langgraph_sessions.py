"""LangGraph's checkpointer that stores a thread's session with each checkpoint of the graph."""

from __future__ import annotations

from typing import TypedDict

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import get_runtime
from support.operating import TIMEOUT, Operators

from criuctl import Session
from criuctl.adapters.langgraph import (
    KEY,
    SessionCheckpoints,
    bring_back,
    session_node,
    thread_session,
)
from criuctl.adapters.task_session import Program, Task, end_run
from criuctl.errors import CommandFailed, NotFound, UsageError

pytestmark = pytest.mark.integration

THREAD = "thread 1"
CONFIG: RunnableConfig = {"configurable": {"thread_id": THREAD}}


class Saver(SessionCheckpoints, InMemorySaver):
    """The graph in memory, and its session in criuctl's store."""


class State(TypedDict):
    """What the graph knows."""

    shown: str
    exit_code: int


def shell() -> Session:
    """The thread's shell, at its prompt."""
    session = thread_session(THREAD, ["bash", "--norc", "--noprofile"])
    session.wait_prompt(timeout=TIMEOUT)
    return session


def sets(state: State) -> dict[str, str]:
    """Sets a variable of the shell."""
    info = get_runtime().execution_info
    assert info is not None and info.thread_id == THREAD
    with shell() as session:
        return {"shown": session.exec("x=$((x + 1)); echo $x").output}


@pytest.fixture
def store(operators: Operators) -> None:
    """A store."""
    operators("store", "init")


def test_going_back_brings_the_session_back(store: None) -> None:
    graph = StateGraph(State)
    for name in ("one", "two"):
        graph.add_node(name, sets)
    graph.add_edge(START, "one")
    graph.add_edge("one", "two")
    graph.add_edge("two", END)
    compiled = graph.compile(checkpointer=Saver())
    done = compiled.invoke({"shown": "", "exit_code": 0}, CONFIG, durability="sync")
    assert done["shown"] == "2\n"

    history = {one.next: one for one in compiled.get_state_history(CONFIG)}
    before, between, after = history[("one",)], history[("two",)], history[()]
    assert KEY not in (before.metadata or {})  # the shell was not there yet
    with shell() as session:
        session.exec("x=100")
        assert [one.labels["step"] for one in session.checkpoints()] == ["1", "2"]
    bring_back(between.metadata).close()
    with shell() as session:
        assert session.exec("echo $x").output == "1\n"
    again = compiled.invoke(None, between.config, durability="sync")
    assert again["shown"] == "2\n"
    bring_back(after.metadata).close()
    with shell() as session:
        assert session.exec("echo $x").output == "2\n"
    with pytest.raises(NotFound):
        bring_back(before.metadata)
    assert len(end_run(THREAD)) == 1


def test_a_node_in_a_graph_without_coroutines(store: None) -> None:
    graph = StateGraph(State)
    graph.add_node("good", session_node(Program(["sh", "-c", "echo out; exit 4"])))
    graph.add_node("bad", session_node(Program(["sh", "-c", "echo why; exit 5"]), check=True))
    graph.add_edge(START, "good")
    graph.add_edge("good", "bad")
    graph.add_edge("bad", END)
    given: State = {"shown": "", "exit_code": 0}
    with pytest.raises(UsageError):
        graph.compile().invoke(given)
    compiled = graph.compile(checkpointer=Saver())
    with pytest.raises(CommandFailed, match="exit code 5\nwhy"):
        list(compiled.stream(given, CONFIG, stream_mode="custom", durability="sync"))
    assert compiled.get_state(CONFIG).values["exit_code"] == 4
    [left] = Session.list()
    assert left.labels["run"] == THREAD and left.exit_code == 4
    assert left.name == Task(THREAD, left.labels["task"]).session
