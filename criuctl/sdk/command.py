"""A command that runs in a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from ..ops import commands
from ..ops.acting import acting
from ..ops.commands import Limits
from ..transport.frames import decode_error
from .results import CommandResult

if TYPE_CHECKING:
    from .connected import Connected

OnTimeout = Literal["leave", "interrupt", "kill"]
GRACE = 5.0  # seconds between an interrupt and SIGKILL


class Command:
    """A command that `Session.exec` has started with ``detach=True``.

    It belongs to the session, not to this object: it runs on when its program ends, and is dumped
    and restored with the session. `Session.command` makes another object of its id.
    """

    def __init__(self, session: Connected, id: str) -> None:
        self._session = session
        self.id = id

    def wait(
        self,
        timeout: float | None = None,
        *,
        silence: float | None = None,
        on_timeout: OnTimeout = "leave",
        plain: bool = False,
    ) -> CommandResult:
        """Wait until it has ended; return it with all of its output.

        After `timeout` seconds, or when it has printed nothing for `silence` seconds, the result's
        state is ``timed-out``, and the command runs on, gets an interrupt, or is killed. `plain`
        removes control sequences from the output. `NotFound` if the session knows no such command,
        `SessionGone` if the session ends first.
        """
        limits = Limits(timeout, silence, on_timeout)
        return self._followed(
            lambda show: commands.follow(*self._place(), show, limits, plain=plain)
        )

    def output(self, since: int | None = None, *, plain: bool = False) -> CommandResult:
        """Return it with the output so far, from the offset `since` on, without waiting."""
        return self._followed(
            lambda show: commands.output(*self._place(), show, since=since, plain=plain)
        )

    def kill(self, grace: float = GRACE) -> CommandResult:
        """End it: an interrupt (of a new command SIGTERM), and after `grace` seconds SIGKILL.

        Return it when it has ended. The shell itself gets the interrupt only.
        """
        return self._followed(lambda show: commands.kill(*self._place(), grace, show=show))

    def _place(self) -> tuple[Any, str, str]:
        operator = self._session._operator
        return operator.config, operator.session, self.id

    def _followed(self, operation: Callable[[commands.Show], Mapping[str, Any]]) -> CommandResult:
        """Collect the output of an operation, and make its result."""
        streams: dict[str, bytearray] = {}

        def show(stream: str, data: bytes) -> None:
            streams.setdefault(stream, bytearray()).extend(data)

        with acting(self._session._operator):
            body = operation(show)
        error = body.get("error")
        return CommandResult(
            session=body["session"],
            command_id=body["command_id"],
            state=body["state"],
            exit_code=body["exit_code"],
            offset=body["offset"],
            end=body["end"],
            missing=body["missing"],
            streams={name: bytes(data) for name, data in streams.items()},
            error=decode_error(error, "this host") if error is not None else None,
        )
