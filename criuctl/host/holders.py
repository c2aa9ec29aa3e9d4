"""A session's holder in a dump and in a restore: it stands by, passes on what it knows, and gets
the tree back.

At a dump the holder is notified when the tree is frozen; it reads the terminal empty and holds
input back until the tree goes on, here or on another host.  Its scrollback is read ahead while the
tree runs, so that only the end of it is read in the freeze.  A connection that breaks shows the
holder that the dump has failed.

At a restore the terminal needs a holder: the one that still waits here with the session's
operators, or a new one, which gets what the last one knew.  The holder starts the process that
becomes the parent of the restored tree, so that it gets the exit status: CRIU itself, or PID 1 of
the tree's namespaces.  A holder made for a restore that fails is ended.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..checkpoint.manifest import HolderRecord, Manifest, TerminalRecord
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.writer import CheckpointWriter
from ..config import Config
from ..criu.images import ImageSet
from ..errors import Conflict, CriuctlError, NoSuchProcess, SessionGone
from ..proc import command, terminalkeeper
from ..proc.namespaces import ns_pids
from ..proc.tree import ProcessIdentity, wait_ended
from ..session import sessions
from ..session.holder import cgroup
from ..session.protocol import ANSWER_TIMEOUT, RESTORES
from . import step_travel
from .registry import SessionRecord

if TYPE_CHECKING:
    from ..session.client.session import Session
    from ..session.terminal import Pty

_STREAM = "scrollback"
_GONE = 10.0  # seconds for a holder that was asked to end
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


class RestoredHolder:
    """The holder of a session that is restored; none for a tree that had neither a holder nor a
    terminal.
    """

    def __init__(
        self,
        config: Config,
        manifest: Manifest,
        session: SessionRecord,
        stored_steps: Callable[[], list[dict[str, Any]]] = list,
        *,
        supervised: bool = False,
    ) -> None:
        """`stored_steps` returns what the store has besides the checkpoint; with `supervised`,
        steps wait for the store.
        """
        self._config, self._manifest, self._record = config, manifest, session
        self._stored_steps, self._supervised = stored_steps, supervised
        self.steps: dict[str, list[str]] = {}  # which attempts came back: in_flight, repeated
        self._session: Session | None = None
        # a folder, and where the tree's namespaces must show it
        self.shown: tuple[str, str] | None = None
        self._started = self._adopted = False

    @property
    def session(self) -> str:
        """Return the session's name."""
        return self._record.name

    @property
    def needed(self) -> bool:
        """Return whether the tree comes back under a holder."""
        m = self._manifest
        return m.holder is not None or any(t.master == "outside" and t.holders for t in m.terminals)

    @property
    def ends_with_root(self) -> bool:
        """Return whether private namespaces end with the root: so they do for a session, which is
        over then.
        """
        return self._manifest.holder is not None

    def prepare(self, reader: CheckpointReader, stack: ExitStack, *, private: bool) -> None:
        """Find the holder that waits for the session, or start one; it ends with `stack` unless it
        has adopted the tree.

        `private`: the tree gets PID and mount namespaces of its own.
        """
        name = self._record.name
        state = sessions.state_of(self._config, name)
        if state is not None and state["holder_alive"] and state["state"] in ("exited", "lost"):
            # also if none is needed: it would be asked for this session
            self._dismiss(name, ProcessIdentity(**state["holder"]))
            state = None
        if state is not None and state["holder_alive"]:
            if (
                state["state"] != "checkpointed"
                or state["id"] != self._record.id
                or not self.needed
            ):
                raise Conflict(
                    f"there is another session {name!r} here ({state['state']})",
                    hint="End it first, or restore a copy with --as NEW-NAME.",
                )
        elif self.needed:
            self._start(reader)
            self._started = True
        if not self.needed:
            return
        self._session = self._connect(name)
        stack.callback(self._leave)
        self.shown = self._inside(private)
        if "steps" in self._session.hello["features"]:
            held, stored = self._manifest.holder, self._stored_steps()
            supervised = self._supervised
            step_travel.hand_on(self._session, held, reader, stored, supervised=supervised)

    def _connect(self, name: str) -> Session:
        from ..session.client.session import Session

        return Session.connect(
            name, config=self._config, kind="service", operator=RESTORES, role="admin"
        )

    def _dismiss(self, name: str, holder: ProcessIdentity) -> None:
        """End a holder that only keeps the exit status of a tree that is about to come back; the
        name is free when it is gone.
        """
        with suppress(CriuctlError), self._connect(name) as old:
            old.request("shutdown")
        wait_ended([holder], _GONE)

    def _start(self, reader: CheckpointReader) -> None:
        from ..session.launch.daemon import HolderSpec, start_holder

        m = self._manifest
        held = m.holder or HolderRecord(command=m.root.argv if m.root is not None else ())
        main = main_terminal(m.terminals)
        memory = os.memfd_create("scrollback", os.MFD_CLOEXEC)
        try:
            if held.scrollback is not None:
                for chunk in reader.chunks(held.scrollback):
                    os.write(memory, chunk)
                os.lseek(memory, 0, os.SEEK_SET)
            spec = HolderSpec(
                name=self._record.name,
                id=self._record.id,
                incarnation=self._record.incarnation,
                created=held.created,
                argv=held.command,
                rows=main.rows if main is not None else held.rows,
                cols=main.columns if main is not None else held.columns,
                labels=held.labels,
                facts={"workspace": held.workspace} if held.workspace else {},
                spawner="",
                log_fd=memory,
                base=held.base,
                input_offset=held.input_offset,
                modes=held.modes,
                shell=held.shell,
                roles=[list(role) for role in held.roles],
                events=held.events,
                audit=held.audit,
                checkpoint=m.id,
            )
            start_holder(self._config, spec)
        finally:
            os.close(memory)

    def _inside(self, private: bool) -> tuple[str, str] | None:
        """Write the folder that the session reads; return what its namespaces must show where."""
        if self._manifest.holder is None:
            return None
        from ..session.launch.spawn import Inside

        inside = Inside.of(self._config.run_dir, self._record.name, private=private)
        restored = {
            "checkpoint": self._manifest.id,
            "host": self._manifest.host.name,
            "created": self._manifest.created,
        }
        inside.write(self._record.name, self._record.id, self._record.incarnation, restored)
        return inside.bind if private else None

    @property
    def starter(self) -> command.Starter | None:
        """Return what starts programs as the holder's children."""
        return self._start_program if self._session is not None else None

    def _start_program(self, argv: Sequence[str], fds: Sequence[int]) -> int:
        assert self._session is not None
        return self._session.spawn(argv, command.environment(), sorted(set(fds)))

    def adopt(
        self,
        root: int,
        init: int,
        ptys: Sequence[tuple[TerminalRecord, Pty]],
        pids: Mapping[int, int],
        images: ImageSet,
    ) -> None:
        """Give the tree to the holder, with the master of its terminal: it is in place and about to
        run.

        `pids`: PID in the tree -> PID on this host.
        """
        if self._session is None:
            return
        main = main_terminal([record for record, _ in ptys])
        for record, pty in ptys:
            if record is not main:
                self._keep(pty)
        identity = ProcessIdentity.of(root)
        m = self._manifest
        restored = {"host": m.host.name, "checkpoint": m.id, "created": m.created, "dropped": []}
        masters = [pty.master for record, pty in ptys if record is main]
        facts: dict[str, Any] = {
            "pid": root,
            "start_time": identity.start_time,
            "incarnation": self._record.incarnation,
        }
        if self.stands_still:
            facts["paused"] = self._paused(pids, images.stopped())
        if m.holder is not None and m.holder.shell:
            facts["shell"] = m.holder.shell
        facts |= {"init": init, "private": bool(init), "settles": self._settles}
        answer = self._session.request(
            "adopt", fds=masters, master=bool(masters), restored=restored, **facts
        )
        self.steps = answer.get("steps") or {}

    @property
    def stands_still(self) -> bool:
        """Return whether the session was paused or halted when it was dumped."""
        return self._manifest.holder is not None and self._manifest.holder.paused is not None

    def _paused(self, pids: Mapping[int, int], stopped: Collection[int]) -> dict[str, Any]:
        """Return the pause for the holder; `stopped`: the processes that are restored as
        stopped.
        """
        assert self._manifest.holder is not None and self._manifest.holder.paused is not None
        paused = self._manifest.holder.paused
        by_pause = set(paused.get("stopped") or ())
        return {
            "by": paused.get("by"),
            "halted": paused.get("halted"),
            "stopped": [pids[pid] for pid in stopped if pid in by_pause and pid in pids],
            "asleep": [pids[pid] for pid in stopped if pid not in by_pause and pid in pids],
        }

    def settle(self) -> None:
        """Note that CRIU is about to release the tree, without a way back; the holder keeps it
        stopped, if it did before.
        """
        if self._session is not None and (self.stands_still or self._settles):
            self._session.request("settle")
        self._adopted = True

    @property
    def _settles(self) -> bool:
        """Return whether the holder waits for `settle`; it may be another program by then, but
        keeps what it got at adopt.
        """
        return self._session is not None and "settle" in self._session.hello["features"]

    def _keep(self, pty: Pty) -> None:
        """Keep a terminal in addition to the main one: it must be read, or the program would
        block.
        """
        assert self._session is not None
        program = [sys.executable, "-I", "-S", "-E", terminalkeeper.__file__, str(pty.master)]
        self._session.spawn(program, command.environment(), [pty.master])

    def _leave(self) -> None:
        if self._session is None:
            return
        started: list[ProcessIdentity] = []
        if self._started and not self._adopted:
            state = sessions.state_of(self._config, self._record.name)
            started = (
                [ProcessIdentity(**state["holder"])]
                if state is not None and state["holder_alive"]
                else []
            )
            with suppress(CriuctlError):
                self._session.request("shutdown", force=True)
        self._session.leave()
        wait_ended(started, _GONE)  # the name is free when it is gone


def _inner(paused: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the holder's record of a pause, with the PIDs in the tree."""
    if paused is None:
        return None
    stopped = []
    for pid in paused["stopped"]:
        with suppress(NoSuchProcess):
            stopped.append(ns_pids(pid)[-1])
    return {**paused, "stopped": stopped}


def main_terminal(records: Sequence[TerminalRecord]) -> TerminalRecord | None:
    """Return the terminal that the holder gets: one that controls a session of the tree, if there
    is any.
    """
    outside = [r for r in records if r.master == "outside" and r.holders]
    return next((r for r in outside if r.leader or r.led_outside), outside[0] if outside else None)


def end_holder(config: Config, name: str, state: Mapping[str, Any]) -> None:
    """End the holder of a session that has ended, which only keeps its exit status, and wait until
    it is gone.
    """
    import select

    from ..session.client.session import Session

    # it may just be ending by itself
    with suppress(SessionGone), Session.connect(name, config=config, role="admin") as session:
        session.request("shutdown")

    try:
        pidfd = ProcessIdentity(**state["holder"]).open_pidfd()
    except NoSuchProcess:
        return
    try:
        select.select([pidfd], [], [], 10)
    finally:
        os.close(pidfd)
