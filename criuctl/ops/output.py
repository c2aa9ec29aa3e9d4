"""A session's screen and output, and waiting for events in it."""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..errors import (
    Conflict,
    NoSuchProcess,
    NotFound,
    NotHeld,
    SessionGone,
    TimedOut,
    UsageError,
    WrongState,
)
from ..host.registry import Registry, exclusive_session
from ..proc.tree import ProcessIdentity
from ..session.client.matching import Find, Matched, Search, compiled, wait_for
from ..session.client.session import Event, Output
from ..session.screen.clipboard import WithoutClipboard
from ..session.screen.plain_text import strip
from ..session.screen.replay import replay
from ..session.screen.replay_range import REPLAY, first_whole
from ..session.screen.screen import Screen
from .logs import kept_output, left_output
from .sessions import check_seconds, connect, describe, ended_error

if TYPE_CHECKING:
    from ..session.client.session import Session

_LOOK = 0.05  # seconds between two looks at the foreground
_LOCK_LOOK = 0.05  # seconds between two looks at whether a dump has ended
_ENDED = ("exited", "lost")


def capture(
    config: Config,
    name: str,
    *,
    scrollback: bool = False,
    since: int | None = None,
    ansi: bool = False,
) -> dict[str, Any]:
    """Return the session's screen; or its scrollback; or its output from offset `since` on. An
    ended session has them, too.

    ``lines`` is text, with control sequences for the colours if `ansi`; ``offset`` is where the
    next capture continues.
    """
    screen_only = since is None and not scrollback
    try:
        with connect(config, name, role="observe") as session:
            status = session.hello["status"]
            if screen_only:
                screen = replay(session, status)
                output = Output(status["offset"], b"")
            else:
                output = session.read("start" if since is None else since, status["offset"])
    except SessionGone:
        status, base, data = kept_output(config, name)
        start = max(base, len(data) + base - REPLAY if screen_only else since or 0)
        output = Output(start, data[start - base :])
        if screen_only:
            screen = Screen(status["cols"], status["rows"])
            whole = 0 if output.offset == 0 else first_whole(output.data, full_screen=False)
            screen.feed(output.data[whole:])
            screen.end = output.end
    if not screen_only:
        screen = Screen(status["cols"], status["rows"], history=output.data.count(b"\n") + 1)
        screen.feed(output.data)
        screen.end = output.end
        lines = screen.scrollback(ansi=ansi)
    else:
        lines = screen.ansi() if ansi else screen.text()
        while lines and not lines[-1]:
            lines.pop()
    return {
        "session": name,
        "state": status["state"],
        "lines": lines,
        "from": output.offset,
        "offset": screen.end,
        "cursor": {
            "row": screen.cursor.y,
            "column": min(screen.cursor.x, screen.columns - 1),
            "visible": screen.visible,
        },
        "size": {"rows": status["rows"], "cols": status["cols"]},
        "alternate": bool(status.get("modes", {}).get("alternate", screen.alternate)),
        "title": screen.title,
    }


def follow(
    config: Config,
    name: str,
    show: Callable[[bytes], None],
    *,
    since: int | str = "now",
    ansi: bool = False,
) -> dict[str, Any]:
    """Pass the session's output from `since` on to `show`, until it ends; return its exit
    status.
    """
    try:
        connected = connect(config, name, role="observe")
    except SessionGone as gone:
        status, base, data = _ended(config, name, gone)
        data = (
            b"" if since == "now" else data[max(0, since - base) if isinstance(since, int) else 0 :]
        )
        if ansi and config.clipboard != "all":
            data = WithoutClipboard().feed(data)
        show(data if ansi else strip(data)[0])
        return {"session": name, "exit_code": status["exit_code"]}
    with connected as session:
        status = session.hello["status"]
        session.attach(since)
        ended = status["state"] in _ENDED
        code, carry, position = status["exit_code"], b"", -1
        watched = WithoutClipboard()  # as for every client that only watches
        while not (ended and position >= status["offset"]):
            message = session.receive(1.0 if ended else None)
            if message is None:
                break
            if isinstance(message, Output):
                position = message.end
                data = message.data
                if not ansi:
                    data, carry = strip(carry + data)
                elif config.clipboard != "all":
                    data = watched.feed(data)
                if data:
                    show(data)
            elif isinstance(message, Event) and message.name == "exit":
                code = message.body["exit_code"]
                break
        if carry.strip(b"\r"):
            show(strip(carry + b"\n")[0][:-1])
        return {"session": name, "exit_code": code}


def _ended(config: Config, name: str, gone: SessionGone) -> tuple[dict[str, Any], int, bytes]:
    """Return `left_output` of an ended session; otherwise raise `gone`."""
    status, base, data = left_output(config, name, gone)
    if status["state"] not in _ENDED:
        raise gone
    return status, base, data


# -- waiting


def wait_exit(config: Config, name: str, timeout: float | None) -> dict[str, Any]:
    """Wait until the session has ended."""
    check_seconds(timeout)
    try:
        session = connect(config, name, role="observe")
    except NotHeld:
        return _wait_unheld(config, name, timeout)
    except SessionGone:
        known = describe(config, name)
        if known["state"] == "exited":
            return {
                "session": name,
                "state": "exited",
                "exit_code": known["exit_code"],
                "exit_signal": known["exit_signal"],
            }
        raise
    with session:
        try:
            answer = session.wait_exit(timeout)
        except TimedOut as error:
            raise TimedOut(f"session {name!r} did not end in {timeout:g} s") from error
        return {
            "session": name,
            "state": answer.get("state", "exited"),
            "exit_code": answer["exit_code"],
            "exit_signal": answer["exit_signal"],
        }


