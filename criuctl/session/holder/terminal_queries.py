"""Answers to what a program asks its terminal while no terminal is attached, as in tmux and screen.

A line editor asks where the cursor is (``CSI 6 n``) and reads the answer; in a session without an
attached terminal it would wait for ever.  `Modes` notes each query with its place in the output.
When a query is read, it is decided once who answers: the terminal of the lease's owner, if it is
attached with one (it is shown the query, and its answer comes as input), else the holder; never
both, for a second answer would be typed text to the program.

An answer needs no lease, takes none, and is not in the audit log: no person typed it.  Answers are
given in the order of the queries, into the same queue as all input.  Queries that wait are part of
the modes, so a checkpoint and a re-exec take them along.  The cursor's place only an emulation of
the screen knows, which is far too large and too slow for a holder: a child (`screen.emulate`)
replays the log, and the holder goes on meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ..screen.modes import Modes
from ..screen.replay_range import beginning
from .clients import Clients
from .event_loop import Loop
from .helper_processes import HelperProcesses
from .kept_screen import EMULATOR, KeptScreen
from .lease_timer import Leasing
from .master import Chunk, Master
from .output_log import OutputLog

TERMINAL = "terminal"  # the kind of input that no person typed
_CURSOR = {"6n": "\x1b[{};{}R", "?6n": "\x1b[?{};{}R"}
_FIXED = {
    "5n": "\x1b[0n",  # all is well
    **dict.fromkeys(("c", "0c"), "\x1b[?1;2c"),  # a VT100 with advanced video, as in screen, tmux
    **dict.fromkeys((">c", ">0c"), "\x1b[>0;0;0c"),
}
_MAX_WAITING = 64  # a program that asks on and on and does not read gets no more


class TerminalQueries:
    """Answers in place of a terminal; the queries that wait are in the session's modes."""

    def __init__(
        self,
        loop: Loop,
        log: OutputLog,
        modes: Modes,
        master: Master,
        helpers: HelperProcesses,
        kept_screen: KeptScreen,
        clients: Clients,
        leasing: Leasing,
    ) -> None:
        self._loop, self._log, self._modes, self._master = loop, log, modes, master
        self._helpers, self._kept_screen = helpers, kept_screen
        self._clients, self._leasing = clients, leasing
        self._decided = max((offset for offset, _query in modes.asked), default=-1)
        # By the offset of the query; None: it cannot be found out.
        self._cursors: dict[int, tuple[int, int] | None] = {}
        self._looking = False
        self._complained = False

    def came(self) -> None:
        """Output came: decide who answers the queries in it."""
        asked = self._modes.asked
        if asked and asked[-1][0] > self._decided:
            old = [query for query in asked if query[0] <= self._decided]
            self._decided = asked[-1][0]
            asked[:] = old if self._terminal_there() else asked[:_MAX_WAITING]
            self.answer()

    def answer(self) -> None:
        """Answer what can be answered now."""
        master, asked = self._master, self._modes.asked
        typing = any(chunk.kind == TERMINAL for chunk in master.queue)
        if not asked or master.fd < 0 or master.held or typing:
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
            who = {"operator": "", "kind": TERMINAL, "name": TERMINAL}
            master.put(Chunk(answers.encode(), who, TERMINAL))

    def _terminal_there(self) -> bool:
        """Return whether a terminal gets the output, and its answers become input."""
        lease = self._leasing.current()
        return lease is not None and any(
            client.answers
            and client.position is not None
            and client.operator is not None
            and client.operator.id == lease["operator"]
            for client in self._clients.all()
        )

    # -- where the cursor is ----------------------------------------------------------------------

    def _look(self) -> None:
        """Start a child that finds out where the cursor was at each query."""
        if self._looking:
            return
        places = [offset for offset, query in self._modes.asked if query in _CURSOR]
        memory = -1

        def ended(status: int) -> None:
            self._looking = False
            with open(memory, "rb") as file:
                file.seek(0)
                answer = file.read() if status == 0 else b"{}"
            self._found(
                places, json.loads(answer).get("cursors", {}), f"ended with status {status}"
            )
            self.answer()

        try:
            memory = os.memfd_create("criuctl-cursor", os.MFD_CLOEXEC)
            self._write_task(memory, places)
            self._helpers.start([sys.executable, "-I", str(EMULATOR)], {0: memory}, ended)
        except OSError as error:
            if memory >= 0:
                os.close(memory)
            self._found(places, {}, str(error))
            self._loop.soon(self.answer)
        else:
            self._looking = True

    def _write_task(self, fd: int, places: list[int]) -> None:
        """Write what `screen.emulate` reads."""
        log, since = self._log, self._modes.alternate_since
        start, drawn = beginning(log.base, places[0], since, self._modes.cleared_at), b""
        whole = start in (0, self._modes.cleared_at)
        kept = self._kept_screen.current()
        if kept is not None and start <= kept.offset <= places[0]:
            start, drawn, whole = max(kept.offset, log.base), kept.drawn, kept.offset >= log.base
        size = {"rows": self._master.rows, "cols": self._master.cols}
        task = {**size, "start": start, "at": places, "whole": whole, "drawn": len(drawn)}
        with open(fd, "wb", closefd=False) as file:
            file.write(json.dumps(task).encode() + b"\n" + drawn)
            file.write(log.read(start, places[-1]))

    def _found(self, places: list[int], cursors: dict[str, Any], why: str) -> None:
        if not cursors and not self._complained:
            self._complained = True
            # The holder's own log.
            print(f"cannot find out where the cursor is: {why}", file=sys.stderr)  # noqa: T201
        for place in places:
            cursor = cursors.get(str(place))
            self._cursors[place] = (int(cursor[0]), int(cursor[1])) if cursor else None
