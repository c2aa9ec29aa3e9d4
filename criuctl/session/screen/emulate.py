"""The program that emulates a session's terminal for its holder.

The holder runs it by path, ``python -I emulate.py``, with the task as standard input.  The task is
a file: a line of JSON, and output of the session.  Keys of the JSON: ``rows``, ``cols``; ``drawn``:
so many bytes before the output draw the screen as it was (`drawing.redraw`); ``start``: the offset
of the output; ``whole``: it begins where a screen does; ``at``: offsets.  The file is overwritten
with a JSON object.  ``cursors``: offset -> [row, column], counted from 1; ``screen``: the bytes, as
Latin-1, that draw the screen behind all of the output.

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
    from criuctl.session.screen.drawing import redraw
    from criuctl.session.screen.replay_range import first_whole
    from criuctl.session.screen.screen import Screen

    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    with open(fd, "r+b", closefd=False) as file:
        file.seek(0)
        task = json.loads(file.readline())
        if not task["at"]:
            os.nice(10)  # the session does not wait for it
        drawn, data = file.read(task["drawn"]), file.read()
        screen = Screen(task["cols"], task["rows"], history=0)
        screen.feed(drawn)
        at = 0 if task["whole"] else first_whole(data, full_screen=screen.alternate)
        cursors = {}
        for place in task["at"]:
            end = max(at, place - task["start"])
            screen.feed(data[at:end])
            at = end
            cursors[place] = screen.cursor_report()
        screen.feed(data[at:])
        shown = redraw(screen, screen.lines, screen.columns) + screen.pending
        file.seek(0)
        file.truncate()
        file.write(json.dumps({"cursors": cursors, "screen": shown.decode("latin-1")}).encode())


if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(__file__ + "/../../../.."))
    main()
