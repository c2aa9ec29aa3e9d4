"""Prefect: a flow that runs a command as a session, served by this program.

    pip install '/path/to/clone/of/criuctl[prefect]'
    python prefect_build.py
    prefect deployment run build/build --param argv='["make", "all"]'

Kill this program at any moment, start it again and retry the flow run (``prefect flow-run retry``):
it finds the command, and logs its exit code. Cancelling the flow run ends the command.
"""

from __future__ import annotations

from prefect import flow

from criuctl.adapters.prefect import end_sessions, run_in_session
from criuctl.adapters.task_session import Program


@flow(log_prints=True, on_cancellation=[end_sessions])
def build(argv: list[str]) -> int:
    """Run the command, and return its exit code."""
    code = run_in_session(Program(argv))
    print("exit code", code)
    return code


if __name__ == "__main__":
    build.serve(name="build")
