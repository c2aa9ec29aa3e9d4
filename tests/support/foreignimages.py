"""CRIU's images and tar headers, as anybody could write them."""

from __future__ import annotations

import struct
from typing import Any

from criuctl.criu import images, schema


def image(kind: str, messages: list[Any]) -> bytes:
    """The content of an image of CRIU's."""
    parts = [images.magics(kind)]
    for message in messages:
        body = message.SerializeToString()
        parts += [struct.pack("<I", len(body)), body]
    return b"".join(parts)


def pstree(*pids: int) -> bytes:
    cls = schema.message("PSTREE")
    return image("PSTREE", [cls(pid=pid, ppid=0, pgid=1, sid=1, threads=[pid]) for pid in pids])


def header(name: bytes, kind: bytes, size: int) -> bytes:
    """The header of an archive's member."""
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108] = b"0000644\0"
    block[108:116] = block[116:124] = b"0000000\0"
    block[124:136] = (
        f"{size:011o}\0".encode() if size < 8 << 30 else b"\x80" + size.to_bytes(11, "big")
    )
    block[136:148] = b"00000000000\0"
    block[148:156] = b" " * 8
    block[156:157] = kind
    block[257:265] = b"ustar\x0000"
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block)
