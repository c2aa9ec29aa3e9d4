"""The holder: one small process per session, outside its tree, that owns terminal, log and socket.

It starts the tree (or waits for one that a restore brings), reads the terminal into the log whether
or not a client is attached, serves any number of clients, reaps, and keeps the exit status until a
client has collected it.  Its one thread never blocks but for a freeze.  It imports little: there is
one holder for every session.

`Holder` makes the parts, gives each what it needs, and does what concerns several of them: the end
of the tree, the end of the session, the loss of a client.  `launch.fresh_start` and `launch.reexec`
make the holder.
"""

from __future__ import annotations

import gc
import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any

from ...proc.syscalls import set_child_subreaper
from ...proc.tree import ProcessIdentity
from ..screen.modes import Modes
from ..screen.shell_marks import Mark
from . import cgroup
from .adoption import Adoption
from .asked_checkpoints import AskedCheckpoints
from .audit_log import AuditWriter
from .base64_text import encoded
from .callbacks import Callbacks
from .checkpointing import Checkpointing
from .clients import Clients
from .command_operations import CommandOperations
from .commanding import Commanding
from .connection import Connection
from .echoes import Echoes
from .environment import SessionEnvironment
from .event_loop import READ, Loop
from .event_operations import EventOperations
from .events import Events
from .handover import Handover
from .helper_processes import HelperProcesses
from .holder_operations import HolderOperations
from .inside_operations import InsideOperations
from .kept_screen import KeptScreen
from .kill import Kills
from .lease_timer import Leasing
from .lifetime import Lifetime
from .master import COMMAND, Chunk, Master
from .output_operations import OutputOperations
from .presence_operations import PresenceOperations
from .processes import Tree, exit_code, reap
from .requests import Requests
from .root_watch import RootWatch
from .self_fence import SelfFence
from .session_files import SessionFiles
from .session_state import Identity, SessionState
from .status_report import StatusReport
from .step_operations import StepOperations
from .step_replication import Replication
from .step_socket import StepSocket
from .steps import Steps
from .terminal_queries import TERMINAL, TerminalQueries
from .time_to_live import TimeToLive
from .tree_operations import TreeOperations
from .waits import Waits
from .write_operations import WriteOperations

_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGQUIT, signal.SIGTSTP)
_LONGEST_TEXT = 4096  # bytes of input that an audit entry repeats


