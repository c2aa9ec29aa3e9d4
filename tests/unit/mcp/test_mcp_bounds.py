"""Answers of `criuctl mcp`: texts are whole pieces, harmless, bounded; every tool has its role."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from criuctl.config import Config
from criuctl.errors import UsageError
from criuctl.mcp import bounds, patterns
from criuctl.mcp.access import _whole
from criuctl.mcp.differences import bounded
from criuctl.mcp.server import build
from criuctl.mcp.service import Service
from criuctl.ops.own_commands import OwnCommands
from criuctl.report import Reporter


@given(st.text(st.characters(exclude_characters="\x1b"), max_size=60), st.integers(6, 20))
def test_pieces_of_output_make_the_whole(text: str, size: int) -> None:
    """However output is cut, its pieces put together are what it is as a whole."""
    data = text.encode() + b"\x1b[31mred\x1b[0m end"
    whole, end = _whole(data, 5, last=True)
    assert end == 5 + len(data)
    read, cursor = "", 0
    while cursor < len(data):
        behind = cursor + size
        piece, behind = _whole(data[cursor:behind], cursor, last=behind >= len(data))
        assert behind > cursor
        read, cursor = read + piece, behind
    assert read == whole


def test_a_sequence_without_an_end_is_passed_at_last() -> None:
    assert _whole(b"\x1b]0;title that never", 0, last=False)[1] == 20
    assert _whole(b"text\x1b]0;titl", 0, last=False) == ("text", 4)
    assert _whole("é".encode()[:1], 3, last=False) == ("\ufffd", 4)


def test_control_and_invisible_characters_are_shown_as_escapes() -> None:
    text = bounds.text_of("a\x01\u202eb\U000e0041\r\nc\td\re")
    assert text == "a\\x01\\u202eb\\U000e0041\n\nc\td\ne"
    raw = base64.b64encode(b"\xff\x1b]0;x\x07").decode()
    assert bounds.text_of(raw, "base64") == "\ufffd\\x1b]0;x\\x07"


def test_a_cut_says_what_is_missing() -> None:
    assert bounds.cut("abc", 3) == ("abc", 0)
    assert bounds.cut("abcdef", 4) == ("cdef", 2)
    assert bounds.cut("abcdef", 4, keep="begin") == ("abcd", 2)
    assert bounds.left_out(0, "before", "how") == {}
    assert bounds.left_out(2, "before", "how")["left_out"]["characters"] == 2
    assert len(bounds.words(["x" * 1000] * 100)) == 33
    assert bounds.words(["x" * 1000])[0] == "x" * 197 + "..."
    assert len(bounds.labels({str(i): "v" * 999 for i in range(99)})) == 32


def test_a_comparison_is_bounded() -> None:
    side = {"session": "s", "id": "1", "number": 1, "incarnation": 1, "created": ""}
    part: dict[str, Any] = {"added": [{"argv": ["x" * 500]}] * 100, "removed": [], "changed": []}
    part["same"] = 7
    memory = dict.fromkeys(("before", "after", "changed", "added", "removed"), 0) | {"exact": False}
    body = {"before": side, "after": side, "same": False, "about": [], "memory": memory}
    body |= dict.fromkeys(("processes", "descriptors", "connections", "files"), part)
    answer = bounded(body, 1000)
    assert answer["processes"] == {"added": 100, "removed": 0, "changed": 0, "same": 7}
    assert len(str(answer[bounds.DATA])) < 2000
    shown = sum(len(answer[bounds.DATA][key]["added"]) for key in ("processes", "files"))
    assert shown < 100 and answer["left_out"]["entries"] > 300


def test_a_search_has_an_end() -> None:
    found = patterns.search("b(.)", "abc\nbd")
    assert found is not None and (found[0], found.groups()) == ("bc", ("c",))
    assert patterns.search("^x", "ax") is None
    with pytest.raises(UsageError, match="takes longer"):
        patterns.search("(a|a|aa)+$(?!a)b", "a" * 60)


@pytest.mark.parametrize(("role", "count"), [("observe", 6), ("write", 15), ("admin", 15)])
def test_tools_by_role(role: str, count: int) -> None:
    service = Service(Config(), role, OwnCommands(["/proc/nonexistent"], Reporter()))
    tools = asyncio.run(build(service).list_tools())
    assert len(tools) == count
    for tool in tools:
        assert tool.description and tool.annotations is not None
        inner = {"asked", "consent", "ending", "ctx"}
        assert not inner & set(tool.input_schema["properties"]), tool.name
        if role == "observe":
            assert tool.annotations.read_only_hint
