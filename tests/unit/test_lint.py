"""What scripts/lint checks, each as a test of its own: style, types, floors, shell programs."""

from __future__ import annotations

import subprocess

import pytest
from support.linting import AHEAD, CHECKOUT, Check

CHECKS = ("ruff", "format", "types", "floors", "shell", "shell-parts")


@pytest.mark.parametrize("check", CHECKS)
def test_lint(check: str, checked_ahead: Check | None) -> None:
    """The check finds nothing; what it finds is the failure's text."""
    running = checked_ahead if check == AHEAD and checked_ahead is not None else Check(check)
    code, said = running.result(280)
    assert code == 0, said


def test_every_check_is_tested() -> None:
    """A check added to scripts/lint is added here too."""
    done = subprocess.run(
        [CHECKOUT / "scripts/lint", "--list"], capture_output=True, text=True, check=True
    )
    assert tuple(done.stdout.split()) == CHECKS
