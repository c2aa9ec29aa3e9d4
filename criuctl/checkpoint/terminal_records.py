"""The records of a session's terminals, and of the state that its holder handed over.

Typed input, the scrollback and the journal of steps are as secret as memory, so they are streams of
sealed chunks like it; a record holds only the references. PIDs and process groups are numbers of
the tree's PID namespace.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import field

from .chunks import StreamRef
from .records import Record, check_path, check_range, damaged


class TerminalRecord(Record, frozen=True):
    """A terminal of the tree and the data that its line discipline held. PIDs and process groups
    are numbers of the tree's PID namespace.
    """

    path: str  # "" if the tree had no descriptor of it open
    rdev: int = 0
    dev: int = 0
    master: Literal["outside", "inside", "gone"] = "inside"  # gone: the master was closed
    holders: tuple[tuple[int, int], ...] = ()  # (PID, descriptor), those of /dev/tty included
    leader: int = 0  # the session leader in the tree that it controls; 0 for none
    led_outside: bool = False  # it controls the root, but the session leader is outside the tree
    foreground: int = 0  # its foreground process group, if that is in the tree
    rows: int = 0
    columns: int = 0
    xpixel: int = 0
    ypixel: int = 0
    canonical: bool = True
    echo: bool = True
    stopped: bool = False  # output was stopped (^S)
    # bytes of `input` that the line discipline had processed; the rest waited in its buffer
    queued: int = 0
    input: StreamRef | None = None  # typed and not yet read: as secret as memory
    master_holders: tuple[tuple[int, int], ...] = ()  # (PID, descriptor) of a master inside
    printed: StreamRef | None = None  # data that such a master had not read yet
    # no process has the slave open any more: a read from the master returns EIO
    slave_gone: bool = False

    def check(self, where: str) -> None:
        if self.path:
            check_path(self.path, f"{where}.path")
        for name in ("rdev", "dev", "queued"):
            check_range(getattr(self, name), 0, (1 << 63) - 1, f"{where}.{name}")
        for name in ("rows", "columns", "xpixel", "ypixel"):
            check_range(getattr(self, name), 0, (1 << 16) - 1, f"{where}.{name}")
        for name in ("leader", "foreground"):
            check_range(getattr(self, name), 0, 1 << 31, f"{where}.{name}")
        if self.queued > (self.input.size if self.input is not None else 0):
            raise damaged(f"{where}.queued", "is more than there is")
        if (self.printed is not None or self.slave_gone) and not self.master_holders:
            raise damaged(f"{where}.master_holders", "is empty")


class HolderRecord(Record, frozen=True):
    """The state that a session's holder handed over: all that its successor needs to continue."""

    # the tree had its own PID and mount namespaces, which end with its root
    private: bool = False
    created: float = 0.0  # unix seconds
    command: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    workspace: str = ""  # the folder that is moved together with the session, if it has one
    # where the tree finds that folder, too: a copy has that of its original there
    shown: tuple[str, ...] = ()
    rows: int = 24
    columns: int = 80
    base: int = 0  # offset of the first byte in `scrollback`
    input_offset: int = 0  # offset of the output at which something was last typed
    scrollback: StreamRef | None = None
    # the journal of its steps, one JSON object a line; None if it has none
    steps: StreamRef | None = None
    # of the terminal, as the holder protocol writes them
    modes: dict[str, Any] = field(default_factory=dict)
    shell: dict[str, Any] = field(default_factory=dict)  # what its shell's marks have said
    # what its programs have asked for: checkpoints that wait, conditions, functions to call
    inside: dict[str, Any] = field(default_factory=dict)
    roles: tuple[tuple[str, ...], ...] = ()  # (kind, name, role): the highest role of each operator
    events: int = 0  # sequence of the last event
    audit: int = 0  # sequence of the last entry in the audit log
    # the operator that paused it, whether it was halted, and the PIDs in the tree that were stopped
    paused: dict[str, Any] | None = None

    def check(self, where: str) -> None:
        for name in ("base", "input_offset", "events", "audit"):
            check_range(getattr(self, name), 0, 1 << 62, f"{where}.{name}")
        for point in self.shown:
            check_path(point, f"{where}.shown")
        for name in ("rows", "columns"):
            check_range(getattr(self, name), 0, (1 << 16) - 1, f"{where}.{name}")
