"""Terminals of an editor's agent: their commands, the end of their output, how they ended."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from criuctl.acp.relay import Relay
from criuctl.acp.terminals import Terminals, command_of, exit_of, is_terminal, tail
from criuctl.config import Config
from criuctl.proc.line_streams import LineStreams
from criuctl.report import Reporter


def test_a_program_or_a_line() -> None:
    assert command_of("ls", ["-l"]) == ["ls", "-l"]
    assert command_of("ls", []) == ["ls"]
    assert command_of("ls -l | wc", []) == ["/bin/sh", "-c", "ls -l | wc"]
    assert command_of("no such", ["x"]) == ["no such", "x"]


def test_the_end_of_output_is_cut_at_a_character() -> None:
    assert tail(b"abc", 3) == ("abc", False)
    assert tail(b"\x1b[1mabc\x1b[0m", 3) == ("abc", False)
    assert tail("xéé".encode(), 3) == ("é", True)
    assert tail("éé".encode(), 0) == ("", True)
    assert tail(b"", 0) == ("", False)


def test_how_it_ended() -> None:
    assert exit_of({"exit_code": 3, "exit_signal": None}) == {"exit_code": 3, "signal": None}
    killed = {"exit_code": 137, "exit_signal": 9}
    assert exit_of(killed) == {"exit_code": None, "signal": "SIGKILL"}


@pytest.mark.parametrize("name", ["work", "acp-", "acp-012345678", "acp-012345678G", 3, None])
def test_no_terminal(name: object) -> None:
    assert not is_terminal(name)


def relay() -> Relay:
    """One without ends."""
    ends: Any = None
    return Relay(ends, ends, Terminals(Config(), "agent"), ["criuctl", "attach"], Reporter())


def test_messages_name_the_terminal_that_the_editor_shows() -> None:
    between = relay()
    between._shown["acp-0123456789"] = "view"
    content: list[Any] = [
        {"type": "terminal", "terminalId": "acp-0123456789"},
        {"type": "terminal", "terminalId": "acp-9876543210"},
        {"type": "terminal", "terminalId": "another"},
        {"type": "text", "text": "acp-0123456789"},
    ]
    message: dict[str, Any] = {"params": {"update": {"content": content}}}
    assert between._renamed(message)
    assert content[0]["terminalId"] == "view"
    assert "criuctl attach acp-9876543210" in content[1]["content"]["text"]
    assert content[2:] == [
        {"type": "terminal", "terminalId": "another"},
        {"type": "text", "text": "acp-0123456789"},
    ]
    assert not between._renamed({"params": {"terminalId": "acp-0123456789"}})


def test_a_message_of_a_hostile_depth_passes() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = [deep]
    assert not relay()._renamed({"params": deep})


def test_lines_of_files_and_pipes(tmp_path: Any) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo")

    async def through(incoming: int, outgoing: int) -> list[bytes]:
        streams = await LineStreams.open(incoming, outgoing)
        found = [line async for line in streams.lines()]
        await streams.send(b"sent\n")
        streams.close()
        return found

    def of(incoming: int) -> list[bytes]:
        out = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
        return asyncio.run(through(incoming, out))

    assert of(os.open(path, os.O_RDONLY)) == [b"one\n", b"two"]
    assert (tmp_path / "out").read_bytes() == b"sent\n"
    assert of(os.open(os.devnull, os.O_RDONLY)) == []
    ours, theirs = os.pipe()
    os.write(theirs, b"piped\n")
    os.close(theirs)
    assert of(ours) == [b"piped\n"]
