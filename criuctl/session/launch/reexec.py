"""The new program of a holder that replaces itself: become what the old one was, and go on.

`holder.handover` writes the memory file that is read here.  Values that an older version did not
write have defaults.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

from ... import __version__
from ...proc.tree import ProcessIdentity
from .. import protocol
from ..holder import helper_processes
from ..holder.audit_log import AuditLog
from ..holder.connection import Wait
from ..holder.holder import Holder, Identity
from ..holder.master import Chunk
from ..holder.operators import Operator
from ..holder.output_log import OutputLog
from ..screen.modes import Modes

_READABLE = (1,)


def check(version: int) -> None:
    """The program in a child: exit status 0 when it can read this format."""
    sys.exit(0 if version in _READABLE else 1)


def resume(memory: int) -> None:
    """The new program: become what the memory file tells, and go on."""
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


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
