"""`Group`: sessions of this host that are stored and brought back as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..config import Config
from ..ops import groups
from ..session.protocol import DEFAULT_GRACE
from . import worker
from .results import GroupCheckpoint
from .session import Policy, _settings


class Group:
    """The sessions that were started with ``Session.run(..., group=NAME)``.

    Calls block. Errors are as those of `Session`; the first member that fails decides for all.
    """

    def __init__(
        self, name: str, *, store: str | None = None, config: Config | None = None
    ) -> None:
        self.name = name
        self._config = _settings(config, store)

    def sessions(self) -> Sequence[str]:
        """Return the names of the members that run; `NotFound` if none does."""
        return [body["session"] for body in groups.living(self._config, self.name)]

    def snapshot(
        self, *, labels: Mapping[str, str] | None = None, max_freeze: float | None = None
    ) -> GroupCheckpoint:
        """Store all members as they are at one moment, and let them run on."""
        return self._dump(labels, max_freeze, leave_running=True)

    def dump(
        self, *, labels: Mapping[str, str] | None = None, max_freeze: float | None = None
    ) -> GroupCheckpoint:
        """Store all members as they are at one moment, and end them; if it fails, all run on."""
        return self._dump(labels, max_freeze, leave_running=False)

    def _dump(
        self, labels: Mapping[str, str] | None, max_freeze: float | None, *, leave_running: bool
    ) -> GroupCheckpoint:
        request = {
            "leave_running": leave_running,
            "labels": dict(labels or {}),
            "max_freeze": max_freeze,
        }
        body = worker.perform("group-dump", self._config, group=self.name, request=request)
        return GroupCheckpoint.of(body)

    def restore(
        self,
        number: int | None = None,
        *,
        connections: Policy | None = None,
        files: Literal["refuse", "restore", "keep"] | None = None,
    ) -> Mapping[str, Any]:
        """Bring all members of a checkpoint back, by default of the newest one; all run again, or
        none. Return the JSON of ``criuctl restore --group``.
        """
        ref = self.name if number is None else f"{self.name}@{number}"
        request = {"connections": connections, "files": files}
        return worker.perform("group-restore", self._config, ref=ref, request=request)

    def fork(
        self, count: int = 1, *, prefix: str | None = None, ttl: float | None = None
    ) -> list[Group]:
        """Make `count` sets of running copies of all members, each a group of its own, as ``criuctl
        fork --group`` does: either all sets run, or none is left and the first error is raised.

        The copies of ``db`` are ``db-1``, ``db-2``, those of the group ``NAME-1``, ``NAME-2``; with
        a `prefix` ``PREFIX-db-1`` and ``PREFIX-1``. After `ttl` seconds each copy is ended.
        """
        request = {"count": count, "prefix": prefix, "ttl": ttl, "whole": True}
        body = worker.perform("group-fork", self._config, ref=self.name, request=request)
        return [Group(one["group"], config=self._config) for one in body["forks"]]

    def checkpoints(self) -> Sequence[GroupCheckpoint]:
        """Return the group's checkpoints in the store, the oldest first; `NoSuchCheckpoint`."""
        listing = groups.list_groups(self._config, self.name)
        return [GroupCheckpoint.of(groups.described(one)) for one in listing.checkpoints]

    def kill(self, grace: float = DEFAULT_GRACE) -> None:
        """End every member that runs, as `Session.kill`; raise the first error after all."""
        done = groups.kill_group(self._config, self.name, grace)
        for one in done:
            if one.error is not None:
                raise one.error
