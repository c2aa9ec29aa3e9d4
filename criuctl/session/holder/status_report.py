"""What a holder reports of its session: to clients (`status`), and in the state file.

The state file is for programs that find no holder any more, and for those that need not ask it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ... import __version__
from ...errors import CriuctlError
from ...proc.tree import ProcessIdentity
from .. import names
from ..screen.modes import Modes
from .checkpointing import Checkpointing
from .clients import Clients
from .echoes import Echoes
from .foreground_report import ForegroundReport
from .lease_timer import Leasing
from .master import Master
from .processes import Tree
from .self_fence import SelfFence
from .session_files import SessionFiles
from .session_state import SessionState

_LONGEST = 32 << 10  # characters of a command that are reported: a frame must hold the status
_IN_STATE_FILE = (
    *("session", "id", "state", "incarnation", "pid", "start_time", "exit_code", "exit_signal"),
    *("since", "created", "reason", "command", "labels", "checkpoint", "moved_to", "home"),
    *("rows", "cols", "input_offset", "echoes", "roles"),
)
_OUTSIDE_SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGKILL)


class StatusReport:
    """Reports one session."""

    def __init__(
        self,
        session: SessionState,
        files: SessionFiles,
        modes: Modes,
        clients: Clients,
        leasing: Leasing,
        master: Master,
        tree: Tree,
        self_fence: SelfFence,
        checkpointing: Checkpointing,
        step_counts: Callable[[], dict[str, Any]],
        foreground: ForegroundReport,
        echoes: Echoes,
    ) -> None:
        self._session, self._files, self._modes = session, files, modes
        self._clients, self._leasing, self._master, self._tree = clients, leasing, master, tree
        self._self_fence, self._checkpointing = self_fence, checkpointing
        self._step_counts = step_counts
        self._foreground, self._echoes = foreground, echoes

    def status(self) -> dict[str, Any]:
        """Return the status as the protocol has it."""
        return {**self.known(), "foreground": self._foreground.report()}

    def known(self) -> dict[str, Any]:
        """Return the status without what only the kernel knows."""
        session, master, log = self._session, self._master, self._files.log
        identity, root, group = session.identity, self._tree.root, self._tree.group
        moved = session.moved
        return {
            "session": identity.name,
            "id": identity.id,
            "state": session.state,
            "incarnation": identity.incarnation,
            "pid": root.pid if root is not None else None,
            "start_time": root.start_time if root is not None else None,
            "exit_code": session.exit[0],
            "exit_signal": session.exit[1],
            "reason": identity.facts.get("fenced", {}).get("reason"),
            "since": session.since,
            "created": identity.created,
            "command": _shortened(identity.command),
            "host": os.uname().nodename,
            "rows": master.rows,
            "cols": master.cols,
            "offset": log.end,
            "base": log.base,
            "modes": self._modes.to_dict(),
            "operators": self._operators(),
            "lease": self._leasing.current(),
            "roles": [
                {"kind": kind, "name": name, "role": role}
                for (kind, name), role in self._leasing.authority.ceilings.items()
            ],
            "paused_by": session.paused_by,
            "halted": session.halted,
            "self_fence": self._self_fence.until is not None,
            "held_input": master.queued if master.held else 0,
            "queued_input": master.queued,
            "input_offset": max(session.input_offset, log.base),
            "echoes": self._echoes.report(),
            "labels": identity.labels,
            "checkpoint": session.checkpoint_id or None,
            "moved_to": moved["to"] if moved is not None else None,
            "home": moved["host"] if moved is not None else os.uname().nodename,
            "checkpointing": self._checkpointing.active,
            "audit": str(self._files.audit.path),
            "steps": self._step_counts(),
            "log_error": log.broken or None,
            "freezer": group.method if group is not None else "SIGSTOP",
            "holder_pid": os.getpid(),
            "version": __version__,
            "restored": identity.restored,
            "facts": identity.facts,
        }

    def _operators(self) -> list[dict[str, Any]]:
        """Return the operators that are connected, with how far each has read the output."""
        end = self._files.log.end
        clients = {
            client.operator.id: client
            for client in self._clients.all()
            if client.operator is not None and not client.dead
        }
        found = []
        for operator in self._leasing.authority.operators.values():
            if operator.id in clients:
                position = clients[operator.id].position
                lag = 0 if position is None else end - position
                place: dict[str, Any] = {"attached": position is not None, "lag": lag}
                if position is not None and clients[operator.id].within:
                    place["within"] = clients[operator.id].within
                about = {"role": operator.role, "since": operator.since}
                found.append({**operator.who(), **about, **place})
        return found

    def write(self, *, ended: bool = False) -> None:
        """Write the state file; `ended`: this holder ends."""
        try:
            mine = ProcessIdentity.of(os.getpid())
        except CriuctlError:  # no /proc: then no other process can check it either
            mine = ProcessIdentity(os.getpid(), 0)
        known, group = self.known(), self._tree.group
        body = {key: known[key] for key in _IN_STATE_FILE}
        body |= {
            "pid_namespace": self._pid_namespace(),
            "socket": str(self._files.socket),
            "cgroup": group.path if group is not None else None,
            "holder": None if ended else mine._asdict(),
            "boot_id": _boot_id(),
            "log": str(self._files.state_folder / "output"),
        }
        with suppress(OSError):
            # The PID namespace in which the holder's PID means something.
            body["holder_namespace"] = os.stat("/proc/self/ns/pid").st_ino
        temporary = self._files.run_folder / ".state"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with suppress(OSError):  # a full disk must not end a session
            with open(os.open(temporary, flags, 0o600), "w") as file:
                json.dump(body, file)
            temporary.replace(self._files.run_folder / "state.json")

    def write_end(self) -> None:
        """Record which incarnation ended by itself, so that no supervisor starts it again.

        One that was killed may have been ended by the host, which shuts down.
        """
        if self._session.exit[1] in _OUTSIDE_SIGNALS:
            return
        identity = self._session.identity
        body = {"id": identity.id, "incarnation": identity.incarnation}
        with suppress(OSError):  # a full disk must not end a session
            (self._files.state_folder / names.ENDED).write_text(json.dumps(body))

    def _pid_namespace(self) -> int | None:
        """Return the inode of the tree's own PID namespace; None if it has none.

        A process inside compares it with that of its own namespace to know which session it is in.
        """
        if self._tree.root is not None:
            with suppress(OSError):
                inode = os.stat(f"/proc/{self._tree.root.pid}/ns/pid").st_ino
                return inode if inode != os.stat("/proc/self/ns/pid").st_ino else None
        return None


def _shortened(command: list[str]) -> list[str]:
    """Return the command, or as much of its beginning as is reported."""
    left, words = _LONGEST, list[str]()
    for word in command:
        if len(word) > left:
            return [*words, word[: max(0, left)] + "..."]
        words.append(word)
        left -= len(word) + 1
    return words


def _boot_id() -> str:
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""
