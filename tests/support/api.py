"""Words that the tests of the Python API share."""

from __future__ import annotations

from collections.abc import Callable

from criuctl import Session

BASH = ("bash", "--norc", "--noprofile")
Shell = Callable[[str], Session]
"""Starts a shell as a session of this name, and waits for its prompt."""
