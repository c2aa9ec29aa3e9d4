"""`criuctl mcp` with real sessions, driven by the official SDK's own client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client.context import ClientRequestContext
from mcp_types import ElicitRequestParams, ElicitResult
from support.command import Home
from support.keeper import Keeper, wait_until
from support.mcp_clients import Agent, listening, over_http, over_stdio
from support.operating import TIMEOUT, Operators

pytestmark = pytest.mark.integration

CLIENT = """
import asyncio, sys
from mcp import Client, StdioServerParameters

async def main():
    arguments = ["-m", "criuctl", "mcp"]
    async with Client(StdioServerParameters(command=sys.executable, args=arguments, env=None)) as c:
        await c.call_tool("exec", {"name": "work", "command": sys.argv[1]})

asyncio.run(main())
"""


@pytest.fixture
def operators(keeper: Keeper, home: Home) -> Iterator[Operators]:
    """criuctl; every session is ended before the leak guard looks."""
    operators = Operators(keeper, home)
    yield operators
    operators.close()


@asynccontextmanager
async def connected(
    operators: Operators, transport: str, *options: str, **settings: Any
) -> AsyncIterator[Agent]:
    """A client over this transport."""
    if transport == "stdio":
        async with over_stdio(operators, *options, **settings) as agent:
            yield agent
    else:
        with listening(operators, *options) as http:
            async with over_http(http, **settings) as agent:
                yield agent


def talk(conversation: Callable[[], Awaitable[None]]) -> None:
    """Run a conversation."""
    asyncio.run(asyncio.wait_for(conversation(), 4 * TIMEOUT))


@pytest.mark.parametrize("transport", ["stdio", "http"])
@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_work_in_a_session(operators: Operators, transport: str, mode: str) -> None:
    async def conversation() -> None:
        async with connected(operators, transport, mode=mode) as agent:
            assert len((await agent.client.list_tools()).tools) == 15
            await agent.shell("work", labels={"tier": "dev"})
            assert [one["session"] for one in (await agent("list"))["sessions"]] == ["work"]
            done = await agent("exec", name="work", command="cd /tmp; printf 'a\\nb\\n'; false")
            assert (done["exit_code"], done["running"]) == (1, False)
            assert done["from_session"] == {"output": "a\nb\n"}
            new = await agent(
                "exec",
                name="work",
                command='cat; echo "$V" >&2',
                new=True,
                stdin="in",
                env={"V": "v"},
            )
            assert new["from_session"] == {"stdout": "in", "stderr": "v\n"}
            status = await agent("status", name="work")
            assert status["from_session"]["foreground"]["cwd"] == "/tmp"
            assert status["from_session"]["labels"] == {"tier": "dev"}
            mark = (await agent("send", name="work", text="read -p 'name? ' x", enter=True))[
                "offset"
            ]
            assert not (await agent("wait", name="work", until="reading"))["running"]
            found = await agent("wait", name="work", until="match", pattern="na(m)e\\?", since=mark)
            assert found["from_session"]["groups"] == ["m"]
            assert (await agent("interrupt", name="work"))["signalled"] >= 1
            await agent("wait", name="work", until="prompt", since=found["cursor"])
            assert "name?" in (await agent("capture", name="work"))["from_session"]["text"]
            assert (
                "name?"
                in (await agent.read("criuctl://session/work/screen"))["from_session"]["text"]
            )
            assert (
                "name?" in (await agent.read("criuctl://session/work/log"))["from_session"]["text"]
            )
            tree = (await agent.read("criuctl://session/work/tree"))["processes"]
            assert any(one["from_session"]["command"] == "bash" for one in tree)
            prompt = await agent.client.get_prompt("resume_after_an_interruption", {"name": "work"})
            assert "'work'" in prompt.messages[0].content.text  # type: ignore[union-attr]
            assert (await agent.fails("exec", name="nothing", command="true"))["exit_code"] == 3

    talk(conversation)


def test_a_long_command_answers_in_time_and_goes_on(operators: Operators, home: Home) -> None:
    gate = home.path / "gate"

    async def conversation() -> None:
        async with connected(operators, "stdio") as agent:
            await agent.shell("work")
            line = f"echo one; until [ -e {gate} ]; do sleep 0.1; done; echo two"
            began = await agent("exec", name="work", command=line, seconds=0.5)
            assert (began["running"], began["exit_code"]) == (True, None)
            command, seen = began["command_id"], began["from_session"]["output"]
            again = await agent(
                "wait", name="work", until="command", command_id=command, seconds=0,
                since=began["cursor"],
            )  # fmt: skip
            assert again["running"]
            seen += again["from_session"]["output"]
            gate.touch()
            done = await agent(
                "wait", name="work", until="command", command_id=command, since=again["cursor"]
            )
            assert (done["running"], done["exit_code"]) == (False, 0)
            assert seen + done["from_session"]["output"] == "one\ntwo\n"

    talk(conversation)


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_a_cancelled_call_ends_the_wait_and_not_the_command(
    operators: Operators, home: Home, transport: str
) -> None:
    gate, done = home.path / "gate", home.path / "done"

    async def conversation() -> None:
        async with connected(operators, transport) as agent:
            await agent.shell("work")
            line = f"until [ -e {gate} ]; do sleep 0.1; done; touch {done}"
            with anyio.move_on_after(2):
                await agent("exec", name="work", command=line)
            status = await agent("status", name="work")  # it answers, and no other connection waits
            assert len(status["operators"]) == 0
            gate.touch()
            answer = await agent("wait", name="work", until="command", command_id="c1")
            assert (answer["state"], answer["exit_code"]) == ("done", 0)
            assert done.exists()

    talk(conversation)


def test_two_clients_at_once(operators: Operators) -> None:
    async def conversation() -> None:
        with listening(operators) as http:
            async with over_http(http, "one") as one, over_http(http, "two") as two:
                await one.shell("work")
                async with asyncio.TaskGroup() as tasks:
                    waits = tasks.create_task(
                        one("wait", name="work", until="match", pattern="from (\\w+)$", since=0)
                    )
                    tasks.create_task(two("exec", name="work", command="echo from two"))
                assert waits.result()["from_session"]["groups"] == ["two"]
                jobs = [
                    agent("exec", name="work", command="echo $PPID", new=True)
                    for agent in (one, two) * 5
                ]
                answers = await asyncio.gather(*jobs)
                assert all(answer["exit_code"] == 0 for answer in answers)
                assert len({answer["command_id"] for answer in answers}) == 10
                # The lease that one of them keeps is not the other's.
                await one("send", name="work", text="# half a line")
                assert (await one("status", name="work"))["lease"]["name"] == "one"
        log = operators("log", "work")
        by = {entry["name"] for entry in log if entry["what"] == "command"}
        assert by == {"one", "two"}
        kinds = {
            entry["kind"] for entry in log if entry["what"] == "joined" and entry["name"] in by
        }
        assert kinds == {"agent"}

    talk(conversation)


def test_a_client_is_killed_in_the_middle(operators: Operators, home: Home) -> None:
    began, done = home.path / "began", home.path / "done"
    operators.shell("work")
    line = f"touch {began}; until [ -e {home.path}/gate ]; do sleep 0.1; done; touch {done}"
    client = operators.keeper.spawn(
        [
            sys.executable,
            "-c",
            CLIENT.replace("env=None", "env=dict(__import__('os').environ)"),
            line,
        ],
        env=operators.environment(),
        cwd=home.path,
    )
    wait_until(began.exists, TIMEOUT, "the command has begun")
    client.kill()
    wait_until(lambda: not servers(home), TIMEOUT, "the server has ended with its client")
    (home.path / "gate").touch()

    async def conversation() -> None:
        async with connected(operators, "stdio") as agent:
            answer = await agent("wait", name="work", until="command", command_id="c1")
            assert (answer["state"], answer["exit_code"]) == ("done", 0)

    talk(conversation)
    assert done.exists()


def servers(home: Home) -> list[str]:
    """The `criuctl mcp` of this test."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            if b"mcp" in words and home.token.encode() in (path.parent / "environ").read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_a_session_is_dumped_and_restored_between_two_calls(operators: Operators) -> None:
    async def conversation() -> None:
        async with connected(operators, "http") as agent:
            await agent.shell("work")
            await agent("exec", name="work", command="x=42")
            before = await agent("status", name="work")
            operators("dump", "work")
            assert (await agent("status", name="work"))["state"] == "checkpointed"
            back = await agent("restore", ref="work")
            assert (back["session"], back["running"]) == ("work", False)
            after = await agent("exec", name="work", command='echo "$x"')
            assert after["from_session"]["output"] == "42\n"
            status = await agent("status", name="work")
            assert status["incarnation"] == before["incarnation"] + 1

    talk(conversation)


