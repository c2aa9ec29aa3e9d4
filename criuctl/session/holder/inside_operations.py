"""What programs of the session may ask besides steps: a checkpoint, what invalidates a checkpoint,
and to be called before and after one. Over the step socket (`step_socket`), and what dumps,
restores and supervisors ask about it over the holder's own.

Only the session's own user may ask: that of the process that leads the terminal's session, or root.
A condition that is a command would be run by root, at dumps and restores. It is accepted from a
program that is root itself, with all of this holder's capabilities, in a session of root's; and a
later home runs it only if it is the host that has noted it (`criuctl.files.predicates`).

The conditions are part of each later checkpoint, and come back with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from ...errors import CriuctlError
from ...proc.procfs import read_status
from ...proc.tree import ProcessIdentity
from ...steps.states import StepRefused
from . import callbacks as calls
from .asked_checkpoints import AskedCheckpoints
from .audit_log import AuditWriter
from .callbacks import Callbacks
from .connection import Connection
from .master import Master
from .operators import Operator, Refused
from .processes import Tree
from .request_values import LATER, Operations, number, one_of, text
from .steps import Message, Peer

KINDS = ("file", "age", "output", "command")
COMMANDS = ("output", "command")
_MAX_CONDITIONS = 16
_LONGEST = 4096  # characters
_AGE = re.compile(r"(?=.*[1-9])([0-9]{1,6}(s|min|h|d|w|y)){1,6}")
_PATIENCE = 3600.0  # seconds that a dump may wait for functions at most


class InsideOperations:
    """What the programs of one session have asked for."""

    def __init__(
        self,
        tree: Tree,
        master: Master,
        asked: AskedCheckpoints,
        callbacks: Callbacks,
        audit: AuditWriter,
    ) -> None:
        self._tree, self._master, self._audit = tree, master, audit
        self._asked, self._callbacks = asked, callbacks
        self._conditions: list[Message] = []  # kind, argument, foreign
        self.of_programs: dict[str, Callable[[Peer, Message], Message]] = {
            "checkpoint": self._own(asked.ask),
            "invalidate-if": self._own(self._invalidate_if),
            "callbacks": self._own(callbacks.register),
            "callback-next": callbacks.next,
            "callback-done": callbacks.report,
        }
        self.operations: Operations = {
            "inside": ("admin", lambda c, o, m: self._shown()),
            "callbacks-call": ("admin", self._call),
            "checkpoint-refused": ("admin", lambda c, o, m: asked.refuse(text(m, "message", 2000))),
        }

    def _own(self, do: Callable[[Peer, Message], Message]) -> Callable[[Peer, Message], Message]:
        """Return the operation for the session's own user only."""

        def operation(peer: Peer, message: Message) -> Message:
            if peer.uid not in (0, self._user()):
                raise StepRefused("forbidden", "only the user of this session may ask for that")
            return do(peer, message)

        return operation

    def _leader(self) -> ProcessIdentity:
        """Return the process whose user is the session's: the leader of the terminal's session, or
        the tree's root.
        """
        root, pid = self._tree.root, self._master.leader()
        try:
            if pid and self._tree.contains(pid):
                return ProcessIdentity.of(pid)
        except CriuctlError:
            pass  # it has just ended
        if root is None:
            raise StepRefused("state", "the session has no tree")
        return root

    def _user(self) -> int:
        """Return the session's user."""
        try:
            return int(read_status(self._leader().pid)["Uid"].split()[0])
        except (CriuctlError, KeyError, ValueError):
            raise StepRefused("state", "the session has ended") from None

    # -- conditions -------------------------------------------------------------------------------

    def _invalidate_if(self, peer: Peer, message: Message) -> Message:
        """Note what invalidates every later checkpoint."""
        kind, argument = message.get("kind"), message.get("argument")
        if not _is_condition(kind, argument):
            text = f"a condition is one of {', '.join(KINDS)}, of 1 to {_LONGEST} characters"
            raise StepRefused("bad-request", text)
        assert isinstance(argument, str)
        if kind == "file" and not argument.startswith("/"):
            raise StepRefused("bad-request", f"file={argument!r} is no absolute path")
        if kind == "age" and not _AGE.fullmatch(argument):
            raise StepRefused("bad-request", f"age={argument!r} is no span of time such as 36h, 7d")
        if kind in COMMANDS and not (self._user() == 0 and _is_root(peer.pid)):
            raise StepRefused(
                "forbidden",
                f"{kind}= is a command, which root would run: only a program of root's, in a "
                "session of root's, may ask for it",
            )
        known = [
            one for one in self._conditions if (one["kind"], one["argument"]) != (kind, argument)
        ]
        if len(known) >= _MAX_CONDITIONS:
            raise StepRefused("busy", f"{_MAX_CONDITIONS} conditions are noted already")
        if len(known) == len(self._conditions):
            self._audit.write("invalidate-if", peer.who, condition=f"{kind}:{argument}"[:500])
        self._conditions = [*known, {"kind": kind, "argument": argument, "foreign": False}]
        return {"conditions": len(self._conditions)}

    # -- dumps and restores -----------------------------------------------------------------------

    def _shown(self) -> Message:
        try:
            leader = self._leader()
        except StepRefused as refused:
            raise Refused(refused.code, refused.message) from None
        return {"conditions": self._conditions, "leader": list(leader)}

    def _call(self, connection: Connection, by: Operator, message: Message) -> Message:
        event = one_of(message, "event", (calls.BEFORE,))
        seconds, request = number(message, "seconds", 0, _PATIENCE, 0), message["id"]

        def answer(body: Message) -> None:
            connection.send({"id": request, "ok": True, **body})

        self._callbacks.call(connection, event, seconds, answer)
        return LATER

    def taken(self) -> Message:
        """The tree is frozen: return what its checkpoint must hold of all this."""
        return {
            "checkpoints": self._asked.taken(),
            "label": self._asked.labels(),
            "conditions": self._conditions,
            "callbacks": self._callbacks.in_tree(),
        }

    def returned(
        self, given: object, connection: Connection, processes: dict[int, ProcessIdentity]
    ) -> None:
        """A restore has brought the tree, and `given` is what its checkpoint holds."""
        body: dict[str, Any] = given if isinstance(given, dict) else {}
        self._asked.returned(body.get("checkpoints"), str(body.get("checkpoint", "")))
        environment = body.get("environment")
        if isinstance(environment, dict):  # the restorer's: its store may be another one
            self._asked.environment = {str(key): str(value) for key, value in environment.items()}
        conditions = body.get("conditions")
        self._conditions = [
            {
                "kind": one["kind"],
                "argument": one["argument"],
                "foreign": one.get("foreign") is not False,
            }
            for one in (conditions if isinstance(conditions, list) else ())
            if isinstance(one, dict) and _is_condition(one.get("kind"), one.get("argument"))
        ][:_MAX_CONDITIONS]
        fork = body.get("fork") is True
        self._callbacks.returned(body.get("callbacks"), processes, connection, fork=fork)

    # -- re-exec ----------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return all of it, for the next program of this holder."""
        return {
            "inside": {
                "conditions": self._conditions,
                **self._asked.to_state(),
                **self._callbacks.to_state(),
            }
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `to_state` returned."""
        given = state.get("inside") or {}
        self._conditions = list(given.get("conditions") or ())
        self._asked.restore(given)
        self._callbacks.restore(given)


def _is_condition(kind: object, argument: object) -> bool:
    return (
        kind in KINDS
        and isinstance(argument, str)
        and bool(argument.strip())
        and len(argument) <= _LONGEST
        and "\0" not in argument
    )


def _is_root(pid: int) -> bool:
    """Return whether a process is root as this holder is: no other user namespace, and no fewer
    capabilities.
    """
    try:
        theirs, mine = read_status(pid), read_status(os.getpid())
        same = os.path.samestat(os.stat(f"/proc/{pid}/ns/user"), os.stat("/proc/self/ns/user"))
        uids = set(theirs["Uid"].split())
        lacking = int(mine["CapEff"], 16) & ~int(theirs["CapEff"], 16)
    except (CriuctlError, OSError, KeyError, ValueError):
        return False
    return same and uids == {"0"} and not lacking
