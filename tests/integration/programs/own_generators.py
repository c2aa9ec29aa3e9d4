"""Random numbers of this process, when it starts and in each later life, which it learns by waiting
for its session's generation number. Argument: the folder for the answers.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import select
import ssl
import sys
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from criuctl import inside
from criuctl.proc.elf_symbols import ElfSymbols

_IN_CLOSE_WRITE, _WIPEONFORK = 0x8, 18

Numbers = Callable[[], str]


def of_kernel() -> Numbers:
    """What the vDSO makes of a state in memory of the program, as glibc 2.41 and Go use it; the
    system call on a kernel without it (before Linux 6.11).
    """
    maps = Path("/proc/self/maps").read_text().splitlines()
    start = next(int(line.partition("-")[0], 16) for line in maps if line.endswith("[vdso]"))
    function = ElfSymbols(ctypes.string_at, start).function(b"__vdso_getrandom")
    if function is None:
        return lambda: os.urandom(8).hex()
    size, word = ctypes.c_size_t, ctypes.c_uint
    kind = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p, size, word, ctypes.c_void_p, size)
    call, needs, buffer = kind(function[0]), (word * 16)(), ctypes.create_string_buffer(8)
    assert call(None, 0, 0, ctypes.addressof(needs), 2**64 - 1) == 0
    libc.mmap.restype = ctypes.c_void_p
    state = libc.mmap(None, size(4096), needs[1], needs[2], -1, size(0))

    def numbers() -> str:
        assert call(ctypes.addressof(buffer), 8, 0, state, needs[0]) == 8
        return buffer.raw.hex()

    numbers()
    return numbers


path = os.environ["CRIUCTL_SESSION_DIR"] + "/generation"
libc = ctypes.CDLL(None)
watch = libc.inotify_init()
assert libc.inotify_add_watch(watch, path.encode(), _IN_CLOSE_WRITE) > 0
memory = mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(_WIPEONFORK)
memory[:] = b"x" * 8192
random.seed(7)
ssl.RAND_bytes(1)
kernel = of_kernel()
calls: list[str] = []


@inside.on_copy
def called() -> None:
    calls.append(inside.generation())


name = "first"
while True:
    values = {
        "openssl": ssl.RAND_bytes(8).hex(),
        "key": ec.generate_private_key(ec.SECP256R1()).private_numbers().private_value,
        "random": random.random(),
        "kernel": kernel(),
        "wiped": memory[:] == bytes(8192),
        "generation": inside.generation(),
    }
    memory[:] = b"x" * 8192
    Path(sys.argv[1], "." + name).write_text(json.dumps(values))
    os.rename(f"{sys.argv[1]}/.{name}", f"{sys.argv[1]}/{name}")
    os.read(watch, 4096)
    name = inside.generation()
    while name not in calls:
        select.select([], [], [], 0.01)
