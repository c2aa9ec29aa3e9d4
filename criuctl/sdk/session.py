"""`Session`: one session of this host, as one operator sees it.

    with Session.run(["bash"], name="work") as s:
        result = s.exec("make test", timeout=60)
        before = s.snapshot(labels={"why": "before"})

Calls block; an object must not be used by two threads at once. `AsyncSession` has the same calls
for an event loop. Errors are the classes of `criuctl.errors`, each with `exit_code`, `code`,
`message` and `hint`: those that the command with the same name ends with.

Closing the object does nothing to the session. `connected` says what an object is worth after a
dump, a restore, a move.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from ..config import Config, load
from ..errors import NoSuchCheckpoint
from ..ops import forget, kill, pause, sessions, steps
from ..ops.acting import acting
from ..ops.groups import grouped
from ..session.protocol import DEFAULT_GRACE
from ..store import settled
from . import worker
from .operator import Kind, Operator, Role
from .results import Checkpoint, SessionInfo
from .terminal import Terminal

Policy = Literal["keep", "reconnect", "hangup", "refuse"]


class Session(Terminal):
    """One session of this host, as one operator; made by `run`, `connect`, `restore` and `fork`."""

    def __init__(self, operator: Operator) -> None:
        super().__init__(operator)
        self.restored: Mapping[str, Any] = {}
        """What `restore` and `fork` report: the JSON of ``criuctl restore``."""

    # -- finding and starting one -----------------------------------------------------------------

    @classmethod
    def run(
        cls,
        argv: Sequence[str],
        *,
        name: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        group: str | None = None,
        workspace: str | None = None,
        size: tuple[int, int] = (24, 80),
        host_pids: bool = False,
        shell_hooks: bool = True,
        kind: Kind = "agent",
        operator: str = "",
        role: Role = "admin",
        store: str | None = None,
        config: Config | None = None,
    ) -> Self:
        """Start `argv` as a new session, and connect to it.

        It starts in `cwd`, else in `workspace`, a folder that travels along, else in the current
        folder. `env` are variables besides those of this process. `group` is stored and restored
        as one (`Group`). `size` is rows and columns. The
        caller is the operator `operator`, by default this user, of this `kind` and `role`: `halt`
        takes the lease from an agent. `Conflict` if the name is taken, `NotFound` if there is no
        such command.
        """
        settings = _settings(config, store)
        options = {
            "name": name,
            "cwd": cwd,
            "workspace": workspace,
            "env": dict(env or {}),
            "labels": grouped(labels or {}, group),
            "size": list(size),
            "host_pids": host_pids,
            "hooks": shell_hooks,
        }
        started = worker.perform(
            "run", settings, argv=[os.fspath(word) for word in argv], options=options
        )
        return cls(Operator(settings, started["session"], kind, operator, role))._begin()

    @classmethod
    def connect(
        cls,
        session: str,
        *,
        kind: Kind,
        name: str = "",
        role: Role = "admin",
        store: str | None = None,
        config: Config | None = None,
    ) -> Self:
        """Connect to a session of this host as the operator `name`, by default this user.

        `kind` says what the operator is. `role` is the most that it may do here. `SessionGone` if
        there is no such session, or it has ended, or waits for a restore without a holder;
        `Forbidden` if it is another user's. To a tree without a terminal of criuctl's, which was
        dumped by its PID, there is no connection: the calls that need one raise `NotHeld`.
        """
        found = cls(Operator(_settings(config, store), session, kind, name, role))
        if role == "admin":
            worker.prepare()
        return found._begin()

    @classmethod
    def restore(
        cls,
        ref: str | Checkpoint,
        *,
        as_name: str | None = None,
        pids: Literal["auto", "same", "private"] = "auto",
        lazy: bool = False,
        connections: Policy | None = None,
        files: Literal["refuse", "restore", "keep"] | None = None,
        share_files: bool = False,
        rewind: bool = False,
        older: bool = False,
        take_over: bool = False,
        force: bool = False,
        kind: Kind = "agent",
        operator: str = "",
        role: Role = "admin",
        store: str | None = None,
        config: Config | None = None,
    ) -> Self:
        """Bring a checkpoint back to life, and connect to the session; see ``criuctl restore``.

        `ref` is a `Checkpoint`, a session's name (its newest one), NAME@N or the begin of an id;
        `as_name` makes a copy of that name, which with `share_files` writes to the files of its
        original; `rewind` puts the workspace back, too. Nothing is left
        of a restore that fails: `RestoreFailed`, `PreflightRefused`, or `Conflict` if the session
        runs already. The outcomes of connections and files are in `restored`.
        """
        if isinstance(ref, Checkpoint):
            store = store or ref.store
            ref = ref.id
        settings = _settings(config, store)
        request = {
            "new_name": as_name,
            "pids": pids,
            "lazy": lazy,
            "connections": connections,
            "files": files,
            "share_files": share_files,
            "rewind": rewind,
            "older": older,
            "take_over": take_over,
            "force": force,
        }
        with acting(Operator(settings, "", kind, operator, role)):
            body = worker.perform("restore", settings, ref=ref, request=request)
        session = cls(Operator(settings, body["session"], kind, operator, role))
        session.restored = body
        return session._begin()

    @staticmethod
    def list(*, config: Config | None = None) -> Sequence[SessionInfo]:
        """Return the sessions that this host knows, by name. No holder is asked."""
        return [SessionInfo.of(body) for body in sessions.sessions(_settings(config, None))]

    # -- control ----------------------------------------------------------------------------------

    def pause(self) -> Mapping[str, Any]:
        """Freeze every process; return the JSON of ``criuctl pause``."""
        return self._steered(pause.pause)

    def halt(self) -> Mapping[str, Any]:
        """Freeze every process, drop queued input that no person typed, take the lease from an
        agent, and let only persons write until `resume`.
        """
        return self._steered(pause.halt)

    def resume(self) -> Mapping[str, Any]:
        """Undo `pause` and `halt`."""
        return self._steered(pause.resume)

    def _steered(self, operation: Any) -> Mapping[str, Any]:
        with acting(self._operator):
            body: Mapping[str, Any] = operation(self._operator.config, self.name).to_dict()
        return body

    def kill(self, grace: float = DEFAULT_GRACE) -> Mapping[str, Any]:
        """End every process of the session: SIGTERM, after `grace` seconds SIGKILL; return the JSON
        of ``criuctl kill`` when it is verified that none is left.

        A checkpointed session is given up; its checkpoints stay.
        """
        operator = self._operator
        operator.check_same()
        with acting(operator):
            return kill.kill(operator.config, self.name, grace)

    def forget(self) -> None:
        """Remove this host's records of the session, which has ended: its output, its audit log,
        its line in ``criuctl ls``.

        Its checkpoints stay. `Conflict` if it runs or can come back from one.
        """
        operator = self._operator
        operator.check_same()
        with acting(operator):
            [done] = forget.forget(operator.config, [self.name])
        if done.error is not None:
            raise done.error

    # -- checkpoints ------------------------------------------------------------------------------

    def snapshot(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        with_files: Sequence[str] = (),
        with_workspace: bool = False,
        connections: Policy | None = None,
        max_freeze: float | None = None,
    ) -> Checkpoint:
        """Store the session as it is at this moment, and let it run on; see ``criuctl dump``.

        It stands still for `Checkpoint.frozen_ms`. `DumpFailed`, `PreflightRefused`, `StoreError`
        and `FrozenTooLong` (after `max_freeze` seconds) leave it running.
        """
        request = {
            "leave_running": True,
            "with_files": _paths(with_files),
            "with_workspace": with_workspace,
            "labels": dict(labels or {}),
            "connections": connections,
            "max_freeze": max_freeze,
        }
        return self._dump(request)

    def dump(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        with_files: Sequence[str] = (),
        with_workspace: bool = False,
        connections: Policy | None = None,
        precopy: bool = False,
        max_freeze: float | None = None,
    ) -> Checkpoint:
        """Store the session and end its processes; `restore` brings it back. As `snapshot`: if it
        fails, the session runs on.
        """
        request = {
            "with_files": _paths(with_files),
            "with_workspace": with_workspace,
            "labels": dict(labels or {}),
            "connections": connections,
            "precopy": precopy,
            "max_freeze": max_freeze,
        }
        return self._dump(request)

    def _dump(self, request: Mapping[str, Any]) -> Checkpoint:
        operator = self._operator
        operator.check_same()
        with acting(operator):
            body = worker.perform("dump", operator.config, target=self.name, request=request)
        return Checkpoint.of_dump(body)

    def checkpoints(self) -> Sequence[Checkpoint]:
        """Return the session's checkpoints in the store, the oldest first.

        One that cannot be read is left out with a `RuntimeWarning`.
        """
        from ..ops.inspect import list_checkpoints

        config = self._operator.config
        try:
            found = list_checkpoints(config, self.name)
        except NoSuchCheckpoint:
            return []
        for error in found.unreadable:
            warnings.warn(error.message, RuntimeWarning, stacklevel=2)
        return [Checkpoint.of_list(one.to_dict(), config.store) for one in found.checkpoints]

    def fork(
        self,
        count: int = 1,
        *,
        prefix: str | None = None,
        fork_workspace: bool = False,
        share_files: bool = False,
        ttl: float | None = None,
    ) -> Sequence[Self]:
        """Make `count` copies of the session, which go on from this moment; return them.

        They are named PREFIX-1, PREFIX-2 and so on, without names that are taken; the prefix is by
        default this session's name. Each is a session of its own, with its own processes; this one
        runs on. It is a snapshot and as many restores from one template, see ``criuctl fork``:
        either all copies run, or none is left and the first error is raised. With `fork_workspace`
        each works in a copy of the workspace; with `share_files` the copies write to the files of
        the original; after `ttl` seconds each is ended.
        """
        operator = self._operator
        operator.check_same()
        how = {"prefix": prefix, "workspace": fork_workspace, "ttl": ttl}
        how["share_files"] = share_files
        return self._forked(operator, self.name, count, how)

    @classmethod
    def fork_from(
        cls,
        ref: str | Checkpoint,
        count: int = 1,
        *,
        prefix: str | None = None,
        fork_workspace: bool = False,
        share_files: bool = False,
        ttl: float | None = None,
        kind: Kind = "agent",
        operator: str = "",
        role: Role = "admin",
        store: str | None = None,
        config: Config | None = None,
    ) -> Sequence[Self]:
        """Make `count` copies of a stored checkpoint, as `fork` does of a live session.

        `ref` as for `restore`.
        """
        if isinstance(ref, Checkpoint):
            store = store or ref.store
            ref = ref.id
        caller = Operator(_settings(config, store), "", kind, operator, role)
        how = {"prefix": prefix, "workspace": fork_workspace, "ttl": ttl}
        how["share_files"] = share_files
        return cls._forked(caller, ref, count, how)

    @classmethod
    def _forked(
        cls, caller: Operator, ref: str, count: int, how: Mapping[str, Any]
    ) -> Sequence[Self]:
        request = {"count": count, "whole": True, **how}
        with acting(caller):
            body = worker.perform("fork", caller.config, ref=ref, request=request)
        made: list[Self] = []
        for one in body["forks"]:
            copy = cls(
                Operator(caller.config, one["session"], caller.kind, caller.name, caller.role)
            )
            copy.restored = one["restored"]
            made.append(copy._begin())
        return made

    def migrate(
        self,
        host: str,
        *,
        with_files: Sequence[str] = (),
        connections: Policy | None = None,
        keep_address: Sequence[str] = (),
        precopy: bool = True,
        lazy: bool | None = None,
        max_freeze: float | None = None,
    ) -> Mapping[str, Any]:
        """Move the session to another host, ``ssh://[USER@]HOST[:PORT]`` or one of the
        configuration; return the JSON of ``criuctl migrate``.

        It runs on exactly one of the two hosts, whatever fails; `InDoubt` means that it has left
        here and the other host did not confirm. Afterwards the session is not here any more: this
        object's calls raise `SessionGone`.
        """
        operator = self._operator
        operator.check_same()
        options = {
            "with_files": _paths(with_files),
            "connections": connections,
            "keep_addresses": list(keep_address),
            "precopy": precopy,
            "lazy": lazy,
            "max_freeze": max_freeze,
        }
        with acting(operator):
            return worker.perform(
                "migrate", operator.config, target=self.name, host=host, options=options
            )

    # -- steps ------------------------------------------------------------------------------------

    def steps(self) -> Sequence[dict[str, Any]]:
        """Return the session's durable steps, in the order in which they began: id, kind, state,
        key, result, progress and others, as ``criuctl step list`` shows them.
        """
        with acting(self._operator):
            return steps.steps(self._operator.config, self.name)

    def resolve_step(
        self, id: str, outcome: Literal["done", "failed"], result: Any = None
    ) -> Mapping[str, Any]:
        """State how a step has ended whose state is unknown; return it as it is then.

        `result` is what its program gets, if it is done. `NotFound` if there is no such step.
        """
        with acting(self._operator):
            return steps.resolve(self._operator.config, self.name, id, outcome, result)


def _settings(config: Config | None, store: str | None) -> Config:
    """Return the configuration of an object: the one that is given, or this host's."""
    return settled((config or load()).with_options(store=store))


def _paths(given: Sequence[str]) -> list[str]:
    """Return absolute paths: the current folder is this process's."""
    return [os.path.abspath(path) for path in given]