def test_snapshots_and_forks(operators: Operators) -> None:
    async def conversation() -> None:
        async with connected(operators, "stdio") as agent:
            await agent.shell("work")
            await agent("exec", name="work", command="x=1")
            first = await agent("snapshot", name="work", labels={"why": "before"})
            assert first["number"] == 1 and not first["running"]
            await agent("exec", name="work", command="x=2; sleep 1000 &")
            made = await agent("fork", name="work", new_name="copy")
            assert made["forks"][0]["session"] == "copy"
            echoed = await agent("exec", name="copy", command='echo "$x"')
            assert echoed["from_session"]["output"].endswith("2\n")
            old = await agent("restore", ref="work@1", new_name="old")
            assert old["session"] == "old"
            echoed = await agent("exec", name="old", command='echo "$x"')
            assert echoed["from_session"]["output"] == "1\n"
            found = (await agent("checkpoints", name="work"))["checkpoints"]
            assert [one["number"] for one in found] == [1, 2]
            between = await agent("diff", before="work@1", after="work@2")
            assert (between["same"], between["processes"]["added"]) == (False, 1)
            assert "sleep" in json.dumps(between["from_session"]["processes"])
            gone = await agent.fails("diff", before="work@1", after="work@9")
            assert gone["exit_code"] == 3

    talk(conversation)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_kill_asks_the_user(operators: Operators, mode: str) -> None:
    asked: list[str] = []
    answers = [
        ElicitResult(action="decline"),
        ElicitResult(action="accept", content={"yes": False}),
    ]
    answers.append(ElicitResult(action="accept", content={"yes": True}))

    async def ask(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        asked.append(params.message)
        return answers[len(asked) - 1]

    async def conversation() -> None:
        async with connected(
            operators, "stdio", "--role", "admin", mode=mode, elicitation_callback=ask
        ) as agent:
            await agent.shell("work")
            for _ in range(2):
                refused = await agent.fails("kill", name="work")
                assert refused["code"] == "not-confirmed"
                assert (await agent("status", name="work"))["state"] == "running"
            assert (await agent("kill", name="work"))["state"] == "exited"
        assert len(asked) == 3 and "session 'work': bash" in asked[0]

    talk(conversation)


def test_without_a_user_the_error_says_how_to_confirm(operators: Operators) -> None:
    async def conversation() -> None:
        async with connected(operators, "stdio", "--role", "admin") as agent:
            await agent.shell("work")
            await agent.shell("other")
            other = (await agent("status", name="other"))["id"]
            for arguments in ({}, {"confirm": "yes"}, {"confirm": other}):
                refused = await agent.fails("kill", name="work", **arguments)
                assert refused["code"] == "not-confirmed"
                assert "bash" in refused["from_session"]["ends"]
            identity = (await agent("status", name="work"))["id"]
            assert identity in refused["hint"]
            began = await agent("exec", name="work", command="sleep 1000", seconds=0)
            ended = await agent("kill", name="work", command_id=began["command_id"], grace=0)
            assert not ended["running"]  # one command: no question
            assert (await agent("kill", name="work", confirm=identity))["state"] == "exited"

    talk(conversation)


def test_taking_over_asks(operators: Operators) -> None:
    operators.shell("work")
    window = operators.window("attach", "work", "--take")
    wait_until(
        lambda: operators("status", "work")["lease"] is not None, TIMEOUT, "a person has the lease"
    )

    async def conversation() -> None:
        async with connected(operators, "stdio", "--role", "admin") as agent:
            refused = await agent.fails("send", name="work", text="x", take=True)
            assert refused["code"] == "not-confirmed"
            assert "human" in refused["from_session"]["takes_from"]
            operator = operators("status", "work")["lease"]["operator"]
            assert operator in refused["hint"]
            await agent("send", name="work", text="x", take=True, confirm=operator)
            taken = [one for one in operators("log", "work") if one["what"] == "lease-take"]
            assert taken[-1]["name"] == "agent"

    talk(conversation)
    window.close(force=True)


def test_a_signal_ends_the_server(operators: Operators, home: Home) -> None:
    operators.shell("work")
    out = home.path / "out"
    client, server = os.pipe()
    with open(client, "rb") as stdin, open(server, "wb") as writer, out.open("wb") as stdout:
        process = operators.keeper.spawn(
            [sys.executable, "-m", "criuctl", "mcp"],
            env=operators.environment(),
            stdin=stdin,
            stdout=stdout,
        )
        about = {"protocolVersion": "2025-06-18", "capabilities": {}}
        about["clientInfo"] = {"name": "agent", "version": "1"}
        request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": about}
        writer.write(json.dumps(request).encode() + b"\n")
        call = {"name": "wait", "arguments": {"name": "work", "until": "exit"}}
        request = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call}
        writer.write(b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n')
        writer.write(json.dumps(request).encode() + b"\n")
        writer.flush()
        wait_until(
            lambda: any(one["name"] == "agent" for one in operators("status", "work")["operators"]),
            TIMEOUT,
            "the call waits",
        )
        assert b"serverInfo" in out.read_bytes()
        process.kill(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 128 + signal.SIGTERM
    assert operators("status", "work")["state"] == "running"
