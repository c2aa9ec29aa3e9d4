"""An agent for an editor: it runs each prompt as a line of shell in a terminal, and reports how
that ended.  ``again ID`` looks at an earlier terminal; ``hang LINE`` begins and does not wait.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import acp
from acp import helpers, schema


class ShellAgent:
    """What of an agent is needed here."""

    def on_connect(self, conn: acp.Client) -> None:
        self.client = conn

    async def initialize(
        self,
        protocol_version: int,
        client_capabilities: schema.ClientCapabilities | None = None,
        client_info: schema.Implementation | None = None,
        **kwargs: Any,
    ) -> acp.InitializeResponse:
        assert client_capabilities is not None and client_capabilities.terminal
        return acp.InitializeResponse(protocol_version=protocol_version)

    async def new_session(self, cwd: str, **kwargs: Any) -> acp.NewSessionResponse:
        self.cwd = cwd
        return acp.NewSessionResponse(session_id="conversation-1")

    async def prompt(self, prompt: list[Any], session_id: str, **kwargs: Any) -> acp.PromptResponse:
        text = prompt[0].text
        if text.startswith("again "):
            await self.finish(session_id, text.removeprefix("again "))
        else:
            hangs = text.startswith("hang ")
            made = await self.client.create_terminal(
                session_id=session_id,
                command=text.removeprefix("hang "),
                cwd=self.cwd,
                env=[schema.EnvVariable(name="WORD", value="secret word")],
                output_byte_limit=1000,
            )
            content = [helpers.tool_terminal_ref(made.terminal_id)]
            await self.client.session_update(
                session_id, helpers.start_tool_call("call-1", "run", content=content)
            )
            if not hangs:
                await self.finish(session_id, made.terminal_id)
        return acp.PromptResponse(stop_reason="end_turn")

    async def finish(self, session_id: str, terminal: str) -> None:
        """Wait for a terminal's command, report it, and release the terminal."""
        where = {"session_id": session_id, "terminal_id": terminal}
        ended = await self.client.wait_for_terminal_exit(**where)
        seen = await self.client.terminal_output(**where)
        said = {"terminal": terminal, "code": ended.exit_code, "signal": ended.signal}
        said |= {"output": seen.output, "truncated": seen.truncated}
        await self.client.release_terminal(**where)
        update = helpers.update_agent_message_text(json.dumps(said))
        await self.client.session_update(session_id, update)


agent: Any = ShellAgent()
asyncio.run(acp.run_agent(agent))
