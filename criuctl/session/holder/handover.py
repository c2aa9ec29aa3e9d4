"""A holder hands its session over to a fresh program, of a newer criuctl perhaps; clients do not notice.

All that the holder knows goes through a memory file as JSON; sockets, terminal and children belong to
the process and stay.  What the tree prints meanwhile waits in the terminal, what clients send waits in
their sockets.  A child first tries whether the new program starts and can read this format: a holder
that is gone would be a lost session.  `launch.reexec` is the other end.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import helper_processes
from .connection import Connection
from .operators import Refused
from .processes import exit_code

if TYPE_CHECKING:
    from .holder import Holder

FORMAT = 1


def begin(holder: Holder, connection: Connection, message: dict[str, Any]) -> None:
    """The operation `reexec`: try the new program, then become it."""
    code = Path(str(message.get("code") or Path(__file__).parents[3]))
    executable = str(message.get("executable") or sys.executable)
    entry = code / "criuctl" / "session" / "entry.py"
    request = message["id"]
    argv = [executable, "-I", "-S", str(entry), holder.identity.name]
    try:
        pid = helper_processes.start([*argv, "check", str(FORMAT), str(holder.run_folder)], dict(os.environ), "/", {})
    except OSError as error:
        raise Refused("failed", f"the new program cannot be started: {error.strerror}") from None
    holder.tree.helpers.add(pid)

    def checked(status: int) -> None:
        code, text = "failed", f"the new program does not start (status {exit_code(status)[0]})"
        if status == 0:
            code, text = "busy", "a checkpoint, a restore or a kill is under way"
        if status == 0 and not busy(holder):
            code, text = "failed", _unwritable(holder)
            if not text:
                connection.send({"id": request, "ok": True})
                _become(holder, argv)
                return
        connection.send({"id": request, "error": {"code": code, "message": text}})

    holder.helpers[pid] = checked


def busy(holder: Holder) -> bool:
    """Whether something is under way that another program could not go on with."""
    return holder.checkpointing.active or holder.checkpointing.arriving or holder.kills > 0


def _unwritable(holder: Holder) -> str:
    """Why the new program could not go on with the files of this one; "": it could."""
    for path in (holder.log.path, holder.audit.path):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        except OSError as error:
            return f"{path} cannot be opened: {error.strerror}"
    return ""


def _become(holder: Holder, argv: list[str]) -> None:
    holder.log.flush()
    fds = [connection.sock.fileno() for connection in holder.connections.values()]
    assert holder.listener is not None
    fds += [holder.listener.fileno()] + ([holder.master.fd] if holder.master.fd >= 0 else [])
    memory = os.memfd_create("criuctl-holder", os.MFD_CLOEXEC)
    with open(memory, "w", closefd=False) as file:
        json.dump(_state(holder), file)
    fds.append(memory)
    for fd in fds:
        os.set_inheritable(fd, True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # handlers end with the exec, and the default would end the session
    try:
        os.execve(argv[0], [*argv, "reexec", str(memory), str(holder.run_folder)], dict(os.environ))
    except OSError as error:
        for fd in fds:
            os.set_inheritable(fd, False)
        os.close(memory)
        holder.watch_term()
        print(f"re-exec failed: {error}", file=sys.stderr)  # noqa: T201 -- the holder's own log


def _state(holder: Holder) -> dict[str, Any]:
    authority, master, log = holder.authority, holder.master, holder.log
    root = holder.tree.root
    return {
        "format": FORMAT,
        "identity": asdict(holder.identity),
        "folders": [str(holder.run_folder), str(holder.state_folder)],
        "state": [holder.state, holder.since, *holder.exit],
        "collected": holder.collected,
        "paused_by": holder.paused_by,
        "halted": holder.halted,
        "input_offset": holder.input_offset,
        "until": holder.deadman.until,
        "checkpoint": holder.checkpoint_id,
        "linger": holder.linger,
        "sequence": holder.sequence,
        "audit": holder.audit.sequence,
        "events": [[sequence, _text(frame)] for sequence, frame in holder.events],
        "log": {
            "path": str(log.path),
            "capacity": log.capacity,
            "base": log.base,
            "end": log.end,
            "broken": _text(log.read(log.base, log.end)) if log.broken else None,
        },
        "modes": [holder.modes.to_dict(), _text(holder.modes.carry)],
        "root": root._asdict() if root is not None else None,
        "stopped": [identity._asdict() for identity in holder.tree.stopped],
        "frozen": holder.tree.frozen,
        "moved": holder.moved,
        "expecting": holder.expecting,
        "asleep": None if holder.tree.asleep is None else [identity._asdict() for identity in holder.tree.asleep],
        "helpers": list(holder.helpers),
        "master": master.fd,
        "size": [master.rows, master.cols, master.xpixel, master.ypixel],
        "held": master.held,
        "queue": [asdict(chunk) | {"data": _text(chunk.data)} for chunk in master.queue],
        "operators": [asdict(operator) for operator in authority.operators.values()],
        "ceilings": [[kind, name, role] for (kind, name), role in authority.ceilings.items()],
        "lease": [authority.holder, authority.expires, authority.ttl, list(authority.queue), authority.serial],
        "soft": [authority.soft, authority.wrote],
        "listener": holder.listener.fileno() if holder.listener is not None else -1,
        "connections": [connection.to_state() for connection in holder.connections.values()],
        "waits": [[w.connection.sock.fileno(), w.request, w.what, w.offset, w.states] for w in holder.waits],
    }


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()
