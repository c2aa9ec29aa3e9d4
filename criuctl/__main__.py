"""``criuctl`` on the PATH, and ``python -m criuctl``.

^C ends it as it ends any program until the command line is imported, which takes some hundredths of
a second, and serves signals.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

_STORING = frozenset({"dump", "restore"})


def program() -> NoReturn:
    """Run the program; see `criuctl.cli.main`."""
    # Python's own, which ends in a traceback
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # commands are short: what loading libraries makes is not garbage, and is much
    gc.set_threshold(200_000, 50, 50)
    at_end: Callable[[], None] | None = None
    if _speaks_to_s3(sys.argv[1:], os.environ):
        from .cli.streams import fill_standard_streams
        from .proc import early_process

        fill_standard_streams()
        early_process.begin("criuctl.store.boto3_process")
        at_end = early_process.end_waiting
    from .cli.main import program as run

    run(at_end)


def _speaks_to_s3(words: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether this looks like a command that needs an S3 client soon; a wrong guess does no
    lasting harm.
    """
    command = next((word for word in words if not word.startswith("-")), "")
    urls = [*words, environ.get("CRIUCTL_STORE", "")]
    return (
        command in _STORING
        and "--help" not in words
        and any("s3://" in url.lower() for url in urls)
    )


if __name__ == "__main__":
    program()
