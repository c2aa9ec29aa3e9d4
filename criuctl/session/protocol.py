"""The wire protocol of a holder: preface, frames, and the numbers that both sides share.

PROTOCOL.md is its reference.  A `Decoder` takes what the socket gives and yields whole frames; it
holds at most one incomplete frame, and refuses a length above its limit before it keeps a byte of
the body.  The header of an output frame is made separately from the bytes, so that a sender can
pass the log's own memory to the kernel (``sendmsg``).

Both sides import this module, and there may be two hundred idle holders: it uses the standard
library only.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from ..quoting import quoted

MAGIC = "criuctl-session"
VERSION = 1  # the newest that this program speaks
OLDEST = 1  # two versions back stay readable
FEATURES = (
    *("lease", "checkpoint", "adopt", "spawn", "reexec", "standstill", "settle"),
    *("steps", "foreground", "commands", "hold", "echoes", "inside", "screen", "environment"),
)

MAX_PREFACE = 128
MAX_FRAME = 1 << 20  # either way
OUTPUT_PIECE = 256 << 10  # bytes of output in one frame; larger gains nothing
MAX_HELD_INPUT = 1 << 20
MAX_FDS = 16

JSON, OUTPUT, DATA, INPUT = b"JODI"

KINDS = ("human", "agent", "service")
ROLES = ("observe", "write", "admin")  # each includes those before it
STATES = ("running", "paused", "checkpointed", "exited", "lost")
DEFAULT_TTL, MAX_TTL = 30.0, 3600.0
MAX_HOLD = 86400.0  # seconds that a lease may be kept for an operator that is not connected
ANY = "*"  # as a name: every operator of a kind
OWN = "criuctl-"  # begins the names of criuctl's own services
DEFAULT_GRACE = 5.0
MAX_GRACE = 3600
ANSWER_TIMEOUT = 30.0  # seconds that a client waits for an answer
RESTORES = "criuctl-restore"  # the operator that brings a restored tree
MOVED_LINGER = 60.0  # seconds for clients to follow a session that has moved

_HEAD = struct.Struct(">IB")
_OUTPUT = struct.Struct(">IBQ")
_DATA = struct.Struct(">IBIQ")
_INPUT = struct.Struct(">IBI")
_U64 = struct.Struct(">Q")
_DATA_BODY = struct.Struct(">IQ")
_U32 = struct.Struct(">I")

Frame = tuple[int, bytes]


def state_hint(state: str, name: str) -> str:
    """Return what lets a session in this state go on, as a hint; "" for none."""
    command = {"paused": "resume", "checkpointed": "restore"}.get(state)
    return f"`criuctl {command} {quoted(name)}` lets it go on." if command else ""


class ProtocolError(Exception):
    """The other side does not speak this protocol, or breaks it; the connection cannot go on."""


def preface(program: str, oldest: int = OLDEST, newest: int = VERSION) -> bytes:
    """Return the first line that each side sends."""
    return f"{MAGIC} {oldest} {newest} {program}\n".encode()


def common_version(line: bytes, oldest: int = OLDEST, newest: int = VERSION) -> int:
    """Return the version that both sides speak.  `line` is the other side's preface."""
    words = line.decode("ascii", "replace").split(" ", 3)
    if len(words) < 3 or words[0] != MAGIC or not (words[1].isdecimal() and words[2].isdecimal()):
        raise ProtocolError("the other side does not speak criuctl's session protocol")
    theirs_oldest, theirs_newest = int(words[1]), int(words[2])
    version = min(newest, theirs_newest)
    if version < max(oldest, theirs_oldest):
        raise ProtocolError(
            f"no common protocol version: {oldest} to {newest} here, {theirs_oldest} to "
            f"{theirs_newest} there"
        )
    return version


def json_frame(message: dict[str, Any]) -> bytes:
    """Return a message as a frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _HEAD.pack(len(body) + 1, JSON) + body


def output_head(offset: int, size: int) -> bytes:
    """Return what precedes `size` bytes of output in a frame ``O``."""
    return _OUTPUT.pack(size + 9, OUTPUT, offset)


def data_head(request: int, offset: int, size: int) -> bytes:
    """Return what precedes `size` bytes of output in a frame ``D``."""
    return _DATA.pack(size + 13, DATA, request, offset)


def input_frame(request: int, data: bytes) -> bytes:
    """Return input as a frame ``I``."""
    return _INPUT.pack(len(data) + 5, INPUT, request) + data


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the object of a frame ``J``; `ProtocolError`."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError("a message is not a JSON object")
    return message


def parse_output(body: bytes) -> tuple[int, memoryview]:
    """Return offset and bytes of a frame ``O``."""
    if len(body) < 8:
        raise ProtocolError("an output frame is too short")
    return _U64.unpack_from(body)[0], memoryview(body)[8:]


def parse_data(body: bytes) -> tuple[int, int, memoryview]:
    """Return request, offset and bytes of a frame ``D``."""
    if len(body) < 12:
        raise ProtocolError("a data frame is too short")
    request, offset = _DATA_BODY.unpack_from(body)
    return request, offset, memoryview(body)[12:]


def parse_input(body: bytes) -> tuple[int, bytes]:
    """Return request and bytes of a frame ``I``."""
    if len(body) < 4:
        raise ProtocolError("an input frame is too short")
    return _U32.unpack_from(body)[0], body[4:]


class Decoder:
    """Turns a stream of bytes into the preface and frames."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self.version = 0  # 0 until the other side's preface has come
        self._max_frame = max_frame
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> None:
        """Take bytes that were received."""
        self._buffer += data

    @property
    def held(self) -> bytes:
        """Return the received part of an incomplete frame."""
        return bytes(self._buffer)

    def frames(self) -> Iterator[Frame]:
        """Yield the complete frames, as (type, payload); `ProtocolError` if the stream is
        broken.
        """
        buffer = self._buffer
        if not self.version and not self._preface():
            return
        at = 0
        try:
            while len(buffer) - at >= 5:
                length, kind = _HEAD.unpack_from(buffer, at)
                if not 1 <= length <= self._max_frame:
                    raise ProtocolError(f"a frame of {length} bytes")
                end = at + 4 + length
                if len(buffer) < end:
                    break
                with memoryview(buffer) as view:
                    body = bytes(view[at + 5 : end])
                at = end
                yield kind, body
        finally:
            del buffer[:at]

    def _preface(self) -> bool:
        end = self._buffer.find(b"\n", 0, MAX_PREFACE)
        if end < 0:
            if len(self._buffer) >= MAX_PREFACE:
                raise ProtocolError("the other side does not speak criuctl's session protocol")
            return False
        self.version = common_version(bytes(self._buffer[:end]))
        del self._buffer[: end + 1]
        return True
