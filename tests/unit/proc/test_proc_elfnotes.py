"""Build-ids of real and of made programs; nothing is read from malformed files."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from criuctl.proc.elfnotes import build_id

ID = bytes(range(20))


def elf(
    *,
    wide: bool = True,
    little: bool = True,
    note: bytes | None = None,
    offset: int | None = None,
    count: int = 2,
) -> bytes:
    """Return a program with two program headers; the second one is a note."""
    order = "<" if little else ">"
    if note is None:
        other = struct.pack(order + "III", 4, 8, 1) + b"GNU\0" + b"\1" * 8
        note = other + struct.pack(order + "III", 4, len(ID), 3) + b"GNU\0" + ID
    head = b"\x7fELF" + bytes([2 if wide else 1, 1 if little else 2]) + bytes(10)
    table, entry = 64, 56 if wide else 32
    start = table + 2 * entry if offset is None else offset
    if wide:
        head += struct.pack(
            order + "HHIQQQIHHHHHH", 2, 62, 1, 0, table, 0, 0, 64, entry, count, 0, 0, 0
        )
        load = struct.pack(order + "IIQQQQQQ", 1, 5, 0, 0, 0, 10, 10, 1)
        mark = struct.pack(order + "IIQQQQQQ", 4, 4, start, 0, 0, len(note), len(note), 4)
    else:
        head += struct.pack(
            order + "HHIIIIIHHHHHH", 2, 3, 1, 0, table, 0, 0, 52, entry, count, 0, 0, 0
        )
        load = struct.pack(order + "IIIIIIII", 1, 0, 0, 0, 10, 10, 5, 1)
        mark = struct.pack(order + "IIIIIIII", 4, start, 0, 0, len(note), len(note), 4, 4)
    return head.ljust(64, b"\0") + load + mark + note


def ask(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        return build_id(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("little", [True, False])
def test_both_classes_and_byte_orders(tmp_path: Path, wide: bool, little: bool) -> None:
    assert ask(tmp_path / "elf", elf(wide=wide, little=little)) == ID.hex()


def test_a_real_program() -> None:
    """The C library of this very process: its notes as the dynamic loader maps them would be the
    same.
    """
    path = next(
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libc.so" in line
    )
    fd = os.open(path, os.O_RDONLY)
    try:
        found = build_id(fd)
    finally:
        os.close(fd)
    assert len(found) in (32, 40)
    assert bytes.fromhex(found) in Path(path).read_bytes()[: 1 << 20]
    assert sys.platform == "linux"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x7fELF",
        b"#!/bin/sh\n" * 20,
        elf(note=b""),
        elf(note=struct.pack("<III", 4, 1 << 31, 3) + b"GNU\0" + ID),
        elf(note=struct.pack("<III", (1 << 32) - 1, 20, 3) + b"GNU\0" + ID),
        elf(note=struct.pack("<III", 4, 20, 3) + b"XYZ\0" + ID),
        elf(offset=1 << 21),
        elf(count=60000),
        elf()[:150],
    ],
)
def test_what_has_none(tmp_path: Path, content: bytes) -> None:
    assert ask(tmp_path / "other", content) == ""


@given(st.binary(max_size=200), st.integers(0, 250))
def test_nonsense_is_no_error(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
) -> None:
    content = bytearray(elf())
    content[at : at + len(noise)] = noise
    assert isinstance(ask(tmp_path_factory.getbasetemp() / "noise", bytes(content)), str)
