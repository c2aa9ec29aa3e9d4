"""The tree that a dump is of: its session, the session's name, and the record that the host keeps
of it.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from msgspec import Struct
from msgspec.structs import replace

from ..config import Config
from ..errors import Conflict
from ..host.registry import (
    Registry,
    SessionRecord,
    boot_id,
    check_name,
    exclusive,
    exclusive_session,
    restore_command,
)
from ..host.target import Target
from ..proc.tree import ProcessIdentity, read_tree
from ..quoting import quoted
from ..report import Reporter
from ..session.sessions import state_of


class Subject(Struct, frozen=True):
    """The tree that is dumped, and its session."""

    root: ProcessIdentity
    session: SessionRecord
    former: SessionRecord | None  # a stored session, of another tree, whose name this one takes


def claim(
    config: Config, registry: Registry, found: Target, name: str | None, stack: ExitStack
) -> Subject:
    """Lock the tree and its session until `stack` ends; `Conflict` while another criuctl has one of
    them.
    """
    root = found.root
    busy = f"PID {root.pid} is being dumped by another criuctl"
    stack.enter_context(exclusive(config, f"tree/{boot_id()}/{root.pid}/{root.start_time}", busy))
    session = session_for(registry, found, name)
    former = session if name is not None and session.state == "checkpointed" else None
    stack.enter_context(exclusive_session(config, session.name))
    return Subject(root, replace(session, moved_to="", home=""), former)  # its home is here


def session_for(registry: Registry, target: Target, name: str | None) -> SessionRecord:
    """Return the session of this tree.

    It is named by the user, or known by its root or its name, or named after its command.
    """
    # a configured tree has its name before it is a session
    name = name if name is not None else target.session
    if name is not None:
        return _named(registry, target, name)
    known = registry.find(target.root)
    if known is not None:
        return known
    process = read_tree(target.root.pid)[0]
    plain = "".join(
        c if (c.isalnum() and c.isascii()) or c in "._-" else "-" for c in process.command
    )
    return SessionRecord(name=f"{plain.strip('-._') or 'process'}-{process.pid}")


def _named(registry: Registry, target: Target, name: str) -> SessionRecord:
    check_name(name)
    taken = registry.get(name)
    if taken is not None and taken.alive() and taken.identity != target.root:
        raise Conflict(
            f"session {name!r} is running as PID {taken.pid}, which is another tree",
            hint="Choose another --name.",
        )
    held = registry.held(target.root, likely=name)
    if held not in (None, name):
        raise Conflict(
            f"PID {target.root.pid} is session {held!r}, which has a terminal",
            hint=(
                f"Use that name; `criuctl restore {quoted(held)} --as {quoted(name)}` makes a "
                "copy that has another."
            ),
        )
    if taken is not None:
        return taken
    known = registry.find(target.root)
    return SessionRecord(
        name=name, id=known.id if known and known.name == name else os.urandom(16).hex()
    )


def end_former_holder(config: Config, name: str, root: ProcessIdentity) -> None:
    """End a holder that only keeps how an earlier session of this name has ended.

    Raises `Conflict` if it has another tree.
    """
    state = state_of(config, name)
    if state is None or not state["holder_alive"]:
        return
    if (state["pid"], state["start_time"]) == (root.pid, root.start_time):
        return
    if state["state"] not in ("exited", "lost"):
        raise Conflict(
            f"session {name!r} is {state['state']}, and another tree", hint="Choose another --name."
        )
    from ..host.holders import end_holder  # seldom needed

    end_holder(config, name, state)


def warn_superseded(config: Config, reporter: Reporter, former: SessionRecord) -> None:
    """Warn that this dump takes the name of a session that is stored and runs nowhere.

    This is no error, unlike the case in which a holder waits for that session: otherwise a service
    that is dumped each night, and then started again by something other than a restore, could not
    be dumped again.
    """
    where = f"is checkpointed as {former.checkpoint[:12]}"
    if former.moved_to:
        where = f"has moved to {former.home or former.moved_to}"
    hint = "Choose another --name."
    if not former.moved_to and former.checkpoint:
        command = restore_command(config, former.checkpoint[:12], former.store, copy=True)
        hint = (
            f"{command} restores the former session, `criuctl pin` keeps its checkpoint from "
            "`prune`."
        )
    reporter.warning(
        (
            f"session {former.name!r} {where}, and this is another tree; from now on the name "
            "means this one"
        ),
        hint,
    )


def remember(
    config: Config,
    registry: Registry,
    record: SessionRecord,
    root: ProcessIdentity,
    *,
    leave_running: bool,
    lock: str | None,
) -> None:
    """Record where the session is now; whether the tree has ended is seen from its root.

    `lock` is the firewall table that holds the connections until a restore here, None if they are
    not kept.
    """
    doomed = root.doomed()
    if doomed and leave_running and _killed(config, record):
        registry.forget(record.name)  # while it was stored: nothing waits for it any more
        return
    record = replace(record, state="running", pid=root.pid, start_time=root.start_time)
    if doomed and not leave_running:
        record = replace(
            record, state="checkpointed", lock_table=lock or "", lock_kept=lock is not None
        )
    registry.put(record)


def _killed(config: Config, record: SessionRecord) -> bool:
    from ..host.audit_log import killed_by_operator  # seldom needed

    return killed_by_operator(config, record)
