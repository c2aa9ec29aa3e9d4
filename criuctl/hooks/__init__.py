"""Hooks: the operator's programs that criuctl runs at fixed points of a dump and a restore.

`contract` defines the phases and the data between criuctl and a hook, `trust` which executables may
run, `find` which exist and in which order, `runner` runs them, `reconnect` hands one of them a
connection.
"""

from .contract import PHASES, HookResult
from .runner import Hooks

__all__ = ["PHASES", "HookResult", "Hooks"]
