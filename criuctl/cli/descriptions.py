"""What becomes of several things at once: a line for each as soon as it is known, or one element of
a JSON array.

Under --json every element stands on a line of its own, behind the ``[`` or the ``,``: whoever reads
along takes lines, whoever waits for the end has one JSON value.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

from ..errors import CriuctlError, of_the_host
from .app import App
from .streams import ResultLost, discard, jsonable, tell, write_result
from .text import printable

T = TypeVar("T")


class JsonArray:
    """The array, as it grows."""

    def __init__(self) -> None:
        self.begun = False

    def add(self, value: Any) -> None:
        """Print one more element."""
        write_result(("," if self.begun else "[") + json.dumps(value, default=jsonable))
        self.begun = True

    def close(self) -> None:
        """Print its end."""
        write_result("]" if self.begun else "[]")


def tell_failure(name: str, error: CriuctlError) -> None:
    """What has failed, and what to do about it."""
    tell(f"criuctl: {printable(name)}: {printable(error.message)}")
    if error.hint:
        tell(f"  hint: {printable(error.hint)}")


def tell_each(
    app: App,
    outcomes: Iterable[T],
    told: Callable[[T], int],
    body: Callable[[T], Any],
    *,
    to_the_end: bool = False,
) -> list[int]:
    """Tell of each outcome: `told` prints it for people and gives its exit code, `body` is its
    JSON.  The exit codes.

    What ends it before its time, a signal say, is the last element once there are others.  When
    nobody listens any more, that does, too, unless all is to be done `to_the_end`: then it is one
    more exit code.
    """
    array = JsonArray()
    codes: list[int] = []

    def tell_of(outcome: T) -> int:
        if app.json:
            app.answered = True
            array.add(body(outcome))
        return told(outcome)

    telling = insistent(tell_of, codes) if to_the_end else tell_of
    try:
        for outcome in outcomes:
            code = telling(outcome)  # which may add to the codes, too
            codes.append(code)
    except (CriuctlError, OSError) as error:
        of_us = of_the_host(error) if isinstance(error, OSError) else error  # a full disk, say
        if of_us is None or not array.begun:
            raise
        array.add({"error": of_us.to_dict()})
        codes.append(of_us.exit_code)
    except KeyboardInterrupt as interrupt:
        if not array.begun:
            raise
        number = int(getattr(interrupt, "number", signal.SIGINT))
        message = f"stopped by {signal.Signals(number).name}"
        array.add(
            {
                "error": {
                    "code": "interrupted",
                    "exit_code": 128 + number,
                    "message": message,
                    "hint": "",
                }
            }
        )
        codes.append(128 + number)
    except Exception:
        if array.begun:
            array.close()  # a bug, which is told on standard error
        raise
    finally:
        if isinstance(outcomes, Generator):
            outcomes.close()  # when nobody listens any more, what is under way ends now
    if app.json:
        array.close()
    return codes


def insistent(told: Callable[[T], int], codes: list[int]) -> Callable[[T], int]:
    """`told`, which goes on when nobody listens any more; the exit code that tells of that is added
    to `codes`.
    """

    def insists(outcome: T) -> int:
        try:
            return told(outcome)
        except (BrokenPipeError, ResultLost) as error:
            codes.append(_unheard(error))
            return told(outcome)

    return insists


def _unheard(error: BrokenPipeError | ResultLost) -> int:
    """Standard output takes nothing any more, and leads nowhere from here on; the exit code that
    tells.
    """
    discard(1)
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    tell(f"criuctl: {error.message}")
    return error.exit_code
