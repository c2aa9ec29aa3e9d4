"""Whether the statement that made a prepared statement begins with PREPARE, decided at once
whatever comes before it.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from criuctl.connections.protocols.postgresql_state import _begins_with_prepare


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("PREPARE one AS SELECT 1", True),
        ("\n\t  prepare one AS SELECT 1", True),
        ("-- why\n--\n  PREPARE one AS SELECT 1", True),
        ("/* a /* nested */ one */ /**/PREPARE one AS SELECT 1", True),
        ("", False),
        ("-- PREPARE one AS SELECT 1", False),
        ("/* open PREPARE one AS SELECT 1", False),
        ("/* a /* nested */ PREPARE one AS SELECT 1", False),
        ("PREPARED", False),
        ("SELECT 1; PREPARE one AS SELECT 1", False),
    ],
)
def test_what_may_stand_before_it(statement: str, expected: bool) -> None:
    assert _begins_with_prepare(statement) is expected


@pytest.mark.parametrize(
    "before", [" " * 5000, "\n " * 5000, "/**/" * 5000, "--\n" * 5000, "/*" * 5000]
)
def test_an_indented_text_of_several_commands_is_decided_at_once(before: str) -> None:
    statement = f"{before}SELECT 1; PREPARE one AS SELECT 1"
    program = f"""if True:
        from criuctl.connections.protocols.postgresql_state import CannotRebuild, _check_prepared
        try:
            _check_prepared(None, [{{"name": "one", "statement": {statement!r}}}], "utf-8")
        except CannotRebuild as error:
            print(error.message)
    """
    done = subprocess.run(
        [sys.executable, "-"], input=program, capture_output=True, text=True, check=True, timeout=20
    )
    assert done.stdout == "the prepared statement one was made by several commands sent together\n"
