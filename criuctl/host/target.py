"""The TARGET of the command line: the one process whose tree is meant.

``4711`` is a PID, ``NAME`` a session, ``unit:NAME`` a systemd unit and ``cgroup:PATH`` a control
group, as a path under ``/sys/fs/cgroup`` or as ``/proc/PID/cgroup`` shows it (version 1 and 2).  A
unit or group means the process in it that none of the others descends from; if there are several
such, criuctl does not guess.

Refused here, because no option could make it work: PID 1, kernel threads, criuctl itself and its
ancestors.  Only the process table is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator

from msgspec import Struct

from ..errors import InvalidName, NoSuchProcess, NotFound, PreflightRefused, UsageError
from ..proc.mounts import read_mounts
from ..proc.procfs import read_raw, read_text
from ..proc.tree import Process, ProcessIdentity, read_process
from ..quoting import quoted

Lookup = Callable[[str], ProcessIdentity | None]
"""Returns the root process of the session of this name that runs on this host."""

SessionOf = Callable[[ProcessIdentity], str | None]
"""Returns the name of the session whose root is this process."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PID = re.compile(r"[0-9]{1,64}")
_UNIT_TYPES = (".service", ".scope", ".slice", ".socket", ".mount", ".swap")


class Target(Struct, frozen=True):
    """The tree that an operation works on."""

    root: ProcessIdentity
    session: str | None = None  # the session that it is, if criuctl knows it as one


def is_pid(text: str) -> bool:
    """Return whether a target is the number of a process, existing or not."""
    return _PID.fullmatch(text) is not None


def resolve_target(text: str, lookup: Lookup, session_of: SessionOf) -> Target:
    """Return the tree that `text` names.

    Raises `NoSuchProcess` or `NotFound` (exit code 3), `UsageError` for what cannot be a target and
    for a group with several roots, `PreflightRefused` for a process that can never be dumped.
    """
    kind, colon, name = text.partition(":")
    if is_pid(text):
        root = _root(int(text))
    elif colon and kind == "unit":
        root = _root(_only_root(_pids_of_unit(name), text))
    elif colon and kind == "cgroup":
        root = _root(_only_root(_pids_of_cgroup(name), text))
    elif colon:
        raise UsageError(
            f"{text!r} is no target",
            hint="A target is a PID, a session's name, unit:NAME or cgroup:PATH.",
        )
    elif _NAME.fullmatch(text) is None:
        raise InvalidName(
            f"{text!r} cannot be a session's name",
            hint=(
                "A target is a PID, a session's name (letters, digits, '.', '_', '-'), unit:NAME "
                "or cgroup:PATH."
            ),
        )
    else:
        identity = lookup(text)
        if identity is None:
            raise NotFound(
                f"no session {text!r} is running on this host",
                hint=f"`criuctl ls` shows those that are, `criuctl list {quoted(text)}` its "
                "checkpoints. A process is named by its PID.",
            )
        if not identity.alive():
            raise NoSuchProcess(
                f"session {text!r} is not running: its root, PID {identity.pid}, has ended"
            )
        # its subreaper keeps processes that try to leave
        _refuse_own(identity.pid, f"session {text!r}", "`criuctl schedule`")
        return Target(identity, text)
    return Target(root.identity, session_of(root.identity))


def _root(pid: int) -> Process:
    """Return the process, if the tree below it may be dumped at all."""
    if not 0 < pid < 1 << 31:
        raise NoSuchProcess(f"there is no process with PID {pid}")
    if pid == 1:
        raise PreflightRefused(
            "PID 1 holds up this whole system; dumping it would end criuctl too",
            hint="Name a tree below it.",
        )
    process = read_process(pid)
    leader = _thread_group(pid)
    if leader != pid:
        raise UsageError(
            f"{pid} is a thread of process {leader}", hint=f"Name the process: {leader}."
        )
    if process.kernel_thread:
        raise PreflightRefused(f"PID {process} is a kernel thread; it has nothing to dump")
    if process.zombie and process.threads <= 1:
        raise NoSuchProcess(
            f"PID {process} has ended already; its parent, PID {process.ppid}, has not reaped it"
        )
    if pid == os.getpid():
        raise PreflightRefused(f"PID {pid} is criuctl itself")
    _refuse_own(
        pid, f"the tree of PID {process}", f"or out of the tree by `setsid -f criuctl dump {pid}`"
    )
    return process


def _refuse_own(root: int, tree: str, way: str) -> None:
    """Raise `PreflightRefused` for the tree that criuctl is in; `way` is a way out of it."""
    if root in ancestors(os.getpid()):
        raise PreflightRefused(
            f"criuctl runs inside {tree}: it cannot freeze what it is a part of",
            hint=f"Run criuctl from elsewhere: another login, a cron job, {way}.",
        )


