"""A holder's part in dumps and restores: standing by while the tree is frozen, letting it go, taking it back.

Between `begin` and its end input is kept, output that was printed before the freeze is read to the last byte, and the
end of the tree is not the session's end: a dump ends the tree by SIGKILL, and only afterwards says ``done``.  A connection
that is lost in between means that the dump was not completed, unless it had already said that the checkpoint is
``committed``: then a tree that is killed within moments was checkpointed, and one that CRIU has let go of was not.

A tree that goes on while its checkpoint is still stored (``thawed``), which may take minutes, is a session as any other: it may
be paused, signalled and killed, and its end is the session's.

A restored tree is the session's from `adopt` on, but its restorer can take everything back until it lets go of it (`settle`): a
tree that is killed before that was not restored, and the session is where it was, in its checkpoint.
"""

from __future__ import annotations

import base64
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import CriuctlError
from ...proc.procfs import read_status
from ...proc.tree import ProcessIdentity
from ..protocol import MOVED_LINGER
from .connection import Connection
from .event_loop import Timer
from .operators import Operator, Refused
from .request_values import fitting

if TYPE_CHECKING:
    from .holder import Holder

_SIGKILL = 9
_UNCERTAIN_SECONDS = 10.0
_LOOK = 0.1  # seconds between two looks at whether the tree is still in CRIU's hands
_RESTORED_KEYS = ("host", "checkpoint", "created", "dropped", "text")


@dataclass
class _Arrival:
    """A restored tree that its restorer has not let go of, and what the session was without it."""

    connection: Connection | None  # None: lost
    checkpoint: str
    incarnation: int
    restored: dict[str, Any] | None
    moved: dict[str, Any] | None
    expected: bool  # the holder was made for this tree alone


