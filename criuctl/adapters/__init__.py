"""Tasks of workflow engines as sessions: Prefect, LangGraph, DBOS, Airflow, Temporal.

- `task_session`: the core, which knows no engine. A task of a run has one session, named after the
  two: `begin` starts it or finds it, `run` and `run_async` wait for it and report the offset of its
  output, `end` ends it.
- `prefect`, `langgraph`, `dbos`, `airflow`, `temporal`: how one engine names its runs and tasks,
  takes heartbeats, and cancels. Each needs its engine: in a clone of criuctl,
  ``pip install '.[prefect]'``.

They use the Python API (`criuctl.sdk`) and nothing below it.
"""
