"""Forks of a group: several running copies of all its members at once, each set a group of its own.

A group that runs is stored as by ``snapshot --group``, and runs on. Then sets of copies are made of
the group checkpoint, one after the other. Each set is a restore of the group (`group_restore`)
under other names, so its members have the connections among them, and run together or not at all.
Each member is a copy as `fork` makes it: its memory is read once, into a template, for all sets.

A set that fails is its own outcome. If all fail, or the whole is interrupted, nothing is left, as
with `fork`. If criuctl is killed, the sets that were decided on run, each whole, and the group
checkpoint stays.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Literal

from msgspec import Struct

from ..checkpoint.groups import GroupCheckpoint
from ..checkpoint.manifest import Manifest
from ..checkpoint.repository import Repository
from ..config import Config
from ..dump.job import DumpRequest
from ..errors import CriuctlError, NoSuchCheckpoint, NotFound, UsageError
from ..host.group_label import LABEL as GROUP
from ..host.group_member import RestoredMember
from ..host.registry import check_name, check_outside
from ..report import Reporter
from ..restore import template
from ..restore.outcome import warn_of_generators
from ..restore.request import RestoreRequest
from ..session.launch.daemon import WarmHolders
from . import acting
from .fork import LABEL, MOST, Fork, carrying, copied, end_copies, forget_copies, fork_of
from .group_restore import restored, shared_buffers
from .group_snapshot import snapshot_group
from .groups import living, remove_group
from .inspect import opened
from .linked.meeting import Facts
from .sessions import sessions


class GroupForkRequest(Struct, frozen=True, kw_only=True):
    """What a fork of a group is asked for."""

    count: int = 1  # sets
    prefix: str | None = None  # of all names; None: those of the originals
    ttl: float | None = None  # seconds until each copy is ended
    share_files: bool = False  # they write to the files of their originals
    whole: bool = False  # all sets run, or none is left


class Names(Struct, frozen=True):
    """The names of one set."""

    group: str
    members: dict[str, str]  # session -> its copy


class ForkedGroup(Struct, frozen=True):
    """One set of copies."""

    group: str
    state: Literal["running", "failed"]
    members: list[Fork]
    error: CriuctlError | None = None

    def to_dict(self) -> dict[str, Any]:
        """Keys as in the command line's contract."""
        return {
            "group": self.group,
            "state": self.state,
            "members": [
                {**one.to_dict(), "connections": one.restored["connections"]}
                for one in self.members
            ],
            "error": self.error.to_dict() if self.error is not None else None,
        }


class GroupForkResult(Struct, frozen=True):
    """All sets of one fork."""

    origin: str  # the group, or what named its checkpoint
    checkpoint: GroupCheckpoint
    frozen_ms: float | None  # None: the checkpoint existed already
    elapsed_ms: float
    sets: list[ForkedGroup]
    warnings: list[str]

    @property
    def degraded(self) -> bool:
        """Whether only some of the sets run, or something optional failed."""
        return any(
            one.error is not None or any(member.degraded for member in one.members)
            for one in self.sets
        )

    def to_dict(self) -> dict[str, Any]:
        """Keys as in the command line's contract."""
        return {
            "from": self.origin,
            "checkpoint": self.checkpoint.id,
            "number": self.checkpoint.number,
            "frozen_ms": self.frozen_ms,
            "elapsed_ms": self.elapsed_ms,
            "forks": [one.to_dict() for one in self.sets],
            "warnings": self.warnings,
        }


def fork_group(
    config: Config, ref: str, *, request: GroupForkRequest, reporter: Reporter
) -> GroupForkResult:
    """Make `request.count` running copies of the group `ref` as it is now, or, if none of it runs,
    of its newest checkpoint; or of the checkpoint ``GROUP@N``.

    Raises what a snapshot of the group raises, and the first set's error if none of them runs.
    """
    began = time.monotonic()
    check_outside(config, begins=True)
    if not 1 <= request.count <= MOST:
        raise UsageError(f"{request.count} copies: from 1 to {MOST} can be made at once")
    with ExitStack() as stack:
        lives = [] if "@" in ref else _living(config, ref)
        frozen_ms = None
        if lives:
            _names(config, ref, lives, request)  # those that are not valid, before the freeze
            asked = DumpRequest(leave_running=True, labels={LABEL: ref})
            dumping = carrying(config, share_files=request.share_files)
            stored = snapshot_group(dumping, ref, request=asked, reporter=reporter)
            found, frozen_ms = stored.checkpoint, stored.checkpoint.frozen_ms
            stack.enter_context(_unless_used(config, found, reporter))
        warm = stack.enter_context(closing(WarmHolders()))
        _, repository = stack.enter_context(opened(config))
        if not lives:
            found = _stored(repository, ref)
        manifests = {m.session: repository.manifest_at(m.object) for m in found.members}
        names = _names(config, found.group, list(manifests), request)
        reporter.step("template", copies=len(names))
        kept = {
            manifest.id: stack.enter_context(
                template.made(config, manifest, repository.reader(reporter))
            )
            for manifest in manifests.values()
            if template.possible(manifest)
        }
        ends = None if request.ttl is None else time.time() + request.ttl
        making = _Sets(config, manifests, kept, warm, ends, request.share_files, reporter)
        sets = making.all_of(names, whole=request.whole)
    warn_of_generators(reporter)
    return GroupForkResult(
        ref,
        found,
        frozen_ms,
        round((time.monotonic() - began) * 1000, 1),
        sets,
        list(reporter.warnings),
    )


