"""The sessions of this host, from the state files in the run folder.

No holder is asked, so this works after a holder's end, too.  `inside` finds out whether this
process runs inside a session by its ancestry, not by an environment variable, which any program may
change: its PID namespace is a session's own, or one of its ancestors is a session's first process.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CriuctlError
from ..proc.ownership import check_own
from ..proc.procfs import read_bytes
from ..proc.tree import ProcessIdentity, read_tree
from . import names
from .holder.cgroup import SessionGroup

if TYPE_CHECKING:
    from ..config import Config

# Inode of the PID namespace that a machine boots in (PROC_PID_INIT_INO): no session's own.
_FIRST_NAMESPACE = 0xEFFFFFFC


def read_state(run_folder: Path) -> dict[str, Any] | None:
    """Return the state file's content, with ``holder_alive``; None: there is none.

    A session is ``lost`` if its holder is gone and had not recorded the end.
    """
    try:
        content = json.loads((run_folder / "state.json").read_text())
        known = {key: value for key, value in content.items() if value is not None}
        state = _defaults(run_folder.name) | known
        holder = state["holder"]
        here = bool(holder) and state["boot_id"] == _boot_id()
        alive = here and (ProcessIdentity(**holder).alive() or _answers(run_folder, state))
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    state["holder_alive"] = alive
    if not alive and state["state"] in ("running", "paused"):
        state["state"] = "lost"
    return state


def _answers(run_folder: Path, state: Mapping[str, Any]) -> bool:
    """Return whether a holder listens whose PID means nothing in this PID namespace.

    Such a holder runs inside of another session, for example.
    """
    if state["holder_namespace"] in (None, _namespace()):
        return False
    try:
        names.connect(run_folder / "socket", 0.0).close()
    except BlockingIOError:  # its queue is full, so it lives
        return True
    except OSError:
        return False
    return True


def _namespace() -> int:
    """Return the inode of this process's PID namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _defaults(name: str) -> dict[str, Any]:
    """Return the values of keys that a state file lacks.

    The file may be of another version, or damaged, while its holder lives.
    """
    known: dict[str, Any] = {
        "session": name,
        "id": "",
        "state": "running",
        "incarnation": 1,
        "since": 0.0,
        "created": 0.0,
    }
    known |= {"command": [], "labels": {}, "rows": 24, "cols": 80, "boot_id": "", "log": ""}
    nothing = (
        "pid",
        "start_time",
        "exit_code",
        "exit_signal",
        "reason",
        "checkpoint",
        "moved_to",
        "home",
    )
    return known | dict.fromkeys(
        (*nothing, "pid_namespace", "socket", "cgroup", "holder", "holder_namespace")
    )


def leftovers(state: Mapping[str, Any]) -> list[ProcessIdentity]:
    """Return the processes of a session that live although its holder is gone.

    They are those in its control group, and the tree of its root.
    """
    pids: list[int] = []
    if state.get("cgroup"):
        pids = SessionGroup(str(state["cgroup"]), 2).pids()
    if state.get("pid") and state.get("start_time"):
        root = ProcessIdentity(int(state["pid"]), int(state["start_time"]))
        with suppress(CriuctlError):
            pids += [
                process.pid
                for process in read_tree(root.pid)
                if root.exists() and process.pid not in pids
            ]
    found = []
    for pid in pids:
        with suppress(CriuctlError):
            found.append(ProcessIdentity.of(pid))
    return [identity for identity in found if identity.alive()]


def state_of(config: Config, name: str) -> dict[str, Any] | None:
    """Return `read_state` of the session `name`."""
    folder = names.run_folder(config.run_dir, name)
    check_own(folder)
    return read_state(folder)


def all_states(config: Config) -> list[dict[str, Any]]:
    """Return the states of all sessions that have had a holder here since the boot, by name."""
    folder = Path(config.run_dir or names.DEFAULT_RUN_DIR) / "holders"
    check_own(folder)
    try:
        found = sorted(name for name in os.listdir(folder) if names.valid_name(name))
    except FileNotFoundError:
        return []
    return [state for name in found if (state := read_state(folder / name)) is not None]


def forget(config: Config, name: str) -> bool:
    """Remove the files of a session: state, output, audit log; False while it has a holder."""
    run_folder = names.run_folder(config.run_dir, name)
    state = state_of(config, name)
    if state is not None and state["holder_alive"]:
        return False
    if state is not None and state["cgroup"]:
        # Of a holder that was killed; not if a process is still in it.
        SessionGroup(str(state["cgroup"]), 2).remove(0)
    for folder in (run_folder, names.state_folder(config.state_dir, name)):
        shutil.rmtree(folder, ignore_errors=True)
    return True


def secluded(config: Config) -> str | None:
    """Return the name of the session in whose own PID namespace this process runs.

    No process outside of that namespace is visible from there.
    """
    return _secluded(all_states(config)) if _namespace() != _FIRST_NAMESPACE else None


def _secluded(known: list[dict[str, Any]]) -> str | None:
    namespace, boot = _namespace(), _boot_id()
    # Whether the holder lives does not matter: one that was killed may have left its tree.
    here = (
        s
        for s in known
        if s["pid_namespace"] == namespace and s["state"] not in ("exited", "checkpointed")
    )
    return next((str(state["session"]) for state in here if state["boot_id"] == boot), None)


def around(config: Config) -> dict[str, Any] | None:
    """Return the state of the session in which this process runs; None: it is in no session."""
    name = inside(config)
    return state_of(config, name) if name is not None else None


def inside(config: Config) -> str | None:
    """Return the name of the session in which this process runs; None: in no session."""
    known = all_states(config)
    around = _secluded(known)
    if around is not None:
        return around
    states = [state for state in known if state["holder_alive"]]
    roots = {
        (s["pid"], s["start_time"]): str(s["session"])
        for s in states
        if s.get("pid") and not s.get("pid_namespace")
    }
    holders = {s["holder"]["pid"]: str(s["session"]) for s in states}
    pid = os.getpid()
    while pid > 1:
        try:
            identity = ProcessIdentity.of(pid)
            fields = read_bytes(pid, "stat").rpartition(b")")[2].split()
        except CriuctlError:
            return None
        if (identity.pid, identity.start_time) in roots:
            return roots[identity.pid, identity.start_time]
        pid = int(fields[1])
        if pid in holders:
            return holders[pid]  # a daemon of the session, which its holder adopted
    return None
