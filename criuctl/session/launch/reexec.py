"""A holder replaces itself by a fresh program, of a newer criuctl perhaps, and nobody notices.

All that it knows goes through a memory file as JSON; sockets, terminal and children are the process's and stay.  What the tree
prints meanwhile waits in the terminal, what clients send waits in their sockets.  Whether the new program can
start and read this format is tried in a child first: a holder that is gone would be a session that is lost.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...proc.tree import ProcessIdentity
from .. import protocol
from ..holder import helper_processes
from ..holder.audit_log import AuditLog
from ..holder.connection import Connection, Wait
from ..holder.master import Chunk
from ..holder.operators import Operator, Refused
from ..holder.output_log import OutputLog
from ..holder.processes import exit_code
from ..screen.modes import Modes

if TYPE_CHECKING:
    from ..holder.holder import Holder

FORMAT = 1
_READABLE = (1,)


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


def check(version: int) -> None:
    """The program in a child: exit status 0 when it can read this format."""
    sys.exit(0 if version in _READABLE else 1)


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


def resume(memory: int) -> None:
    """The new program: become what the memory file tells, and go on."""
    from ..holder.holder import Holder, Identity

    with open(memory) as file:
        file.seek(0)
        state = json.load(file)
    run_folder, state_folder = map(Path, state["folders"])
    log = _resume_log(Path(state["log"].get("path", state_folder / "output")), state["log"])
    modes = Modes.from_dict(state["modes"][0])
    modes.carry = _bytes(state["modes"][1])
    holder = Holder(
        Identity(**state["identity"]),
        run_folder,
        state_folder,
        log,
        modes,
        AuditLog(state_folder / "audit.jsonl", state["audit"]),
    )
    holder.state, holder.since, code, number = state["state"]
    holder.exit = (code, number)
    holder.collected, holder.paused_by, holder.linger = state["collected"], state["paused_by"], state["linger"]
    holder.halted, holder.input_offset = state["halted"], state.get("input_offset", log.end)
    holder.checkpoint_id, holder.sequence = state["checkpoint"], state["sequence"]
    holder.events.extend((sequence, _bytes(frame)) for sequence, frame in state["events"])
    holder.prepare()
    _resume_authority(holder, state)
    _resume_tree(holder, state)
    _resume_connections(holder, state)
    holder.deadman.go_on(state.get("until"))
    holder.emit("reexec", version=__version__)
    if holder.state in ("exited", "lost"):
        holder.loop.after(holder.linger, holder.end_lingering)
    holder.loop.soon(holder.answer_waits)
    holder.loop.soon(holder.queries.go_on)
    holder.run()


def _resume_log(path: Path, state: dict[str, Any]) -> OutputLog:
    if state["broken"] is None:
        try:
            log = OutputLog.reopen(path)
            if log.end == state["end"]:
                return log
            log.close()
        except (OSError, ValueError):
            pass  # somebody removed it; the scrollback is lost, the session is not
        return OutputLog(path, state["capacity"], base=state["end"])
    log = OutputLog(path, state["capacity"], base=state["base"])
    log.append(_bytes(state["broken"]))
    return log


def _resume_authority(holder: Holder, state: dict[str, Any]) -> None:
    authority = holder.authority
    authority.operators = {values["id"]: Operator(**values) for values in state["operators"]}
    authority.ceilings = {(kind, name): role for kind, name, role in state["ceilings"]}
    authority.holder, authority.expires, authority.ttl, queue, authority.serial = state["lease"]
    authority.queue.extend((operator, ttl) for operator, ttl in queue)
    authority.soft, authority.wrote = state.get("soft", (False, 0.0))
    holder.leasing.watch()


def _resume_tree(holder: Holder, state: dict[str, Any]) -> None:
    tree, master = holder.tree, holder.master
    tree.stopped = [ProcessIdentity(**values) for values in state["stopped"]]
    tree.frozen = state["frozen"]
    if state.get("expecting"):
        holder.expect()
    holder.moved = state.get("moved")
    if holder.moved is not None:
        holder.loop.after(protocol.MOVED_LINGER, holder.end_moved)
    if state.get("asleep") is not None:
        tree.asleep = frozenset(ProcessIdentity(**values) for values in state["asleep"])
    for pid in state["helpers"]:
        tree.helpers.add(pid)
        holder.helpers[pid] = helper_processes.reporter(holder, pid)
    master.held = state["held"]
    master.rows, master.cols, master.xpixel, master.ypixel = state["size"]
    for values in state["queue"]:
        chunk = Chunk(**values | {"data": _bytes(values["data"])})
        master.queue.append(chunk)
        master.queued += len(chunk.data) - chunk.at
    if state["root"] is not None:
        tree.root = ProcessIdentity(**state["root"])
        if holder.state in ("running", "paused"):
            holder.root_watch.begin()
    if state["master"] >= 0:
        master.open(state["master"])


def _resume_connections(holder: Holder, state: dict[str, Any]) -> None:
    for values in state["connections"]:
        os.set_inheritable(values["fd"], False)
        connection = holder.add_connection(socket.socket(fileno=values["fd"]), values["pid"])
        connection.restore(values, holder.authority.operators)
        holder.loop.soon(connection.pump)
        holder.loop.soon(partial(holder.requests.process, connection))
    for fd, request, what, offset, states in state["waits"]:
        if fd in holder.connections:
            holder.waits.append(Wait(holder.connections[fd], request, what, offset, states))
    os.set_inheritable(state["listener"], False)
    holder.take_listener(socket.socket(fileno=state["listener"]))


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
