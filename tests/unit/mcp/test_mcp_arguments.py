"""Arguments that do not fit: what a client is answered."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS

from criuctl.config import Config
from criuctl.errors import Conflict, UsageError
from criuctl.mcp.server import build
from criuctl.mcp.service import Service, as_tool_error
from criuctl.ops.own_commands import OwnCommands
from criuctl.report import Reporter

SERVER = build(Service(Config(), "admin", OwnCommands(["/proc/nonexistent"], Reporter())))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "work", "command": "true", "bogus": 1}, "bogus"),
        ({"name": "work", "command": "true", "timeout": 5}, "timeout"),
        ({"name": "../x", "command": "true"}, "name"),
        ({"command": 5}, "name"),
    ],
)
def test_a_tool_names_what_does_not_fit(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolError) as refused:
        asyncio.run(SERVER.call_tool("exec", arguments))
    error = json.loads(str(refused.value))["error"]
    assert error["code"] == "usage" and said in error["message"]
    assert "http" not in str(refused.value) and "pydantic" not in str(refused.value)


def test_every_tool_says_that_it_takes_no_others() -> None:
    for tool in asyncio.run(SERVER.list_tools()):
        assert tool.input_schema["additionalProperties"] is False, tool.name


@pytest.mark.parametrize("arguments", [None, {}, {"task": "x"}, {"name": "x", "bogus": "y"}])
def test_a_prompt_that_lacks_its_name_is_the_client_s_error(
    arguments: dict[str, Any] | None,
) -> None:
    with pytest.raises(MCPError) as refused:
        asyncio.run(SERVER.get_prompt("resume_after_an_interruption", arguments))
    assert refused.value.error.code == INVALID_PARAMS


def test_a_hint_names_no_command_line() -> None:
    for hint in ("End it first, or use --as NEW-NAME.", "`criuctl ls` shows them."):
        assert (
            "hint" not in str(as_tool_error(Conflict("no", hint=hint)))
            or not json.loads(str(as_tool_error(Conflict("no", hint=hint))))["error"]["hint"]
        )
    kept = as_tool_error(UsageError("no", hint="Call kill again with confirm='x'."))
    assert json.loads(str(kept))["error"]["hint"]
