"""The two streams: results on standard output, everything else on standard error.

An error of a stream is never reported as the operation's failure. A closed standard error is
ignored. A closed reader of standard output raises BrokenPipeError, which `main` ends silently. A
result that cannot be written for another reason is a separate error, `ResultLost`.
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
    """Print `text` and a newline on standard output, and flush.

    Raise BrokenPipeError when the reader has gone, `ResultLost` on any other failure (mostly a full
    disk behind ``>``).
    """
    _write(lambda stream: stream.write(text + "\n"))


def unheard(write: Callable[[], object]) -> bool:
    """Call `write` for the result of an operation that cannot be undone. Return whether the output
    is lost, which is reported but is not a failure of the operation.
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
    """Print `data` unchanged; raise as `write_result` does."""
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
    """Print one line, without credentials, on standard error; ignore a closed stream."""
    stream = sys.stderr
    if stream is None:
        return
    try:
        stream.write(redacted(line) + "\n")
        stream.flush()
    except OSError:
        discard(2)  # a closed pipe, or a terminal that is gone


def discard(descriptor: int) -> None:
    """Discard the data in the buffer of a broken stream. Otherwise the interpreter's flush at exit
    would fail again and change the exit code.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, descriptor)
    finally:
        os.close(null)


def fill_standard_streams() -> None:
    """Open /dev/null in the place of closed descriptors among 0, 1 and 2. Otherwise the next file
    would get that number, and messages would be written to it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # open returns the lowest free number: this one
            os.open(os.devnull, os.O_RDWR)


def reader_gone() -> bool:
    """Return whether the reader of standard output has gone; a broken pipe elsewhere is another
    matter.
    """
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def jsonable(value: Any) -> Any:
    """Convert for ``json.dumps(default=...)``: records by their ``to_dict``, anything else
    to text.
    """
    to_dict = getattr(value, "to_dict", None)
    return to_dict() if to_dict is not None else str(value)
