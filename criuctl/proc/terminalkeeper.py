"""Keep the master of an unused terminal.

A separate program: ``python terminalkeeper.py FD``.

A restored tree may have more terminals than its holder takes. They must not hang up, and output to
them must not block the program: it is read and discarded. The program ends when no process has the
terminal open any more.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Read until the terminal hangs up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    master = int(sys.argv[1])
    try:
        while os.read(master, 1 << 16):
            pass
    except OSError:
        pass  # EIO: all slaves are closed
    return 0


if __name__ == "__main__":
    sys.exit(main())