class _Sets(Struct, frozen=True):
    """The making of sets of copies of one group checkpoint."""

    config: Config
    manifests: Mapping[str, Manifest]  # by session
    templates: Mapping[str, template.Template]  # by checkpoint
    warm: WarmHolders
    ends: float | None  # when the holders end the copies, in Unix seconds
    share_files: bool
    reporter: Reporter

    def all_of(self, names: Sequence[Names], *, whole: bool) -> list[ForkedGroup]:
        """Make them one after the other; an error leaves none."""
        known = {str(body["session"]) for body in sessions(self.config)}
        done: list[ForkedGroup] = []
        begun: list[str] = []
        try:
            for one in names:
                begun += one.members.values()
                try:
                    members = self._one(one)
                except CriuctlError as error:
                    # none of it runs: a session of such a name is not of this fork
                    del begun[-len(one.members) :]
                    forget_copies(self.config, set(one.members.values()) - known)
                    if whole:
                        raise
                    done.append(ForkedGroup(one.group, "failed", [], error))
                else:
                    done.append(ForkedGroup(one.group, "running", members))
            failed = [one.error for one in done if one.error is not None]
            if len(failed) == len(done):
                raise failed[0]
        except BaseException as error:
            made = {manifest.id for manifest in self.manifests.values()}
            end_copies(self.config, set(begun) - known, made, error)
            forget_copies(self.config, set(begun) - known)
            raise
        return done

    def _one(self, names: Names) -> list[Fork]:
        """Make one set: all of it runs, or none."""

        def one(
            manifest: Manifest, member: RestoredMember, network: str, reporter: Reporter
        ) -> Facts:
            asked = RestoreRequest(
                new_name=member.session,
                forked_from=manifest.session.name,
                ends=self.ends,
                group=names.group,
                share_files=self.share_files,
                network=network,
            )
            kept = self.templates.get(manifest.id)
            return copied(config, manifest, asked, kept, self.warm, reporter, group=member)

        config = shared_buffers(self.config, len(self.manifests))
        outcomes = restored(
            config, names.group, self.manifests, names.members, one, self.reporter, copy=True
        )
        self.reporter.step("group-done")
        return [fork_of(outcome) for outcome in outcomes.values()]


def _stored(repository: Repository, ref: str) -> GroupCheckpoint:
    try:
        return repository.groups.resolve(ref)
    except NoSuchCheckpoint as error:
        if "@" not in ref:
            error.message = f"no session of group {ref!r} runs here, and {error.message}"
        raise


def _living(config: Config, group: str) -> list[str]:
    """Return the sessions of the group that run."""
    try:
        return [str(body["session"]) for body in living(config, group)]
    except NotFound:
        return []


def _names(
    config: Config, group: str, members: Sequence[str], request: GroupForkRequest
) -> list[Names]:
    """Return the names of the sets: GROUP-1 with MEMBER-1 and so on, or with a prefix PREFIX-1 with
    PREFIX-MEMBER-1; without numbers that are taken by one of them. Raise `InvalidName`.
    """
    here = sessions(config)
    taken = {str(body["session"]) for body in here}
    groups = {body["labels"].get(GROUP) for body in here}
    before = "" if request.prefix is None else f"{request.prefix}-"
    found: list[Names] = []
    number = 0
    while len(found) < request.count:
        number += 1
        own = check_name(f"{request.prefix or group}-{number}")
        copies = {name: check_name(f"{before}{name}-{number}") for name in members}
        if own not in groups and taken.isdisjoint(copies.values()):
            found.append(Names(own, copies))
    return found


@contextmanager
def _unless_used(config: Config, made: GroupCheckpoint, reporter: Reporter) -> Iterator[None]:
    """Remove the group checkpoint that was made for the copies if no set of them runs."""
    try:
        yield
    except BaseException as error:
        try:
            with acting.undoing():
                kept = remove_group(config, made.ref, reporter=reporter).kept
        except CriuctlError as left:
            error.add_note(f"group checkpoint {made.ref} could not be removed: {left}")
        else:
            for name, why in kept:
                error.add_note(f"checkpoint {name} could not be removed: {why}")
        raise
