"""What scripts/lint checks, each as a test of its own: style, types, floors, shell programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
CHECKS = ("ruff", "format", "types", "floors", "shell", "shell-parts")


@pytest.mark.parametrize("check", CHECKS)
def test_lint(check: str) -> None:
    """The check finds nothing; what it finds is the failure's text."""
    environment = os.environ | {"LINT_BIN": os.path.dirname(sys.executable)}
    done = subprocess.run(
        [CHECKOUT / "scripts/lint", check], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_check_is_tested() -> None:
    """A check added to scripts/lint is added here too."""
    done = subprocess.run([CHECKOUT / "scripts/lint", "--list"], capture_output=True, text=True, check=True)
    assert tuple(done.stdout.split()) == CHECKS
