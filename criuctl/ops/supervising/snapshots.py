"""The snapshots of a supervised session: when one is due, how it is taken, and what it removes.

The `Schedule` decides by time, and by the terminal, which `TerminalWatch` looks at. A snapshot that
fails is reported and tried again; the tree that it was of is not harmed by that. When more would be
lost than the settings allow, that is an event and a hook, and another event ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from ...dump.job import DumpRequest
from ...dump.story import dump
from ...errors import Conflict, CriuctlError, HomeLost, of_the_host
from ...host.hook_facts import snapshot_failed
from ...host.latest_checkpoints import moment
from ...host.registry import SessionRecord
from ...host.retention import Rules
from ...proc.tree import ProcessIdentity, read_tree
from ..prune import prune
from .context import Post
from .death import candidates
from .decisions import Reason, Schedule
from .heartbeat import Heartbeat
from .terminal_watch import TerminalWatch


class Snapshots:
    """The snapshots of the session of `post`, while it lives here."""

    def __init__(self, post: Post, heart: Heartbeat, refuse: Callable[[str], None]) -> None:
        """`refuse` gives programs that have asked for a checkpoint the reason why there is none."""
        settings = post.settings
        self._post, self._heart, self._refuse = post, heart, refuse
        self._schedule = Schedule(
            settings.period, settings.on_idle, settings.on_step, settings.max_loss
        )
        self._terminal = TerminalWatch(post.config, post.name, settings.on_idle, settings.on_step)
        self.members: list[ProcessIdentity] = []  # the processes of the tree at the last look
        self.at_risk = False  # more would be lost than allowed
        self.asked = False  # a program of the session has asked for a checkpoint
        self._owed = False  # it waits for one that was tried

    @property
    def every(self) -> float:
        """The seconds between two snapshots; 0: none by time alone."""
        return self._schedule.every

    def begin(self, record: SessionRecord, *, fresh: bool) -> None:
        """Begin, or begin again; a `fresh` tree was restored just now."""
        self._schedule.begin(time.monotonic(), 0.0 if fresh else self._age(record))

    def due(self, now: float) -> Reason | None:
        """Return why a snapshot is due, if one is."""
        reason: Reason | None = "asked" if self.asked else self._schedule.due(now)
        return reason or self._terminal.look(self._schedule, now)

    def pause(self, now: float) -> float:
        """Return the seconds after which `due` may have changed."""
        wait = self._schedule.wait(now)
        return self._terminal.pause if wait is None else min(self._terminal.pause, wait)

    def rest(self) -> None:
        """Disconnect from the terminal until the next look at it."""
        self._terminal.close()

    def remember(self, record: SessionRecord) -> None:
        """Remember the processes of the tree: when its root dies, others of it may live on."""
        with suppress(CriuctlError):
            self.members = [process.identity for process in read_tree(record.pid)]

    def take(self, record: SessionRecord, reason: str) -> bool:
        """Take a snapshot; return False if another host has taken the session over."""
        post, began = self._post, time.monotonic()
        self._owed, self.asked = self._owed or self.asked, False
        post.reporter.warnings = []
        try:
            with post.working():
                request = DumpRequest(
                    leave_running=True, with_files=post.settings.with_files, keep_tracking=True
                )
                result = dump(post.config, record.name, request=request, reporter=post.reporter)
        except HomeLost:
            return False
        except Exception as error:
            if not record.alive():
                # The tree's end, which may have come at any moment of the dump, is handled next.
                return True
            outcome = of_the_host(error) if isinstance(error, OSError) else error
            if not isinstance(outcome, CriuctlError):
                raise
            if self._owed and not isinstance(outcome, Conflict):  # else it is tried again soon
                self._owed = False
                self._refuse(outcome.message)
            self._schedule.failed(time.monotonic())
            again = round(self._schedule.wait(time.monotonic()) or 0.0, 1)
            post.tell(
                "snapshot-failed",
                reason=reason,
                failures=self._schedule.failures,
                again_s=again,
                error=outcome,
            )
            if not isinstance(outcome, Conflict):  # another command works on the session
                with post.working():
                    snapshot_failed(post.config, post.reporter, record.name, outcome)
            return True
        self._owed = False
        self._schedule.taken(began, time.monotonic())
        self._heart.hurry()
        self.remember(record)
        body = result.to_dict()
        facts = {
            key: body[key]
            for key in (
                "checkpoint",
                "number",
                "processes",
                "frozen_ms",
                "total_ms",
                "bytes",
                "warnings",
            )
        }
        post.tell("snapshot", reason=reason, **facts)
        if post.settings.keep_last:
            self._prune()
        return True

    def look_at_loss(self) -> None:
        """Report when more would be lost than allowed, and when that is over."""
        now = time.monotonic()
        risky = self._schedule.at_risk(now)
        if risky == self.at_risk:
            return
        self.at_risk = risky
        facts = {
            "loss_s": round(self._schedule.loss(now), 1),
            "max_loss_s": self._post.settings.max_loss,
        }
        self._post.tell("at-risk" if risky else "safe", **facts)
        if risky:
            self._post.hook("loss-exceeded", **facts)

    def _prune(self) -> None:
        """Remove checkpoints beyond the retention rules."""
        post = self._post
        try:
            with post.working():
                done = prune(
                    post.config,
                    [post.name],
                    Rules(last=post.settings.keep_last),
                    reporter=post.reporter,
                )
        except (CriuctlError, OSError) as error:
            outcome = of_the_host(error) if isinstance(error, OSError) else error
            if outcome is None:
                raise
            post.tell("prune-failed", error=outcome)
            return
        for trouble in done.errors.values():
            post.tell("prune-failed", error=trouble)

    def _age(self, record: SessionRecord) -> float | None:
        """Return the seconds since the newest checkpoint of this life of the session; None if there
        is none or the store does not say.
        """
        with suppress(CriuctlError), self._post.repository() as repository:
            for summary in candidates(repository, record.name, record.id, [])[:1]:
                created = moment(summary.created)
                if summary.incarnation == record.incarnation and created is not None:
                    return max(0.0, time.time() - created)
        return None
