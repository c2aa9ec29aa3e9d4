"""Supervising one session: snapshots while it runs, and a restore after it died.

A supervisor is a home or a standby.

    home      The session runs here.  `Snapshots` are taken, and the lease is renewed
              (`Heartbeat`).  When the tree dies it is restored (`Recoverer`), or given up if that
              does not help.
    standby   The session lives on another host, whose lease is watched (`LeaseWatch`).  When that
              has expired the session is restored here, in the place of exactly that lease: of
              several standbys one gets it, the others go on watching.  This also fences the old
              home: when it comes back its copy is ended, and it becomes a standby.

RULE: only a tree that is known to be gone, or whose lease has expired, is restored; a store that
does not answer proves neither.

RULE: a supervisor that ends, in whatever way, ends no session. If it ends in order, it leaves a
lease that does not expire. After a ``kill -9`` the lease expires unless a supervisor is started
again in time, which continues where the other stopped.

Actions are reported as events, one mapping each: ``event`` is the kind, the other keys are facts.
"""

from __future__ import annotations

import os
import select
import time
from contextlib import ExitStack, suppress
from typing import Literal

from ..checkpoint import leases
from ..checkpoint.leases import Head
from ..checkpoint.manifest import SessionRef
from ..checkpoint.repository import Repository
from ..config import Config
from ..errors import (
    Conflict,
    Damaged,
    DataError,
    NoSuchBucket,
    NoSuchProcess,
    NotFound,
    PreflightRefused,
    StoreError,
    StoreNotInitialised,
)
from ..host import fencing, lost_homes, rights
from ..host.journal import events, operation_facts
from ..host.latest_checkpoints import moment
from ..host.registry import SessionRecord, check_outside, exclusive
from ..quoting import quoted
from ..report import Reporter
from .supervising.context import TICK, Post, SupervisorSettings, Tell
from .supervising.death import Wanted, candidates, fate
from .supervising.decisions import End, LeaseWatch
from .supervising.heartbeat import Heartbeat
from .supervising.recoverer import Loss, Recoverer, holder_of
from .supervising.self_fence import SelfFence, lift
from .supervising.snapshots import Snapshots
from .supervising.step_storing import StepStoring

Role = Literal["home", "recover", "standby", "undecided", "over"]

_LOOK = 5.0  # seconds between two readings of a lease, at most


@events.recorded("supervise", operation_facts.supervised, about=operation_facts.of_name)
def supervise(
    config: Config, name: str, settings: SupervisorSettings, *, reporter: Reporter, tell: Tell
) -> bool:
    """Supervise the session until it is over or a signal comes; return False if more would be lost
    than allowed.
    """
    settings.check()
    check_outside(config, begins=True)
    rights.check(config, "supervise", name)
    return Supervisor(Post(config, name, settings, reporter=reporter, tell=tell)).run()


