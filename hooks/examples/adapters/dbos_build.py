"""DBOS: run a command as a session, in a workflow that is recovered when this program was killed.

    pip install '/path/to/clone/of/criuctl[dbos]'
    python dbos_build.py build-1 make all

Kill it at any moment and start it again: it finds the command, and prints its exit code.
"""

from __future__ import annotations

import sys

from dbos import DBOS, SetWorkflowID

from criuctl.adapters.dbos import run_in_session
from criuctl.adapters.task_session import Program

DATABASE = "sqlite:///build.sqlite"


@DBOS.workflow()
def build(argv: list[str]) -> int:
    """Run the command, and return its exit code."""
    return run_in_session(Program(argv))


def main(workflow: str, argv: list[str]) -> None:
    """Start the workflow, or go on with it."""
    DBOS(config={"name": "build", "system_database_url": DATABASE})
    DBOS.launch()
    with SetWorkflowID(workflow):
        handle = DBOS.start_workflow(build, argv)
    print("exit code", handle.get_result())
    DBOS.destroy()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
