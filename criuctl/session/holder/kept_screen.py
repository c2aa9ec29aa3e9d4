"""The screen of a full-screen program that has printed much, kept at an offset of the log.

A client makes the screen from the log, beginning where the full-screen program began.  That may be
too far back, or no longer in the log.  So for each `_STEP` bytes of its output a child
(`screen.emulate`) goes on from the screen that was kept last, and hands back the next: the bytes
that draw it.  The holder copies one step for it, runs one child at a time, and never waits.

If the program prints faster than the child reads, the kept screen lags behind, but by no more than
`_MAX_BEHIND`: then output is left out, and what only that has drawn is missing until it is drawn
again.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..screen.modes import Modes
from ..screen.replay_range import before
from .base64_text import encoded
from .helper_processes import HelperProcesses
from .master import Master
from .output_log import OutputLog

EMULATOR = Path(__file__).parents[1] / "screen" / "emulate.py"
_STEP = 1 << 20
_MAX_BEHIND = 6 << 20
_MAX_DRAWN = 256 << 10  # bytes: what is longer is not kept
_ENTER = b"\x1b[?1049h"


@dataclass(frozen=True, slots=True)
class Kept:
    """A screen: what draws it, the offset behind it, and where its program began."""

    offset: int
    since: int
    drawn: bytes


class KeptScreen:
    """The kept screen of one session, if it has one."""

    def __init__(
        self, log: OutputLog, modes: Modes, master: Master, helpers: HelperProcesses
    ) -> None:
        self._log, self._modes, self._master, self._helpers = log, modes, master, helpers
        self._kept: Kept | None = None
        self._busy = False
        self._tried = 0  # the log's end when a child last failed

    def current(self) -> Kept | None:
        """Return the kept screen, if the program that it belongs to still runs."""
        kept = self._kept
        if kept is None or kept.since != self._modes.alternate_since or kept.offset > self._log.end:
            return None
        return kept

    def came(self) -> None:
        """Output came: go on if there is enough of it."""
        since, log = self._modes.alternate_since, self._log
        if since is None:
            self._kept = None
            return
        if self._busy or log.end - since < _STEP:
            return
        kept, whole = self.current(), True
        if kept is None:
            kept = Kept(before(log.base, since), since, b"")
            whole = kept.offset == 0
        if max(kept.offset, since) < max(log.base, log.end - _MAX_BEHIND):
            # What comes next is not kept any more, or would take too long: leave it out.
            kept, whole = Kept(max(log.base, log.end - _STEP), since, kept.drawn or _ENTER), False
        if log.end - max(kept.offset, self._tried) >= _STEP:
            self._go_on(kept, whole)

    def _go_on(self, kept: Kept, whole: bool) -> None:
        """Start a child that makes the next screen of this one."""
        end = min(kept.offset + _STEP, self._log.end)
        task = {"start": kept.offset, "whole": whole, "at": [], "drawn": len(kept.drawn)}
        task |= {"rows": self._master.rows, "cols": self._master.cols}
        memory = -1

        def ended(status: int) -> None:
            self._busy = False
            with open(memory, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                small = status == 0 and size < 8 * _MAX_DRAWN
                shown = (
                    json.loads(file.read()).get("screen", "").encode("latin-1") if small else b""
                )
            if 0 < len(shown) <= _MAX_DRAWN:
                self._kept = Kept(end, kept.since, shown)
                self.came()
            else:
                self._tried = self._log.end

        try:
            memory = os.memfd_create("criuctl-screen", os.MFD_CLOEXEC)
            with open(memory, "wb", closefd=False) as file:
                file.write(json.dumps(task).encode() + b"\n" + kept.drawn)
                file.write(self._log.read(kept.offset, end))
            self._helpers.start([sys.executable, "-I", str(EMULATOR)], {0: memory}, ended)
        except OSError:
            if memory >= 0:
                os.close(memory)
            self._tried = self._log.end
        else:
            self._busy = True

    # -- re-exec, checkpoints ---------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any] | None:
        """Return the kept screen, for the protocol and for the next holder."""
        kept = self.current()
        if kept is None:
            return None
        return {"offset": kept.offset, "since": kept.since, "base64": encoded(kept.drawn)}

    def restore(self, values: object) -> None:
        """Take over what `to_dict`, of this or another version, returned.

        It may come from a checkpoint: what is damaged is not taken.
        """
        if isinstance(values, dict):
            with suppress(KeyError, TypeError, ValueError):
                drawn = base64.b64decode(values["base64"], validate=True)
                if len(drawn) <= _MAX_DRAWN:
                    self._kept = Kept(int(values["offset"]), int(values["since"]), drawn)