def _wait_unheld(config: Config, name: str, timeout: float | None) -> dict[str, Any]:
    """Wait for a session without a holder, whose exit status is lost. Raise `SessionGone` when a
    dump ends it.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    lookup, state, gone = Registry(config).lookup, "running", True
    while state == "running":
        with suppress(NoSuchProcess):
            gone = (root := lookup(name)) is None or _gone(root, deadline)
        if not gone or (deadline is not None and time.monotonic() > deadline):
            raise TimedOut(f"session {name!r} did not end in {timeout:g} s")
        try:
            # a dump that ended it has recorded that
            with exclusive_session(config, name):
                known = describe(config, name)
        except Conflict:
            time.sleep(_LOCK_LOOK)
            continue
        except NotFound:  # it was killed
            state = "exited"
            continue
        state = known["state"]
        if state == "checkpointed":
            raise ended_error(known)
    return {"session": name, "state": state, "exit_code": None, "exit_signal": None}


def _gone(process: ProcessIdentity, deadline: float | None) -> bool:
    """Wait until it has ended; return False at the deadline."""
    pidfd = process.open_pidfd()
    try:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return bool(select.select([pidfd], [], [], left)[0])
    finally:
        os.close(pidfd)


def wait_idle(
    config: Config,
    name: str,
    seconds: float,
    timeout: float | None,
) -> dict[str, Any]:
    """Wait until the session has printed nothing for `seconds`, or has ended."""
    check_seconds(seconds)
    check_seconds(timeout)
    try:
        connected = connect(config, name, role="observe")
    except SessionGone as gone:
        status, base, data = _ended(config, name, gone)
        return {"session": name, "state": status["state"], "offset": base + len(data)}
    with connected as session:
        try:
            offset = session.wait_idle(seconds, timeout)
        except WrongState:  # it ended, and is silent from now on
            offset = session.status()["offset"]
        return {"session": name, "state": session.status()["state"], "offset": offset}


def wait_match(
    config: Config,
    name: str,
    pattern: str,
    since: int | None,
    timeout: float | None,
    *,
    search: Callable[[str, str], Matched | None] | None = None,
) -> dict[str, Any]:
    """Wait until `pattern` is in the session's output from `since` (the last input) on, without
    control sequences, and without the echo of what was typed.

    A server gives its own `search`, of a pattern in a text, which takes a limited time.
    """
    check_seconds(timeout)
    try:
        wanted = compiled(pattern)
    except re.error as error:
        raise UsageError(f"{pattern!r} is no regular expression: {error}") from error
    find: Find[Matched] = wanted.search if search is None else partial(search, pattern)
    try:
        connected = connect(config, name, role="observe")
    except SessionGone as gone:
        status, base, data = _ended(config, name, gone)
        begin = max(0, (status.get("input_offset", base) if since is None else since) - base)
        found = Search(find).add(base + begin, data[begin:], status.get("echoes", ()))
        if found is not None:
            return _matched(name, found, base + len(data))
        raise SessionGone(f"session {name!r} ended before {pattern!r} came") from gone
    with connected as session:
        # The answer to the last input may be there already; older output is not searched.
        place = "input" if since is None else since
        return _matched(name, *wait_for(session, pattern, find, place, timeout))


def _matched(name: str, match: Matched, offset: int) -> dict[str, Any]:
    return {"session": name, "match": match[0], "groups": list(match.groups()), "offset": offset}


def wait_prompt(
    config: Config,
    name: str,
    since: int | None,
    timeout: float | None,
) -> dict[str, Any]:
    """Wait until a shell is in the foreground and at its prompt; with `since`, only after output
    beyond that offset.
    """
    check_seconds(timeout)

    def met(status: dict[str, Any]) -> bool:
        foreground = status["foreground"] or {}
        return bool(foreground.get("at_prompt")) and (since is None or status["offset"] > since)

    with _observed(config, name) as session:
        status = _look_until(session, name, met, "a prompt came", "came to no prompt", timeout)
    shell = status["foreground"]["shell"]
    return {"session": name, "shell": shell, "offset": status["offset"]}


def wait_reading(config: Config, name: str, timeout: float | None) -> dict[str, Any]:
    """Wait until a program in the foreground waits for input of the terminal, and return which."""
    check_seconds(timeout)

    def met(status: dict[str, Any]) -> bool:
        return status["foreground"] is not None and bool(status["foreground"]["reading_tty"])

    before = "a program waited for input"
    with _observed(config, name) as session:
        status = _look_until(session, name, met, before, "waited for no input", timeout)
    return {"session": name, "foreground": status["foreground"], "offset": status["offset"]}


def _observed(config: Config, name: str) -> Session:
    """Connect to a holder that reports what is in the foreground; `WrongState` if it is too old."""
    session = connect(config, name, role="observe")
    if "foreground" not in session.hello["features"]:
        session.leave()
        raise WrongState(f"the holder of session {name!r} is of an older version")
    return session


def _look_until(
    session: Session,
    name: str,
    met: Callable[[dict[str, Any]], bool],
    before: str,
    late: str,
    timeout: float | None,
) -> dict[str, Any]:
    """Return the first status of the session that is as wanted.

    `SessionGone` if the session ends first, `TimedOut`.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        status = session.status()
        if status["state"] in _ENDED:
            raise SessionGone(f"session {name!r} ended before {before}")
        if met(status):
            return status
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimedOut(f"session {name!r} {late} in {timeout:g} s")
        time.sleep(_LOOK if left is None else min(_LOOK, left))
