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
from pathlib import Path

from criuctl import inside

_IN_CLOSE_WRITE, _WIPEONFORK = 0x8, 18

path = os.environ["CRIUCTL_SESSION_DIR"] + "/generation"
libc = ctypes.CDLL(None)
watch = libc.inotify_init()
assert libc.inotify_add_watch(watch, path.encode(), _IN_CLOSE_WRITE) > 0
memory = mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(_WIPEONFORK)
memory[:] = b"x" * 8192
random.seed(7)
ssl.RAND_bytes(1)
calls: list[str] = []


@inside.on_copy
def called() -> None:
    calls.append(inside.generation())


name = "first"
while True:
    values = {
        "openssl": ssl.RAND_bytes(8).hex(),
        "random": random.random(),
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
