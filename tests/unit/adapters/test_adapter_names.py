"""Names of tasks' sessions, and what the core of the adapters imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from criuctl import adapters
from criuctl.adapters.task_session import Task
from criuctl.session.names import check_name

ENGINES = {"airflow", "dbos", "langgraph", "prefect", "temporal"}
PROJECT = Path(__file__).resolve().parents[3]


@given(st.text(), st.text())
def test_any_ids_make_a_name(run: str, task: str) -> None:
    assert check_name(Task(run, task).session)


def test_names_are_the_same_for_ever_and_differ() -> None:
    """Another version of criuctl has to find the sessions of this one."""
    assert Task("run 1", "build/all").session == "task-build-all-56ac3eba8308ebe0"
    pairs = [("a", "b"), ("a:b", ""), ("", "a:b"), ("ab", ""), ("1:a", "b"), ("a", "b:")]
    assert len({Task(*pair).session for pair in pairs}) == len(pairs)


def test_the_core_needs_no_engine() -> None:
    look = "import criuctl.adapters.task_session, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {*ENGINES, "temporalio", "langchain_core"}


def test_each_engine_has_a_module_an_extra_an_example_and_a_place_in_the_manual() -> None:
    modules = {file.stem for file in Path(adapters.__path__[0]).glob("*.py")}
    assert modules == ENGINES | {"__init__", "task_session"}
    extras = (PROJECT / "pyproject.toml").read_text()
    manual = (PROJECT / "criuctl/manual/adapters.md").read_text()
    for engine in ENGINES:
        assert f"\n{engine} = [" in extras and f"[{engine}]" in manual
        assert (PROJECT / f"hooks/examples/adapters/{engine}_build.py").is_file()
