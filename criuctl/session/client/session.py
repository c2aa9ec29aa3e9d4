"""`Session`: one connection to a holder, and the Python API to a session.

All that the command line does with a session goes through this class.

    with Session.connect("build", kind="agent", operator="ci", role="write") as session:
        mark = session.send("make\\n")["offset"]
        found = session.wait_match(r"\\$ $", since=mark, timeout=600)

Calls block.  `request` sends any operation of the protocol, with or without a method here.  One
connection is one operator, and must not be used by two threads at once: open one for each.

A program with an event loop of its own (the attach client) uses `fileno`, `submit` and
`receive(0)`: output, events and answers come as `Output`, `Event` and `Answer`, in the order in
which the holder sent them.  What comes while a blocking call waits for its answer is kept for
`receive` in that order.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ... import __version__
from ...errors import (
    CriuctlError,
    Forbidden,
    SessionGone,
    TimedOut,
)
from ...proc.ownership import check_own
from .. import names, protocol
from ..protocol import ANSWER_TIMEOUT
from . import caller
from .matching import compiled, wait_for
from .wire import Answer, Event, Message, Output, Wire

if TYPE_CHECKING:
    from ...config import Config

__all__ = ["ANSWER_TIMEOUT", "Answer", "Event", "Message", "Output", "Session"]

_SEND = 64 << 10
_GIVE_UP = 5.0  # seconds for an answer that is not needed


class Session(Wire):
    """A connection to the holder of one session."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        kind: str,
        operator: str = "",
        role: str = "write",
        resume: tuple[str, str] | None = None,
    ) -> None:
        """Greet the holder on the connected socket `sock`, which belongs to this object from now
        on.

        `resume` is (operator id, token) of a connection that was lost: go on as that operator.
        """
        self._closed = False
        self.comes_back = False  # leaving a ``with`` block keeps the operator, for `resume`
        try:
            super().__init__(sock, f"criuctl/{__version__}")
            hello: dict[str, Any] = {
                "kind": kind,
                "name": operator or caller.name(),
                "role": role,
                "program": f"criuctl/{__version__}",
            }
            if resume is not None:
                hello["operator"], hello["token"] = resume
            self.hello = self.request("hello", **hello)
        except BaseException:
            sock.close()
            raise
        self.operator: str = self.hello["operator"]
        self.token: str = self.hello["token"]
        self.role: str = self.hello["role"]

    @classmethod
    def connect(
        cls,
        name: str,
        *,
        kind: str,
        config: Config | None = None,
        operator: str = "",
        role: str = "write",
        resume: tuple[str, str] | None = None,
        timeout: float = 10.0,
    ) -> Self:
        """Connect to the session `name` of this host; `SessionGone` when no holder answers.

        `kind` is what this client is: ``human``, ``agent`` or ``service``.  `halt` stops all but
        humans.
        """
        if config is None:
            from ...config import load

            config = load()
        path = names.run_folder(config.run_dir, name) / "socket"
        check_own(path.parent)  # another user's program at the socket would read what is typed
        try:
            sock = names.connect(path, timeout)
        except PermissionError as error:
            raise Forbidden(
                f"session {name!r} belongs to another user",
                hint="Only its owner and root may connect.",
            ) from error
        except BlockingIOError as error:
            raise TimedOut(
                f"the holder of session {name!r} takes no connection in {timeout:g} s"
            ) from error
        except OSError as error:
            raise SessionGone(
                f"session {name!r} has no holder on this host ({error.strerror or error})"
            ) from error
        return cls(sock, kind=kind, operator=operator, role=role, resume=resume)

    # -- requests ---------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return what `criuctl status` shows."""
        status: dict[str, Any] = self.request("status")["status"]
        return status

    def send(self, data: str | bytes, *, timeout: float | None = ANSWER_TIMEOUT) -> dict[str, Any]:
        """Type `data` and wait until the terminal has taken it.

        ``offset`` of the answer is the end of the output before that.  `TimedOut` after `timeout`
        seconds: what the terminal has not taken by then, because no program reads, is dropped.
        """
        data = data.encode() if isinstance(data, str) else data
        deadline = None if timeout is None else time.monotonic() + timeout
        answer: dict[str, Any] = {}
        for at in range(0, max(len(data), 1), _SEND):
            request = self.submit_input(data[at : at + _SEND], answered=True)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                found = self._await(request, "input", left).body
            except TimedOut as late:
                found = self._not_taken(request, at, f"of {len(data)} bytes in {timeout:g} s", late)
            except KeyboardInterrupt:
                self._cancel(request)
                raise
            answer = found | {
                key: value for key, value in answer.items() if key in ("offset", "held")
            }
        return answer

    def _not_taken(self, request: int, before: int, text: str, late: TimedOut) -> dict[str, Any]:
        """Return the answer to input that timed out, if it has come after all.

        Else raise `TimedOut`, with how much of the input was typed.
        """
        answer = self._cancel(request)
        if answer is None:  # an older holder does not report this, and a frozen one nothing
            raise TimedOut(
                f"the session's terminal has not taken all {text}",
                hint="It may take the rest later.",
            ) from late
        if answer.error is None:
            return answer.body
        if "written" not in answer.error.details:
            raise answer.error
        taken = before + int(answer.error.details["written"])
        hint = "Its program does not read. What it has not taken is not typed any more."
        raise TimedOut(f"the session's terminal has taken {taken} {text}", hint=hint) from late

    def resize(self, rows: int, cols: int, xpixel: int = 0, ypixel: int = 0) -> None:
        """Set the window size; needs the lease."""
        self.request("resize", rows=rows, cols=cols, xpixel=xpixel, ypixel=ypixel)

    def signal(self, number: int | str, to: str = "foreground") -> int:
        """Signal the foreground group, the leader or the session; return the number of
        processes.
        """
        return int(self.request("signal", signal=number, to=to)["signalled"])

    def pause(self) -> dict[str, Any]:
        """Freeze every process."""
        return self.request("pause")

    def resume(self, *, agents_stay_out: bool = False) -> None:
        """Undo `pause` and `halt`.

        With `agents_stay_out`, which needs the role admin, agents and services only observe from
        now on, until `set_role` gives them more.
        """
        arguments: dict[str, Any] = {"agents_stay_out": True} if agents_stay_out else {}
        self.request("resume", **arguments)

    def halt(self) -> dict[str, Any]:
        """Freeze now, drop queued input that is not a human's, take the lease from an agent."""
        return self.request("halt")

    def kill(self, grace: float = protocol.DEFAULT_GRACE) -> int:
        """End every process of the session; return their number when all are gone."""
        return int(self.request("kill", grace=grace, timeout=grace + ANSWER_TIMEOUT)["killed"])

    def spawn(self, argv: Sequence[str], env: Mapping[str, str], fds: Sequence[int]) -> int:
        """Start a program as the holder's child; return its PID.

        It gets copies of the descriptors `fds` under the same numbers.
        """
        return int(
            self.request("spawn", argv=list(argv), env=dict(env), numbers=list(fds), fds=fds)["pid"]
        )

    # -- output -----------------------------------------------------------------------------------

    def attach(
        self,
        start: int | str = "now",
        *,
        size: tuple[int, int] | None = None,
        write: bool = False,
        answers: bool | None = None,
    ) -> dict[str, Any]:
        """Ask for output from `start` on (offset, "start", "now", -N); `receive` and `stream`
        return it.

        `answers`: the output is shown to a terminal whose answers to queries are sent as input.
        None: that is so for a human.
        """
        arguments: dict[str, Any] = {"from": start}
        if size is not None:
            arguments["size"] = {"rows": size[0], "cols": size[1]}
        if write:
            arguments["write"] = True
        if answers is not None:
            arguments["answers"] = answers
        return self.request("attach", **arguments)

    def detach(self) -> int:
        """Stop the output; return the offset of the next byte that would have come."""
        return int(self.request("detach")["offset"])

    def stream(self, timeout: float | None = None) -> Iterator[Output | Event]:
        """Yield output and events as they come, until the event ``exit`` or `timeout` idle
        seconds.
        """
        while (message := self.receive(timeout)) is not None:
            if isinstance(message, Answer):
                continue
            yield message
            if isinstance(message, Event) and message.name == "exit":
                return

    def read(self, start: int | str = "start", end: int | None = None) -> Output:
        """Return the bytes of the log from `start` to `end`; None: to its end.

        What is no longer kept is missing at the front: see `Output.offset`.
        """
        arguments: dict[str, Any] = {"from": start}
        if end is not None:
            arguments["to"] = end
        answer = self._await(self.submit("read", **arguments), "read", ANSWER_TIMEOUT)
        return Output(int(answer.body["from"]), answer.data)

    def kept_screen(self) -> dict[str, Any] | None:
        """Return the screen that the holder keeps of a full-screen program: ``offset`` behind it,
        ``since`` where the program began, and in ``base64`` what draws it.  None: there is none.
        """
        if "screen" not in self.hello["features"]:
            return None
        screen: dict[str, Any] | None = self.request("screen")["screen"]
        return screen

    def subscribe(self, since: int | None = None) -> int:
        """Ask for events; `receive` and `stream` return them.  Return the newest one's sequence.

        With `since`, events after that sequence which the holder still remembers come too.
        """
        arguments: dict[str, Any] = {} if since is None else {"since": since}
        return int(self.request("subscribe", **arguments)["sequence"])

    # -- waiting ----------------------------------------------------------------------------------

    def wait_exit(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait until the session has ended; return ``exit_code``, ``exit_signal``.  `TimedOut`."""
        return self._wait("exit", timeout)

    def wait_state(self, *states: str, timeout: float | None = None) -> str:
        """Wait until the session is in one of these states, and return which.  `TimedOut`."""
        return str(self._wait("state", timeout, states=list(states))["state"])

    def wait_command(self, command_id: str, timeout: float | None = None) -> dict[str, Any]:
        """Wait until a command has ended; return its record.  `TimedOut`."""
        record: dict[str, Any] = self._wait("command", timeout, command=command_id)["command"]
        return record

    def wait_output(self, offset: int, timeout: float | None = None) -> int:
        """Wait until there is output behind `offset`; return the new end.  `TimedOut`."""
        return int(self._wait("output", timeout, offset=offset)["end"])

    def wait_idle(self, seconds: float, timeout: float | None = None) -> int:
        """Wait until nothing was printed for `seconds`; return the end of the log.  `TimedOut`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        end = int(self.status()["offset"])
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimedOut(f"the session was not idle for {seconds:g} s in {timeout:g} s")
            try:
                end = self.wait_output(end, seconds if left is None else min(seconds, left))
            except TimedOut:
                if left is None or left >= seconds:
                    return end

    def wait_match(
        self,
        pattern: str | re.Pattern[str],
        *,
        since: int | str = "input",
        timeout: float | None = None,
    ) -> re.Match[str]:
        """Wait until `pattern` is found in the output, and return the match.

        `TimedOut`; `SessionGone` if the session ends first.  `since` is an offset, "start", "now",
        or "input": the end of the output when any operator typed last.  As by ``criuctl wait
        --match``, the output is searched without control sequences and without the echo of what was
        typed, undecodable bytes replaced; ``^`` and ``$`` of a text are at each line.
        """
        wanted = compiled(pattern)
        return wait_for(self, wanted.pattern, wanted.search, since, timeout)[0]

    # -- authority --------------------------------------------------------------------------------

    def lease_request(
        self,
        ttl: float = protocol.DEFAULT_TTL,
        *,
        queue: bool = False,
        soft: bool = False,
        hold: float | None = None,
        timeout: float | None = ANSWER_TIMEOUT,
    ) -> dict[str, Any]:
        """Ask for the write lease; `LeaseHeld` if another operator has it.

        With `queue`, wait for it.  A `soft` lease is lost to the next operator that types once this
        one has not typed for a second, like the lease that comes by typing.  With `hold`, it is
        kept for so many seconds, for every client of the same user, kind and name, whether or not
        one is connected.
        """
        arguments: dict[str, Any] = {} if hold is None else {"hold": hold}
        lease: dict[str, Any] = self.request(
            "lease-request", ttl=ttl, queue=queue, soft=soft, timeout=timeout, **arguments
        )["lease"]
        return lease

    def lease_take(
        self, ttl: float = protocol.DEFAULT_TTL, *, hold: float | None = None
    ) -> dict[str, Any]:
        """Take the lease from its owner; ``from`` of the answer is that operator, or None.

        `hold` is as in `lease_request`; a lease that is held for longer already stays so.
        """
        arguments: dict[str, Any] = {} if hold is None else {"hold": hold}
        return self.request("lease-take", ttl=ttl, **arguments)

    def lease_grant(self, to: str) -> dict[str, Any]:
        """Hand the lease to operator `to`."""
        lease: dict[str, Any] = self.request("lease-grant", to=to)["lease"]
        return lease

    def lease_yield(self, to: str | None = None) -> None:
        """Give the lease up, or hand it to operator `to`."""
        arguments: dict[str, Any] = {} if to is None else {"to": to}
        self.request("lease-yield", **arguments)

    def heartbeat(self) -> dict[str, Any] | None:
        """Keep the lease, if it is this operator's; return the lease of now."""
        lease: dict[str, Any] | None = self.request("heartbeat")["lease"]
        return lease

    def set_role(self, kind: str, operator: str, role: str | None) -> None:
        """Limit an operator to a role; None removes the limit.

        The operator ``*`` stands for all of that kind.
        """
        self.request("set-role", kind=kind, name=operator, role=role)

    def audit(self, since: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """Return entries of the audit log with a higher sequence than `since`."""
        entries: list[dict[str, Any]] = self.request("audit", since=since, limit=limit)["entries"]
        return entries

    def reexec(self, **arguments: Any) -> None:
        """Replace the holder by a fresh program; ``code`` is the folder of an upgraded criuctl."""
        self.request("reexec", **arguments)

    def shutdown(self, *, force: bool = False) -> None:
        """End the holder; with `force` even while a tree runs."""
        self.request("shutdown", force=force)

    # -- the end ----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Close the connection for good; the lease is free at once."""
        if not self._closed:
            with contextlib.suppress(CriuctlError):
                self.request("bye", timeout=_GIVE_UP)
        self.close()

    @property
    def closed(self) -> bool:
        """Whether this end has closed the connection."""
        return self._closed

    def close(self) -> None:
        """Close the connection; the operator may come back with `resume`."""
        self._closed = True
        super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.comes_back:
            self.close()
        else:
            self.leave()

    # -- inside -----------------------------------------------------------------------------------

    def _wait(self, what: str, timeout: float | None, **arguments: Any) -> dict[str, Any]:
        arguments["for"] = what
        request = self.submit("wait", **arguments)
        try:
            return self._await(request, f"wait for {what}", timeout).body
        except TimedOut:
            answer = self._cancel(request)
            if answer is not None and answer.error is None:
                return answer.body
            raise

    def _cancel(self, request: int) -> Answer | None:
        """Cancel `request`; return its answer if that came before the holder read the cancel."""
        with contextlib.suppress(CriuctlError):
            self.request("cancel", request=request, timeout=_GIVE_UP)
        crossed = next((m for m in self._inbox if isinstance(m, Answer) and m.id == request), None)
        if crossed is not None:
            self._inbox.remove(crossed)
        return crossed
