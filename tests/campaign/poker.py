"""Write into another process, as it asks for in a file: ``python -S poker.py FOLDER``.

By process_vm_writev(2), /proc/PID/mem and ptrace(2) in turn. It ends with its standard input.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import struct
import sys
import time

CELL, LANES = 64 << 10, 32
REQUEST = struct.Struct("=5Q")
MASK = (1 << 64) - 1
ATTACH, DETACH, POKE = 16, 17, 5
libc = ctypes.CDLL(None, use_errno=True)
libc.process_vm_writev.argtypes = [
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_size_t) * 2,
    *[ctypes.c_size_t],
]
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def words(key: int) -> bytes:
    """What a cell with this key holds."""
    step = 0x9E3779B97F4A7C15
    return struct.pack(f"={CELL // 8}Q", *(((key + i) * step) & MASK for i in range(CELL // 8)))


def by_call(pid: int, address: int, data: bytes) -> bool:
    buffer = ctypes.create_string_buffer(data, len(data))
    ours = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), len(data))
    theirs = (ctypes.c_size_t * 2)(address, len(data))
    return bool(libc.process_vm_writev(pid, ours, 1, theirs, 1, 0) == len(data))


def by_mem(pid: int, address: int, data: bytes) -> bool:
    fd = os.open(f"/proc/{pid}/mem", os.O_WRONLY)
    try:
        return os.pwrite(fd, data, address) == len(data)
    finally:
        os.close(fd)


def by_ptrace(pid: int, address: int, data: bytes) -> bool:
    """Poke a few words; the others by the other way: tracing keeps dumps away."""
    if libc.ptrace(ATTACH, pid, None, None):
        return by_call(pid, address, data)
    try:
        os.waitpid(pid, 0x40000000)
        for at in range(0, 64, 8):
            libc.ptrace(POKE, pid, address + at, int.from_bytes(data[at : at + 8], "little"))
    finally:
        libc.ptrace(DETACH, pid, None, None)
    return by_call(pid, address + 64, data[64:])


def main() -> None:
    """Serve the requests."""
    os.chdir(sys.argv[1])
    with open("requests", "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    served = 0
    while not select.select([0], [], [], 0.002)[0]:
        for at in range(0, LANES * REQUEST.size, REQUEST.size):
            number, done, address, key, pid = REQUEST.unpack_from(memory, at)
            if number == done or not pid:
                continue
            served += 1
            way = by_ptrace if served % 40 == 0 else (by_call, by_mem)[served % 2]
            try:
                data = words(key)
                ours = os.path.samefile(f"/proc/{pid}/cwd", ".")
                # It may have been taken back, because another process has this PID now.
                ours = ours and REQUEST.unpack_from(memory, at)[0] == number
                if ours and way(pid, address, data):
                    struct.pack_into("=Q", memory, at + 8, number)
            except OSError:
                time.sleep(0.01)


main()
