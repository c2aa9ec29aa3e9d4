"""Removing checkpoints by rule, freeing their space, and pins.

`prune` decides by `criuctl.host.retention` and removes what no rule keeps: some sessions at a
time, of each the oldest first. If it is interrupted, the next run removes the rest. The newest
checkpoint of a session that lives, or is checkpointed, is kept unless its removal is requested.
This also holds for sessions of other hosts: a lease shows that the session lives there, or was
killed; the checkpoint itself shows that its dump has ended it. Group checkpoints, and those of
their members, are decided on by `linked.pruning`. `collect` frees space.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from msgspec import Struct, field

from ..checkpoint import leases
from ..checkpoint.gc import Collection
from ..checkpoint.gc_result import Collected
from ..checkpoint.repository import Repository
from ..checkpoint.summary import CheckpointSummary
from ..config import Config
from ..errors import (
    ConfigError,
    Conflict,
    CriuctlError,
    Damaged,
    DataError,
    NoSuchCheckpoint,
    UsageError,
)
from ..host.journal import events, operation_facts
from ..host.registry import Registry
from ..host.retention import Decision, Rules, decide, policies, policy, seconds
from ..proc.threads import in_parallel
from ..report import Reporter
from ..store import open_store
from .inspect import Removal, check_right, forget_gone, remove_one, reporting_removed
from .linked import pruning as linked

_AT_ONCE = 8  # sessions


@contextmanager
def _opened(config: Config) -> Iterator[Repository]:
    with open_store(config.store, config) as store:
        repository = Repository.open(store, config)
        try:
            yield repository
        finally:
            repository.close()


class Pruned(Struct):
    """The decisions and results of `prune`."""

    dry_run: bool
    decisions: list[Decision]  # by session, newest first
    passed: list[str]  # sessions without a policy
    unreadable: list[DataError]
    removed: list[CheckpointSummary] = field(default_factory=list)
    errors: dict[str, CriuctlError] = field(default_factory=dict)  # by checkpoint id
    # on checkpoints of groups: `session` is the group's name
    groups: list[Decision] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return counts, and one object for each checkpoint."""
        kept = sum(d.keep for d in self.decisions)
        return {
            "dry_run": self.dry_run,
            "kept": kept,
            "removed": len(self.decisions) - kept if self.dry_run else len(self.removed),
            "failed": len(self.errors),
            "without_policy": self.passed,
            "checkpoints": [
                {
                    **d.to_dict(),
                    "error": self.errors[d.checkpoint.id].to_dict()
                    if d.checkpoint.id in self.errors
                    else None,
                }
                for d in self.decisions
            ],
            "groups": [
                {
                    "group": d.checkpoint.session,
                    "id": d.checkpoint.id,
                    "number": d.checkpoint.number,
                    "keep": d.keep,
                    "rules": list(d.reasons),
                }
                for d in self.groups
            ],
            "unreadable": [error.to_dict() for error in self.unreadable],
        }


def _pruning(arguments: Mapping[str, Any]) -> str:
    return "" if arguments.get("dry_run") else "prune"


@events.recorded(_pruning, operation_facts.pruned)
def prune(
    config: Config,
    names: Sequence[str],
    rules: Rules,
    *,
    newest_too: bool = False,
    dry_run: bool = False,
    reporter: Reporter,
    now: datetime | None = None,
) -> Pruned:
    """Remove what neither `rules` nor, if these are empty, the session's policy keeps; raise
    `UsageError` without any rule.
    """
    configured = policies(config.retention)
    if not rules and not configured:
        raise UsageError(
            "no rule says what to keep, so nothing was removed",
            hint=(
                "Give --keep-last N, --keep-daily N, --keep-within 7d ..., or set `retention` in "
                "the configuration."
            ),
        )
    with _opened(config) as repository:
        return prune_in(
            repository,
            config,
            names,
            rules,
            newest_too=newest_too,
            dry_run=dry_run,
            reporter=reporter,
            now=now,
        )


def prune_in(
    repository: Repository,
    config: Config,
    names: Sequence[str],
    rules: Rules,
    *,
    newest_too: bool = False,
    dry_run: bool = False,
    reporter: Reporter,
    now: datetime | None = None,
) -> Pruned:
    """Do the same in an open repository."""
    configured = policies(config.retention)
    unreadable: list[DataError] = []
    found = [
        s for name in dict.fromkeys(names) for s in repository.list(name, unreadable=unreadable)
    ]
    found = found if names else repository.list(unreadable=unreadable)
    if missing := set(names) - {s.session for s in found}:
        if not unreadable:
            raise NoSuchCheckpoint(
                f"the store holds no checkpoint of a session named {min(missing)!r}"
            )
    done = Pruned(dry_run, [], [], unreadable)
    at = now or datetime.now(UTC)
    groups = repository.groups.list()
    done.groups = linked.decided(
        groups,
        lambda group: None if names else rules or policy(group, configured),
        at,
        newest_too=newest_too,
    )
    held = linked.held(groups, done.groups)

    def decided(checkpoints: list[CheckpointSummary]) -> list[Decision] | None:
        session = checkpoints[0].session
        own = rules or policy(session, configured)
        if not own:
            return None
        decisions = decide(checkpoints, own, at, protected=held)
        if newest_too or all(d.keep for d in decisions):
            return decisions
        protected = _protected(config, repository, session, decisions)
        return decide(checkpoints, own, at, protected=held | protected)

    sessions = [list(group) for _, group in groupby(found, key=lambda s: s.session)]
    every = in_parallel(decided, sessions, _AT_ONCE, "criuctl-prune")
    for checkpoints, decisions in zip(sessions, every, strict=True):
        if decisions is None:
            done.passed.append(checkpoints[0].session)
        else:
            done.decisions += decisions
    if not dry_run:
        gone = {d.checkpoint.id for d in done.groups if not d.keep}
        for one in groups:
            if one.id in gone:  # before its members
                repository.groups.remove(one)
        with reporting_removed(done.removed):
            _remove(repository, config, done, [d for d in every if d], reporter)
            forget_gone(config, repository, done.removed, reporter)
    return done


