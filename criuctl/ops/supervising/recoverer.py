"""Restoring a session that has died: from the newest good checkpoint, repeatedly if needed, with a
limit.

A checkpoint that is damaged, or that fails to restore, is skipped for the one before. A restore
that fails counts, as does one whose tree dies again soon (`Guard`); a damaged checkpoint does not
count while there is a good one. A store that does not answer, or whose lease of the session cannot
be read, is asked again without limit.
"""

from __future__ import annotations

import time
from typing import Any, Literal

from msgspec import Struct

from ...checkpoint.leases import Head, read_head
from ...checkpoint.manifest import SessionRef
from ...checkpoint.repository import Repository
from ...checkpoint.summary import CheckpointSummary
from ...errors import (
    Conflict,
    CriuctlError,
    Damaged,
    DataError,
    NoSuchCheckpoint,
    ObjectMissing,
    PreflightRefused,
    RestoreFailed,
    StoreError,
    of_the_host,
)
from ...hooks.runner import error_body
from ...host.latest_checkpoints import moment
from ...host.registry import SessionRecord
from ...proc.tree import ProcessIdentity
from ...quoting import quoted
from ...restore.outcome import RestoreResult
from ...restore.request import RestoreRequest
from ...restore.story import restore
from .context import TICK, Post
from .death import candidates, end_strays
from .decisions import Guard
from .heartbeat import BEATS, Heartbeat

_STORE_PAUSE = 30.0  # seconds between two tries of a store that does not answer, at most

Outcome = Literal["back", "overtaken", "blind"]


class GaveUp(RestoreFailed):
    """The session could not be kept alive: too many restores in a row failed, or died again."""

    code = "gave-up"


class Loss(Struct):
    """A session that is to be restored."""

    record: SessionRecord | None  # its last life on this host
    died: float  # by the monotonic clock; of another host's session, when its last beat was seen
    # the same in UNIX seconds, by the clock of the host that it was on, if that is known
    at: float | None = None
    instead_of: Head | None = None  # that host's lease, which has expired

    @property
    def session_id(self) -> str | None:
        """The session whose checkpoints are used; None: the last that was stored by the name."""
        if self.instead_of is not None:
            return self.instead_of.session.id
        return self.record.id if self.record is not None else None


