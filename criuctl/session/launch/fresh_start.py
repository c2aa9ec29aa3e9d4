"""A holder's first minute: read the specification, start the tree, listen, answer the launcher.

The specification is one JSON object on a socket from `daemon.start_holder`, with the keys of
`daemon.HolderSpec`.  The answer is one JSON object, ``{"pid", "holder_pid", ...}`` or ``{"error":
{"errno", "message", "file"}}``, and the end of the stream.  The socket listens before the tree is
started, so no program that knows of the tree finds no holder.

What an earlier session of the name has left (output, times, audit log) stays until the new one
stands: that begins in a folder of its own, from where its files then take the places of the others.
So does the output of a session that is to be restored, until its tree is there: what its last life
has printed since the checkpoint is not lost by a restore that fails.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...errors import CriuctlError
from ...proc.tree import ProcessIdentity
from .. import names
from ..holder import cgroup
from ..holder.audit_log import AuditLog
from ..holder.holder import Holder
from ..holder.lifetime import DEFAULT_LINGER
from ..holder.output_log import DEFAULT_CAPACITY, OutputLog
from ..holder.session_files import SessionFiles
from ..holder.session_state import Identity
from ..holder.timeline import owner
from ..screen.modes import Modes
from . import shell_hooks
from .plain_spawn import Spawned, SpawnRequest


def start(channel: int) -> None:
    """Run a new holder; return when it has ended."""
    with socket.socket(fileno=channel) as launcher:
        launcher.set_inheritable(False)
        with launcher.makefile("rb") as file:
            spec = json.loads(file.read())
        try:
            holder = _prepare(spec)
        except (OSError, CriuctlError) as error:
            launcher.sendall(json.dumps(_refusal(error)).encode())
            return
        has_tree = holder.tree.root is not None
        stands, answer = True, _answer(holder)
        if has_tree:
            try:
                holder.files.move_in()
            except OSError as error:
                stands, answer = False, _refusal(error)
        holder.report.write()
        try:
            launcher.sendall(json.dumps(answer).encode())
        except OSError:
            # The launcher has given up, or was interrupted, and has reported that there is no
            # session: then there must be none.
            stands = False
        if not stands and has_tree:
            holder.lifetime.collect()
            holder.loop.soon(lambda: _end(holder))
    holder.run()


def _answer(holder: Holder) -> dict[str, Any]:
    """Return what the launcher is answered when the session stands."""
    identity, root = holder.session.identity, holder.tree.root
    answer: dict[str, Any] = {
        "holder_pid": os.getpid(),
        "socket": str(holder.files.socket),
        "id": identity.id,
    }
    if root is not None:
        answer |= {"pid": root.pid, "start_time": root.start_time, "facts": identity.facts}
    return answer


def _refusal(error: OSError | CriuctlError) -> dict[str, Any]:
    """Return what the launcher is answered when there is no session."""
    refusal: dict[str, Any] = {"errno": None, "message": str(error), "file": None}
    if isinstance(error, OSError):
        refusal["errno"] = error.errno
        if error.filename:
            refusal["message"] = f"{error.filename}: {error.strerror}"
            refusal["file"] = error.filename if isinstance(error.filename, str) else None
    return {"error": refusal}


def _end(holder: Holder) -> None:
    holder.kills.begin(0, lambda _killed: holder.lifetime.end_if_done())


def _prepare(spec: dict[str, Any]) -> Holder:
    """Make the holder, and start the tree if the specification names a spawner."""
    cgroup.leave_launchers()
    known = {field.name for field in fields(Identity)}
    identity = Identity(**{key: value for key, value in spec.items() if key in known})
    beginning = Path(spec["state_folder"]) / names.BEGINNING
    names.clear(beginning)  # of a holder that was killed
    beginning.mkdir(0o700)
    try:
        holder = Holder(identity, _files(spec, identity), Modes.from_dict(spec.get("modes") or {}))
        _continue_session(spec, holder)
        holder.prepare()
        holder.clients.listen(holder.files.socket)
        try:
            _take_tree(spec, holder)
        except BaseException:
            holder.files.socket.unlink(missing_ok=True)
            if holder.tree.group is not None:
                holder.tree.group.remove()
            raise
    except BaseException:
        with suppress(OSError):
            names.clear(beginning)
        raise
    return holder


def _files(spec: dict[str, Any], identity: Identity) -> SessionFiles:
    """Open the session's files, in the folder of those that begin if they belong to a new
    session.
    """
    run_folder, state_folder = Path(spec["run_folder"]), Path(spec["state_folder"])
    beginning = state_folder / names.BEGINNING
    if spec.get("spawner") or owner(state_folder / "timeline") not in ("", identity.id):
        state_folder = beginning
    capacity = int(spec.get("scrollback") or DEFAULT_CAPACITY)
    log = OutputLog(beginning / "output", capacity, base=int(spec.get("base", 0)))
    last = int(spec.get("audit", 0))
    path = state_folder / "audit.jsonl"
    audit = AuditLog.opened(path, identity.id, identity.incarnation, last)
    return SessionFiles(run_folder, state_folder, log, audit, identity.id)


def _continue_session(spec: dict[str, Any], holder: Holder) -> None:
    """Take over what the specification says of a session that is to be restored."""
    session, log = holder.session, holder.log
    holder.lifetime.linger = float(spec.get("linger", DEFAULT_LINGER))
    holder.events.sequence = int(spec.get("events", 0))
    session.input_offset = int(spec.get("input_offset", 0))
    session.checkpoint_id = str(spec.get("checkpoint", ""))
    holder.commanding.restore(spec.get("shell") or {})
    holder.asked.environment = dict(spec.get("helper_environment") or {})
    if spec.get("update_environment") is not None:
        holder.environment.allowed = tuple(spec["update_environment"])
    holder.kept_screen.restore((spec.get("modes") or {}).get("screen"))
    ceilings = {(kind, name): role for kind, name, role in spec.get("roles", ())}
    holder.leasing.authority.ceilings = ceilings
    if spec.get("log_fd") is not None:
        with open(int(spec["log_fd"]), "rb") as file:
            while piece := file.read(1 << 20):
                log.append(piece)
        log.flush()
        holder.files.timeline.skip(log.end)


def _take_tree(spec: dict[str, Any], holder: Holder) -> None:
    """Start the tree, or wait for a restore that brings it."""
    if not spec.get("spawner"):
        holder.master.resize(int(spec["rows"]), int(spec["cols"]), 0, 0)
        holder.master.hold(True)
        holder.lifetime.expect()
        return
    spawned = _spawn(spec, holder)
    holder.session.identity.facts |= spawned.facts
    began = spawned.start_time
    pid = spawned.pid
    root = ProcessIdentity.of(pid) if began is None else ProcessIdentity(pid, began)
    holder.own(root, spawned.master)
    # Not by `set_state`: the state file is written when the session stands.
    holder.session.state = "running"


def _spawn(spec: dict[str, Any], holder: Holder) -> Spawned:
    """Call the spawner of the specification."""
    module, _, function = str(spec["spawner"]).partition(":")
    identity, group = holder.session.identity, holder.tree.group
    argv, env = spec["argv"], spec["env"]
    options = spec.get("options") or {}
    refused = [what for what in ("io_uring", "mptcp") if not options.get(what, True)]
    holder.commanding.new.refused = refused
    if spec.get("hooks"):
        nonce = os.urandom(8).hex()
        shell = shell_hooks.hooked(argv, env, nonce)
        if shell is not None:
            holder.master.marks.begin(shell.shell, nonce)
            argv, env = shell.argv, shell.env
    request = SpawnRequest(
        argv=tuple(argv),
        env=env,
        cwd=spec["cwd"],
        rows=int(spec["rows"]),
        cols=int(spec["cols"]),
        name=identity.name,
        id=identity.id,
        incarnation=identity.incarnation,
        cgroup_procs=(group.procs,) if group is not None else (),
        options=spec.get("options") or {},
    )
    spawned: Spawned = getattr(importlib.import_module(module), function)(request)
    return spawned
