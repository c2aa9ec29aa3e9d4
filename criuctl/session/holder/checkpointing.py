"""A holder's part in a dump: standing by while the tree is frozen, then letting it go or going on.

A dump is a connection that calls, in this order: `prepare` (CRIU is about to seize the tree),
`seized`, `begin` (the tree is frozen), then either `commit` (the checkpoint exists) and `done`, or
`thawed` (the tree goes on while its checkpoint is still stored) and `done`, or `abort`.

Between `begin` and its end input is kept, output that was printed before the freeze is read to the
last byte, and the end of the tree is not the session's end: a dump ends the tree by SIGKILL, and
only afterwards calls `done`.  A connection that is lost in between means that the dump was not
completed, unless it had called `commit`: then a tree that is killed within moments was
checkpointed, and one that CRIU has let go of was not.

A tree that goes on while its checkpoint is still stored, which may take minutes, is a session as
any
other: it may be paused, signalled and killed, and its end is the session's.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from typing import Any

from ...errors import CriuctlError
from ...proc.procfs import read_status
from ...proc.tree import ProcessIdentity
from .adoption import Adoption
from .audit_log import AuditWriter
from .connection import Connection
from .echoes import behind_echo
from .event_loop import Loop, Timer
from .events import Events
from .master import Master
from .operators import Authority, Operator, Refused
from .output_log import OutputLog
from .processes import Tree
from .request_values import fitting
from .session_state import SessionState

_SIGKILL = 9
_UNCERTAIN_SECONDS = 10.0
_LOOK = 0.1  # seconds between two looks at whether the tree is still in CRIU's hands
_MADE = "a checkpoint of this session is being made"
_FOR_RESTORE = (
    *("offset", "base", "rows", "cols", "modes", "operators", "lease", "state"),
    "command",
)


class Checkpointing:
    """The dump of one session that is being made, if one is.

    `finish` ends the session, `let_go` makes it ``checkpointed``, `save` writes the state file.
    """

    def __init__(
        self,
        loop: Loop,
        session: SessionState,
        tree: Tree,
        master: Master,
        log: OutputLog,
        events: Events,
        audit: AuditWriter,
        authority: Authority,
        adoption: Adoption,
        finish: Callable[[str, int | None, int | None], None],
        let_go: Callable[[str], None],
    ) -> None:
        self._loop, self._session, self._tree, self._master = loop, session, tree, master
        self._log, self._events, self._audit = log, events, audit
        self._authority, self._adoption = authority, adoption
        self._finish, self._let_go = finish, let_go
        self.status: Callable[[], dict[str, Any]] = dict  # as in the protocol
        self.save: Callable[[], None] = lambda: None
        self.on_seize: Callable[[], None] = lambda: None  # the tree may hold no connection to here
        self.on_release: Callable[[], None] = lambda: None
        self.shell: Callable[[], dict[str, Any]] = dict  # what the next holder must know of it
        self.inside: Callable[[], dict[str, Any]] = dict  # the same of what programs have asked for
        self.on_stored: Callable[[str], None] = lambda checkpoint: None  # and the tree goes on
        self._preparing: Connection | None = None  # which has called `prepare`
        self._held: str | None = None  # the group that stands still for it meanwhile
        self._connection: Connection | None = None  # which has begun
        self._thawed = False  # the tree goes on, and its dump as well
        self._committed = ""  # id of the checkpoint that exists, whatever happens to the tree
        self._end: tuple[int | None, int | None] | None = None  # how the tree ended meanwhile
        self._uncertain: Timer | None = None  # its maker is gone and its outcome not known yet

    @property
    def active(self) -> bool:
        """Whether a dump is being made, or the outcome of one or of a restore is uncertain."""
        made = self._preparing is not None or self._connection is not None
        return made or self._uncertain is not None or self._adoption.uncertain

    @property
    def busy(self) -> bool:
        """Whether a dump or a restore is under way."""
        return self.active or self._adoption.pending

    @property
    def seizing(self) -> bool:
        """Whether CRIU has the tree in its hands, or is about to."""
        if self._adoption.pending:
            return self._adoption.seizing
        return self.active and not self._thawed

    def arrived(self) -> None:
        """Adopt a restored tree, whatever its restorer does."""
        self._adoption.complete()

    # -- the dump, step by step -------------------------------------------------------------------

    def prepare(self, connection: Connection, message: dict[str, Any]) -> dict[str, Any]:
        """Prepare for CRIU, which is about to seize the tree: no operator may freeze or thaw it.

        Return the control group that it stands still in.  A tree of many threads is held until
        `seized`, if the client asks for it.
        """
        if self.active and connection is not self._preparing:
            raise Refused("busy", _MADE)
        self._preparing, self._thawed = connection, False
        self.on_seize()
        self._unhold()
        if message.get("hold") is True and self._session.state == "running":
            self._held = self._tree.hold(connection.pid)
        return {"freezer": self._tree.seizable(), "held": self._held}

    def seized(self, connection: Connection) -> None:
        """Release a held tree: CRIU has seized all processes, or has given up."""
        if connection is self._preparing:
            self._unhold()

    def begin(self, connection: Connection, by: Operator) -> dict[str, Any]:
        """Begin the dump of the frozen tree: read its output, hold input back.

        Return all of the session that a restore needs.
        """
        session, tree = self._session, self._tree
        if self.active and connection is not self._preparing:
            raise Refused("busy", _MADE)
        session.needs("running", "paused")
        self._unhold()
        self.on_seize()
        self._preparing, self._connection = None, connection
        self._committed, self._end, self._thawed = "", None, False
        if session.state == "paused" and tree.group is not None and tree.group.version > 1:
            # CRIU has thawed the group, and this freezer allows all that CRIU still does.  Frozen
            # again, no process runs if it is let go because CRIU was killed.  Without this freezer
            # the processes are stopped.
            tree.freeze()
        self._master.hold(True)
        self._master.drain()
        self._audit.write("checkpoint-begin", {**by.who(), "pid": connection.pid})
        self._events.emit("checkpoint-begin", by=by.who(), offset=self._log.end)
        return self._for_restore()

    def commit(self, connection: Connection, checkpoint: str) -> None:
        """Record that the checkpoint exists and its maker is about to end the tree."""
        self._check(connection)
        self._committed = checkpoint

    def thawed(self, connection: Connection) -> None:
        """Let the tree continue, though its checkpoint is not complete yet."""
        self._check(connection)
        self._thawed = True
        self._go_on()

    def done(self, connection: Connection, checkpoint: str, ended: bool) -> None:
        """Complete the dump; `ended`: it has ended the tree."""
        self._check(connection)
        self._connection = None
        if ended:
            self._let_go(checkpoint)
            return
        self._session.checkpoint_id = checkpoint
        self.save()
        self.on_stored(checkpoint)
        end = self._log.end
        self._events.emit("checkpoint", checkpoint=checkpoint, ended=False, offset=end)
        self._go_on()

    def abort(self, connection: Connection) -> None:
        """Handle the failure of the dump."""
        if connection is self._preparing:
            self._stop_preparing()
            return
        self._check(connection)
        self._connection = None
        self._events.emit("checkpoint-aborted")
        self._go_on()

    # -- what else happens ------------------------------------------------------------------------

    def lost(self, connection: Connection) -> None:
        """Handle the loss of a client, which may be that of the dump or of the restore."""
        if connection is self._preparing:
            self._stop_preparing()
        self._adoption.lost(connection)
        if connection is not self._connection:
            return
        self._connection = None
        if self._committed and self._end is None:
            self._look(time.monotonic() + _UNCERTAIN_SECONDS)
        elif self._committed and self._end is not None and self._end[1] == _SIGKILL:
            self._let_go(self._committed)
        else:
            self._events.emit("checkpoint-aborted")
            self._go_on()

    def takes_the_end(self, code: int | None, number: int | None) -> bool:
        """Handle the end of the tree; return whether it is part of a dump or a restore, and not the
        session's end.
        """
        killed = number == _SIGKILL or code is None
        if killed and self._adoption.pending:
            self._adoption.turn_back()
            return True
        if killed and not self._adoption.pending and self._uncertain is not None:
            self._uncertain.cancel()
            self._uncertain = None
            self._let_go(self._committed)
            return True
        if self._connection is not None and not self._thawed:
            self._end = (code, number)
            return True
        return self._session.state == "checkpointed"

    # -- inside -----------------------------------------------------------------------------------

    def _check(self, connection: Connection) -> None:
        if self._connection is not connection:
            text = "this connection has not begun a checkpoint"
            raise Refused("state", text, state=self._session.state)

    def _for_restore(self) -> dict[str, Any]:
        """Return the answer to `begin`."""
        master, status = self._master, self.status()
        pending = fitting(
            {**chunk.who, "base64": base64.b64encode(chunk.data[chunk.at :]).decode()}
            for chunk in master.queue
        )
        ceilings = self._authority.ceilings.items()
        return {
            **{key: status[key] for key in _FOR_RESTORE},
            # The next holder does not know of these echoes.
            "input_offset": behind_echo(status["input_offset"], status["echoes"]),
            "xpixel": master.xpixel,
            "ypixel": master.ypixel,
            "roles": [[kind, name, role] for (kind, name), role in ceilings],
            "events": self._events.sequence,
            "audit": self._audit.log.sequence,
            "pending_input": pending,
            "shell": self.shell(),
            "inside": self.inside(),
            "paused": self._paused(),
        }

    def _paused(self) -> dict[str, Any] | None:
        session = self._session
        if session.state != "paused":
            return None
        stopped = [identity.pid for identity in self._tree.stopped]
        return {"by": session.paused_by, "halted": session.halted, "stopped": stopped}

    def _unhold(self) -> None:
        if self._held is not None:
            self._held = None
            self._tree.unhold()

    def _stop_preparing(self) -> None:
        self._preparing = None
        self._unhold()
        self._stand_still()
        self.on_release()

    def _go_on(self) -> None:
        """Let the session continue, or end it if its tree has ended meanwhile."""
        end, self._end = self._end, None
        self.on_release()
        if end is not None:
            self._finish("exited" if end[0] is not None else "lost", *end)
        else:
            self._stand_still()
            self._master.hold(False)

    def _stand_still(self) -> None:
        """Freeze a paused tree again: CRIU leaves it as it found it, unless it was killed."""
        if self._session.state == "paused":
            self._tree.freeze()

    def _look(self, until: float) -> None:
        """Wait while CRIU may still end the tree, although the client is gone; then go on."""
        root = self._tree.root
        if time.monotonic() < until and (root is None or _in_hands(root)):
            self._uncertain = self._loop.after(_LOOK, lambda: self._look(until))
            return
        self._uncertain = None
        self._events.emit("checkpoint-aborted")
        self._go_on()


def _in_hands(root: ProcessIdentity) -> bool:
    """Return whether a process is traced, or about to end."""
    try:
        return int(read_status(root.pid)["TracerPid"]) != 0 or root.doomed()
    except CriuctlError:
        return True
