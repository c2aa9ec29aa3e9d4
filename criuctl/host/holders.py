"""A session's holder in a restore: it gets the tree back; and the end of one that is not needed.

The terminal of a restored tree needs a holder: the one that still waits here with the session's
operators, or a new one, which gets what the last one knew.  The holder starts the process that
becomes the parent of the restored tree, so that it gets the exit status: CRIU itself, or PID 1 of
the tree's namespaces.  A holder made for a restore that fails is ended.

The holder's part in a dump is in `dumped_holder`.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from ..checkpoint.manifest import Manifest
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.terminal_records import HolderRecord, TerminalRecord
from ..config import Config
from ..criu.images import ImageSet
from ..errors import Conflict, CriuctlError, NoSuchProcess, SessionGone
from ..proc import command, terminalkeeper
from ..proc.tree import ProcessIdentity, wait_ended
from ..session import sessions
from ..session.protocol import RESTORES
from . import group_label, key, step_travel
from .registry import SessionRecord

if TYPE_CHECKING:
    from ..session.client.session import Session
    from ..session.launch.daemon import WarmHolders
    from ..session.launch.spawn import Inside
    from ..session.terminal import Pty

_GONE = 10.0  # seconds for a holder that was asked to end


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
        copy: bool = False,
        group: str = "",
        ends: float | None = None,
        warm: WarmHolders | None = None,
    ) -> None:
        """`stored_steps` returns what the store has besides the checkpoint; with `supervised`,
        steps wait for the store. `copy`: the session is another one than the checkpoint's, and a
        member of `group` if that is given. `ends`: when the holder ends it, in Unix seconds. `warm`
        starts it.
        """
        self._config, self._manifest, self._record = config, manifest, session
        self._stored_steps, self._supervised = stored_steps, supervised
        self._copy, self._ends, self._warm = copy, ends, warm
        self._group = group
        self.steps: dict[str, list[str]] = {}  # which attempts came back: in_flight, repeated
        self._session: Session | None = None
        # a folder, and where the tree's namespaces must show it
        self.shown: tuple[str, str] | None = None
        self._folder: Inside | None = None  # what the session reads
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
        from ..session.client.session import Session  # most trees have no holder

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
                labels=group_label.of_copy(held.labels, self._group) if self._copy else held.labels,
                facts=self._facts(held),
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
            start_holder(self._config, spec, warm=self._warm)
        finally:
            os.close(memory)

    def _facts(self, held: HolderRecord) -> dict[str, Any]:
        facts: dict[str, Any] = {"workspace": held.workspace} if held.workspace else {}
        return facts | ({"ends": self._ends} if self._ends is not None else {})

    def _inside(self, private: bool) -> tuple[str, str] | None:
        """Write the folder that the session reads; return what its namespaces must show where."""
        if self._manifest.holder is None:
            return None
        from ..session.launch.spawn import Inside

        self._folder = inside = Inside.of(self._config.run_dir, self._record.name, private=private)
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
        if self._folder is not None:
            self._folder.renew()
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
        facts["inside"] = self._asked_inside()
        facts |= {"init": init, "private": bool(init), "settles": self._settles}
        answer = self._session.request(
            "adopt", fds=masters, master=bool(masters), restored=restored, **facts
        )
        self.steps = answer.get("steps") or {}

    def _asked_inside(self) -> dict[str, Any]:
        """Return what the tree's programs had asked for at the dump.

        RULE: no command runs here because a checkpoint contains it (`criuctl.files.predicates`): a
        condition that this host has not noted itself is `foreign`.
        """
        from ..session.launch.daemon import helper_environment

        held = self._manifest.holder
        given = dict(held.inside) if held is not None else {}
        sealed = {
            (one.kind, one.argument)
            for one in self._manifest.predicates
            if one.mac and key.is_sealed(self._config, f"{one.kind}:{one.argument}", one.mac)
        }
        found = given.get("conditions")
        given["conditions"] = [
            {**one, "foreign": (str(one.get("kind")), str(one.get("argument"))) not in sealed}
            for one in (found if isinstance(found, list) else ())
            if isinstance(one, dict)
        ]
        return given | {
            "checkpoint": self._manifest.id,
            "fork": self._copy,
            "environment": helper_environment(self._config),
        }

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
    from ..session.client.session import Session

    # it may just be ending by itself
    with (
        suppress(SessionGone),
        Session.connect(
            name, config=config, kind="service", operator="criuctl-end", role="admin"
        ) as session,
    ):
        session.request("shutdown")

    try:
        pidfd = ProcessIdentity(**state["holder"]).open_pidfd()
    except NoSuchProcess:
        return
    try:
        select.select([pidfd], [], [], 10)
    finally:
        os.close(pidfd)
