"""What the screen of a session costs: processor time of the emulator for 16 MiB of output, which is
all that a session keeps, by what a program prints.  It runs in this process.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from criuctl.session.screen.drawing import redraw
from criuctl.session.screen.screen import Screen

from .report import SUBJECT, Bound, Section

if TYPE_CHECKING:
    from .cases import Bench

_SIZE = 4 << 20  # measured; the time for all is estimated from it
_WHOLE = 16 << 20
_LINES = {
    "plain lines": "line {0} of the output of a program that prints much\r\n",
    "lines with colours": "[\x1b[32m{0}\x1b[0m] \x1b[1msrc/file{0}.c\x1b[0m compiled in 17 ms\r\n",
    "lines with wide characters": "größe {0} 世界の人々 ⚠️  and more\r\n",
    "places all over the screen": "\x1b[{1};{2}H\x1b[38;5;{1}mword {0}\x1b[m",
}
_BOUNDS = {"plain lines": Bound(1.0), "lines with colours": Bound(6.0)}


def screens(bench: Bench) -> Iterator[Section]:
    """Measure how fast output is shown, and how long a redraw takes."""
    section = Section("the screen of a session", {"case": "screens"})
    chance = random.Random(1)
    for label, line in _LINES.items():
        places = ((chance.randint(1, 24), chance.randint(1, 80)) for _ in range(_SIZE // 16))
        text = "".join(line.format(n, *place) for n, place in enumerate(places))
        output = text.encode()[:_SIZE]
        for _ in range(bench.runs):
            screen, began = Screen(80, 24, history=1 << 30), time.process_time()
            screen.feed(output)
            took = time.process_time() - began
            row = section.row(f"16 MiB: {label}", "s", _BOUNDS.get(label))
            row.add(SUBJECT, took * _WHOLE / len(output))
            began = time.process_time()
            redraw(screen, 24, 80)
            took = time.process_time() - began
            section.row("... drawn again", "ms").add(SUBJECT, took * 1000)
    yield section