def _remove(
    repository: Repository,
    config: Config,
    done: Pruned,
    sessions: Sequence[Sequence[Decision]],
    reporter: Reporter,
) -> None:
    """Remove what is not kept: some sessions at a time, and of each the oldest first.

    A store answers many requests at once about as fast as one. What is removed is in
    `Pruned.removed` also if an error ends it.
    """
    registry, lock = Registry(config), threading.Lock()
    total = sum(not d.keep for decisions in sessions for d in decisions)

    def remove(decisions: Sequence[Decision]) -> None:
        newest_kept = max((d.checkpoint.number for d in decisions if d.keep), default=0)
        for summary in (d.checkpoint for d in reversed(decisions) if not d.keep):
            outcome = remove_one(
                repository,
                Removal(summary.id, summary),
                registry,
                Reporter(),
                newer_stays=summary.number < newest_kept,
            )
            with lock:
                if outcome.error is None:
                    done.removed.append(summary)
                else:  # pinned since it was listed
                    done.errors[summary.id] = outcome.error
                handled = len(done.removed) + len(done.errors)
                reporter.progress("checkpoints", handled, total, "checkpoints")

    in_parallel(remove, sessions, _AT_ONCE, "criuctl-prune")


def _protected(
    config: Config, repository: Repository, session: str, decisions: Sequence[Decision]
) -> dict[str, str]:
    """Return the checkpoints from which the session would be restored, wherever it lives, and why
    they stay.
    """
    newest = decisions[0].checkpoint
    known = Registry(config).get(session)
    if known is not None:
        where = {
            newest.id: "newest of a session that runs here"
            if known.alive()
            else "newest of a session of this host"
        }
        if known.checkpoint and not known.alive():
            where[known.checkpoint] = "this host's session would come back from it"
        return where
    try:
        head = (
            leases.read_head(repository, session)
            if repository.capabilities.conditional_create
            else None
        )
    except (Conflict, DataError):  # it is damaged, or a write-only host cannot see where it lives
        return {newest.id: "newest of a session that another host may hold"}
    if head is not None and head.state == "held":
        return {newest.id: f"newest of a session that lives on {head.host_name or head.host}"}
    over = head is not None and head.ended and head.session.id == newest.session_id
    if not over and _ended_by(repository, newest):
        return {newest.id: f"newest of a session that was ended by it, on {newest.host}"}
    return {}


def _ended_by(repository: Repository, newest: CheckpointSummary) -> bool:
    """Return whether the dump has ended the session, which then exists only in this checkpoint; an
    unknown answer counts as yes.
    """
    try:
        return repository.manifest_at(newest.object).criu.get("leave_running") is False
    except NoSuchCheckpoint:
        return False  # removed meanwhile
    except DataError:
        return True


def _collecting(arguments: Mapping[str, Any]) -> str:
    return "" if arguments.get("dry_run") else "gc"


@events.recorded(_collecting, operation_facts.collected)
def collect(
    config: Config, *, grace: str | None = None, dry_run: bool = False, reporter: Reporter
) -> Collected:
    """Free what no checkpoint needs; `grace` None uses the configuration's."""
    try:
        span = seconds(config.gc_grace if grace is None else grace)
    except UsageError as error:
        if grace is not None:
            raise
        raise ConfigError(f"gc_grace: {error.message}", hint=error.hint) from None
    with _opened(config) as repository:
        repository.need_key("collect garbage")  # it does not know the needs of others' checkpoints
        return Collection(repository, reporter, grace=span, dry_run=dry_run).run()


class Pinning(Struct, frozen=True):
    """A checkpoint that was pinned, or unpinned."""

    checkpoint: CheckpointSummary

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of ``list``."""
        return self.checkpoint.to_dict()


def _pinning(arguments: Mapping[str, Any]) -> str:
    return "pin" if arguments.get("pinned") else "unpin"


@events.recorded(_pinning, operation_facts.pinned)
def pin(config: Config, refs: Sequence[str], *, pinned: bool) -> list[Pinning]:
    """Pin or unpin checkpoints. All REFs are looked up before the first is changed; if one cannot
    be, none is.
    """
    with _opened(config) as repository:
        found = [repository.resolve(ref) if pinned else _pinned(repository, ref) for ref in refs]
        for summary in found:
            check_right(repository, "pin" if pinned else "unpin", summary)
        for summary in found:
            if pinned:
                repository.catalog.pin(summary.id)
            else:
                repository.catalog.unpin(summary.id)
        return [Pinning(summary.with_use(pinned=pinned)) for summary in found]


def _pinned(repository: Repository, ref: str) -> CheckpointSummary:
    """Return the checkpoint, damaged or not (otherwise it could never be removed), if its pin can
    be removed; raise `Conflict`.
    """
    try:
        summary = repository.resolve(ref)
        for_good = repository.manifest_at(summary.object).pinned
    except Damaged:
        return repository.resolve_damaged(ref)
    if for_good:
        raise Conflict(
            f"{summary.session}@{summary.number} was pinned for good when it was made",
            hint="Its manifest says so.",
        )
    return summary