class Holder:
    """The parts of one holder, and how they belong together."""

    def __init__(self, identity: Identity, files: SessionFiles, modes: Modes) -> None:
        self.files, self.modes, self.log = files, modes, files.log
        self.loop = Loop()
        self.session = SessionState(identity)
        self.session.on_change = self._on_state
        self.audit = AuditWriter(files.audit, identity)
        self._make_parts()
        self._make_checkpointing()
        self._make_report()
        self._make_requests()
        self._connect()
        self._wake: tuple[int, int] = (-1, -1)

    # -- the parts --------------------------------------------------------------------------------

    def _make_parts(self) -> None:
        loop, session, log, identity = self.loop, self.session, self.log, self.session.identity
        # Two homes of one session may share a kernel (containers, or a copy that has not ended
        # yet): the place of the run folder gives each a control group of its own.
        place = os.stat(self.files.run_folder)
        group = f"{identity.name}-{identity.id[:8]}-{place.st_dev:x}-{place.st_ino:x}"
        self.tree = Tree(cgroup.create(group))
        self.master = Master(loop, log, self.modes)
        self.clients = Clients(loop, log)
        self.events = Events(identity, self.files, self.clients)
        self.lifetime = Lifetime(loop, session, self.clients)
        self.leasing = Leasing(loop, session, self.events, self.audit)
        self.helpers = HelperProcesses(self.tree, self.events)
        self.environment = SessionEnvironment(self.files, self.tree, self.audit)
        self.commanding = Commanding(
            loop, session, self.tree, self.master, self.helpers, self.environment
        )
        self.echoes = Echoes(log, self.master.marks)
        self.waits = Waits(session, log, self.lifetime.collect, self.commanding.commands)
        self.kept_screen = KeptScreen(log, self.modes, self.master, self.helpers)
        self.queries = TerminalQueries(
            loop,
            log,
            self.modes,
            self.master,
            self.helpers,
            self.kept_screen,
            self.clients,
            self.leasing,
        )
        self.root_watch = RootWatch(loop, self.tree, identity, self.on_reaped, self.root_ended)
        self.steps = Steps(loop, session, self.files, self.tree, self.events, self.audit)
        self._make_inside()
        self.step_socket = StepSocket(
            loop,
            self.files,
            self.tree,
            self.steps,
            self.replication,
            self.inside.of_programs,
        )
        self.kills = Kills(loop, self.tree, session, lambda: self.finish("exited", None, None))

    def _make_inside(self) -> None:
        loop, session, tree = self.loop, self.session, self.tree
        self.asked = AskedCheckpoints(
            loop, session, self.helpers, self.audit, busy=lambda: self.checkpointing.busy
        )
        self.callbacks = Callbacks(loop, session, tree, self.events)
        self.inside = InsideOperations(tree, self.master, self.asked, self.callbacks, self.audit)
        self.replication = Replication(self.steps, self.asked)

    def _make_checkpointing(self) -> None:
        self.self_fence = SelfFence(
            self.loop,
            self.tree,
            self.session,
            self.events,
            self.audit,
            seizing=lambda: self.checkpointing.seizing,
        )
        self.adoption = Adoption(
            self.loop,
            self.session,
            self.tree,
            self.master,
            self.log,
            self.clients,
            self.events,
            self.audit,
            self.lifetime,
            self.self_fence,
            take_tree=self._take_restored,
            let_go=self._let_go,
            returned=self.commanding.returned,
        )
        self.checkpointing = Checkpointing(
            self.loop,
            self.session,
            self.tree,
            self.master,
            self.log,
            self.events,
            self.audit,
            self.leasing.authority,
            self.adoption,
            finish=self.finish,
            let_go=self._let_go,
        )
        self.time_to_live = TimeToLive(
            self.loop,
            self.session,
            self.kills,
            self.events,
            self.audit,
            busy=lambda: self.checkpointing.busy,
        )

    def _make_report(self) -> None:
        self.report = StatusReport(
            self.session,
            self.files,
            self.modes,
            self.clients,
            self.leasing,
            self.master,
            self.tree,
            self.self_fence,
            self.checkpointing,
            self._step_counts,
            self.commanding.foreground,
            self.echoes,
        )
        self.checkpointing.status = self.report.known
        self.checkpointing.save = self.leasing.save = self.report.write
        self.checkpointing.shell = self.commanding.state
        self.checkpointing.inside = self.inside.taken
        self.checkpointing.on_stored = self.asked.stored
        self.commanding.new.is_dumped = lambda: (
            self.checkpointing.busy or self.session.state == "checkpointed"
        )

    def _make_requests(self) -> None:
        session, events, audit = self.session, self.events, self.audit
        clients, leasing, master = self.clients, self.leasing, self.master
        presence = PresenceOperations(clients, leasing, events, audit, self.report.status)
        writing = WriteOperations(session, self.log, master, leasing, events, audit)
        output = OutputOperations(
            self.loop,
            session,
            self.log,
            self.modes,
            master,
            self.lifetime,
            writing,
            self.kept_screen,
        )
        waiting = EventOperations(
            self.loop, master, events, self.waits, audit, self.commanding.commands
        )
        commanding = CommandOperations(
            self.loop,
            session,
            leasing,
            events,
            audit,
            self.waits,
            self.checkpointing,
            self.commanding,
        )
        steps = StepOperations(self.steps, self.replication)
        own = (self._tree_operations(), self._holder_operations())
        acting = (commanding, steps, self.inside, self.environment, *own)
        groups = (presence, output, waiting, writing, *acting)
        operations = {name: what for group in groups for name, what in group.operations.items()}
        hello, type_input = presence.hello, writing.type_input
        self.requests = Requests(
            self.loop, leasing.authority, hello, type_input, operations, self.session.identity.name
        )

    def _tree_operations(self) -> TreeOperations:
        return TreeOperations(
            self.session,
            self.tree,
            self.master,
            self.clients,
            self.leasing,
            self.events,
            self.audit,
            self.kills,
            self.self_fence,
            self.checkpointing,
            self.report,
        )

    def _holder_operations(self) -> HolderOperations:
        handover = Handover(
            self.session.identity.name,
            self.files,
            self.clients,
            self.master,
            self.helpers,
            self.kills,
            self.checkpointing,
            state=self.to_state,
            more=self.commanding.new.descriptors,
            watch_term=self.watch_term,
        )
        return HolderOperations(
            self.session,
            self.events,
            self.audit,
            self.checkpointing,
            self.adoption,
            self.helpers,
            handover,
            self.lifetime,
            self.report,
            came_back=self._came_back,
        )

    def _connect(self) -> None:
        """Say what happens when a part has something to say."""
        self.clients.on_request = self.requests.process
        self.clients.on_lost = self._on_client_lost
        self.master.on_output = self._on_output
        self.master.marks.on_mark = self._on_mark
        self.master.on_begun = self._on_input_begun
        self.master.on_written = self._on_input_written
        self.master.on_broken = self.master.close
        self.master.on_released = self.queries.answer
        self.checkpointing.on_seize = self.step_socket.shut
        self.checkpointing.on_release = self._released

    # -- life -------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Become fit to be a parent: adopt orphans, notice ended children, ignore keys' signals."""
        set_child_subreaper(True)
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self.watch_term()
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        self.loop.watch(self._wake[0], READ, self._on_child)

    def watch_term(self) -> None:
        """Let SIGTERM ask the holder to end."""

        def asked(_number: int, _frame: FrameType | None) -> None:
            self.lifetime.ask()

        signal.signal(signal.SIGTERM, asked)

    def own(self, root: ProcessIdentity, master: int) -> None:
        """Make the tree of `root` the session's, with its terminal's `master` (-1: it has none)."""
        self.tree.root = root
        self.root_watch.begin()
        if master >= 0:
            self.master.open(master)
            size = {"rows": self.master.rows, "cols": self.master.cols}
            self.files.timeline.event("resize", self.log.end, size)

    def run(self) -> None:
        """Serve until the holder is no longer needed; its state file and logs stay."""
        gc.collect()
        gc.freeze()
        self.step_socket.open()
        self.report.write()
        self.time_to_live.begin()
        self._on_child(0)  # those that ended before SIGCHLD was watched
        self.loop.run()
        self.clients.close("the holder ends")
        self.files.socket.unlink(missing_ok=True)
        # A process that lives outside of it, a CRIU that rolls back for example, needs no group.
        if self.tree.group is not None and not self.tree.group.pids():
            self.tree.group.remove()
        self.master.close()
        self.log.close()
        if self.lifetime.expecting:
            # Its tree has never come.  Before the name is free, under which another may begin.
            self.files.remove_beginning()
        self.report.write(ended=True)

    # -- the tree ---------------------------------------------------------------------------------

    def _on_child(self, events: int) -> None:
        with suppress(BlockingIOError):
            while events and os.read(self._wake[0], 4096):
                pass
        reap(self.on_reaped)

    def on_reaped(self, pid: int, status: int) -> None:
        """Handle the end of a child of the holder that has been reaped."""
        identity, root = self.session.identity, self.tree.root
        if self.helpers.reaped(pid, status):
            return  # first: it may have the PID of a root that is long gone
        if root is not None and pid in (root.pid, identity.init):
            code, number = exit_code(status)
            if number is None and "init" in identity.facts and 128 < code <= 128 + signal.SIGRTMAX:
                number = code - 128  # so the inits report the signal that ended the command
            self.root_ended(code, number)

    def root_ended(self, code: int | None, number: int | None) -> None:
        """Handle the end of the tree's first process: by exit code, by signal, or unknown."""
        self.root_watch.close()
        if self.session.over or self.checkpointing.takes_the_end(code, number):
            return
        self.finish("exited" if code is not None else "lost", code, number)

    def finish(self, state: str, code: int | None, number: int | None) -> None:
        """End the session; a copy of one that goes on at another host is no more than lost."""
        session = self.session
        self.master.close()
        if "fenced" in session.identity.facts:
            state, code, number = "lost", None, None
        session.exit = (code, number)
        self.commanding.session_over()
        session.run_again()
        self.tree.thaw()
        if state == "exited" and not self.lifetime.stopped:
            self.report.write_end()
        self.events.emit("exit", exit_code=code, exit_signal=number, offset=self.log.end)
        if any(client.position is not None for client in self.clients.all()):
            self.lifetime.collect()
        session.set_state(state)
        self.lifetime.linger_for_status()
        self.lifetime.end_if_done()

    def _take_restored(self, root: ProcessIdentity, master: int) -> None:
        self.files.move_in()
        self.own(root, master)

    def _let_go(self, checkpoint: str) -> None:
        """Make the session ``checkpointed``: its tree is in the store now and nowhere else."""
        self.session.checkpoint_id = checkpoint
        self.master.close()
        self.tree.thaw()
        self.session.run_again()
        self.events.emit("checkpointed", checkpoint=checkpoint, offset=self.log.end)
        self.session.set_state("checkpointed")

    def _came_back(self, connection: Connection, message: dict[str, Any]) -> dict[str, Any]:
        """A restored tree is the session's; return which of its steps are under way."""
        processes = {
            inner: ProcessIdentity(owner.pid, owner.start_time)
            for inner, owner in self.steps.inner_pids().items()
        }
        self.inside.returned(message.get("inside"), connection, processes)
        self._released()
        return {"steps": self.steps.came_back()}

    # -- what the parts report --------------------------------------------------------------------

    def _released(self) -> None:
        """No dump has the tree in its hands: its processes may reach the journal of steps."""
        self.steps.go_on()
        self.step_socket.open()
        self.asked.released()

    def _step_counts(self) -> dict[str, Any]:
        return {**self.steps.counts(), "waiting": self.replication.waiting}

    def _on_state(self) -> None:
        self.report.write()
        self.waits.answer()

    def _on_client_lost(self, connection: Connection, why: str) -> None:
        self.waits.lost(connection)
        self.master.forget(connection.sock.fileno())
        self.checkpointing.lost(connection)
        self.lifetime.lost(connection)
        self.steps.lost(connection)
        self.replication.lost(connection)
        self.callbacks.lost(connection, why)
        if connection.operator is not None:
            self.leasing.left(connection.operator, "left" if why == "bye" else "lost")
        self.lifetime.end_if_done()

    def _on_mark(self, mark: Mark) -> None:
        self.echoes.on_mark(mark)
        self.commanding.in_shell.on_mark(mark)

    def _on_output(self) -> None:
        self.queries.came()
        self.echoes.look(self.log.end)
        self.kept_screen.came()
        self.commanding.in_shell.output()
        self.clients.pump_output()
        self.files.timeline.output(self.log.end)  # after the clients, which wait for it
        self.waits.answer()

    def _on_input_begun(self, chunk: Chunk, hidden: bool) -> None:
        if chunk.kind in (TERMINAL, COMMAND):
            return  # no person typed it; a command has an entry of its own
        self.echoes.typed(chunk.data, echoes=not hidden, line_mode=self.master.canonical)
        facts: dict[str, Any] = {"offset": chunk.offset, "bytes": len(chunk.data)}
        if hidden:
            facts["hidden"] = True
        else:
            facts["text"] = chunk.data[:_LONGEST_TEXT].decode(errors="replace")
        self.audit.write("input", chunk.who, **facts)

    def _on_input_written(self, chunk: Chunk) -> None:
        if chunk.kind == TERMINAL:
            self.loop.soon(self.queries.answer)
        connection = self.clients.connections.get(chunk.connection)
        if chunk.request and not chunk.answered and connection is not None:
            place = {"offset": chunk.offset, "sequence": self.audit.log.sequence}
            connection.send({"id": chunk.request, "ok": True, **place})

    # -- re-exec ----------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return all of it, for the next program of this holder."""
        return {
            **self.session.to_state(),
            **self.files.to_state(),
            **self.lifetime.to_state(),
            **self.events.to_state(),
            "modes": [self.modes.to_dict(), encoded(self.modes.carry)],
            "screen": self.kept_screen.to_dict(),
            "shell": self.commanding.state(),
            "new_commands": self.commanding.new.to_dict(),
            "until": self.self_fence.until,
            **self.tree.to_state(),
            **self.helpers.to_state(),
            **self.master.to_state(),
            **self.leasing.authority.to_state(),
            **self.inside.to_state(),
            **self.environment.to_state(),
            **self.clients.to_state(),
            **self.waits.to_state(),
            **self.echoes.to_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `to_state` returned, and go on where that holder was."""
        self.session.restore(state, self.log.end)
        self.events.restore(state)
        self.echoes.restore(state)
        self.prepare()
        self.leasing.restore(state)
        self.tree.restore(state)
        self.lifetime.restore(state)
        self.helpers.restore(state)
        self.kept_screen.restore(state.get("screen"))
        self.commanding.restore(state.get("shell") or {})
        self.commanding.new.restore(state.get("new_commands") or {})
        self.master.restore(state)
        if self.session.state in ("running", "paused") and self.tree.root is not None:
            self.root_watch.begin()
        self.clients.restore(state, self.leasing.authority.operators)
        self.inside.restore(state)
        self.environment.restore(state)
        self.waits.restore(state, self.clients.connections)
        self.self_fence.resume(state.get("until"))
        self.loop.soon(self.waits.answer)
        self.loop.soon(self.queries.answer)
