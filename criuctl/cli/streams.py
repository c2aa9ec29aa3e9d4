"""The two streams: results on standard output, all else on standard error.

What goes wrong with a stream is never mistaken for the operation's failure.  A closed standard
error is ignored.  A closed reader of standard output raises BrokenPipeError, which `main` ends
quietly.  A result that cannot be written for another reason is an error of its own, `ResultLost`.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from typing import Any, TextIO

from ..errors import CriuctlError
from ..redact import redacted


class ResultLost(CriuctlError):
    """The operation ended, but its result could not be written to standard output."""

    code = "result-lost"


def write_result(text: str) -> None:
    """Print `text` and a newline on standard output, now.

    Raises BrokenPipeError when the reader has gone, `ResultLost` on any other failure (a full disk
    behind
    ``>`` above all).
    """
    _write(lambda stream: stream.write(text + "\n"))


def unheard(write: Callable[[], object]) -> bool:
    """`write` the result of what is done for good; whether nobody takes it, which is told, and is
    no failure of what was done.
    """
    try:
        write()
        return False
    except BrokenPipeError:
        discard(1)
        tell("criuctl: done, but the result could not be written: its reader has gone")
    except ResultLost as error:
        tell(f"criuctl: done, but {error.message}")
    return True


def write_bytes(data: bytes) -> None:
    """Print `data` as it is; raises as `write_result` does."""
    _write(lambda stream: stream.buffer.write(data))


def _write(write: Callable[[TextIO], object]) -> None:
    stream = sys.stdout
    if stream is None:
        raise ResultLost("the result could not be printed: standard output is closed")
    try:
        write(stream)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(1)
        raise ResultLost(f"the result could not be printed: {error.strerror or error}") from error


def tell(line: str) -> None:
    """Print one line, without credentials, on standard error; if nobody can read it, go on
    without.
    """
    stream = sys.stderr
    if stream is None:
        return
    try:
        stream.write(redacted(line) + "\n")
        stream.flush()
    except OSError:
        discard(2)  # a closed pipe, or a terminal that went away


def discard(descriptor: int) -> None:
    """Send what is still in the buffer of a broken stream nowhere, or the interpreter's own flush
    at exit would fail once more and change the exit code."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, descriptor)
    finally:
        os.close(null)


def fill_standard_streams() -> None:
    """What is closed among 0, 1 and 2 leads nowhere; else the next file would get its number, and
    be written messages into.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # which is given the lowest number that is free: this one
            os.open(os.devnull, os.O_RDWR)


def reader_gone() -> bool:
    """Has the reader of standard output gone?  (A broken pipe elsewhere is another matter.)"""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def jsonable(value: Any) -> Any:
    """For ``json.dumps(default=...)``: records by their own ``to_dict``, anything else as text."""
    to_dict = getattr(value, "to_dict", None)
    return to_dict() if to_dict is not None else str(value)
