"""The context of a supervisor: its settings, its clock, its event output."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from ...checkpoint.repository import Repository
from ...config import Config
from ...errors import CriuctlError, UsageError
from ...hooks import Hooks
from ...host.identity import host_id
from ...host.registry import Registry, SessionRecord
from ...proc.notify import ServiceManager
from ...report import Reporter
from ...session.names import check_name
from ...store import open_store
from .decisions import Restart, period

Tell = Callable[[dict[str, Any]], None]

TICK = 1.0  # seconds between two looks at state that no descriptor reports
# seconds without a tick, outside of any operation, after which the watchdog gets no more
# notifications
_WELL = 120.0


class SupervisorSettings(Struct, frozen=True):
    """How to supervise; spans of time in seconds, 0 is none."""

    every: float | None = None  # None: chosen from the other settings
    on_idle: float = 0.0
    on_step: bool = False
    max_loss: float = 0.0
    keep_last: int = 0
    with_files: tuple[str, ...] = ()
    standby: bool = False
    restart: Restart = "on-failure"
    max_restores: int = 3
    stable: float = 60.0  # a restored tree that lives so long counts as well
    backoff: float = 1.0
    max_backoff: float = 300.0
    lease: float = 30.0  # a home without a beat for so long is lost
    self_fence: bool = False  # whether it stops its session before that

    @property
    def period(self) -> float:
        """Return the seconds between two snapshots."""
        return period(
            self.every or 0.0, terminal=bool(self.on_idle or self.on_step), max_loss=self.max_loss
        )

    def check(self) -> None:
        """Raise `UsageError` for impossible settings, alone or together."""
        if self.every is not None and self.every <= 0:
            raise UsageError(
                "a snapshot every 0 s is not possible",
                hint="Leave --every out, or give a span such as 60s.",
            )
        if self.lease < 1:  # it is renewed, and read, several times in that
            raise UsageError(
                f"a lease of {self.lease:g} s is not possible",
                hint="Leave --lease out, or give a span such as 30s.",
            )
        if self.max_loss and not 0 < self.period <= self.max_loss:
            raise UsageError(
                f"a snapshot every {self.period:g} s cannot keep the loss below {self.max_loss:g} s"
            )


class Post:
    """The place where one session is supervised."""

    def __init__(
        self,
        config: Config,
        name: str,
        settings: SupervisorSettings,
        *,
        reporter: Reporter,
        tell: Tell,
    ) -> None:
        self.config, self.name, self.settings = config, check_name(name), settings
        self.reporter, self._emit = reporter, tell
        self.registry, self.host = Registry(config), host_id(config)
        self.service = ServiceManager()
        self._count = 0  # of events
        self._ticked, self._busy = time.monotonic(), False

    def lives(self) -> SessionRecord | None:
        """Return the session's record, if it runs here."""
        record = self.registry.get(self.name)
        return record if record is not None and record.alive() else None

    @contextmanager
    def repository(self, patience: float | None = None) -> Iterator[Repository]:
        """Yield the open store; with `patience` wait so many seconds for an answer, and do not
        repeat requests.
        """
        config = self.config
        if patience is not None:
            config = config.with_options(
                s3_retries=1, s3_timeout=min(config.s3_timeout, max(1.0, patience))
            )
        with (
            open_store(config.store, config) as store,
            Repository.open(store, config) as repository,
        ):
            yield repository

    @contextmanager
    def working(self) -> Iterator[None]:
        """While inside, missing ticks are expected."""
        self._busy = True
        try:
            yield
        finally:
            self._busy, self._ticked = False, time.monotonic()

    def tick(self) -> None:
        """Record that the session is supervised."""
        self._ticked = time.monotonic()

    def well(self) -> bool:
        """Return whether ticks come as expected, for the watchdog."""
        return self._busy or time.monotonic() - self._ticked < _WELL

    def sleep(self, seconds: float) -> None:
        """Wait, with a tick each second."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._ticked = time.monotonic()
            time.sleep(min(left, TICK))

    def hook(self, phase: str, **more: Any) -> None:
        """Run the hooks of a supervisor's own phases."""
        facts: dict[str, Any] = {
            "session": self.name,
            "incarnation": None,
            "checkpoint": None,
            "pid": None,
            "inner_pid": None,
            "store": self.config.store,
            "labels": {},
            "leave_running": None,
        }
        with self.working():
            hooks = Hooks(
                self.config, self.reporter, facts | {k: v for k, v in more.items() if k in facts}
            )
            hooks.run(phase, **{k: v for k, v in more.items() if k not in facts})

    def tell(self, event: str, **facts: Any) -> None:
        """Report an event, numbered; errors as in the command line's JSON."""
        self._count += 1
        body = {
            key: fact.to_dict() if isinstance(fact, CriuctlError) else fact
            for key, fact in facts.items()
            if fact is not None
        }
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._emit(
            {"event": event, "sequence": self._count, "time": stamp, "session": self.name, **body}
        )
        self.service.tell(f"STATUS={event}, {stamp}")
