"""`criuctl acp` between an editor and an agent, both made with the protocol's own SDK."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import acp
import pytest
from acp import schema
from support.command import Home
from support.keeper import Keeper, wait_until
from support.operating import TIMEOUT, Operators

pytestmark = pytest.mark.integration

AGENT = Path(__file__).parent / "programs" / "acp_agent.py"


@pytest.fixture
def operators(keeper: Keeper, home: Home) -> Iterator[Operators]:
    """criuctl; every session is ended before the leak guard looks."""
    operators = Operators(keeper, home)
    yield operators
    operators.close()


class Editor:
    """What of an editor is needed here: what it was sent, and the terminals it was asked for."""

    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.views: list[tuple[str, list[str]]] = []
        self.released: list[str] = []

    def on_connect(self, conn: acp.Agent) -> None:
        self.agent = conn

    async def session_update(self, session_id: str, update: Any, **kwargs: Any) -> None:
        self.updates.append(update)

    async def create_terminal(
        self, session_id: str, command: str, args: list[str] | None = None, **kwargs: Any
    ) -> schema.CreateTerminalResponse:
        self.views.append((command, args or []))
        return schema.CreateTerminalResponse(terminal_id=f"view-{len(self.views)}")

    async def release_terminal(
        self, session_id: str, terminal_id: str, **kwargs: Any
    ) -> schema.ReleaseTerminalResponse | None:
        self.released.append(terminal_id)
        return schema.ReleaseTerminalResponse()

    def said(self) -> list[dict[str, Any]]:
        """What the agent has reported."""
        chunks = [one for one in self.updates if isinstance(one, schema.AgentMessageChunk)]
        return [json.loads(one.content.text) for one in chunks]

    def shown(self) -> list[Any]:
        """The contents of the tool calls."""
        calls = [one for one in self.updates if isinstance(one, schema.ToolCallStart)]
        return [content for call in calls for content in call.content or []]


class Conversation:
    """An editor that talks with its agent through `criuctl acp`."""

    def __init__(self, editor: Editor, agent: Any, process: asyncio.subprocess.Process) -> None:
        self.editor, self.agent, self.process = editor, agent, process

    async def prompt(self, text: str) -> None:
        """Have the agent do something."""
        block = acp.text_block(text)
        await self.agent.prompt(prompt=[block], session_id="conversation-1")


@asynccontextmanager
async def editing(operators: Operators, *, terminal: bool) -> AsyncIterator[Conversation]:
    """An editor with or without terminals of its own."""
    editor = Editor()
    as_client: Any = editor
    command = ["-m", "criuctl", "acp", "--", sys.executable, str(AGENT)]
    async with acp.spawn_agent_process(
        as_client,
        sys.executable,
        *command,
        env=operators.environment(),
        cwd=operators.home.path,
        transport_kwargs={"stderr": None},
    ) as (agent, process):
        able = schema.ClientCapabilities(terminal=terminal)
        await agent.initialize(protocol_version=acp.PROTOCOL_VERSION, client_capabilities=able)
        await agent.new_session(cwd=str(operators.home.path), mcp_servers=[])
        yield Conversation(editor, agent, process)


def talk(conversation: Callable[[], Awaitable[None]]) -> None:
    """Run a conversation."""
    asyncio.run(asyncio.wait_for(conversation(), 4 * TIMEOUT))


def test_a_terminal_is_a_session_and_the_editor_shows_it(operators: Operators, home: Home) -> None:
    async def conversation() -> None:
        async with editing(operators, terminal=True) as talking:
            await talking.prompt('pwd; echo "$WORD"; exit 3')
            (said,) = talking.editor.said()
            assert said["output"] == f"{home.path}\nsecret word\n"
            assert (said["code"], said["signal"], said["truncated"]) == (3, None, False)
            (shown,) = talking.editor.shown()
            assert (shown.type, shown.terminal_id) == ("terminal", "view-1")
            ((_program, arguments),) = talking.editor.views
            assert arguments[-3:] == ["attach", "--read-only", said["terminal"]]
            assert talking.editor.released == ["view-1"]
            await talking.prompt("kill -TERM $$")
            assert talking.editor.said()[1]["signal"] == "SIGTERM"
            await talking.prompt("head -c 5000 /dev/zero | tr '\\0' x")
            third = talking.editor.said()[2]
            assert (third["output"], third["truncated"]) == ("x" * 1000, True)
        assert operators("ls") == []  # released: forgotten

    talk(conversation)


def test_an_editor_without_terminals_is_told_how_to_attach(operators: Operators) -> None:
    async def conversation() -> None:
        async with editing(operators, terminal=False) as talking:
            await talking.prompt("true")
            (said,) = talking.editor.said()
            (shown,) = talking.editor.shown()
            assert shown.type == "content" and said["terminal"] in shown.content.text
            assert talking.editor.views == []

    talk(conversation)


def test_a_terminal_outlives_the_editor(operators: Operators, home: Home) -> None:
    gate = home.path / "gate"

    async def first() -> None:
        async with editing(operators, terminal=True) as talking:
            await talking.prompt(
                f"hang echo begun; until [ -e {gate} ]; do sleep 0.1; done; echo end"
            )
            talking.process.kill()  # and with it the editor's end

    talk(first)
    (session,) = operators("ls")
    assert session["state"] == "running" and session["labels"] == {"acp": "conversation-1"}
    wait_until(lambda: "begun" in operators.text("capture", session["session"]), TIMEOUT, "it runs")

    async def second() -> None:
        async with editing(operators, terminal=True) as talking:
            gate.touch()
            await talking.prompt(f"again {session['session']}")
            (said,) = talking.editor.said()
            assert (said["output"], said["code"]) == ("begun\nend\n", 0)

    talk(second)


def test_only_its_own_terminals_are_given(operators: Operators) -> None:
    """A session that is no terminal of an agent is neither shown nor ended."""
    operators.shell("work")
    operators("run", "-d", "--name", "acp-0123456789", "--", "sleep", "1000")

    async def conversation() -> None:
        async with editing(operators, terminal=True) as talking:
            for name in ("work", "acp-0123456789", "acp-9999999999", "../x"):
                with pytest.raises(acp.RequestError):
                    await talking.prompt(f"again {name}")

    talk(conversation)
    assert {one["state"] for one in operators("ls")} == {"running"}


def test_terminals_alone(operators: Operators) -> None:
    """Without an agent: a program that asks for terminals only."""

    def request(number: int, method: str, **params: Any) -> bytes:
        params["sessionId"] = "s"
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        return json.dumps(message).encode() + b"\n"

    async def conversation() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "criuctl", "acp",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env=operators.environment(), cwd=operators.home.path,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None

        async def ask(line: bytes) -> dict[str, Any]:
            process.stdin.write(line)  # type: ignore[union-attr]
            answer: dict[str, Any] = json.loads(await process.stdout.readline())  # type: ignore[union-attr]
            return answer

        made = await ask(request(1, "terminal/create", command="sleep", args=["1000"]))
        name = made["result"]["terminalId"]
        seen = await ask(request(2, "terminal/output", terminalId=name))
        assert seen["result"] == {"output": "", "truncated": False, "exitStatus": None}
        await ask(request(3, "terminal/kill", terminalId=name))
        seen = await ask(request(4, "terminal/output", terminalId=name))
        assert seen["result"]["exitStatus"]["signal"] in ("SIGTERM", "SIGKILL")
        assert (await ask(request(5, "terminal/create")))["error"]["code"] == -32602
        assert (await ask(request(6, "fs/read_text_file")))["error"]["code"] == -32601
        assert (await ask(request(7, "terminal/release", terminalId=name)))["result"] == {}
        process.stdin.close()
        assert await process.wait() == 0

    talk(conversation)