class Recoverer:
    """Restores one session, as often as its guard allows."""

    def __init__(self, post: Post, heart: Heartbeat) -> None:
        self._post, self._heart = post, heart
        self._damaged: set[str] = set()  # checkpoints that cannot be restored
        self.reset()

    def reset(self) -> None:
        """Reset all counts."""
        settings = self._post.settings
        self.guard = Guard(
            settings.max_restores, settings.stable, settings.backoff, settings.max_backoff
        )

    def recover(self, loss: Loss, members: list[ProcessIdentity]) -> Outcome:
        """Restore it. Return ``overtaken`` when another host has it, ``blind`` when the store could
        not be read; raise `GaveUp`.

        `members` were in its tree, and may have outlived its root.
        """
        post, guard = self._post, self.guard
        if loss.record is not None and loss.instead_of is None:
            end_strays(post.config, loss.record, members)
        passed: list[str] = []
        failure: CriuctlError | None = None
        pause = 0.0  # seconds, for a store that does not answer
        while not guard.exhausted:
            if wait := max(guard.delay(), pause):
                post.tell("waiting", seconds=round(wait, 1), failures=guard.failures)
                post.sleep(wait)
            if post.lives() is not None:
                return "back"  # another process has restored it meanwhile
            try:
                failure = self._try(loss, passed)
            except Conflict as error:
                post.tell("overtaken", error=error)
                self._heart.rest()
                post.sleep(TICK)
                return "overtaken"
            except (StoreError, Damaged) as error:
                post.tell("store-failed", error=error)
                if loss.instead_of is not None:
                    self._heart.rest()
                    return "blind"  # the last reading of the lease is too old
                pause = min(_STORE_PAUSE, max(TICK, 2 * pause))
                continue
            pause = 0.0
            if failure is None:
                return "back"
        raise self._give_up(failure)

    def _try(self, loss: Loss, passed: list[str]) -> CriuctlError | None:
        """Restore the newest checkpoint that can be; return why none could be."""
        post, guard = self._post, self.guard
        failure: CriuctlError | None = None
        unreadable: list[DataError] = []
        with post.repository() as repository, post.working():
            if repository.capabilities.conditional_create:
                # a damaged lease is not an error of any checkpoint
                read_head(repository, post.name)
            found = candidates(repository, post.name, loss.session_id, unreadable)
            for damaged in unreadable:
                self._pass_over(None, damaged, passed)
            for summary in (one for one in found if one.id not in self._damaged):
                self._heart.start(SessionRef(post.name, summary.session_id))
                try:
                    self._restore(loss, summary, repository, passed)
                except (DataError, ObjectMissing, NoSuchCheckpoint) as error:
                    self._damaged.add(summary.id)
                    self._pass_over(summary, error, passed)
                except (RestoreFailed, PreflightRefused) as error:
                    self._pass_over(summary, error, passed)
                    failure = error
                    guard.failed()
                    if guard.exhausted:
                        break
                except (Conflict, StoreError):
                    raise
                # a veto or a full disk, for example: the checkpoint before would fail too
                except (CriuctlError, OSError) as error:
                    known = of_the_host(error) if isinstance(error, OSError) else error
                    if known is None:
                        raise
                    post.tell("restore-failed", checkpoint=summary.id, error=known)
                    guard.failed()
                    return known
                else:
                    return None
        if failure is None:
            guard.failed()
        return failure or NoSuchCheckpoint(
            f"the store has no good checkpoint of session {post.name!r}"
        )

    def _pass_over(
        self, summary: CheckpointSummary | None, error: CriuctlError, passed: list[str]
    ) -> None:
        name = summary.id if summary is not None else error.message
        if name not in passed:
            passed.append(name)
            facts = (
                {"checkpoint": summary.id, "number": summary.number} if summary is not None else {}
            )
            self._post.tell("passed-over", **facts, error=error)

    def _restore(
        self, loss: Loss, summary: CheckpointSummary, repository: Repository, passed: list[str]
    ) -> None:
        """Restore this checkpoint."""
        post = self._post
        post.reporter.warnings = []
        ttl = round(post.settings.lease * 1000) if repository.capabilities.conditional_create else 0
        request = RestoreRequest(instead_of=loss.instead_of, ttl=ttl)
        result = restore(
            post.config, summary.id, request=request, reporter=post.reporter, repository=repository
        )
        assert isinstance(result, RestoreResult)  # no dry run
        now, created, at = time.monotonic(), moment(summary.created), loss.at
        if loss.instead_of is not None and at is not None:
            # it may have lived until just before its next beat
            at += loss.instead_of.ttl / 1000 / BEATS
        facts: dict[str, Any] = {
            "checkpoint": result.checkpoint,
            "number": summary.number,
            "incarnation": result.incarnation,
            "pid": result.pid,
            "recovered_ms": round((now - loss.died) * 1000, 1),
            "restore_ms": result.elapsed_ms,
            "newer": result.found.newer if result.found is not None else None,
            "lost_s": round(max(0.0, at - created), 3)
            if at is not None and created is not None
            else None,
            "passed_over": list(passed),
            "from_host": holder_of(loss.instead_of),
            "connections": result.connections,
            "warnings": result.warnings,
        }
        self.guard.restored(now)
        post.tell("recovered", **facts)
        post.hook("recovered", **facts)

    def _give_up(self, failure: CriuctlError | None) -> GaveUp:
        """Give up: too many restores in a row failed."""
        post, count = self._post, self.guard.failures
        what = "failed" if failure is not None else f"died again within {post.settings.stable:g} s"
        why = f": {failure.message}" if failure is not None else ""
        given_up = GaveUp(
            f"session {post.name!r} is given up: {count} "
            f"{'restore' if count == 1 else 'restores'} in a row {what}{why}",
            hint=f"`criuctl list {quoted(post.name)}` shows from what it can be restored,"
            f" `criuctl log {quoted(post.name)}` what happened.",
            failures=count,
        )
        post.tell("gave-up", failures=count, error=given_up)
        post.hook("gave-up", failures=count, error=error_body(given_up))
        return given_up


def holder_of(head: Head | None) -> str | None:
    """Return the present or former holder of a lease, in words."""
    return (head.host_name or head.host) if head is not None else None
