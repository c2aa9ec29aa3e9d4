"""What the sessions of this host do just now: processor time, memory, who writes, last checkpoint.

States, processor time and memory come from records and ``/proc``, so they cannot hang.  Who writes
is known to a session's holder alone: a thread asks the holders in turn over connections that it
keeps, and one that does not answer leaves that column as it was.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from msgspec import Struct

from ..config import Config
from ..errors import CriuctlError
from ..host import latest_checkpoints
from ..proc.procfs import anonymous_memory, read_bytes
from ..proc.tree import read_tree
from .sessions import connect, sessions

if TYPE_CHECKING:
    from ..session.client.session import Session

_OPERATOR = "criuctl-top"
_ANSWER = 2.0  # seconds for a holder to answer
_ROUND = 1.0  # seconds between two rounds of asking
_TICKS = os.sysconf("SC_CLK_TCK")


class Sample(Struct, frozen=True):
    """One session now."""

    body: Mapping[str, Any]  # as `sessions` returns it
    cpu: float | None  # share of one processor since the last look; None: not known yet
    memory: int  # bytes that a dump would read, about
    writer: str
    checkpoint: str  # when the newest one was made, RFC 3339; "": none is known


class Sampler:
    """Looks at the sessions again and again; use it as a context manager."""

    def __init__(self, config: Config, *, all_: bool = False) -> None:
        self._config, self._all = config, all_
        self._ticks: dict[tuple[int, int], int] = {}  # of (PID, start time), at the last look
        self._looked = 0.0
        self._writers: dict[str, str] = {}  # by session id
        self._held: dict[str, str] = {}  # names of sessions with a holder, by id
        self._over = threading.Event()
        self._asking = threading.Thread(target=self._ask, name="top-writers", daemon=True)

    def __enter__(self) -> Self:
        self._asking.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()  # the thread may wait for a holder; it ends with this process

    def look(self) -> list[Sample]:
        """Return the sessions that run here, or all, as they are now."""
        found = [
            body
            for body in sessions(self._config)
            if self._all or body["state"] in ("running", "paused")
        ]
        now, before = time.monotonic(), self._ticks
        passed = now - self._looked if self._looked else 0.0
        self._ticks, self._looked = {}, now
        self._held = {body["id"]: body["session"] for body in found if body["holder"]}
        return [self._sample(body, before, passed) for body in found]

    def _sample(
        self, body: Mapping[str, Any], before: Mapping[tuple[int, int], int], passed: float
    ) -> Sample:
        spent = memory = 0
        with suppress(CriuctlError):
            for process in read_tree(body["pid"]) if body["pid"] else ():
                with suppress(CriuctlError):  # it has ended meanwhile
                    memory += anonymous_memory(process.pid)
                    key, ticks = _ticks(process.pid)
                    self._ticks[key] = ticks
                    spent += ticks - before.get(key, 0)
        latest = latest_checkpoints.known(self._config, body["session"])
        return Sample(
            body,
            spent / _TICKS / passed if passed else None,
            memory,
            self._writers.get(body["id"], ""),
            latest.created if latest is not None and latest.session == body["id"] else "",
        )

    def _ask(self) -> None:
        """Ask the holders who writes, until the end."""
        connections: dict[str, Session] = {}
        while not self._over.wait(_ROUND):
            for identifier, name in list(self._held.items()):
                try:
                    if identifier not in connections:
                        connections[identifier] = connect(
                            self._config, name, kind="service", role="observe", operator=_OPERATOR
                        )
                    answer = connections[identifier].request("status", timeout=_ANSWER)
                except CriuctlError:
                    self._writers.pop(identifier, None)
                    if identifier in connections:
                        connections.pop(identifier).close()
                    continue
                lease = answer["status"]["lease"]
                self._writers[identifier] = lease["name"] if lease else ""
            for identifier in connections.keys() - self._held.keys():
                connections.pop(identifier).close()


def _ticks(pid: int) -> tuple[tuple[int, int], int]:
    """Return (PID, start time) of a process, and the clock ticks that it has used."""
    fields = read_bytes(pid, "stat").rpartition(b")")[2].split()
    return (pid, int(fields[19])), int(fields[11]) + int(fields[12])
