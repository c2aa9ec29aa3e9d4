"""The program of a holder: ``entry.py NAME (fresh FD | reexec FD | check FORMAT | warm FD)
RUN_FOLDER``.

NAME and RUN_FOLDER are there for a person who reads the process table.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Do what the command line says."""
    mode, argument = sys.argv[2], int(sys.argv[3])
    if mode == "fresh":
        from .fresh_start import start

        start(argument)
    elif mode == "warm":
        from .warm_start import serve

        serve(argument)
    elif mode == "reexec":
        from .reexec import resume

        resume(argument)
    elif mode == "check":
        from .reexec import check

        check(argument)
    else:
        raise KeyError(mode)
