"""`AsyncSession`: the calls of `Session` as coroutines, for an event loop.

    async with await AsyncSession.connect("work", kind="agent") as s:
        built = asyncio.create_task(s.exec("make"))
        print((await s.screen()).text)

A thin layer: each call runs the one of `Session` in a thread. What types (the connection that is
the operator) runs in one thread of the object's own, one call after the other, in the order of the
calls. Every other call has a thread of its own for as long as it takes, and opens a connection of
its own: a long wait keeps nothing else waiting.

A wait, and following a command, can be cancelled: its connection is closed, the holder forgets the
request, and neither the command nor the session notices. A call of another kind that is cancelled
before its turn never begins; one that has begun goes on to its end, and its result is dropped:
input may have been typed, a checkpoint may have been made.

The object belongs to one event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from ..config import Config
from ..session.protocol import DEFAULT_GRACE
from .async_calls import in_thread
from .async_terminal import AsyncTerminal
from .operator import Kind, Role
from .results import Checkpoint, SessionInfo
from .session import Policy, Session


class AsyncSession(AsyncTerminal):
    """`Session`, as coroutines: made by `run`, `connect`, `restore` and `fork`."""

    # -- finding and starting one -----------------------------------------------------------------

    @classmethod
    async def run(
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
        """Start a session, and connect to it; see `Session.run`."""
        made = await in_thread(
            lambda: Session.run(
                argv,
                name=name,
                cwd=cwd,
                env=env,
                labels=labels,
                group=group,
                workspace=workspace,
                size=size,
                host_pids=host_pids,
                shell_hooks=shell_hooks,
                kind=kind,
                operator=operator,
                role=role,
                store=store,
                config=config,
            )
        )
        return cls(made)

    @classmethod
    async def connect(
        cls,
        session: str,
        *,
        kind: Kind,
        name: str = "",
        role: Role = "admin",
        store: str | None = None,
        config: Config | None = None,
    ) -> Self:
        """Connect to a session of this host; see `Session.connect`."""
        made = await in_thread(
            lambda: Session.connect(
                session,
                kind=kind,
                name=name,
                role=role,
                store=store,
                config=config,
            )
        )
        return cls(made)

    @classmethod
    async def restore(
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
        """Bring a checkpoint back to life, and connect to the session; see `Session.restore`."""
        made = await in_thread(
            lambda: Session.restore(
                ref,
                as_name=as_name,
                pids=pids,
                lazy=lazy,
                connections=connections,
                files=files,
                share_files=share_files,
                rewind=rewind,
                older=older,
                take_over=take_over,
                force=force,
                kind=kind,
                operator=operator,
                role=role,
                store=store,
                config=config,
            )
        )
        return cls(made)

    @classmethod
    async def fork_from(
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
        """Make copies of a stored checkpoint; see `Session.fork_from`."""
        made = await in_thread(
            lambda: Session.fork_from(
                ref,
                count,
                prefix=prefix,
                fork_workspace=fork_workspace,
                share_files=share_files,
                ttl=ttl,
                kind=kind,
                operator=operator,
                role=role,
                store=store,
                config=config,
            )
        )
        return [cls(one) for one in made]

    @staticmethod
    async def list(*, config: Config | None = None) -> Sequence[SessionInfo]:
        """Return the sessions that this host knows; see `Session.list`."""
        return await in_thread(lambda: Session.list(config=config))

    # -- the object -------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The session's name."""
        return self._session.name

    @property
    def id(self) -> str:
        """The session's id; see `Session.id`."""
        return self._session.id

    @property
    def restored(self) -> Mapping[str, Any]:
        """What `restore` and `fork` report: the JSON of ``criuctl restore``."""
        return self._session.restored

    async def status(self) -> SessionInfo:
        """Return the session's state; see `Session.status`."""
        return await self._apart(lambda s: s.status())

    async def reconnect(self) -> None:
        """Connect again after `SessionGone`; see `Session.reconnect`."""
        await self._in_turn(lambda s: s.reconnect())

    async def close(self) -> None:
        """Leave the session, which runs on; see `Session.close`. Calls under way go on."""
        await self._in_turn(lambda s: s.close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<criuctl.AsyncSession {self.name!r} as {self._session._operator.kind}>"

    # -- control ----------------------------------------------------------------------------------

    async def pause(self) -> Mapping[str, Any]:
        """Freeze every process; see `Session.pause`."""
        return await self._apart(lambda s: s.pause())

    async def halt(self) -> Mapping[str, Any]:
        """Freeze every process, and drop queued input that no person typed; see `Session.halt`."""
        return await self._apart(lambda s: s.halt())

    async def resume(self) -> Mapping[str, Any]:
        """Undo `pause` and `halt`; see `Session.resume`."""
        return await self._apart(lambda s: s.resume())

    async def kill(self, grace: float = DEFAULT_GRACE) -> Mapping[str, Any]:
        """End every process of the session; see `Session.kill`."""
        return await self._apart(lambda s: s.kill(grace))

    async def forget(self) -> None:
        """Remove this host's records of the session; see `Session.forget`."""
        await self._apart(lambda s: s.forget())

    # -- checkpoints ------------------------------------------------------------------------------

    async def snapshot(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        with_files: Sequence[str] = (),
        with_workspace: bool = False,
        connections: Policy | None = None,
        max_freeze: float | None = None,
    ) -> Checkpoint:
        """Store the session as it is at this moment; see `Session.snapshot`."""
        return await self._apart(
            lambda s: s.snapshot(
                labels=labels,
                with_files=with_files,
                with_workspace=with_workspace,
                connections=connections,
                max_freeze=max_freeze,
            )
        )

    async def dump(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        with_files: Sequence[str] = (),
        with_workspace: bool = False,
        connections: Policy | None = None,
        precopy: bool = False,
        max_freeze: float | None = None,
    ) -> Checkpoint:
        """Store the session and end its processes; see `Session.dump`."""
        return await self._apart(
            lambda s: s.dump(
                labels=labels,
                with_files=with_files,
                with_workspace=with_workspace,
                connections=connections,
                precopy=precopy,
                max_freeze=max_freeze,
            )
        )

    async def checkpoints(self) -> Sequence[Checkpoint]:
        """Return the session's checkpoints in the store; see `Session.checkpoints`."""
        return await self._apart(lambda s: s.checkpoints())

    async def fork(
        self,
        count: int = 1,
        *,
        prefix: str | None = None,
        fork_workspace: bool = False,
        share_files: bool = False,
        ttl: float | None = None,
    ) -> Sequence[Self]:
        """Make copies of the session; see `Session.fork`."""
        made = await self._apart(
            lambda s: s.fork(
                count,
                prefix=prefix,
                fork_workspace=fork_workspace,
                share_files=share_files,
                ttl=ttl,
            )
        )
        return [type(self)(one) for one in made]

    async def migrate(
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
        """Move the session to another host; see `Session.migrate`."""
        return await self._apart(
            lambda s: s.migrate(
                host,
                with_files=with_files,
                connections=connections,
                keep_address=keep_address,
                precopy=precopy,
                lazy=lazy,
                max_freeze=max_freeze,
            )
        )

    # -- steps ------------------------------------------------------------------------------------

    async def steps(self) -> Sequence[dict[str, Any]]:
        """Return the session's durable steps; see `Session.steps`."""
        return await self._apart(lambda s: s.steps())

    async def resolve_step(
        self, id: str, outcome: Literal["done", "failed"], result: Any = None
    ) -> Mapping[str, Any]:
        """State how a step has ended whose state is unknown; see `Session.resolve_step`."""
        return await self._apart(lambda s: s.resolve_step(id, outcome, result))
