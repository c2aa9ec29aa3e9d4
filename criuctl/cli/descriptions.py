"""The outcomes of several things at once: a line for each as soon as it is known, or one element of
a JSON array.

Under --json every element is on its own line, after the ``[`` or the ``,``. A reader can take the
lines as they come, or the whole as one JSON value.
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
    """A JSON array that is printed element by element."""

    def __init__(self) -> None:
        self.begun = False

    def add(self, value: Any) -> None:
        """Print one more element."""
        write_result(("," if self.begun else "[") + json.dumps(value, default=jsonable))
        self.begun = True

    def close(self) -> None:
        """Print the end of the array."""
        write_result("]" if self.begun else "[]")


def print_failure(name: str, error: CriuctlError) -> None:
    """Print what failed and the hint."""
    tell(f"criuctl: {printable(name)}: {printable(error.message)}")
    if error.hint:
        tell(f"  hint: {printable(error.hint)}")


def print_each(
    app: App,
    outcomes: Iterable[T],
    print_outcome: Callable[[T], int],
    body: Callable[[T], Any],
    *,
    to_the_end: bool = False,
) -> list[int]:
    """Print each outcome, and return the exit codes.

    `print_outcome` prints it for people and returns its exit code; `body` is its JSON.

    An error that ends the loop, for example a signal, becomes the last element if others were
    printed before. A closed standard output ends the loop as well, except with `to_the_end`: then
    it is one more exit code.
    """
    array = JsonArray()
    codes: list[int] = []

    def print_one(outcome: T) -> int:
        if app.json:
            app.answered = True
            array.add(body(outcome))
        return print_outcome(outcome)

    print_it = insistent(print_one, codes) if to_the_end else print_one
    try:
        for outcome in outcomes:
            code = print_it(outcome)  # it may add to the codes, too
            codes.append(code)
    except (CriuctlError, OSError) as error:
        # a full disk, for example
        of_us = of_the_host(error) if isinstance(error, OSError) else error
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
            array.close()  # a bug, which is reported on standard error
        raise
    finally:
        if isinstance(outcomes, Generator):
            outcomes.close()  # when standard output is closed, the operations under way end now
    if app.json:
        array.close()
    return codes


def insistent(print_outcome: Callable[[T], int], codes: list[int]) -> Callable[[T], int]:
    """Make `print_outcome` continue when standard output is closed; add the exit code for that to
    `codes`.
    """

    def insists(outcome: T) -> int:
        try:
            return print_outcome(outcome)
        except (BrokenPipeError, ResultLost) as error:
            codes.append(_discard_output(error))
            return print_outcome(outcome)

    return insists


def _discard_output(error: BrokenPipeError | ResultLost) -> int:
    """Redirect a closed standard output to nowhere; return the exit code for it."""
    discard(1)
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    tell(f"criuctl: {error.message}")
    return error.exit_code
