"""The program that finds out for a holder where the cursor was.

The holder runs it by path, ``python -I cursor.py``, with the task as standard input.  The task is a
file: a line of JSON (``rows``, ``cols``, ``start``: the offset of the output that follows,
``whole``: it begins where a screen does, ``at``: offsets) and output of the session.  It is
overwritten with a JSON
object: offset -> [row, column], counted from 1.

It is a process of its own because the session's program chooses how much time and memory the
emulation of its output takes, and the holder must survive that.
"""

from __future__ import annotations

import json
import os
import resource
import sys

_SECONDS = 10  # of processor time
_MEMORY = 1 << 30


def main(fd: int = 0) -> None:
    """Read the task, and write the answer over it."""
    from criuctl.session.screen.screen import Screen

    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    with open(fd, "r+b", closefd=False) as file:
        file.seek(0)
        task, data = json.loads(file.readline()), file.read()
        # The middle of a line may be the middle of a sequence.
        at = 0 if task["whole"] else data.find(b"\n") + 1
        screen = Screen(task["cols"], task["rows"], history=0)
        found = {}
        for place in task["at"]:
            end = max(at, place - task["start"])
            screen.feed(data[at:end])
            at = end
            found[place] = screen.cursor_report()
        file.seek(0)
        file.truncate()
        file.write(json.dumps(found).encode())


if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(__file__ + "/../../../.."))
    main()
