"""What runs in the terminals that are compared: it echoes every byte, and answers ``F`` with a
flood of lines.

``payload.py BYTES LINE``, run with ``-I -S``: the terminal is made raw, so what is measured is the
way of the bytes.
"""

import os
import sys
import tty

READY, FLOOD, END = b"<ready>", b"F", b"<end of the flood>"
_BLOCK = 64 << 10


def main() -> None:
    """Echo until the terminal hangs up."""
    size = int(sys.argv[1])
    line = b"%s\r\n" % (b"one line of output, as a build or a log prints it, " * 2)[:78]
    block = (line * (_BLOCK // len(line) + 1))[: _BLOCK // len(line) * len(line)]
    tty.setraw(0)
    _write(READY)
    while key := os.read(0, 4096):
        if key != FLOOD:
            _write(key)
            continue
        left = size
        while left > 0:
            _write(block[:left])
            left -= len(block)
        _write(END)


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


if __name__ == "__main__":
    main()
