"""The frames of a link, as bytes; `criuctl.transport.link` specifies their meaning."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CriuctlError, UsageError, of_the_host
from ..proc import jsontext

Buffer = bytes | bytearray | memoryview
Data = Buffer | Sequence[Buffer]

MAGIC = b"\x93CRL"
HEADER = struct.Struct("!4sB3xQII")  # magic, kind, request, bytes of JSON, bytes of body
HELLO, ASK, ANSWER, ERROR, TELL, PING, BYE = range(1, 8)
# the needs of a tree with very many connections and files are sent at once
MAX_JSON = 64 << 20
MAX_BODY = 64 << 20
MAX_TEXT = 100_000  # characters of an error
# values of JSON in any frame, and bytes of it for each further one
_FREE_VALUES, _VALUE = 1 << 18, 8
_MAX_DETAILS = 1 << 20  # bytes of an error's details
_WITH_BODY = (ASK, ANSWER)
_WITHOUT_REQUEST = (HELLO, TELL, PING, BYE)


class Broken(Exception):
    """The other side violated the protocol."""


def as_views(data: Data) -> list[memoryview]:
    """Return `data` as flat byte views, empty ones left out; nothing is copied."""
    pieces: Sequence[Buffer] = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    views = (memoryview(piece) for piece in pieces)
    return [view.cast("B") for view in views if view.nbytes]


def encode(
    kind: int, request: int, said: Mapping[str, Any] | None = None, body: Data = b""
) -> list[memoryview]:
    """Return the frame, in pieces; `UsageError` for one that is too large."""
    views = as_views(body)
    length = sum(view.nbytes for view in views)
    try:
        text = json.dumps(said, separators=(",", ":")).encode() if said is not None else b""
    except (TypeError, ValueError) as error:
        raise TypeError(f"what a link carries must be JSON: {error}") from error
    # Spaces mean nothing, and show the other side by the length that so many values are intended.
    text = text.ljust((jsontext.values(text) - _FREE_VALUES) * _VALUE)
    if length > MAX_BODY or len(text) > MAX_JSON:
        raise UsageError(
            f"a message of {len(text)} and {length} bytes is more than a link carries at once "
            f"({MAX_JSON}, {MAX_BODY})"
        )
    return [memoryview(HEADER.pack(MAGIC, kind, request, len(text), length) + text), *views]


def numbered(head: memoryview, request: int) -> memoryview:
    """Return the first piece of an encoded frame with this number."""
    data = bytearray(head)
    data[8:16] = request.to_bytes(8, "big")
    return memoryview(data)


def decode_header(data: Buffer) -> tuple[int, int, int, int]:
    """Return kind, request, and the lengths of JSON and body; `Broken`."""
    magic, kind, request, text, body = HEADER.unpack(data)
    if magic != MAGIC:
        raise Broken(f"a frame begins with {bytes(data[:4])!r}")
    if not HELLO <= kind <= BYE:
        raise Broken(f"a frame has the unknown kind {kind}")
    if text > MAX_JSON or body > MAX_BODY:
        raise Broken(f"a frame of {text} and {body} bytes is too long")
    if (
        (body and kind not in _WITH_BODY)
        or (request == 0) != (kind in _WITHOUT_REQUEST)
        or (text and kind == PING)
    ):
        raise Broken(f"a frame of kind {kind} has a part that its kind does not have")
    return kind, request, text, body


def decode_json(data: Buffer) -> dict[str, Any]:
    """Return the mapping in a frame; `Broken`."""
    try:
        said = jsontext.decoded(bytes(data), _FREE_VALUES + len(data) // _VALUE)
    except ValueError as error:
        raise Broken(f"a frame's JSON cannot be read: {error}") from None
    if not isinstance(said, dict):
        raise Broken("a frame's JSON is not a mapping")
    return said


def text_of(said: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """Return the text under `key`; `Broken`."""
    value = said.get(key, default)
    if not isinstance(value, str):
        raise Broken(f"a frame's {key} is not text")
    return value


def mapping_of(said: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the mapping under `key`, empty if there is none; `Broken`."""
    value = said.get(key, {})
    if not isinstance(value, dict):
        raise Broken(f"a frame's {key} is not a mapping")
    return value


# -- errors ----------------------------------------------------------------------------------------


class OtherSideFailed(CriuctlError):
    """The criuctl on the other side met a bug."""

    code = "other-side"


def encode_error(error: BaseException, *, debug: bool = False) -> dict[str, Any]:
    """Return an error as it is sent, with those of its details that are JSON and fit."""
    if isinstance(error, OSError):
        error = of_the_host(error) or error  # a full disk there is no bug
    if isinstance(error, CriuctlError):
        said = {
            "code": error.code,
            "exit_code": error.exit_code,
            "message": error.message[:MAX_TEXT],
            "hint": error.hint[:MAX_TEXT],
        }
        details: dict[str, Any] = {}
        room: float = _MAX_DETAILS
        for key, value in error.details.items():
            if (size := _size(value)) <= room:
                details[key] = value
                room -= size
        return {**said, "details": details} if details else said
    bug: dict[str, Any] = {"bug": type(error).__name__, "message": str(error)[:MAX_TEXT]}
    if debug:
        import traceback

        bug["traceback"] = "".join(traceback.format_exception(error))[-MAX_TEXT:]
    return bug


def decode_error(said: Mapping[str, Any], where: str) -> CriuctlError:
    """Return the error of the other side (`where`), as its own class where this criuctl has it."""
    message = text_of(said, "message")[:MAX_TEXT]
    if "bug" in said:
        details = {"traceback": text_of(said, "traceback")} if "traceback" in said else {}
        return OtherSideFailed(
            f"criuctl on {where} met a bug: {text_of(said, 'bug')}: {message}", **details
        )
    code, exit_code, details = (
        text_of(said, "code"),
        said.get("exit_code"),
        mapping_of(said, "details"),
    )
    for key in ("message", "hint", "self"):
        details.pop(key, None)
    if not isinstance(exit_code, int) or isinstance(exit_code, bool) or not 1 <= exit_code <= 255:
        raise Broken("an error's exit code is none")
    known = _classes().get((code, exit_code), CriuctlError)
    error = known(message, hint=text_of(said, "hint", ""), **details)
    if (known.code, known.exit_code) != (code, exit_code):
        error.code, error.exit_code = code, exit_code
    return error


def _classes() -> dict[tuple[str, int], type[CriuctlError]]:
    found: dict[tuple[str, int], type[CriuctlError]] = {}
    wanted = [CriuctlError]
    for known in wanted:  # grows meanwhile: a class comes before its subclasses
        if known.__init__ is CriuctlError.__init__:  # the other classes need more than what is sent
            found.setdefault((known.code, known.exit_code), known)
        wanted += known.__subclasses__()
    return found


def _size(value: Any) -> float:
    """Return its bytes as JSON; infinite if it is not JSON."""
    try:
        return len(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        return math.inf
