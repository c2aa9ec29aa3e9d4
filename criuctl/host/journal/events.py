"""Events, and the one place where they are made: the end of an operation.

`recorded` decorates the function of an operation, so its caller does not matter: a command, a
schedule, a supervisor, a program.  When that function returns or raises, what it was about and how
it ended (`operation_facts`) is appended to the event log, and forwarded if the configuration says
so (`event_sinks`).
An operation within an operation (the dump in a migration) is not an event of its own; but what a
schedule, maintenance or a supervisor does is one, and so is their end.  What changed nothing, for
example a dry run, is no event.

RULE: an event never changes how an operation ends.  One that cannot be written (full disk, no
rights) is dropped, with a warning if the operation has a reporter; its number was not used, so the
next event has it.

An operation that `kill -9`, or the end of the host, cut off is reported by the next operation
(`under_way`): interrupted, exit code 137, error ``killed``, with the time when it began.

An event has: seq, time, host, operation, uid, session, session_id, incarnation, epoch (of the lease
here), checkpoint, number, exit_code (as the command would end), outcome (done, degraded, failed,
interrupted), error (its code), seconds, frozen_ms, total_ms, processes, bytes, connections (counts
by outcome), warnings (how many), warning_codes; of several sessions: sessions, states (counts);
schedule.  Empty keys are left out.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, ParamSpec, TypeVar, cast

from ...config import Config
from ...errors import CriuctlError, of_the_host
from ...report import Reporter
from ...session.names import valid_name
from ..identity import host_name
from ..registry import Registry
from . import under_way
from .event_log import EventLog, now

P = ParamSpec("P")
R = TypeVar("R")
Facts = dict[str, Any]
About = Callable[[tuple[Any, ...], Mapping[str, Any]], Facts]

_COPIED = (
    "session",
    "checkpoint",
    "number",
    "incarnation",
    "frozen_ms",
    "total_ms",
    "processes",
    "bytes",
    "lazy",
    "host",
)
DEGRADED = 11
BUG = 1
KILLED = 128 + signal.SIGKILL


def recorded(
    operation: str | Callable[[Mapping[str, Any]], str],
    describe: Callable[[Any], Iterable[Facts]] | None = None,
    *,
    about: About | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Record each end of the function, whose first argument is the configuration.

    `operation` may depend on the keyword arguments; "" is none.  `describe` returns the facts of a
    result, one mapping for each event (by default one, from the result's own fields); `about`
    returns, from the arguments, those that are known also when it fails.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def inner(*args: P.args, **kwargs: P.kwargs) -> R:
            name = operation if isinstance(operation, str) else operation(kwargs)
            config = args[0]
            if not name or not isinstance(config, Config):
                return function(*args, **kwargs)
            reporter = kwargs.get("reporter")
            reported = len(getattr(reporter, "codes", ()))
            # before: a session that was ended is not known afterwards
            known = _named(about, args, kwargs)
            began = time.monotonic()
            try:
                with _under_way(config, name, known):
                    result = function(*args, **kwargs)
            except BaseException as error:
                _record(config, name, [known | failure(error)], began, reporter, reported)
                raise
            _record(config, name, _described(describe, result, known), began, reporter, reported)
            return result

        return inner

    return decorate


def recorded_each(
    operation: str,
    describe: Callable[[Sequence[Any]], Iterable[Facts]],
    *,
    about: About | None = None,
) -> Callable[[Callable[P, Iterator[R]]], Callable[P, Iterator[R]]]:
    """Do the same for a generator: one event when it has ended; `describe` gets what was yielded
    until then.
    """

    def decorate(function: Callable[P, Iterator[R]]) -> Callable[P, Iterator[R]]:
        @functools.wraps(function)
        def inner(*args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
            config, reporter = cast("Config", args[0]), kwargs.get("reporter")
            reported = len(getattr(reporter, "codes", ()))
            known = _named(about, args, kwargs)
            began = time.monotonic()
            found: list[R] = []
            try:
                each = cast("Generator[R, None, None]", function(*args, **kwargs))
                with _under_way(config, operation, known), closing(each):
                    for one in each:
                        found.append(one)
                        yield one
            except BaseException as error:
                cut = (_described(describe, found, known) or [known])[0] | failure(error)
                _record(config, operation, [cut], began, reporter, reported)
                raise
            _record(
                config, operation, _described(describe, found, known), began, reporter, reported
            )

        return inner

    return decorate


def record(config: Config, operation: str, facts: Iterable[Facts], *, seconds: float = 0.0) -> str:
    """Append one event for each of `facts`; return what went wrong, "" if nothing did.  Never
    raises.
    """
    try:
        bodies = [_body(config, operation, one, seconds) for one in facts]
        events = EventLog(config.state_dir).append(bodies)
    except OSError as error:
        return f"{error.strerror or error}"
    # the operation itself is done, and must not fail because of its own log
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if config.events == "none" or not events:
        return ""
    from .event_sinks import forward

    return forward(config.events, events)


@contextmanager
def _under_way(config: Config, operation: str, known: Facts) -> Iterator[None]:
    """Report what was killed before, and note this operation, in case it is killed."""
    facts: Facts = {"operation": operation}
    with suppress(Exception):
        for one in under_way.cut_off(config.state_dir):
            record(
                config,
                str(one.pop("operation", "")),
                [one | {"exit_code": KILLED, "error": "killed"}],
            )
        facts |= {"uid": _uid(), "began": now()} | known_session(config, known) | known
    with under_way.noted(config.state_dir, facts):
        yield


def _record(
    config: Config, name: str, facts: list[Facts], began: float, reporter: Any, reported: int
) -> None:
    seconds = round(time.monotonic() - began, 3)
    if codes := list(getattr(reporter, "codes", ()))[reported:]:
        facts = [one | {"warning_codes": codes} for one in facts]
        del reporter.codes[reported:]  # a reporter may live for years
    trouble = record(config, name, facts, seconds=seconds)
    if trouble and isinstance(reporter, Reporter):
        with suppress(Exception):
            reporter.warning(
                f"this {name} is not in the event log: {trouble}",
                f"`criuctl events` shows what is; it is in {config.state_dir}.",
            )


def _body(config: Config, operation: str, facts: Facts, seconds: float) -> Facts:
    code = facts.get("exit_code", 0)
    outcome = {0: "done", DEGRADED: "degraded"}.get(code, "interrupted" if code > 128 else "failed")
    body: Facts = {"host": host_name(config), "operation": operation, "uid": _uid()}
    body |= (
        known_session(config, facts)
        | {"exit_code": code, "outcome": outcome, "seconds": seconds}
        | facts
    )
    return {key: value for key, value in body.items() if value not in (None, "", [], {})}


def _uid() -> int:
    """Return the user who asked for it, also behind sudo."""
    try:
        with open("/proc/self/loginuid") as file:
            number = int(file.read())
        return number if number != 0xFFFFFFFF else os.getuid()
    except (OSError, ValueError):
        return os.getuid()


def known_session(config: Config, facts: Facts) -> Facts:
    """Return what this host knows of the session that the event is about; the result's own fields
    come first.
    """
    name, pid = facts.get("session"), facts.get("pid")
    if not name and pid:
        name = next((r.name for r in Registry(config).of_pid(pid) if r.alive()), None)
    if not name or not valid_name(name):
        return {}
    found = Registry(config).get(name)
    if found is None:
        return {"session": name}
    epochs = [int(claimed.get("epoch", 0)) for claimed in found.leases.values()]
    known: Facts = {"session": name, "session_id": found.id, "incarnation": found.incarnation}
    return known | ({"epoch": max(epochs)} if epochs else {})


# -- the facts of an end


def failure(error: BaseException) -> Facts:
    """Return the exit code and the code of an error."""
    if isinstance(error, CriuctlError):
        return {"exit_code": error.exit_code, "error": error.code}
    # the latter: the program that received the results was interrupted
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        return {
            "exit_code": 128 + getattr(error, "number", int(signal.SIGINT)),
            "error": "interrupted",
        }
    if isinstance(error, OSError) and (of_host := of_the_host(error)) is not None:
        return failure(of_host)
    return {"exit_code": BUG, "error": "bug"}


def _named(about: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Facts:
    if about is None:
        return {}
    try:
        facts: Facts = about(args, kwargs)
    except Exception:
        return {}  # arguments that the operation itself could not use either
    return facts


def _described(
    describe: Callable[[Any], Iterable[Facts]] | None, result: Any, known: Facts
) -> list[Facts]:
    try:
        return [known | facts for facts in (describe or outcome)(result)]
    except Exception:
        return [known]  # that it was done is recorded in any case


def outcome(result: Any) -> list[Facts]:
    """Return the facts from a result's JSON, for operations on one session."""
    body: Mapping[str, Any] = result if isinstance(result, Mapping) else result.to_dict()
    facts = {key: body[key] for key in _COPIED if body.get(key) is not None}
    if "elapsed_ms" in body:
        facts["total_ms"] = body["elapsed_ms"]
    if (moved := facts.pop("host", None)) is not None:
        facts["to"] = moved
    if connections := body.get("connections"):
        facts["connections"] = dict(
            Counter(str(c.get("outcome") or c.get("policy")) for c in connections)
        )
    facts["warnings"] = len(body.get("warnings", ())) or None
    facts["exit_code"] = DEGRADED if getattr(result, "degraded", False) else 0
    return [facts]


def target(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Facts:
    """Return the session, or the process, of ``f(config, TARGET, ..., name=)``."""
    name, given = kwargs.get("name"), str(args[1] if len(args) > 1 else kwargs.get("target", ""))
    if name and valid_name(name):
        return {"session": name}
    if given.isdigit():
        return {"pid": int(given)}
    return {"session": given} if valid_name(given) else {}


def reference(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Facts:
    """Return the session that the checkpoint is, or will be, of, for ``f(config, REF, ...,
    new_name=)``.
    """
    given = str(args[1] if len(args) > 1 else kwargs.get("ref", ""))
    name, at, _number = given.partition("@")
    forced = kwargs.get("instead_of") is not None or (
        kwargs.get("take_over") and kwargs.get("held") is None
    )
    facts: Facts = {"take_over": True} if forced else {}
    if (new := kwargs.get("new_name")) and valid_name(new):
        return facts | {"session": new}
    an_id = not at and len(name) >= 6 and not set(name) - set("0123456789abcdef")
    return facts | ({"session": name} if valid_name(name) and not an_id else {})
