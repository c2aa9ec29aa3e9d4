"""The Python API: sessions as objects, for programs and agents that drive them.

- `session`: `Session`, one session as one operator sees it; every call blocks. Its parts are
  `connected`, which has the connection, and `terminal`, which types, looks and waits.
- `asynchronous`: `AsyncSession`, the same calls as coroutines, with `async_terminal` and
  `async_calls`.
- `command`: a command that runs in a session. `lease`: the write lease.
- `results`: what the calls return.
- `group`: `Group`, sessions that are stored and restored as one.
- `operator`: how an operator's connections to the holder are made.
- `worker`, `worker_process`: the warm process in which trees are started, dumped and restored.

The command line and this package call the same operations (`criuctl.ops`) and raise the same errors
(`criuctl.errors`); nothing of one is repeated in the other.
"""

from .async_calls import AsyncCommand, AsyncLease
from .asynchronous import AsyncSession
from .command import Command
from .group import Group
from .lease import Lease
from .results import (
    Checkpoint,
    CommandResult,
    Exit,
    GroupCheckpoint,
    Match,
    Screen,
    Sent,
    SessionInfo,
)
from .session import Session

__all__ = [
    "AsyncCommand",
    "AsyncLease",
    "AsyncSession",
    "Checkpoint",
    "Command",
    "CommandResult",
    "Exit",
    "Group",
    "GroupCheckpoint",
    "Lease",
    "Match",
    "Screen",
    "Sent",
    "Session",
    "SessionInfo",
]
