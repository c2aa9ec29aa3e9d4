"""What programs in a session ask for: a checkpoint, what invalidates one, and to be called around
one. With real CRIU.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators
from support.stepping import run_program, said, wait_for
from support.supervising import Supervised

pytestmark = pytest.mark.integration

ASKS = """
say("ready")
for number in range(1000):
    while not os.path.exists(f"{sys.argv[1]}{number}"):
        time.sleep(0.01)
    try:
        cp = inside.checkpoint(label=f"before {number}")
    except inside.StepError as error:
        say("refused", number, error.code, error)
    else:
        say("made", number, cp.restored, cp.id)
    say("on", number)
"""


def ask(operators: Operators, number: int) -> str:
    """Let the program ask for its checkpoint; return what it has printed when it goes on."""
    (operators.home.path / f"go{number}").touch()
    return wait_for(operators, "work", f"on {number}\\b")


def test_a_program_asks_for_a_checkpoint(operators: Operators) -> None:
    run_program(operators, "work", ASKS, str(operators.home.path / "go"))
    wait_for(operators, "work", "ready")
    text = ask(operators, 0)
    (made,) = operators("list", "work")
    assert f"made 0 False {made['id']}" in text.replace("\n", "")
    assert made["labels"] == {"label": "before 0"}
    operators("kill", "work")
    operators("restore", "work", "--detach")
    wait_for(operators, "work", f"made 0 True {made['id'][:8]}")
    text = ask(operators, 1)
    assert "made 1 False" in text
    assert [one["labels"]["label"] for one in operators("list", "work")] == ["before 0", "before 1"]
    operators("kill", "work")
    operators("restore", "work@1", "--as", "copy", "--detach")
    wait_for(operators, "copy", f"made 0 True {made['id'][:8]}")
