"""What programs have printed, as an answer holds it: harmless, not too long, and marked.

A model that reads a session's output may take a sentence in it for an instruction.  So each text
that a session's programs choose (output, title, arguments, labels) is in the object `DATA` of an
answer, and nothing else is; the server's instructions say what that means.  It holds no control
sequence and no invisible character.  A text that is too long is cut, and ``left_out`` says how much
is missing, where, and how to get it.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from ..quoting import harmless, printable

DATA = "from_session"
DEFAULT_LIMIT, MAX_LIMIT = 16_000, 100_000  # characters of a text
_MOST_WORDS, _WORD = 32, 200  # words of a command line, and characters of one


def text_of(data: str, encoding: str = "utf-8") -> str:
    """Return output, as `criuctl.ops.commands` returns it, as harmless text."""
    if encoding == "base64":
        data = base64.b64decode(data).decode(errors="replace")
    return harmless(data.replace("\r", "\n"))  # a carriage return begins a line again


def cut(text: str, limit: int, *, keep: str = "end") -> tuple[str, int]:
    """Return the begin or the end of `text`, and how many characters are left out."""
    left_out = max(0, len(text) - limit)
    if not left_out:
        return text, 0
    return (text[left_out:] if keep == "end" else text[:limit]), left_out


def left_out(count: int, where: str, how: str) -> dict[str, Any]:
    """Return the part of an answer that says what is missing; nothing is: no part."""
    if not count:
        return {}
    return {"left_out": {"characters": count, "where": where, "how_to_read_it": how}}


def words(argv: Any) -> list[str]:
    """Return a command line, with long words and long lines cut."""
    line = argv if isinstance(argv, list) else []
    found = [short(word) for word in line[:_MOST_WORDS]]
    return found + (["..."] if len(line) > _MOST_WORDS else [])


def short(text: Any, limit: int = _WORD) -> str:
    """Return one line of text, cut with an ellipsis."""
    line = printable(text)
    return line if len(line) <= limit else line[: limit - 3] + "..."


def labels(values: Mapping[str, Any] | None) -> dict[str, str]:
    """Return labels, cut."""
    return {short(key): short(value) for key, value in list((values or {}).items())[:_MOST_WORDS]}


def foreground(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the program in the foreground as the part of `DATA` that describes it."""
    if found is None:
        return None
    return {
        "pid": found.get("pid"),
        "argv": words(found.get("argv")),
        "cwd": short(found.get("cwd") or ""),
        "reading_tty": found.get("reading_tty"),
        "echo": found.get("echo"),
        "at_prompt": found.get("at_prompt"),
    }