class Supervisor:
    """One supervisor; `run` is its main loop."""

    def __init__(self, post: Post) -> None:
        settings = post.settings
        self._post = post
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._fence = (
            SelfFence(post.config, post.name, settings.lease) if settings.self_fence else None
        )
        self._heart = Heartbeat(post.config, settings.lease, self._wake, self._fence)
        self._steps = StepStoring(
            post, lambda error: post.tell("store-failed", error=error), self._ask
        )
        self._snapshots = Snapshots(post, self._heart, self._steps.refuse)
        self._recoverer = Recoverer(post, self._heart)
        self._loss: Loss | None = None  # the loss to recover from
        self._fresh = False  # it was restored just now
        self._still = False  # the tree is stopped, since the lease could not be renewed

    def run(self) -> bool:
        """Run until the session is over; see `supervise`."""
        post = self._post
        taken = f"session {post.name!r} is supervised by another criuctl"
        with ExitStack() as stack:
            stack.callback(os.close, self._wake)
            stack.enter_context(
                exclusive(post.config, f"supervise/{post.config.state_dir}/{post.name}", taken)
            )
            stack.callback(
                self._heart.stop, lambda: post.tell("lease-runs-out", lease_s=post.settings.lease)
            )
            stack.callback(self._steps.stop)
            stack.callback(self._snapshots.rest)
            stack.callback(post.service.close)
            try:
                role = self._role(first=True)
                post.tell("started", role=role, every_s=self._snapshots.every or None)
                post.service.tell("READY=1")
                post.service.watchdog(post.well)
                plays = {
                    "home": self._at_home,
                    "recover": self._recover,
                    "standby": self._stand_by,
                    "undecided": self._role_again,
                }
                while role != "over":
                    role = plays[role]()
            except KeyboardInterrupt:  # the session runs on
                post.tell("stopped", runs=post.lives() is not None, still=self._still or None)
            finally:
                post.service.tell("STOPPING=1")
        return not self._snapshots.at_risk

    # -- which role
    # ----------------------------------------------------------------------------------

    def _role(self, *, first: bool = False) -> Role:
        """Return this host's role, from where the session lives."""
        post = self._post
        record = post.registry.get(post.name)
        if record is not None and record.alive():
            return self._look_for_lease(record, first)
        with post.repository() as repository:
            leased = repository.capabilities.conditional_create
            if not leased and (post.settings.standby or record is None):
                raise PreflightRefused(
                    f"session {post.name!r} does not run here, and it is unknown where it runs: "
                    f"{leases.UNLEASED}",
                    hint=(
                        f"If it does not run anywhere, `criuctl restore {quoted(post.name)}`, then "
                        "supervise it."
                    ),
                )
            head = leases.read_head(repository, post.name) if leased else None
            held = head if head is not None and head.state == "held" else None
            if held is not None and held.host == post.host and record is None and not held.ttl:
                raise Conflict(
                    f"session {post.name!r} is held by this host, which does not know it",
                    hint=(
                        "If another host has the same machine id, give each a host_id; else "
                        "`criuctl restore` it."
                    ),
                )
            if post.settings.standby or (
                held is not None and (held.host != post.host or record is None)
            ):
                return "standby"
            if not candidates(repository, post.name, record.id if record is not None else None, []):
                raise NotFound(
                    f"session {post.name!r} does not run here, and the store has no checkpoint of "
                    "it"
                )
        self._loss = Loss(
            record, time.monotonic(), moment(held.beaten) if held is not None else None
        )
        if record is None or record.state == "checkpointed":
            return "recover"  # it lives nowhere, and is meant to live
        return self._after(record, fate(post.config, record))

    def _role_again(self) -> Role:
        """Return the role again while supervising. Errors that hide it (a store that does not
        answer, an unreadable lease, a restore under way here) are waited out, because there may be
        a session to supervise afterwards.
        """
        outcome = ""
        while True:
            try:
                return self._role()
            except (StoreError, Damaged, Conflict) as error:
                if error.code != outcome:
                    self._post.tell("store-failed", error=error)
                outcome = error.code
                self._post.sleep(_LOOK)

    def _look_for_lease(self, record: SessionRecord, first: bool) -> Role:
        """Decide whether the session that runs here is at home or a stale copy. A store that does
        not answer fences no session.
        """
        post = self._post
        try:
            with post.repository() as repository:
                if fencing.check(post.config, repository, record) is not None:
                    return self._stand_down(record)
                if not repository.capabilities.conditional_create:
                    if post.settings.standby or post.settings.self_fence:
                        what = "a standby" if post.settings.standby else "--self-fence"
                        raise PreflightRefused(
                            f"{what} needs a store that gives leases: {leases.UNLEASED}"
                        )
                    if first:
                        post.tell("unleased", text=leases.UNLEASED)
        except (NoSuchBucket, StoreNotInitialised):
            pass  # the first snapshot makes it, or reports the error
        except (StoreError, DataError, Conflict) as error:
            post.tell("store-failed", error=error)
        return "home"

    def _stand_down(self, record: SessionRecord) -> Role:
        """End what runs here: another host has the session."""
        post = self._post
        self._rest()
        self._snapshots.rest()
        post.reporter.warnings = []
        known = post.registry.get(record.name)
        if known is not None and known.state == "lost":  # a snapshot has detected and done it
            post.tell("fenced", done="ended", text=known.reason)
            return "standby"
        with post.working():
            for found in lost_homes.stand_down(post.config, [record.name], reporter=post.reporter):
                facts = {
                    "host": holder_of(found.lease),
                    "text": found.reason or None,
                    "error": found.error,
                }
                post.tell("fenced", done=found.done, processes=found.processes, **facts)
        if post.lives() is None:
            return "standby"
        post.sleep(TICK)
        return "undecided"

    # -- home
    # ----------------------------------------------------------------------------------------

    def _at_home(self) -> Role:
        """Supervise the session while it runs here."""
        post = self._post
        record = post.lives()
        if record is None:
            return "undecided"
        self._loss, self._still = None, False
        self._snapshots.remember(record)
        self._heart.start(SessionRef(record.name, record.id))
        self._steps.start(SessionRef(record.name, record.id))
        self._heart.check_fence()
        if self._fence is None and self._heart.beaten is not None:
            lift(post.config, post.name)  # the fence that a former supervisor set
        self._snapshots.begin(record, fresh=self._fresh)
        self._fresh = False
        post.tell("home", pid=record.pid, incarnation=record.incarnation)
        try:
            pidfd = record.identity.open_pidfd()
        except NoSuchProcess:
            return self._gone(record)
        try:
            return self._watch(record, pidfd)
        finally:
            os.close(pidfd)
            self._snapshots.rest()

    def _watch(self, record: SessionRecord, pidfd: int) -> Role:
        """Take snapshots until the root has ended or another host has the session."""
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            now = time.monotonic()
            reason, pause = None, TICK
            if not self._stands_still():
                reason = self._snapshots.due(now)
                pause = 0.0 if reason else min(TICK, self._snapshots.pause(now))
            ready = {fd for fd, _events in poll.poll(pause * 1000)}
            self._post.tick()
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if pidfd in ready:
                return self._gone(record)
            if self._heart.taken is not None:
                return self._stand_down(record)
            if reason and not self._snapshots.take(record, reason):
                return self._stand_down(record)
            self._snapshots.look_at_loss()

    def _ask(self) -> None:
        """Note that a program waits for a checkpoint; called in another thread."""
        self._snapshots.asked = True
        with suppress(OSError):  # the supervisor ends
            os.eventfd_write(self._wake, 1)

    def _stands_still(self) -> bool:
        """Return whether the tree was stopped because the lease could not be renewed; report when
        that begins and ends.
        """
        still = self._fence is not None and self._fence.holds
        if still != self._still:
            self._still = still
            events.record(
                self._post.config,
                "self-fence" if still else "self-fence-end",
                [{"session": self._post.name}],
            )
            self._post.tell(
                "self-fenced" if still else "goes-on",
                lease_s=self._post.settings.lease if still else None,
            )
        return still

    # -- its end
    # -------------------------------------------------------------------------------------

    def _rest(self) -> None:
        """Neither renew the lease nor store steps: the session is not here any more."""
        self._heart.rest()
        self._steps.rest()

    def _gone(self, record: SessionRecord) -> Role:
        """Handle the end of the tree of `record`."""
        self._steps.rest()
        self._snapshots.rest()
        self._loss = Loss(record, time.monotonic(), time.time())
        return self._after(record, fate(self._post.config, record))

    def _after(self, record: SessionRecord, end: End | Wanted) -> Role:
        """Return the next role after an end of that kind."""
        post = self._post
        assert self._loss is not None
        if isinstance(end, Wanted):
            self._rest()
            post.tell("ended", by=end.what, text=end.text)
            return "over" if end.what == "killed" else "standby"
        self._recoverer.guard.died(self._loss.died)
        post.tell("died", text=end.text, exit_code=end.code, exit_signal=end.signal)
        if end.restarts(post.settings.restart):
            return "recover"
        self._rest()
        kept = fencing.give_back(post.config, record)
        post.tell("ended", by="itself", text=f"it {end.text}", exit_code=end.code, leases_kept=kept)
        return "over"

    def _recover(self) -> Role:
        """Restore the session."""
        assert self._loss is not None
        outcome = self._recoverer.recover(self._loss, self._snapshots.members)
        self._fresh = outcome == "back"
        if outcome == "overtaken":
            return "undecided"
        return "home" if outcome == "back" else "standby"

    # -- standby
    # -------------------------------------------------------------------------------------

    def _stand_by(self) -> Role:
        """Wait while the session lives on another host or was put away, until that host's lease has
        expired, or it lives here.
        """
        post = self._post
        self._rest()
        self._recoverer.reset()
        post.tell("standby")
        watch, usual, blind = LeaseWatch(), min(_LOOK, post.settings.lease / 8), False
        with ExitStack() as stack:
            repository: Repository | None = None
            while post.lives() is None:
                head: Head | None = None
                try:
                    repository = repository or stack.enter_context(
                        post.repository(post.settings.lease / 4)
                    )
                    head = leases.read_head(repository, post.name)
                    blind = False
                except (StoreError, DataError, Conflict) as error:
                    if not blind:
                        post.tell("store-failed", error=error)
                    blind, repository = True, None
                    stack.close()
                now = time.monotonic()
                if watch.look(now, head) and head is not None:
                    silent = round(now - watch.since, 1)
                    post.tell(
                        "lease-expired", host=holder_of(head), epoch=head.epoch, silent_s=silent
                    )
                    self._loss = Loss(
                        post.registry.get(post.name),
                        watch.since,
                        moment(head.beaten or head.time),
                        head,
                    )
                    return "recover"
                post.sleep(watch.pause(usual))
        return "home"
