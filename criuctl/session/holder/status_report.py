"""What a holder says of its session: to clients (`status`), and to those who find no holder any more (the state file)."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...errors import CriuctlError
from ...proc.tree import ProcessIdentity
from .. import names

if TYPE_CHECKING:
    from .holder import Holder

_LONGEST = 32 << 10  # characters of a command that are told: a frame holds no more than so many, whatever they are


def status(holder: Holder) -> dict[str, Any]:
    """As in the protocol."""
    identity, root, now = holder.identity, holder.tree.root, time.monotonic()
    attached = {c.operator.id: c for c in holder.connections.values() if c.operator is not None and not c.dead}
    operators = []
    for operator in holder.authority.operators.values():
        if operator.id in attached:
            position = attached[operator.id].position
            place = {"attached": position is not None, "lag": 0 if position is None else holder.log.end - position}
            operators.append({**operator.who(), "role": operator.role, "since": operator.since, **place})
    return {
        "session": identity.name,
        "id": identity.id,
        "state": holder.state,
        "incarnation": identity.incarnation,
        "pid": root.pid if root is not None else None,
        "start_time": root.start_time if root is not None else None,
        "exit_code": holder.exit[0],
        "exit_signal": holder.exit[1],
        "reason": holder.identity.facts.get("fenced", {}).get("reason"),
        "since": holder.since,
        "created": identity.created,
        "command": _told(identity.command),
        "host": os.uname().nodename,
        "rows": holder.master.rows,
        "cols": holder.master.cols,
        "offset": holder.log.end,
        "base": holder.log.base,
        "modes": holder.modes.to_dict(),
        "operators": operators,
        "lease": holder.lease(now),
        "paused_by": holder.paused_by,
        "halted": holder.halted,
        "self_fence": holder.deadman.until is not None,
        "held_input": holder.master.queued if holder.master.held else 0,
        "queued_input": holder.master.queued,
        "input_offset": max(holder.input_offset, holder.log.base),
        "labels": identity.labels,
        "checkpoint": holder.checkpoint_id or None,
        "moved_to": holder.moved["to"] if holder.moved is not None else None,
        "home": holder.moved["host"] if holder.moved is not None else os.uname().nodename,
        "checkpointing": holder.checkpointing.active,
        "audit": str(holder.audit.path),
        "log_error": holder.log.broken or None,
        "freezer": holder.tree.group.method if holder.tree.group is not None else "SIGSTOP",
        "holder_pid": os.getpid(),
        "version": __version__,
        "restored": identity.restored,
        "facts": identity.facts,
    }


def write_state(holder: Holder, ended: bool = False) -> None:
    """What `ls` and `status` know when there is no holder to ask."""
    try:
        mine = ProcessIdentity.of(os.getpid())
    except CriuctlError:  # no /proc: then nobody can check it either
        mine = ProcessIdentity(os.getpid(), 0)
    known = status(holder)
    kept = ("session", "id", "state", "incarnation", "pid", "start_time", "exit_code", "exit_signal", "since", "created")
    body = {
        key: known[key]
        for key in (*kept, "reason", "command", "labels", "checkpoint", "moved_to", "home", "rows", "cols", "input_offset")
    }
    body |= {"pid_namespace": _pid_namespace(holder), "socket": str(holder.run_folder / "socket")}
    body["cgroup"] = holder.tree.group.path if holder.tree.group is not None else None
    body |= {"holder": None if ended else mine._asdict(), "boot_id": _boot_id(), "log": str(holder.state_folder / "output")}
    with suppress(OSError):
        body["holder_namespace"] = os.stat("/proc/self/ns/pid").st_ino  # in which that PID means something
    temporary = holder.run_folder / ".state"
    with suppress(OSError):  # a full disk must not end a session
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
            json.dump(body, file)
        temporary.replace(holder.run_folder / "state.json")


def write_end(holder: Holder) -> None:
    """Which life has ended of itself, so that nobody brings it back; who was killed may be one whom the host has ended."""
    if holder.stopped or holder.exit[1] in (signal.SIGHUP, signal.SIGTERM, signal.SIGKILL):
        return
    with suppress(OSError):  # a full disk must not end a session
        body = {"id": holder.identity.id, "incarnation": holder.identity.incarnation}
        (holder.state_folder / names.ENDED).write_text(json.dumps(body))


def _told(command: list[str]) -> list[str]:
    """The command, or as much of it as can be told."""
    left, words = _LONGEST, list[str]()
    for word in command:
        if len(word) > left:
            return [*words, word[: max(0, left)] + "..."]
        words.append(word)
        left -= len(word) + 1
    return words


def _pid_namespace(holder: Holder) -> int | None:
    """Inode of the tree's PID namespace, if it has one of its own: how a process inside knows where it is."""
    if holder.tree.root is not None:
        with suppress(OSError):
            inode = os.stat(f"/proc/{holder.tree.root.pid}/ns/pid").st_ino
            return inode if inode != os.stat("/proc/self/ns/pid").st_ino else None
    return None


def _boot_id() -> str:
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""
