"""Watching for the notice that this machine will be taken away, and storing everything in time.

The watch looks at the cloud's metadata service again and again. An interruption begins maintenance
(`criuctl.ops.maintenance`): new sessions are refused, and everything is dumped and ended, the most
valuable first if not all fits (`plan`), until the moment that the notice names. What fails is tried
again while there is time. A rebalance recommendation names no moment: everything is stored and left
running, so that little is left to do at an interruption.

While a rebalance is being stored, the watch looks for an interruption after each dump; then dumps
that are under way are interrupted, and the interruption is acted upon. The watch starts no thread,
because dumps are forked from it.

A service that does not answer is reported once, and asked again. The most that an answer can cause
is that everything is stored and ended here: do not run a watch on a machine whose link-local
address may be answered by another than its cloud.

What happens is reported as events, one mapping each: ``event`` is the kind, the other keys are
facts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, Literal

from msgspec import Struct

from ...config import Config
from ...errors import CriuctlError
from ...host.maintenance import Item
from ...host.registry import check_outside, exclusive
from ...proc.notify import ServiceManager
from ...report import Reporter
from ..maintenance import begin
from ..scheduling.subjects import Subject, running
from .metadata import MetadataUnavailable
from .notices import Cloud, Notice
from .plan import Plan, plan, too_slow
from .worth import worths

Tell = Callable[[Mapping[str, Any]], None]
Rebalance = Literal["snapshot", "dump", "ignore"]

_LEAD = 300.0  # seconds before which nothing is begun, if the notice comes so early
_REVIEW = 300.0  # seconds between two looks at what would not fit
_ROUNDS = 3  # tries of what fails
_AGAIN = 1.0  # seconds between two tries, and between two looks once a notice stands
_AWAY = 5.0  # seconds between two looks at a service that does not answer


class WatchSettings(Struct, frozen=True):
    """The options of a watch."""

    jobs: int = 2
    window: float = 0.0  # seconds, at most; 0: what the cloud gives
    rebalance: Rebalance = "snapshot"


class Watch:
    """One watch; `run` is its main loop."""

    def __init__(
        self,
        config: Config,
        cloud: Cloud,
        settings: WatchSettings,
        *,
        reporter: Reporter,
        tell: Tell,
    ) -> None:
        self._config, self._cloud, self._settings = config, cloud, settings
        self._reporter, self._emit = reporter, tell
        self._count = 0  # of events
        self._away = False
        self._done = ""  # id of the notice that was acted upon
        self._announced = ""  # id of one that is still far away
        self._reviewed: float | None = None
        self._forewarned: tuple[Any, ...] = ()

    def run(self) -> None:
        """Watch until a signal comes."""
        check_outside(self._config, begins=True)
        busy = "another criuctl watches for notices on this host"
        service = ServiceManager()
        with exclusive(self._config, f"spot/{self._config.state_dir}", busy):
            self._tell("started", cloud=self._cloud.name, window_s=self.window)
            service.tell("READY=1")
            try:
                while True:
                    self._review()
                    time.sleep(self.look())
            except KeyboardInterrupt:
                self._tell("stopped")
            finally:
                service.tell("STOPPING=1")

    @property
    def window(self) -> float:
        """The seconds that the cloud's shortest notice gives, or as many as are to be used."""
        return min(self._settings.window or self._cloud.window, self._cloud.window)

    def look(self) -> float:
        """Look once, and act; return the seconds until the next look."""
        try:
            notice = self._cloud.look()
        except MetadataUnavailable as error:
            if not self._away:
                self._tell("metadata-failed", error=error)
            self._away = True
            return max(self._cloud.pause, _AWAY)
        if self._away:
            self._tell("metadata-back")
        self._away = False
        if notice is None:
            if self._done:
                self._tell("withdrawn", notice=self._done)
            self._done = self._announced = ""
            return self._cloud.pause
        self._noticed(notice)
        return max(self._cloud.pause, _AGAIN)

    def _noticed(self, notice: Notice) -> None:
        if notice.id == self._done:
            return
        left = notice.left(time.time())
        if left > max(_LEAD, notice.window):
            if notice.id != self._announced:
                self._announced = notice.id
                self._tell("announced", action=notice.action, left_s=round(left, 1))
            return
        if notice.kind == "rebalance" and self._settings.rebalance == "ignore":
            self._done = notice.id
            self._tell("ignored", action=notice.action)
            return
        if self._settings.window:
            left = min(left, self._settings.window)
        if self._store(notice, left):
            self._done = notice.id

    # -- storing

    def _store(self, notice: Notice, left: float) -> bool:
        """Store everything; return False if that could not be begun, or was overtaken by an
        interruption.
        """
        until = time.monotonic() + left
        self._tell("notice", kind=notice.kind, action=notice.action, left_s=round(left, 1))
        items: dict[str, Item] = {}
        for _ in range(_ROUNDS):
            try:
                with closing(self._round(notice, until)) as outcomes:
                    for item in outcomes:
                        items[item.session] = item
                        self._tell_item(item, until)
                        if notice.kind == "rebalance" and self._overtaken():
                            return False
            except CriuctlError as error:
                self._tell("begin-failed", error=error)
                return False
            if not _failed(items) or until - time.monotonic() <= _AGAIN:
                break
            time.sleep(_AGAIN)
        failed = _failed(items)
        stored = [item.session for item in items.values() if item.state == "stored"]
        spare = round(until - time.monotonic(), 1)
        self._tell("done", stored=len(stored), not_stored=failed, left_s=spare)
        if not failed and notice.kind == "interruption":
            self._acknowledge(notice)
        return True

    def _round(self, notice: Notice, until: float) -> Generator[Item, None, None]:
        snapshot = notice.kind == "rebalance" and self._settings.rebalance == "snapshot"
        yield from begin(
            self._config,
            "snapshot" if snapshot else "dump",
            f"{notice.cloud}: {notice.action}",
            jobs=self._settings.jobs,
            until=until,
            grouped=lambda found: self._grouped(found, until),
            reporter=self._reporter,
        )

    def _grouped(self, found: list[Subject], until: float) -> list[list[Subject]]:
        """Return what is to be stored in groups, by value if not all fits; tell what does not."""
        left = until - time.monotonic()
        chosen = plan(worths(self._config, found), left, self._settings.jobs)
        if chosen.late:
            self._tell_late(chosen, left)
        named = {subject.name: subject for subject in found}
        groups = [[named.pop(name) for name in group] for group in chosen.groups]
        return [*groups, [*named.values()]] if named else groups

    def _overtaken(self) -> bool:
        try:
            notice = self._cloud.look()
        except MetadataUnavailable:
            return False
        return notice is not None and notice.kind == "interruption"

    def _acknowledge(self, notice: Notice) -> None:
        try:
            if self._cloud.acknowledge(notice):
                self._tell("acknowledged", action=notice.action)
        except MetadataUnavailable as error:
            self._tell("acknowledge-failed", error=error)

    # -- telling

    def _review(self) -> None:
        """Tell what would not be stored within a notice, while there is time to do something."""
        now = time.monotonic()
        if self._reviewed is not None and now - self._reviewed < _REVIEW:
            return
        self._reviewed = now
        try:
            found = worths(self._config, running(self._config))
        except (CriuctlError, OSError):
            return  # the next one sees it, and a notice reports it
        slow = too_slow(found, self.window)
        late = plan(found, self.window, self._settings.jobs)
        state = (tuple(w.name for w in slow), tuple(sorted(late.late)))
        if state == self._forewarned:
            return
        self._forewarned = state
        for w in slow:
            self._tell(
                "too-slow", session=w.name, seconds=round(w.seconds, 1), window_s=self.window
            )
        if late.late:
            self._tell_late(late, self.window)

    def _tell_late(self, late: Plan, left: float) -> None:
        facts = {"needs_s": round(late.needs, 1), "left_s": round(left, 1)}
        self._tell("does-not-fit", sessions=list(late.late), **facts)

    def _tell_item(self, item: Item, until: float) -> None:
        left = round(until - time.monotonic(), 1)
        facts = {"session": item.session, "state": item.state, "left_s": left}
        error = {"error": item.error} if item.error is not None else {}
        self._tell(
            "stored" if item.state == "stored" else item.state,
            checkpoint=item.checkpoint or None,
            **facts,
            **error,
        )

    def _tell(self, event: str, **facts: Any) -> None:
        self._count += 1
        body = {
            key: fact.to_dict() if isinstance(fact, CriuctlError) else fact
            for key, fact in facts.items()
            if fact is not None
        }
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._emit({"event": event, "sequence": self._count, "time": stamp, **body})


def _failed(items: Mapping[str, Item]) -> list[str]:
    return [item.session for item in items.values() if item.state not in ("stored", "gone")]
