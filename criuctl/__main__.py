"""``criuctl`` on the PATH, and ``python -m criuctl``.

^C ends it as it ends any program until the command line is imported, which takes a tenth of a second, and serves signals.
"""

from __future__ import annotations

import signal
from typing import NoReturn


def program() -> NoReturn:
    """The program; see `criuctl.cli.main`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Python's own, which ends in a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli.main import program as run

    run()


if __name__ == "__main__":
    program()
