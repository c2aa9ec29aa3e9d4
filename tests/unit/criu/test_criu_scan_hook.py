"""The hook in CRIU's ioctl(): what it finds in a program, and what it answers."""

from __future__ import annotations

import ctypes
import ctypes.util
import mmap
import os
import socket
import struct
import sys
import threading

import pytest

from criuctl.config import Config
from criuctl.criu import binary, call_table, scan_hook

SCAN = 0xC0606610


def test_the_pointer_and_the_function_are_found() -> None:
    with open(binary.find(Config()).argv[-1], "rb") as file:
        assert call_table.slot(file.read(), "ioctl")
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps") as maps:
        first = next(line for line in maps if "/libc.so." in line or "/libc-" in line)
    base = int(first.split("-")[0], 16)
    address = ctypes.cast(libc.ioctl, ctypes.c_void_p).value
    with open(first.split()[-1], "rb") as file:
        assert base + call_table.function(file.read(), "ioctl") == address


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF\x02\x01" + bytes(58)])
def test_other_files_are_refused(content: bytes) -> None:
    for look in (call_table.slot, call_table.function):
        with pytest.raises(ValueError, match="not a"):
            look(content, "ioctl")
    with open(sys.executable, "rb") as file, pytest.raises(ValueError, match="no_such"):
        call_table.slot(file.read(), "no_such")


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="only known for x86-64")
def test_the_code_asks_for_scans_and_passes_all_else_on() -> None:
    """It is run here, in this process, in place of ioctl()."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    libc = ctypes.CDLL(None, use_errno=True)
    original = ctypes.cast(libc.ioctl, ctypes.c_void_p).value
    assert original is not None
    code = scan_hook._code(theirs.fileno(), original)
    page = mmap.mmap(
        -1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE | 4
    )
    page[: len(code)] = code
    place = ctypes.addressof(ctypes.c_char.from_buffer(page))
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)(place)
    calls = []

    def answer(answers: list[int]) -> None:
        for one in answers:
            address, command, fd = struct.unpack("=QQQ", ours.recv(64))
            calls.append((address, command, fd & 0xFFFFFFFF))
            ours.sendall(struct.pack("=q", one))

    thread = threading.Thread(target=answer, args=([7, -1, -4096],))
    thread.start()
    assert function(5, SCAN, 0x1234) == 7
    assert function(6, SCAN, 0x1234) == -1
    assert function(-1, SCAN, None) == -1  # from the kernel: a bad descriptor
    thread.join()
    assert calls == [(0x1234, SCAN, 5), (0x1234, SCAN, 6), (0, SCAN, 0xFFFFFFFF)]
    unread = ctypes.c_int(-1)
    assert function(theirs.fileno(), 0x541B, ctypes.addressof(unread)) == 0  # FIONREAD
    assert unread.value == 0
    ours.close()
    assert function(5, SCAN, None) == -1  # criuctl was killed
    theirs.close()


@pytest.mark.parametrize(
    ("hidden", "left"),
    [
        ([], [(10, 20)]),
        ([(0, 30)], []),
        ([(10, 12), (15, 20)], [(12, 15)]),
        ([(0, 11), (13, 14), (19, 40)], [(11, 13), (14, 19)]),
        ([(0, 10), (20, 30)], [(10, 20)]),
    ],
)
def test_what_is_left_of_a_range(
    hidden: list[tuple[int, int]], left: list[tuple[int, int]]
) -> None:
    assert list(scan_hook._left(10, 20, hidden)) == left


def test_where_anything_is_hidden() -> None:
    """Of all processes; ranges that overlap or touch are one."""
    hidden = {1: [(4, 8), (20, 24)], 2: [(6, 10), (24, 28)], 3: [(4, 8)], 4: []}
    assert scan_hook._united(hidden) == ([4, 20], [10, 28])
    assert scan_hook._united({}) == ([], [])
