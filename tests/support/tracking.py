"""What the tracking of writes leaves in processes, and who keeps it."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from .command import Home


def registered(pid: int) -> list[str]:
    """The flags of the mappings of a process whose writes are tracked."""
    flags = re.findall(r"^VmFlags:(.*)$", Path(f"/proc/{pid}/smaps").read_text(), re.MULTILINE)
    return [line for line in flags if " uw" in line]


def opened(pid: int) -> str:
    """What the descriptors of a process lead to."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            found.append(os.readlink(fd))
    return " ".join(found)


def keepers(home: Home) -> list[int]:
    """The PIDs of the keepers of this home."""
    folder = f"{home.run}/tracking/".encode()
    return [
        int(process.name)
        for process in Path("/proc").iterdir()
        if process.name.isdecimal() and any(word.startswith(folder) for word in _argv(process))
    ]


def _argv(process: Path) -> list[bytes]:
    try:
        return (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
