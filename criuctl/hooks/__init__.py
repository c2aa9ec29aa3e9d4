"""Hooks: programs of the operator's that criuctl runs at the turning points of a dump and a
restore.

`contract` says what phases there are and what is said between criuctl and a hook, `trust` which
executables may run, `find` which there are and in which order, `runner` runs them, `reconnect`
hands one of them a connection.
"""

from .contract import PHASES, HookResult
from .runner import Hooks

__all__ = ["PHASES", "HookResult", "Hooks"]
