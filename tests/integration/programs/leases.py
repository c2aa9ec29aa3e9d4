"""Files with leases (fcntl F_SETLEASE), as file servers hold them: a process that opens one of them
breaks its lease, which ends the program.
"""

from __future__ import annotations

import fcntl
import os

from animal import Check, path, serve

WANTED = {
    "read": (os.O_RDONLY, fcntl.F_RDLCK),
    "both": (os.O_RDWR, fcntl.F_WRLCK),
    "written": (os.O_WRONLY, fcntl.F_WRLCK),
}
CONTENT = b"nobody else has this open\n"

files = {}
for name, (mode, kind) in WANTED.items():
    with open(path(name), "wb") as file:
        file.write(CONTENT)
    files[name] = os.open(path(name), mode)
    # The signal that it is to be given up ends a program that does not expect it.
    fcntl.fcntl(files[name], fcntl.F_SETLEASE, kind)


def check(found: Check) -> None:
    for name, (_mode, kind) in WANTED.items():
        found.equal(f"lease of {name}", fcntl.fcntl(files[name], fcntl.F_GETLEASE), kind)
    found.equal("contents", os.pread(files["both"], 100, 0), CONTENT)


serve(check)
