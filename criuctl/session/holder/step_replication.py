"""Steps that wait for the store.

The holder does not write to the store itself. A supervisor does: it asks for the steps that have
changed (`replicate`), stores them, and states so with its next request. From the first such request
on, and across restarts of the holder, a step counts as done only when it is stored: answers wait in
`wait`. A supervisor that ends in order says so (`stop`); one that is killed leaves the answers
waiting until the next one comes.

Whether a step has to be stored depends on its record: that it ended, in whatever way, and that a
step of the kind ``once`` has begun. Otherwise another host that takes the session over could run it
without knowing that it was tried.

The supervisor is also the one that takes the checkpoints that programs ask for: the answers to its
requests say when it has to (`asked_checkpoints`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...steps.journal import Journal
from .asked_checkpoints import AskedCheckpoints
from .connection import Connection
from .request_values import LATER, Message, fitting
from .steps import Steps


class Replication:
    """The waits of one holder for its replica in the store."""

    def __init__(self, steps: Steps, asked: AskedCheckpoints) -> None:
        self._steps, self._asked = steps, asked
        self._stored = 0  # sequence of the newest record that is in the store
        self._replica: tuple[Connection, int, int] | None = None  # connection, request, sequence
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        steps.on_change = self._changed
        asked.on_asked = self._asked_for

    @property
    def waiting(self) -> int:
        """Return how many answers wait for the store."""
        return len(self._waiting)

    def needed(self, name: str) -> int:
        """Return the sequence that has to be stored before the step's state counts; 0: none."""
        journal = self._journal()
        if journal is None or not journal.replicated:
            return 0
        step = journal.get(name)
        if step is None or (step.state == "began" and step.kind != "once"):
            return 0
        sequence = journal.sequence_of(name)
        return sequence if sequence > self._stored else 0

    def wait(self, sequence: int, answer: Callable[[], None]) -> None:
        """Call `answer` when the record `sequence` is stored."""
        self._waiting.append((sequence, answer))

    def forget(self, answer: Callable[[], None]) -> None:
        """Do not call it: its client is gone."""
        self._waiting = [one for one in self._waiting if one[1] is not answer]

    # -- the supervisor ---------------------------------------------------------------------------

    def replicate(self, connection: Connection, stored: int, request: int) -> Message:
        """All up to `stored` is in the store; answer with what has changed since, when it has."""
        journal = self._journal(create=True)
        assert journal is not None
        journal.replicate(True)
        if self._replica is not None and self._replica[0] is not connection:
            self._replica[0].close("another supervisor stores the steps")
        self._replica = (connection, request, stored)
        self._stored = min(stored, journal.sequence)
        self._release()
        body = self._news(journal)
        if body is None:
            return LATER
        self._replica = (connection, 0, stored)
        return body

    def stop(self) -> None:
        """The session is not supervised any more: nothing waits for the store."""
        journal = self._journal()
        if journal is not None:
            journal.replicate(False)
        self._replica = None
        self._asked.supervisor_left(0)
        for _, answer in self._waiting:
            answer()
        self._waiting.clear()

    def lost(self, connection: Connection) -> None:
        """A client is gone; it may be the supervisor. Answers go on waiting for the next one."""
        if self._replica is not None and self._replica[0] is connection:
            self._replica = None
            self._asked.supervisor_left()

    # -- inside -----------------------------------------------------------------------------------

    def _journal(self, create: bool = False) -> Journal | None:
        return self._steps.writable() if create else self._steps.journal

    def _asked_for(self) -> bool:
        """Programs wait for a checkpoint: return whether there is a supervisor, which takes it."""
        self._changed()
        return self._replica is not None

    def _changed(self) -> None:
        """A record was written: answer the supervisor that waits for one."""
        journal = self._journal()
        if self._replica is None or not self._replica[1] or journal is None:
            return
        connection, request, stored = self._replica
        body = self._news(journal)
        if body is not None and not connection.dead:
            self._replica = (connection, 0, stored)
            connection.send({"id": request, "ok": True, **body})

    def _news(self, journal: Journal) -> dict[str, Any] | None:
        """Return what the supervisor has to store, and whether it has to take a checkpoint; None:
        nothing.
        """
        assert self._replica is not None
        found = fitting(
            {**step.to_dict(), "sequence": number} for number, step in journal.steps(self._stored)
        )
        asked = bool(self._asked.news())
        if not found and not asked:
            return None
        sequence = found[-1]["sequence"] if found else self._stored
        return {"steps": found, "sequence": sequence, "checkpoint_asked": asked}

    def _release(self) -> None:
        """Answer those whose record is stored by now."""
        ready = [answer for sequence, answer in self._waiting if sequence <= self._stored]
        self._waiting = [one for one in self._waiting if one[0] > self._stored]
        for answer in ready:
            answer()
