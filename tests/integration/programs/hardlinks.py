"""One file under several names.  Arguments, NAME:HOW: each name is opened to read, write (at an
offset) or append.

Those that begin with a minus sign are deleted then.  HOW none: the name is only there; map: it is
mapped, shared, and closed.
"""

from __future__ import annotations

import mmap
import os
import sys

from animal import Check, path, serve

FLAGS = {"read": os.O_RDONLY, "write": os.O_RDWR, "append": os.O_RDWR | os.O_APPEND}
names = dict(word.split(":") for word in sys.argv[2:])
opened: dict[str, int] = {}
maps: list[mmap.mmap] = []
with open(path("first"), "w") as file:
    file.write("as it was\n")
for name in names:
    os.makedirs(os.path.dirname(path(name.lstrip("-"))), exist_ok=True)
    os.link(path("first"), path(name.lstrip("-")))
os.unlink(path("first"))
for name, how in names.items():
    if how == "map":
        with open(path(name.lstrip("-")), "r+b") as writable:
            maps.append(mmap.mmap(writable.fileno(), 0))
    elif how != "none":
        opened[name] = os.open(path(name.lstrip("-")), FLAGS[how])
    if how == "write":
        os.lseek(opened[name], 0, os.SEEK_END)
for name in names:
    if name.startswith("-"):
        os.unlink(path(name[1:]))


def check(found: Check) -> None:
    found.facts |= {
        "inodes": {name: os.fstat(fd).st_ino for name, fd in opened.items()},
        "links": {name: os.fstat(fd).st_nlink for name, fd in opened.items()},
        "texts": {name: os.pread(fd, 4096, 0).decode() for name, fd in opened.items()},
        "mapped": [memory[:].decode() for memory in maps],
    }
    for name, fd in opened.items():
        if names[name] != "read":
            os.write(fd, b"more\n")


serve(check)
