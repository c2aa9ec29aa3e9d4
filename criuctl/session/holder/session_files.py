"""The files of a session: its folders, its output log with the times of the output, its audit log,
the journal of its steps.

A session that has not begun yet keeps its files in the folder ``names.BEGINNING``, so that those of
an earlier session of the same name, or of its own last life, are still there if it does not begin.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...steps import journal
from ...steps.journal import Journal
from .. import names
from .audit_log import AuditLog
from .base64_text import encoded
from .output_log import OutputLog
from .timeline import Timeline


class SessionFiles:
    """The files of the session `session_id`."""

    def __init__(
        self, run_folder: Path, state_folder: Path, log: OutputLog, audit: AuditLog, session_id: str
    ) -> None:
        self.run_folder, self.state_folder = run_folder, state_folder
        self.log, self.audit = log, audit
        self.timeline = Timeline(state_folder / "timeline", log.end, session_id)
        self._session = session_id
        self._steps: Journal | None = None  # opened when it is needed

    @property
    def socket(self) -> Path:
        """The path of the holder's socket."""
        return self.run_folder / "socket"

    def step_journal(self, *, create: bool) -> Journal | None:
        """Return the journal of the session's steps; None: it has none, and `create` is false.

        `OSError` if it cannot be read, or is damaged.
        """
        if self._steps is None:
            path = self.state_folder / names.STEPS
            if create or journal.owner(path) == self._session:
                self._steps = Journal(path, self._session)
        return self._steps

    @property
    def beginning(self) -> bool:
        """Whether the files are in the folder of a session that has not begun yet."""
        return self.log.path.parent.name == names.BEGINNING

    def move_in(self) -> None:
        """Move the files of a session that begins to their places; `OSError`."""
        if not self.beginning:
            return
        beginning = self.log.path.parent
        if self.state_folder == beginning:
            self.state_folder = beginning.parent
            self.timeline.move(self.state_folder)
            self.audit.move(self.state_folder)
            if self._steps is not None:
                self._steps.move(self.state_folder)
        self.log.move(self.state_folder)
        with suppress(OSError):  # something else is in it, which the next beginning removes
            beginning.rmdir()

    def remove_beginning(self) -> None:
        """Remove the files of a session that has never begun."""
        if self.beginning:
            with suppress(OSError):
                names.clear(self.log.path.parent)

    # -- re-exec ----------------------------------------------------------------------------------

    def unwritable(self) -> str:
        """Return why another program could not go on writing these files; "": it could."""
        for path in (self.log.path, self.audit.path):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            try:
                os.close(os.open(path, flags, 0o600))
            except OSError as error:
                return f"{path} cannot be opened: {error.strerror}"
        return ""

    def to_state(self) -> dict[str, Any]:
        """Return what the next program of this holder needs to open them again."""
        log = self.log
        return {
            "folders": [str(self.run_folder), str(self.state_folder)],
            "audit": self.audit.sequence,
            "log": {
                "path": str(log.path),
                "capacity": log.capacity,
                "base": log.base,
                "end": log.end,
                "broken": encoded(log.read(log.base, log.end)) if log.broken else None,
            },
        }

    @classmethod
    def reopen(cls, state: dict[str, Any], session_id: str) -> SessionFiles:
        """Open what `to_state` described."""
        run_folder, state_folder = map(Path, state["folders"])
        log = OutputLog.resume(state["log"], state_folder / "output")
        audit = AuditLog(state_folder / "audit.jsonl", state["audit"])
        return cls(run_folder, state_folder, log, audit, session_id)
