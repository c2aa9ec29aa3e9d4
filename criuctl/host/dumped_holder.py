"""A session's holder in a dump: it stands by, and passes on what it knows.

The holder is notified when the tree is frozen; it reads the terminal empty and holds input back
until the tree goes on, here or on another host.  Its scrollback is read ahead while the tree runs,
so that only the end of it is read in the freeze.  A connection that breaks shows the holder that
the dump has failed.

`prepared` and `seized` enclose the time in which the holder keeps the control group frozen for
CRIU; `begin` returns the record for the manifest; `commit`, `thawed`, `done` and `failed` say how
the dump ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..checkpoint.terminal_records import HolderRecord
from ..checkpoint.writer import CheckpointWriter
from ..config import Config
from ..errors import CriuctlError, NoSuchProcess, SessionGone
from ..proc.namespaces import ns_pids
from ..proc.tree import ProcessIdentity
from ..session import sessions
from ..session.holder import cgroup
from ..session.protocol import ANSWER_TIMEOUT
from . import step_travel
from .registry import SessionRecord

if TYPE_CHECKING:
    from ..session.client.session import Session

_STREAM = "scrollback"
_GIVE_UP = 5.0  # seconds for one that also finds out by itself


class DumpedHolder:
    """The holder of the session that is dumped, if it has one."""

    def __init__(
        self, config: Config, session: SessionRecord, root: ProcessIdentity, stack: ExitStack
    ) -> None:
        self._session: Session | None = None
        self._steps: step_travel.StepCopy | None = None
        self._begun = False
        self.in_flight: list[str] = []  # steps that a restore brings back in the middle
        # the control group that is frozen until CRIU has seized the tree
        self._held: str | None = None
        self.held_since = 0.0  # when it was frozen, monotonic; 0 if there is none
        state = sessions.state_of(config, session.name)
        if (
            state is None
            or not state["holder_alive"]
            or (state["pid"], state["start_time"]) != (root.pid, root.start_time)
        ):
            return
        from ..session.client.session import Session  # most trees have no holder

        connection = Session.connect(
            session.name, config=config, kind="service", operator="criuctl-dump", role="admin"
        )
        stack.callback(connection.close)
        self._session = connection
        self._base = self._end = -1
        # an older holder has no steps
        if "steps" in connection.hello["features"]:
            self._steps = step_travel.StepCopy(connection)

    def workspace(self) -> str:
        """Return the session's workspace; "" for none, or without a holder."""
        if self._session is None:
            return ""
        return str(self._session.status().get("facts", {}).get("workspace", ""))

    def read_ahead(self, writer: CheckpointWriter) -> None:
        """Take most of the scrollback while the tree still runs."""
        if self._session is not None:
            self._read(writer, None)
            if self._steps is not None:
                self._steps.read()

    def _read(self, writer: CheckpointWriter, end: int | None) -> None:
        assert self._session is not None
        found = self._session.read("start" if self._end < 0 else self._end, end)
        if self._base < 0 or found.offset > self._end:
            # the earlier part is not kept there any more, nor what came after it: start again
            self._base = found.offset
        if found.data:
            writer.add_bytes((_STREAM, self._base), found.data)
        self._end = found.end

    def call_back(self, seconds: float) -> dict[str, Any]:
        """Have programs of the session prepare for the checkpoint, for `seconds` at most.

        Return ``called`` (how many processes), ``vetoes`` and ``failures`` ({pid, reason} each).
        """
        if self._session is None or "inside" not in self._session.hello["features"]:
            return {"called": 0, "vetoes": [], "failures": []}
        return self._session.request(
            "callbacks-call",
            event="before-checkpoint",
            seconds=seconds,
            timeout=seconds + ANSWER_TIMEOUT,
        )

    def conditions(self) -> tuple[list[dict[str, Any]], ProcessIdentity | None]:
        """Return what programs of the session want this checkpoint to require: {kind, argument,
        foreign} each; and the process whose user is the session's.

        `foreign`: it came with a checkpoint that this host has not made.
        """
        if self._session is None or "inside" not in self._session.hello["features"]:
            return [], None
        answer = self._session.request("inside")
        return list(answer["conditions"]), ProcessIdentity(*answer["leader"])

    @contextmanager
    def prepared(self, patience: float = 0.0) -> Iterator[int | None]:
        """Announce the freeze: no other program may freeze the tree from now on.

        Return a descriptor of the control group that is frozen already.  The holder, which may have
        stopped the tree when it answers, is waited for `patience` seconds at most, if given.
        """
        freezer: str | None = None
        if self._session is not None and "standstill" in self._session.hello["features"]:
            if self._steps is not None:
                # A restore to the middle of a step that must not be repeated would repeat it.
                quiet = min(step_travel.QUIET_SECONDS, patience or step_travel.QUIET_SECONDS)
                answer = self._session.request("step-quiet", seconds=quiet)
                self.in_flight = answer["in_flight"]
            asked = time.monotonic()
            answer = self._session.request(
                "checkpoint-prepare",
                hold=True,
                timeout=min(ANSWER_TIMEOUT, patience or ANSWER_TIMEOUT),
            )
            # an older holder freezes nothing
            freezer, self._held = answer["freezer"], answer.get("held")
            self.held_since = asked if self._held is not None else 0.0
        if freezer is None:
            try:
                yield None
            finally:
                self.seized()
            return
        fd = os.open(freezer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def seized(self) -> None:
        """Note that CRIU has seized the tree, or that the dump has failed: the control group is
        thawed.
        """
        held, self._held = self._held, None
        if held is not None and self._session is not None:
            try:
                self._session.request("checkpoint-seized")
            # the holder does not do it, and no other process is left that would
            except BaseException as error:
                group = cgroup.existing(held)
                if group is not None:
                    group.thaw()
                if not isinstance(error, SessionGone):
                    raise

    def unprepare(self) -> None:
        """Note that the dump begins again."""
        if self._session is not None and "standstill" in self._session.hello["features"]:
            self._session.request("checkpoint-abort")

    def begin(self, writer: CheckpointWriter) -> HolderRecord | None:
        """Note that the tree is frozen: its earlier output is in the record, and no input reaches
        it until the end of the dump.
        """
        if self._session is None:
            return None
        state = self._session.request("checkpoint-begin")
        self._begun = True
        self._read(writer, state["offset"])
        if self._steps is not None:
            self._steps.read()
        status = self._session.status()
        return HolderRecord(
            private=bool(status.get("facts", {}).get("private")),
            created=float(status["created"]),
            command=tuple(status["command"]),
            labels=dict(status["labels"]),
            workspace=str(status.get("facts", {}).get("workspace", "")),
            rows=state["rows"],
            columns=state["cols"],
            base=self._base,
            input_offset=state.get("input_offset", 0),
            scrollback=writer.stream((_STREAM, self._base)) if self._end > self._base else None,
            steps=self._steps.store(writer) if self._steps is not None else None,
            modes=state["modes"] | {"screen": self._session.kept_screen()},
            shell=state.get("shell") or {},
            inside=state.get("inside") or {},
            roles=tuple(map(tuple, state["roles"])),
            events=state["events"],
            audit=state["audit"],
            paused=_inner(state.get("paused")),
        )

    def commit(self, checkpoint: str) -> None:
        """Note that the checkpoint exists and the tree is about to be ended: that will not be the
        session's end.
        """
        if self._session is not None:
            self._session.request("checkpoint-commit", checkpoint=checkpoint)

    def failed(self) -> None:
        """Note that the tree goes on and the dump has failed, even if its checkpoint exists."""
        if self._session is not None and self._begun:
            with suppress(CriuctlError):  # it finds that out by itself
                self._session.request("checkpoint-abort", timeout=_GIVE_UP)

    def thawed(self) -> None:
        """Note that the tree goes on, though its checkpoint is not stored yet: input reaches it
        again.
        """
        if self._session is not None and self._begun:
            # it was killed: its tree may end because of that, and needs this checkpoint all the
            # more
            with suppress(SessionGone):
                self._session.request("checkpoint-thawed")

    def done(self, checkpoint: str, number: int, *, ended: bool) -> None:
        """Note that the dump is complete."""
        if self._session is not None and self._begun:
            # it has ended after its tree, for example; the checkpoint exists
            with suppress(SessionGone):
                self._session.request(
                    "checkpoint-done", checkpoint=checkpoint, number=number, ended=ended
                )


def _inner(paused: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the holder's record of a pause, with the PIDs in the tree."""
    if paused is None:
        return None
    stopped = []
    for pid in paused["stopped"]:
        with suppress(NoSuchProcess):
            stopped.append(ns_pids(pid)[-1])
    return {**paused, "stopped": stopped}
