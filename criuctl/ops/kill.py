"""Ending a session for good: every process of it, and the records that it lives here.

Its holder does it where there is one. Without one (its holder was killed, or it never had a
terminal of criuctl's) this module finds and ends its processes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from ..config import Config
from ..errors import Conflict, CriuctlError, NoSuchProcess, SessionGone, TimedOut
from ..host import rights
from ..host.journal import events, operation_facts
from ..host.registry import Registry, SessionRecord, boot_id, check_outside, exclusive_session
from ..proc import netfilter, socketfiles
from ..proc.namespaces import is_namespace_init
from ..proc.tree import ProcessIdentity, read_process
from ..session.holder.cgroup import existing
from ..session.holder.processes import Tree
from ..session.sessions import leftovers, state_of
from .sessions import check_seconds, connect, ended_error, known_of

_LOOK = 0.02  # seconds between two looks at processes that are to end
_DUMP_PATIENCE = 10.0  # seconds that a dump of the session may take to let go of it
_KILL_PATIENCE = 20.0  # seconds that processes may take to end after SIGKILL


@events.recorded("kill", operation_facts.killed, about=operation_facts.of_session)
def kill(config: Config, name: str, grace: float) -> dict[str, Any]:
    """End every process of a session and verify it; remove the records that it runs here.

    For a copy, the files of its unix sockets are removed too, which have their own names next to
    those of its original: no other record of them exists. So are its files in memory.
    """
    check_seconds(grace)
    record = Registry(config).get(name)
    rights.check(config, "kill", name, lambda: _stored_roles(config, record))
    own: set[str] = set()
    if record is not None and record.alive():
        from ..files import socket_names  # slow to import

        own = socket_names.copys_files(record.pid)
    body = _kill(config, name, grace)
    _forget_memory(config)
    for path in own:
        if socketfiles.at(path) == "dead":
            with suppress(OSError):
                os.unlink(path)
    return body


def _stored_roles(config: Config, record: SessionRecord | None) -> rights.Roles:
    """Return the roles in the session's newest checkpoint; none while its store cannot be read."""
    if record is not None and record.checkpoint and record.store:
        # stores are slow to import, and a session with a holder needs none
        from ..checkpoint.repository import Repository
        from ..store import open_store

        with (
            suppress(CriuctlError),
            open_store(record.store, config) as store,
            Repository.open(store, config) as repository,
        ):
            return rights.roles_of(repository.manifest(record.checkpoint))
    return ()


def _forget_memory(config: Config) -> None:
    from ..files import memory_files  # slow to import

    with suppress(OSError):  # a read-only run folder: the next command removes them
        memory_files.sweep(config)


def _kill(config: Config, name: str, grace: float) -> dict[str, Any]:
    try:
        session = connect(config, name, role="admin")
    except SessionGone:
        with ExitStack() as stack:
            killed = _end_tree(config, name, grace, stack)
            return {
                "session": name,
                "state": "exited",
                "killed": killed,
                "leases_kept": forget(config, name),
            }
    with session:
        was = session.hello["status"]["state"]
        if was in ("exited", "lost"):
            killed = 0
        else:
            killed = _once_free(lambda: session.kill(grace))
        ended = session.wait_exit(_KILL_PATIENCE)
    body = {"session": name, "state": "exited", "killed": killed, "exit_code": ended["exit_code"]}
    return body | {"leases_kept": forget(config, name)}


def _once_free(end: Callable[[], int]) -> int:
    """Return what `end` returns, once no dump has the tree in its hands.

    A snapshot is over soon, and a program may ask for one after the other.
    """
    deadline = time.monotonic() + _DUMP_PATIENCE
    while True:
        last = time.monotonic() >= deadline
        try:
            return end()
        except Conflict:
            if last:
                raise
        time.sleep(_LOOK)


def _end_tree(config: Config, name: str, grace: float, stack: ExitStack) -> int:
    """End a session that has no holder: SIGTERM to its processes, SIGKILL after `grace` seconds;
    return how many there were.

    A checkpointed one is kept from coming back while `stack` is open.
    """
    check_outside(config)
    state, record = state_of(config, name), Registry(config).get(name)
    if state is None and record is None:
        raise SessionGone(f"no session {name!r} is known to this host")
    known = known_of(state, record)
    # Without a holder its group is still frozen, if it was: processes frozen by a version 1 freezer
    # do not die.
    tree = Tree(
        existing(state["cgroup"])
        if state is not None and state.get("cgroup") and _is_of(state, record)
        else None
    )
    if record is not None and record.alive():
        tree.root = record.identity
    elif state is not None and state.get("pid") and state.get("boot_id") == boot_id():
        # its holder is gone, but it may live
        tree.root = ProcessIdentity(state["pid"], state["start_time"])
    if tree.root is not None and tree.root.alive():
        tree.stopped = _stopped_init(tree.root)
    # processes in the group may have outlived its root
    elif tree.group is None or state is None or not leftovers(state):
        # no restore of it is under way, nor begins before it is forgotten
        stack.enter_context(exclusive_session(config, name))
        record = Registry(config).get(name)
        if record is not None and record.state == "checkpointed" and not record.moved_to:
            return 0  # it is given up
        raise ended_error(known)
    hard = time.monotonic() + grace
    seen = set(tree.members())
    tree.signal(signal.SIGTERM if grace else signal.SIGKILL, seen)
    tree.thaw()
    while members := tree.members():
        seen.update(members)
        if time.monotonic() >= hard:
            tree.signal(signal.SIGKILL, members)
        if time.monotonic() >= hard + _KILL_PATIENCE:
            left = ", ".join(str(member.pid) for member in members)
            raise TimedOut(
                f"session {name!r}: processes survive SIGKILL: PID {left}",
                hint="They are stuck in the kernel.",
            )
        time.sleep(_LOOK)
    if tree.group is not None:
        tree.group.remove()
    return len(seen)


def _stopped_init(root: ProcessIdentity) -> list[ProcessIdentity]:
    """Return PID 1 of the tree's namespaces, if a pause without a freezer has stopped it with the
    tree: it would never reap the tree.
    """
    with suppress(NoSuchProcess):
        parent = read_process(root.pid).ppid
        if (
            parent > 1
            and (above := read_process(parent)).state == "T"
            and is_namespace_init(parent)
        ):
            return [above.identity]
    return []


def _is_of(state: Mapping[str, Any], record: SessionRecord | None) -> bool:
    """Return whether a state file is about this life of the session."""
    return state.get("boot_id") == boot_id() and (record is None or state["id"] == record.id)


def forget(config: Config, name: str, *, stored: bool = True) -> list[str]:
    """Remove the records that this session lives here, or is to come back here; return the stores
    in which that failed.

    One without a checkpoint (`stored`) cannot come back, so no store needs a record.
    """
    registry = Registry(config)
    record = registry.get(name)
    if (
        record is not None
        and record.lock_table
        and record.boot_id == boot_id()
        and not record.alive()
    ):
        netfilter.delete_table(record.lock_table)  # its connections are not taken up any more
    registry.forget(name)  # last: no other record names the table
    if record is None or not (record.leases or (stored and record.state == "checkpointed")):
        return []
    # stores are slow to import, and a session that was never stored needs none
    from ..host import fencing

    return fencing.give_back(config, record)
