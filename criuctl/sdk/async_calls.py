"""What all coroutines of `AsyncSession` are made of, and its command handles and lease."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from ..errors import CriuctlError
from ..session.protocol import ANSWER_TIMEOUT, DEFAULT_TTL
from .command import GRACE, OnTimeout
from .lease import HOLD
from .operator import Cancellable
from .results import CommandResult
from .session import Session

T = TypeVar("T")


async def in_thread(work: Callable[[], T], cancel: Callable[[], None] | None = None) -> T:
    """Run `work` in a thread of its own; call `cancel` when the caller is cancelled."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, daemon=True, name="criuctl-call").start()
    try:
        return await future
    except asyncio.CancelledError:
        if cancel is not None:
            cancel()
        raise


class Calls:
    """Makes the calls of one `Session` in threads."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._typing = ThreadPoolExecutor(1, thread_name_prefix=f"criuctl-{session.name}")

    async def _in_turn(self, call: Callable[[Session], T]) -> T:
        """Make a call that uses the connection that types."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._typing, call, self._session)

    async def _apart(self, call: Callable[[Session], T]) -> T:
        """Make a call that opens connections of its own, and may be cancelled."""
        operator = Cancellable(self._session._operator)
        session = copy.copy(self._session)  # the same session, by other connections
        session._operator, session._connection = operator, None

        def work() -> T:
            try:
                return call(session)
            finally:
                operator.close()

        return await in_thread(work, operator.cancel)


class AsyncCommand:
    """`Command`, as coroutines."""

    def __init__(self, session: Calls, id: str) -> None:
        self._session = session
        self.id = id

    async def wait(
        self,
        timeout: float | None = None,
        *,
        silence: float | None = None,
        on_timeout: OnTimeout = "leave",
        plain: bool = False,
    ) -> CommandResult:
        """Wait until it has ended; see `Command.wait`. Cancelling leaves it running."""
        return await self._session._apart(
            lambda s: s.command(self.id).wait(
                timeout, silence=silence, on_timeout=on_timeout, plain=plain
            )
        )

    async def output(self, since: int | None = None, *, plain: bool = False) -> CommandResult:
        """Return it with the output so far; see `Command.output`."""
        return await self._session._apart(lambda s: s.command(self.id).output(since, plain=plain))

    async def kill(self, grace: float = GRACE) -> CommandResult:
        """End it; see `Command.kill`."""
        return await self._session._apart(lambda s: s.command(self.id).kill(grace))


class AsyncLease:
    """`Lease`, as coroutines: `AsyncSession.lease`."""

    def __init__(self, session: Calls) -> None:
        self._session = session

    async def request(
        self,
        ttl: float = DEFAULT_TTL,
        *,
        queue: bool = False,
        timeout: float | None = ANSWER_TIMEOUT,
    ) -> Mapping[str, Any]:
        """Ask for the lease; see `Lease.request`. With `queue`, what types waits meanwhile."""
        return await self._session._in_turn(
            lambda s: s.lease.request(ttl, queue=queue, timeout=timeout)
        )

    async def take(self, ttl: float = DEFAULT_TTL) -> Mapping[str, Any]:
        """Take the lease from the operator that has it; see `Lease.take`."""
        return await self._session._in_turn(lambda s: s.lease.take(ttl))

    async def yield_(self, to: str | None = None) -> None:
        """Give the lease up, or hand it over; see `Lease.yield_`."""
        await self._session._in_turn(lambda s: s.lease.yield_(to))

    @asynccontextmanager
    async def hold(self, ttl: float = HOLD, *, take: bool = False) -> AsyncIterator[None]:
        """Hold the lease inside an ``async with``; see `Lease.hold`."""
        await (self.take(ttl) if take else self.request(ttl))
        try:
            yield
        finally:
            with suppress(CriuctlError):  # another operator has it by now, or the session is gone
                await self.yield_()

    async def owner(self) -> Mapping[str, Any] | None:
        """Return the operator that has the lease; see `Lease.owner`."""
        return await self._session._apart(lambda s: s.lease.owner())
