"""criuctl, and criuctl with commands that misbehave, as programs of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.program import CRIUCTL, run_program, start_program

_PROVOKE = (sys.executable, str(Path(__file__).with_name("provoke.py")))


@pytest.fixture
def criuctl() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``criuctl("list", "--json")`` -> CompletedProcess with text streams."""
    return partial(run_program, CRIUCTL)


@pytest.fixture
def provoke() -> Callable[..., subprocess.CompletedProcess[str]]:
    """The same for provoke.py."""
    return partial(run_program, _PROVOKE)


@pytest.fixture
def provoking() -> Callable[..., subprocess.Popen[str]]:
    """provoke.py started, with pipes at its streams."""
    return partial(start_program, _PROVOKE)
