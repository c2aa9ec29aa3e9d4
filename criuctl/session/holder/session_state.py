"""What a holder knows of its session, apart from the session's processes and its terminal.

The states:

- ``running``, ``paused``: the tree runs, or an operator has frozen it.
- ``checkpointed``: the tree is in a store, and may be restored here.
- ``exited``: the tree has ended, and how is known.
- ``lost``: the tree has ended, and how is not known.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..protocol import state_hint
from .operators import Refused

OVER = ("exited", "lost")


@dataclass
class Identity:
    """Which session this is; all of it survives a re-exec and a restore."""

    name: str
    id: str
    incarnation: int = 1
    command: list[str] = field(default_factory=list)
    created: float = 0.0
    labels: dict[str, str] = field(default_factory=dict)
    restored: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def init(self) -> int:
        """PID of the holder's child that ends with the root's exit status; 0: that is the root."""
        return int(self.facts.get("init") or 0)


class SessionState:
    """The state of one session; `on_change` is called after each change of `state`."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.state, self.since = "checkpointed", time.time()
        self.exit: tuple[int | None, int | None] = (None, None)  # code, signal
        self.paused_by: dict[str, Any] | None = None
        self.halted = False  # by the operation `halt`, until `resume`
        self.input_offset = 0  # the log's end when something was typed last
        self.checkpoint_id = ""
        self.moved: dict[str, Any] | None = None  # to which host, once the session goes on there
        self.on_change: Callable[[], None] = lambda: None

    @property
    def over(self) -> bool:
        """Whether the session has ended."""
        return self.state in OVER

    def needs(self, *states: str) -> None:
        """Refuse a request unless the session is in one of these states."""
        if self.state not in states:
            hint = state_hint(self.state, self.identity.name)
            raise Refused("state", f"the session is {self.state}", hint, state=self.state)

    def set_state(self, state: str) -> None:
        """Change the state."""
        if state != self.state:
            self.state, self.since = state, time.time()
            self.on_change()

    def run_again(self) -> None:
        """Forget by which operator, and how, the session was paused."""
        self.paused_by, self.halted = None, False

    # -- re-exec ----------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return all of it, for the next program of this holder."""
        return {
            "identity": asdict(self.identity),
            "state": [self.state, self.since, *self.exit],
            "paused_by": self.paused_by,
            "halted": self.halted,
            "input_offset": self.input_offset,
            "checkpoint": self.checkpoint_id,
            "moved": self.moved,
        }

    def restore(self, state: dict[str, Any], end: int) -> None:
        """Take over what `to_state` returned; the log ends at `end`."""
        self.state, self.since, code, number = state["state"]
        self.exit = (code, number)
        self.paused_by, self.halted = state["paused_by"], state["halted"]
        self.input_offset = state.get("input_offset", end)
        self.checkpoint_id, self.moved = state["checkpoint"], state.get("moved")