def _thread_group(pid: int) -> int:
    for line in read_text(pid, "status").split("\n"):
        if line.startswith("Tgid:"):
            return int(line.split()[1])
    return pid


def ancestors(pid: int) -> set[int]:
    """Return the PIDs above a process, from the status alone; `NoSuchProcess`.

    Some hosts do not show what their PID 1 executes.
    """
    found: set[int] = set()
    while pid > 0:
        pid = next(
            int(line.split()[1])
            for line in read_text(pid, "status").split("\n")
            if line.startswith("PPid:")
        )
        if pid in found:
            break
        found.add(pid)
    return found


# -- control groups --------------------------------------------------------------------------------


class _Hierarchy(Struct, frozen=True):
    """One mounted control group hierarchy."""

    mount: str
    options: tuple[str, ...]  # v1: its controllers or name, among others
    unified: bool

    @property
    def is_systemd(self) -> bool:
        """Return whether systemd keeps its units in it."""
        return self.unified or "name=systemd" in self.options


def _hierarchies() -> list[_Hierarchy]:
    """Return every hierarchy that is mounted here, those that systemd uses first."""
    groups = [mount for mount in read_mounts() if mount.kind in ("cgroup", "cgroup2")]
    found = [_Hierarchy(mount.point, mount.settings, mount.kind == "cgroup2") for mount in groups]
    return sorted(found, key=lambda h: (not h.is_systemd, not h.unified, h.mount))


def _members(folder: str) -> set[int]:
    """Return the processes of a group and of all groups below it, without kernel threads."""
    pids: set[int] = set()
    for path, _folders, files in os.walk(folder):
        if "cgroup.procs" in files:
            try:
                # 0 stands for a process outside criuctl's PID namespace.
                pids.update(
                    int(word) for word in read_raw(f"{path}/cgroup.procs").split() if word != b"0"
                )
            except OSError:
                # the group was removed, or is a threaded one whose parent lists its processes
                continue
    return pids


def _pids_of_cgroup(path: str) -> set[int]:
    if not path or "\0" in path or ".." in path.split("/"):
        raise UsageError(f"{path!r} is no path of a control group")
    hierarchies = _hierarchies()
    inside = [h for h in hierarchies if path == h.mount or path.startswith(h.mount + "/")]
    candidates = (
        [path] if inside else [f"{h.mount}/{path.strip('/')}".rstrip("/") for h in hierarchies]
    )
    there = [folder for folder in candidates if os.path.exists(f"{folder}/cgroup.procs")]
    if not there:
        raise NotFound(
            f"there is no control group {path}",
            hint="`cat /proc/PID/cgroup` shows the groups of a process.",
        )
    for folder in there:
        pids = _members(folder)
        if pids:
            return pids
    raise NoSuchProcess(f"the control group {path} has no processes")


def _unit_folders(name: str) -> Iterator[str]:
    for hierarchy in _hierarchies():
        if hierarchy.is_systemd:
            for path, folders, _files in os.walk(hierarchy.mount):
                if name in folders:
                    yield os.path.join(path, name)


def _pids_of_unit(name: str) -> set[int]:
    if not name or "/" in name or "\0" in name:
        raise UsageError(
            f"{name!r} is no name of a unit", hint="Like unit:nginx or unit:nginx.service."
        )
    full = name if name.endswith(_UNIT_TYPES) else f"{name}.service"
    groups = {folder: pids for folder in _unit_folders(full) if (pids := _members(folder))}
    if not groups:
        raise NotFound(
            f"no unit {full} with processes is known to this host",
            hint="`systemctl status` shows the running units.",
        )
    if len(set(map(frozenset, groups.values()))) > 1:
        raise UsageError(
            f"several units are called {full}: {', '.join(sorted(groups))}",
            hint="Name the group: cgroup:PATH with one of these paths.",
        )
    return next(iter(groups.values()))


def _only_root(pids: set[int], text: str) -> int:
    """Return the one process of `pids` that has no ancestor among them."""
    roots = []
    for pid in sorted(pids):
        try:
            process = read_process(pid)
            if not process.kernel_thread and not pids & ancestors(pid):
                roots.append(process)
        except NoSuchProcess:
            continue
    if not roots:
        raise NoSuchProcess(f"{text} has no processes any more")
    if len(roots) > 1:
        listed = ", ".join(str(process) for process in roots)
        raise UsageError(
            f"{text} has several roots: {listed}",
            hint="Name one of them by its PID; each is a tree of its own.",
        )
    return roots[0].pid
