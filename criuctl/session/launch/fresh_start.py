"""A holder's first minute: it reads its specification, starts the tree, listens, and tells its launcher so.

The specification is one JSON object on a socket from `launch.start_holder`, with the keys of `launch.HolderSpec`; the answer
is one JSON object, ``{"pid", "holder_pid", ...}`` or ``{"error": {"errno", "message", "file"}}``, and the end of the stream.  The
socket is listening before the tree is started, so nobody who knows of the tree finds no holder.

What an earlier session of the name has left (output, times, audit log) stays until the new one stands: it begins in
a folder of its own, from where its files then take the places of the others.  So does the output of one that is to be
restored, until its tree is there: what its last life has printed since the checkpoint is not lost by a restore that fails.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import CriuctlError
from ...proc.tree import ProcessIdentity
from .. import names
from ..holder import cgroup
from ..holder.audit_log import AuditLog
from ..holder.holder import DEFAULT_LINGER, Holder, Identity
from ..holder.kill import Kill
from ..holder.output_log import DEFAULT_CAPACITY, OutputLog
from ..holder.timeline import owner
from ..screen.modes import Modes
from .plain_spawn import Spawned, SpawnRequest


def start(channel: int) -> None:
    """Run a new holder; returns when it has ended."""
    with socket.socket(fileno=channel) as launcher:
        launcher.set_inheritable(False)
        with launcher.makefile("rb") as file:
            spec = json.loads(file.read())
        try:
            holder = _prepare(spec)
        except (OSError, CriuctlError) as error:
            launcher.sendall(json.dumps(_refusal(error)).encode())
            return
        root = holder.tree.root
        answer: dict[str, Any] = {
            "holder_pid": os.getpid(),
            "socket": str(holder.run_folder / "socket"),
            "id": holder.identity.id,
        }
        if root is not None:
            answer |= {"pid": root.pid, "start_time": root.start_time, "facts": holder.identity.facts}
        stands = True
        if root is not None:
            try:
                holder.move_in()
            except OSError as error:
                stands, answer = False, _refusal(error)
        holder.write_state()
        try:
            launcher.sendall(json.dumps(answer).encode())
        except OSError:  # it has given up, or was interrupted: who asked for the session was told that there is none
            stands = False
        if not stands and root is not None:
            holder.collected = True
            holder.loop.soon(partial(_end, holder))
    holder.run()


def _refusal(error: OSError | CriuctlError) -> dict[str, Any]:
    told: dict[str, Any] = {"errno": None, "message": str(error), "file": None}
    if isinstance(error, OSError):
        told["errno"] = error.errno
        if error.filename:
            told["message"] = f"{error.filename}: {error.strerror}"
            told["file"] = error.filename if isinstance(error.filename, str) else None
    return {"error": told}


def _end(holder: Holder) -> None:
    Kill(holder, 0, lambda _killed: holder.end_if_done())


def _prepare(spec: dict[str, Any]) -> Holder:
    cgroup.leave_launchers()
    identity = Identity(**{key: spec[key] for key in asdict(Identity("", "")) if key in spec})
    run_folder, state_folder = Path(spec["run_folder"]), Path(spec["state_folder"])
    beginning = state_folder / names.BEGINNING
    names.clear(beginning)  # of a holder that was killed
    beginning.mkdir(0o700)
    try:
        return _begin(spec, identity, run_folder, state_folder)
    except BaseException:
        with suppress(OSError):
            names.clear(beginning)
        raise


def _begin(spec: dict[str, Any], identity: Identity, run_folder: Path, state_folder: Path) -> Holder:
    beginning = state_folder / names.BEGINNING
    if spec.get("spawner") or owner(state_folder / "timeline") not in ("", identity.id):  # of another session
        state_folder = beginning
    log = OutputLog(beginning / "output", int(spec.get("scrollback") or DEFAULT_CAPACITY), base=int(spec.get("base", 0)))
    audit = AuditLog.opened(state_folder / "audit.jsonl", identity.id, identity.incarnation, int(spec.get("audit", 0)))
    holder = Holder(identity, run_folder, state_folder, log, Modes.from_dict(spec.get("modes") or {}), audit)
    holder.linger = float(spec.get("linger", DEFAULT_LINGER))
    holder.sequence = int(spec.get("events", 0))
    holder.input_offset = int(spec.get("input_offset", 0))
    holder.checkpoint_id = str(spec.get("checkpoint", ""))
    holder.authority.ceilings = {(kind, name): role for kind, name, role in spec.get("roles", ())}
    if spec.get("log_fd") is not None:
        with open(int(spec["log_fd"]), "rb") as file:
            while piece := file.read(1 << 20):
                log.append(piece)
        log.flush()
        holder.timeline.skip(log.end)
    holder.prepare()
    holder.listen()
    try:
        if spec.get("spawner"):
            spawned = _spawn(spec, holder)
            identity.facts |= spawned.facts
            began = spawned.start_time
            holder.own(ProcessIdentity.of(spawned.pid) if began is None else ProcessIdentity(spawned.pid, began), spawned.master)
            holder.state = "running"
        else:
            holder.master.resize(int(spec["rows"]), int(spec["cols"]), 0, 0)
            holder.master.hold(True)
            holder.expect()
    except BaseException:
        (run_folder / "socket").unlink(missing_ok=True)
        if holder.tree.group is not None:
            holder.tree.group.remove()
        raise
    return holder


def _spawn(spec: dict[str, Any], holder: Holder) -> Spawned:
    module, _, function = str(spec["spawner"]).partition(":")
    request = SpawnRequest(
        argv=tuple(spec["argv"]),
        env=spec["env"],
        cwd=spec["cwd"],
        rows=int(spec["rows"]),
        cols=int(spec["cols"]),
        name=holder.identity.name,
        id=holder.identity.id,
        incarnation=holder.identity.incarnation,
        cgroup_procs=(holder.tree.group.procs,) if holder.tree.group is not None else (),
        options=spec.get("options") or {},
    )
    spawned: Spawned = getattr(importlib.import_module(module), function)(request)
    return spawned
