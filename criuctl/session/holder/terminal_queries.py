"""What a program asks its terminal while no terminal is there: the holder answers, as tmux and screen do.

A line editor asks where the cursor is (``CSI 6 n``) and reads the answer; in a session that nobody with a terminal is attached to
it would wait for ever.  `Modes` notes each query with its place in the output.  Once, when it is read, it is decided who
answers: the terminal of the lease's holder, if he is attached by one (it is shown the query, and its answer comes as
input), else the holder; never both, for a second answer would be text to the program.  A client that attaches later
and is shown old output is not to show the queries in it to its terminal (`screen.queries`).

Answers are the terminal's, not a person's: they need no lease and take none, and are not in the audit log.  They are
given in the order of the queries, into the same queue as all input.  Queries that wait are part of the modes, so a
checkpoint and a re-exec take them along.  Where the cursor is only an emulation of the screen can tell, which is far too
large and too slow for a holder: a child (`cursor`) replays the log, and nobody waits for it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..screen.redraw import beginning
from . import helper_processes
from .master import Chunk

if TYPE_CHECKING:
    from .holder import Holder

TERMINAL = "terminal"  # the kind of input that nobody types
_CURSOR = {"6n": "\x1b[{};{}R", "?6n": "\x1b[?{};{}R"}
_FIXED = {
    "5n": "\x1b[0n",  # all is well
    **dict.fromkeys(("c", "0c"), "\x1b[?1;2c"),  # a VT100 with advanced video, as screen and tmux say
    **dict.fromkeys((">c", ">0c"), "\x1b[>0;0;0c"),
}
_MAX_WAITING = 64  # a program that asks on and on and does not read gets no more
_PROGRAM = Path(__file__).parents[1] / "screen" / "cursor.py"


class Queries:
    """Answers in place of a terminal; the queries that wait are in the holder's modes."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._decided = max((offset for offset, _query in holder.modes.asked), default=-1)
        self._cursors: dict[int, tuple[int, int] | None] = {}  # by the offset of the query; None: it cannot be told
        self._looking = False
        self._complained = False

    def came(self) -> None:
        """Output came, with queries in it perhaps: decide who answers."""
        asked = self._holder.modes.asked
        if asked and asked[-1][0] > self._decided:
            old = [query for query in asked if query[0] <= self._decided]
            self._decided = asked[-1][0]
            asked[:] = old if self._terminal_there() else asked[:_MAX_WAITING]
            self.go_on()

    def go_on(self) -> None:
        """Answer what can be answered now."""
        holder = self._holder
        master, asked = holder.master, holder.modes.asked
        if not asked or master.fd < 0 or master.held or any(chunk.kind == TERMINAL for chunk in master.queue):
            return
        answers, done = "", 0
        for offset, query in asked:
            if query in _FIXED:
                answers += _FIXED[query]
            elif offset in self._cursors:
                cursor = self._cursors.pop(offset)
                answers += _CURSOR[query].format(*cursor) if cursor is not None else ""
            else:
                self._look()
                break
            done += 1
        del asked[:done]
        if answers:
            master.put(Chunk(answers.encode(), {"operator": "", "kind": TERMINAL, "name": TERMINAL}, TERMINAL))

    def _terminal_there(self) -> bool:
        """Whether a terminal is shown what comes, and what it says is typed."""
        lease = self._holder.lease(time.monotonic())
        return lease is not None and any(
            c.answers and c.position is not None and c.operator is not None and c.operator.id == lease["operator"]
            for c in self._holder.connections.values()
        )

    # -- where the cursor is ----------------------------------------------------------------------

    def _look(self) -> None:
        """Have a child find out where the cursor was at each query."""
        if self._looking:
            return
        holder, log = self._holder, self._holder.log
        places = [offset for offset, query in holder.modes.asked if query in _CURSOR]
        since = holder.modes.alternate_since
        start = beginning(log.base, places[0], since)
        memory = -1
        try:
            memory = os.memfd_create("criuctl-cursor", os.MFD_CLOEXEC)
            task = {"rows": holder.master.rows, "cols": holder.master.cols, "start": start, "at": places}
            task["whole"] = start in (0, since)
            _write(memory, json.dumps(task).encode() + b"\n" + log.read(start, places[-1]))
            pid = helper_processes.start([sys.executable, "-I", str(_PROGRAM)], dict(os.environ), "/", {0: memory})
        except OSError as error:
            if memory >= 0:
                os.close(memory)
            self._found(places, {}, str(error))
            holder.loop.soon(self.go_on)
            return
        self._looking = True
        holder.tree.helpers.add(pid)

        def ended(status: int) -> None:
            self._looking = False
            with open(memory, "rb") as file:
                file.seek(0)
                answer = file.read() if status == 0 else b"{}"
            self._found(places, json.loads(answer), f"ended with status {status}")
            self.go_on()

        holder.helpers[pid] = ended

    def _found(self, places: list[int], cursors: dict[str, Any], why: str) -> None:
        if not cursors and not self._complained:
            self._complained = True
            print(f"where the cursor is cannot be told: {why}", file=sys.stderr)  # noqa: T201 -- the holder's own log
        for place in places:
            cursor = cursors.get(str(place))
            self._cursors[place] = (int(cursor[0]), int(cursor[1])) if cursor else None


def _write(fd: int, data: bytes) -> None:
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
