"""Programs with durable steps, for tests, and what a test does to them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .command import PROJECT
from .keeper import wait_until
from .operating import TIMEOUT, Operators

HEAD = f"""\
import os, sys, time
sys.path.insert(0, {str(PROJECT)!r})
from criuctl import inside
def say(*words): print(*words, flush=True)
"""


def run_program(operators: Operators, name: str, program: str, *arguments: str) -> None:
    """Start a Python program that has `inside` and `say` as the session `name`."""
    path = operators.home.path / f"{name}.py"
    path.write_text(HEAD + program)
    operators("run", "-d", "--name", name, "--", sys.executable, "-u", path, *arguments)


def wait_for(operators: Operators, name: str, text: str) -> str:
    """Wait until the session has printed `text`; return its output."""
    operators("wait", name, "--match", text, "--since", "0", "--timeout", TIMEOUT)
    return said(operators, name)


def said(operators: Operators, name: str) -> str:
    """All that the session has printed."""
    lines: list[str] = operators("capture", name, "--since", "0")["lines"]
    return "\n".join(lines)


def steps_of(operators: Operators, name: str) -> dict[str, dict[str, Any]]:
    """The steps of the session, by id."""
    return {step["id"]: step for step in operators("step", "list", name)}


def wait_for_step(operators: Operators, name: str, step: str, state: str) -> None:
    """Wait until a step is in that state."""

    def there() -> bool:
        found = steps_of(operators, name).get(step)
        return found is not None and found["state"] == state

    wait_until(there, TIMEOUT, f"step {step} is {state}")


def exists(path: Path) -> None:
    """Wait until a file is there."""
    wait_until(path.exists, TIMEOUT, f"{path} is there")
