"""One entry of the tables of CRIU's error messages, and the hints that several entries share.

Each entry is a pattern of CRIU's sentence (4.2; subsystem prefix and place taken off), a stable
code (the preflight's where it knows the same obstacle), what happened, and what to do.  Named
groups of the pattern can be used in both; ``pid`` and ``fd`` are also the process and descriptor
that it is about.

A dump waits until an obstacle is gone that a tree has only for a moment (`Remedy.passes`).  The
same is done for obstacles that the preflight refuses if they last: CRIU meets only those that have
appeared since.
"""

from __future__ import annotations

import re

from msgspec import Struct


class Remedy(Struct, frozen=True):
    """One known message of CRIU."""

    code: str
    pattern: re.Pattern[str]
    text: str
    hint: str
    about_descriptor: bool  # it is about the descriptor that CRIU was processing
    passes: bool  # it passes by itself: a dump tries again


def remedy(
    code: str, pattern: str, text: str, hint: str, *, fd: bool = False, passes: bool = False
) -> Remedy:
    """Return an entry; a hint to try again means that the obstacle passes."""
    return Remedy(code, re.compile(pattern), text, hint, fd, passes or hint == AGAIN)


AGAIN = "It passes by itself: try again."
CLOSE = "Have the program close it before the dump."
DROP = "Have the program drop the watch, or close what it keeps open of the file."
OLD_CRIU = "`criuctl doctor --fix` finds or installs a CRIU that works on this kernel."
ROOT = (
    "Run criuctl as root with all capabilities; some containers drop CAP_SYS_RESOURCE, "
    "CAP_SYS_ADMIN or CAP_NET_ADMIN."
)
PIDS = (
    "Restore with `--pids private`, or end the process that has the number (`criuctl restore "
    "--dry-run` names it)."
)
TRACED = (
    "process {pid} cannot be stopped: another program traces it, criuctl may not stop it, or it "
    "was just ending"
)
UNTRACE = (
    "End the tracer (gdb, strace, a profiler) or have it detach; run criuctl as root; or try again."
)
TERMINAL = (
    "Detach the program from the terminal (redirect its input and output), or start it as a "
    "session of criuctl."
)
