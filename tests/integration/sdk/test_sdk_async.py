"""`AsyncSession`: waits that keep nothing else waiting and can be cancelled; several objects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from support.api import BASH
from support.operating import TIMEOUT, Operators

from criuctl import AsyncSession
from criuctl.errors import CriuctlError, TimedOut, WrongState

pytestmark = pytest.mark.integration


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it in a loop of its own, not for ever."""
    asyncio.run(asyncio.wait_for(main(), 5 * TIMEOUT))


async def shell(name: str) -> AsyncSession:
    """A shell at its prompt."""
    session = await AsyncSession.run(BASH, name=name)
    await session.wait_prompt(timeout=TIMEOUT)
    return session


async def until(condition: Callable[[], Coroutine[Any, Any, bool]], what: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + TIMEOUT
    while not await condition():
        assert time.monotonic() < deadline, f"still not: {what}"
        await asyncio.sleep(0.01)


async def waiting(session: AsyncSession) -> int:
    """The number of operators that only look."""
    operators = (await session.status()).facts["operators"]
    return len([one for one in operators if one["operator"] != "op-1"])


def test_a_long_wait_keeps_nothing_else_waiting(operators: Operators) -> None:
    async def main() -> None:
        async with await shell("work") as s:
            waits = [asyncio.create_task(s.wait_match(f"^word {n}$")) for n in range(10)]
            exits = asyncio.create_task(s.wait_exit())
            made = asyncio.create_task(s.exec("read x; echo got $x"))
            await s.wait_reading(timeout=TIMEOUT)
            await s.send("typed\n")
            assert (await made).output.endswith("got typed\n")
            for n in range(10):
                await s.exec(f"echo word {n}")
            assert [found.text for found in await asyncio.gather(*waits)] == [
                f"word {n}" for n in range(10)
            ]
            assert not exits.done()
            assert "word 9" in (await s.capture(0)).text
            await s.kill(0)
            assert (await exits).exit_code == 137

    run(main)


def test_cancelled_waits_end_at_the_holder_and_nothing_else_does(operators: Operators) -> None:
    async def main() -> None:
        async with await shell("work") as s:
            made = asyncio.create_task(s.exec("sleep 1000"))
            waits = [
                asyncio.create_task(wait)
                for wait in (
                    s.wait_match("never"),
                    s.wait_exit(),
                    s.wait_idle(1000),
                    s.wait_prompt(since=1 << 40),
                )
            ]

            async def all_wait() -> bool:
                foreground = (await s.status()).facts["foreground"] or {"argv": [""]}
                return await waiting(s) == 5 and foreground["argv"][0] == "sleep"

            await until(all_wait, "the command runs, and all wait")
            for task in (made, *waits):
                task.cancel()
            done = await asyncio.gather(made, *waits, return_exceptions=True)
            assert all(isinstance(one, asyncio.CancelledError) for one in done)

            async def none_waits() -> bool:
                return await waiting(s) == 0

            await until(none_waits, "the holder has forgotten the waits")
            assert (await s.status()).facts["foreground"]["argv"] == ["sleep", "1000"]
            running = s.command("c1")
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(running.wait(), 0.1)
            assert (await running.output()).state == "running"
            assert (await running.kill()).state in ("interrupted", "done")
            with pytest.raises(TimedOut):
                await s.wait_match("never", timeout=0.1)
            await s.kill(0)

    run(main)


def test_two_at_once(operators: Operators) -> None:
    """Of two sessions, and of one; their operations share the worker."""

    async def main() -> None:
        one, two = await asyncio.gather(shell("one"), shell("two"))
        same = await AsyncSession.connect("one", kind="service", name="same")
        await asyncio.gather(one.exec("x=1"), two.exec("x=2"))
        first, second = await asyncio.gather(one.snapshot(), two.snapshot())
        assert (first.ref, second.ref) == ("one@1", "two@1")
        typed = await asyncio.gather(*(one.send(f"echo {n}; ") for n in range(20)))
        assert [found.offset for found in typed] == sorted(found.offset for found in typed)
        await one.keys("Enter")
        numbers = r"^{}$".format(r"\n".join(str(n) for n in range(20)))
        await one.wait_match(numbers, timeout=TIMEOUT)
        async with one.lease.hold():
            with pytest.raises(CriuctlError) as held:
                await same.send("x")
            assert (held.value.code, held.value.exit_code) == ("lease-held", 9)
        found = await asyncio.gather(same.exec("echo $x"), two.exec("echo $x"))
        assert [result.output for result in found] == ["1\n", "2\n"]
        copies = await one.fork(1)
        assert (await copies[0].exec("echo $x", new=False)).output == "1\n"
        for session in (one, two, *copies):
            await session.kill(0)
        for session in (one, two, same, *copies):
            await session.close()

    run(main)


def test_a_dump_and_a_restore_between_two_calls(operators: Operators) -> None:
    async def main() -> None:
        async with await shell("work") as s:
            await s.exec("x=42")
            wait = asyncio.create_task(s.wait_match("^later$", since=0))
            await s.dump()
            async with await AsyncSession.restore("work") as again:
                await again.wait_prompt(timeout=TIMEOUT)
                assert (await again.exec("echo later >&2; echo $x")).output == "later\n42\n"
                assert (await wait).text == "later"
                assert (await s.exec("echo $x")).output == "42\n"
                assert [one.number for one in await s.checkpoints()] == [1]
                assert await s.steps() == []
            await s.kill(0)
            assert (await s.wait_exit(timeout=TIMEOUT)).exit_code == 137
            with pytest.raises(WrongState):
                await s.send("x")

    run(main)