class Checkpointing:
    """The state of the dump that is being made, if one is, or of the restore that is being completed."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._preparing: Connection | None = None  # whose CRIU is about to seize the tree, or just does
        self._held: str | None = None  # the group that stands still for it meanwhile
        self._connection: Connection | None = None
        self._thawed = False  # the tree goes on, and its dump as well
        self._committed = ""  # id of the checkpoint that exists, whatever becomes of the tree
        self._end: tuple[int | None, int | None] | None = None  # how the tree ended meanwhile
        self._uncertain: Timer | None = None
        self._arrival: _Arrival | None = None

    @property
    def active(self) -> bool:
        """Whether a dump is being made."""
        return self._preparing is not None or self._connection is not None or self._uncertain is not None

    @property
    def seizing(self) -> bool:
        """Whether CRIU has the tree in its hands, or is about to."""
        if self._arrival is not None:
            return self._arrival.connection is not None and self._holder.state == "paused"
        return self.active and not self._thawed

    @property
    def arriving(self) -> bool:
        """Whether a restore may still take its tree back."""
        return self._arrival is not None

    # -- the dump ---------------------------------------------------------------------------------

    def prepare(self, connection: Connection, message: dict[str, Any]) -> dict[str, Any]:
        """CRIU is about to seize the tree: nobody may freeze or thaw it under its hands.  The group that it stands still in.

        One of many threads is `held` until they are `seized`, if CRIU's caller will tell.
        """
        if self.active and connection is not self._preparing:
            raise Refused("busy", "a checkpoint of this session is being made")
        self._preparing, self._thawed = connection, False
        self._unhold()
        tree = self._holder.tree
        if message.get("hold") is True and self._holder.state == "running":
            self._held = tree.hold(connection.pid)
        return {"freezer": tree.seizable(), "held": self._held}

    def seized(self, connection: Connection) -> None:
        """All are in CRIU's hands, or nothing comes of it: who was held is not any more."""
        if connection is self._preparing:
            self._unhold()

    def _unhold(self) -> None:
        if self._held is not None:
            self._held = None
            self._holder.tree.unhold()

    def begin(self, connection: Connection, by: Operator) -> dict[str, Any]:
        """The tree is frozen: record what it printed, hold input back, tell all that a restore needs."""
        holder = self._holder
        if self.active and connection is not self._preparing:
            raise Refused("busy", "a checkpoint of this session is being made")
        if holder.state not in ("running", "paused"):
            raise Refused("state", f"the session is {holder.state}", state=holder.state)
        self._unhold()
        self._preparing, self._connection, self._committed, self._end = None, connection, "", None
        self._thawed = False
        if holder.state == "paused" and holder.tree.group is not None and holder.tree.group.version > 1:
            # CRIU has thawed it, and is done with it but for letting go or killing, which this freezer allows: nobody runs who is
            # let go because CRIU was killed.  Without it they are stopped.
            holder.tree.freeze()
        holder.master.hold(True)
        holder.master.drain()
        holder.audit.write("checkpoint-begin", {**by.who(), "pid": connection.pid}, holder.identity.incarnation)
        holder.emit("checkpoint-begin", by=by.who(), offset=holder.log.end)
        master = holder.master
        status = holder.status()
        kept = ("offset", "base", "input_offset", "rows", "cols", "modes", "operators", "lease", "state", "command")
        pending = fitting({**c.who, "base64": base64.b64encode(c.data[c.at :]).decode()} for c in master.queue)
        return {
            **{key: status[key] for key in kept},
            "xpixel": master.xpixel,
            "ypixel": master.ypixel,
            "roles": [[kind, name, role] for (kind, name), role in holder.authority.ceilings.items()],
            "events": holder.sequence,
            "audit": holder.audit.sequence,
            "pending_input": pending,
            "paused": self._paused(),
        }

    def _paused(self) -> dict[str, Any] | None:
        holder = self._holder
        if holder.state != "paused":
            return None
        return {"by": holder.paused_by, "halted": holder.halted, "stopped": [identity.pid for identity in holder.tree.stopped]}

    def commit(self, connection: Connection, checkpoint: str) -> None:
        """The checkpoint exists and its maker is about to end the tree."""
        self._check(connection)
        self._committed = checkpoint

    def thawed(self, connection: Connection) -> None:
        """The tree goes on, though its checkpoint is not complete yet."""
        self._check(connection)
        self._thawed = True
        self._go_on()

    def done(self, connection: Connection, checkpoint: str, ended: bool) -> None:
        """The dump is complete."""
        self._check(connection)
        self._connection = None
        if ended:
            self._let_go(checkpoint)
        else:
            self._holder.checkpoint_id = checkpoint
            self._holder.write_state()
            self._holder.emit("checkpoint", checkpoint=checkpoint, ended=False, offset=self._holder.log.end)
            self._go_on()

    def abort(self, connection: Connection) -> None:
        """The dump came to nothing."""
        if connection is self._preparing:
            self._preparing = None
            self._unhold()
            self._stand_still()
            return
        self._check(connection)
        self._connection = None
        self._holder.emit("checkpoint-aborted")
        self._go_on()

    def lost(self, connection: Connection) -> None:
        """A connection was lost; was it the one that makes the dump?"""
        if connection is self._preparing:
            self._preparing = None
            self._unhold()
            self._stand_still()
        if self._arrival is not None and connection is self._arrival.connection:
            self._arrival.connection = None
            self._stand_still()
            self._uncertain = self._holder.loop.after(_UNCERTAIN_SECONDS, self.arrived)
        if connection is not self._connection:
            return
        self._connection = None
        if self._committed and self._end is None:
            self._look(time.monotonic() + _UNCERTAIN_SECONDS)
        elif self._committed and self._end is not None and self._end[1] == _SIGKILL:
            self._let_go(self._committed)
        else:
            self._holder.emit("checkpoint-aborted")
            self._go_on()

    def takes_the_end(self, code: int | None, number: int | None) -> bool:
        """The tree ended; True when that is a matter of the checkpoint and not the session's end."""
        killed = number == _SIGKILL or code is None
        if self._arrival is not None and killed:
            self._turn_back(self._arrival)
            return True
        if self._arrival is None and self._uncertain is not None and killed:
            self._uncertain.cancel()
            self._uncertain = None
            self._let_go(self._committed)
            return True
        if self._connection is not None and not self._thawed:
            self._end = (code, number)
            return True
        return self._holder.state == "checkpointed"

    def _check(self, connection: Connection) -> None:
        if self._connection is not connection:
            raise Refused("state", "this connection has not begun a checkpoint", state=self._holder.state)

    def _let_go(self, checkpoint: str) -> None:
        """The tree is in the store now and nowhere else."""
        holder = self._holder
        holder.checkpoint_id = checkpoint
        holder.master.close()
        holder.tree.thaw()
        holder.paused_by, holder.halted = None, False
        holder.emit("checkpointed", checkpoint=checkpoint, offset=holder.log.end)
        holder.set_state("checkpointed")

    def _go_on(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            self._holder.finish("exited" if end[0] is not None else "lost", *end)
        else:
            self._stand_still()
            self._holder.master.hold(False)

    def _stand_still(self) -> None:
        """CRIU leaves a paused tree as it found it, unless it was killed."""
        if self._holder.state == "paused":
            self._holder.tree.freeze()

    def _look(self, until: float) -> None:
        """Its maker is gone and CRIU may end the tree yet, which it never lets go of before."""
        root = self._holder.tree.root
        if time.monotonic() < until and (root is None or _in_hands(root)):
            self._uncertain = self._holder.loop.after(_LOOK, lambda: self._look(until))
            return
        self._uncertain = None
        self._holder.emit("checkpoint-aborted")
        self._go_on()

    # -- the restore ------------------------------------------------------------------------------

    def adopt(self, connection: Connection, by: Operator, message: dict[str, Any]) -> None:
        """A restored tree is the session's from now on."""
        holder = self._holder
        fds = connection.take_fds()
        try:
            if holder.state != "checkpointed":
                raise Refused("state", f"the session is {holder.state}, it has a tree or needs none", state=holder.state)
            if message.get("master", True) and len(fds) != 1:
                raise Refused("bad-request", "adopt needs the terminal's master as the one descriptor")
            root = _identity(message)
            restored = message.get("restored")
            facts = {key: restored[key] for key in _RESTORED_KEYS if key in restored} if isinstance(restored, dict) else {}
            if isinstance(message.get("init"), int):
                holder.identity.facts |= {"init": message["init"], "private": bool(message["init"])}
            holder.move_in()
            holder.own(root, fds.pop() if message.get("master", True) else -1)
        finally:
            for fd in fds:
                os.close(fd)
        if holder.tree.group is not None:
            for identity in holder.tree.members():
                holder.tree.group.add(identity.pid)
        paused = _paused_facts(message.get("paused"))
        if paused is not None or message.get("settles") is True:
            before = holder.identity
            self._arrival = _Arrival(
                connection, holder.checkpoint_id, before.incarnation, before.restored, holder.moved, expected=holder.expecting
            )
        holder.moved, holder.expecting, holder.forsaken = None, False, False
        if paused is not None:
            holder.tree.returns(paused.pop("stopped"), paused.pop("asleep"))
            holder.paused_by, holder.halted = paused["by"], paused["halted"]
        held = holder.master.queued
        if message.get("input") == "drop":
            holder.requests.refuse_dropped(holder.master.drop(lambda chunk: False))
        holder.identity.incarnation = int(message["incarnation"])
        holder.identity.restored = {**facts, "at": round(time.time(), 3)}
        holder.audit.write("adopt", {**by.who(), "pid": connection.pid}, holder.identity.incarnation, tree=root.pid, **facts)
        holder.emit("restored", **facts, offset=holder.log.end, held_input=held)
        if paused is not None:
            holder.emit("halted" if paused["halted"] else "paused", by=paused["by"], restored=True)
        holder.set_state("running" if paused is None else "paused")
        holder.deadman.extend(0)  # this is its home now: also what stood still as a home that was cut off goes on
        holder.master.hold(self._arrival is not None)  # what a tree that is taken back would have been typed is the next one's

    def settle(self, connection: Connection) -> dict[str, Any]:
        """CRIU is about to let go of a restored tree, of one that is to stand still as well."""
        if self._arrival is None or connection is not self._arrival.connection:
            raise Refused("state", "this connection has not adopted a tree that it has to let go of", state=self._holder.state)
        self._arrival = None
        method, count = self._holder.tree.freeze() if self._holder.state == "paused" else (None, 0)
        self._holder.master.hold(False)
        return {"method": method, "processes": count}

    def _turn_back(self, arrival: _Arrival) -> None:
        """The restore came to nothing, and has killed what it had made."""
        self._end_arrival()
        holder = self._holder
        holder.identity.incarnation, holder.identity.restored = arrival.incarnation, arrival.restored
        holder.moved, holder.forsaken = arrival.moved, arrival.expected
        self._let_go(arrival.checkpoint)
        if holder.moved is not None:
            holder.loop.after(MOVED_LINGER, holder.end_moved)
        holder.end_if_done()

    def arrived(self) -> None:
        """A tree that lives on without its restorer, or that is ended because somebody wants it, is the session's."""
        if self._arrival is not None:
            self._end_arrival()
            self._holder.master.hold(False)

    def _end_arrival(self) -> None:
        self._arrival = None
        if self._uncertain is not None:
            self._uncertain.cancel()
            self._uncertain = None


def _in_hands(root: ProcessIdentity) -> bool:
    """Whether somebody traces this process, or it is about to end."""
    try:
        return int(read_status(root.pid)["TracerPid"]) != 0 or root.doomed()
    except CriuctlError:
        return True


def _identity(message: dict[str, Any]) -> ProcessIdentity:
    pid, start_time = message.get("pid"), message.get("start_time")
    if not isinstance(pid, int) or pid <= 0 or not isinstance(message.get("incarnation"), int):
        raise Refused("bad-request", "adopt needs pid and incarnation")
    try:
        root = ProcessIdentity.of(pid)
    except CriuctlError as error:
        raise Refused("not-found", str(error)) from None
    if start_time is not None and start_time != root.start_time:
        raise Refused("not-found", f"PID {pid} is another process by now")
    return root


def _paused_facts(facts: Any) -> dict[str, Any] | None:
    if not isinstance(facts, dict):
        return None
    by = facts.get("by")
    found = {key: [_living(pid) for pid in facts.get(key) or () if isinstance(pid, int)] for key in ("stopped", "asleep")}
    lists = {key: [identity for identity in listed if identity is not None] for key, listed in found.items()}
    return {"by": by if isinstance(by, dict) else None, "halted": facts.get("halted") is True, **lists}


def _living(pid: int) -> ProcessIdentity | None:
    try:
        return ProcessIdentity.of(pid)
    except CriuctlError:
        return None
