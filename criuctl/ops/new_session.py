"""Starting a new session: a command under a holder of its own.

The name is reserved first, so of two commands that start a session of one name, one gets it; the
remains of an ended session with that name are removed. A session does not start inside another,
whose checkpoints would hold its holder. The variables that hold credentials are carried into the
checkpoints of the session, which is a warning.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from msgspec import Struct

from ..config import Config
from ..errors import Conflict, NotFound, PlatformError, UsageError
from ..host.holders import end_holder
from ..host.journal import events, operation_facts
from ..host.maintenance import check_open
from ..host.registry import Registry, SessionRecord, boot_id, exclusive_session, restore_command
from ..proc.procfs import umask
from ..quoting import quoted
from ..session import names
from ..session.launch.daemon import HolderSpec, start_holder
from ..session.sessions import inside, state_of
from .environment import credentials, for_terminal, inherited
from .sessions import sessions

SPAWNER = "criuctl.session.launch.spawn:spawn_session"
_LARGEST = 10000  # rows or columns of a terminal, as of ``--size``
_MAX_COPIES = 1000  # names that are tried for one command
_CARRIED = (
    "the session has the store's credentials in its environment ({}), and so has each checkpoint "
    "of it: start it without them (`env -u NAME criuctl run ...`) unless its program needs them; "
    "dumps and restores read them by themselves"
)


class NewSession(Struct, frozen=True):
    """A session that `run` has started."""

    name: str
    id: str
    pid: int
    holder_pid: int
    command: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of `criuctl run -d --json`."""
        return {
            "session": self.name,
            "id": self.id,
            "state": "running",
            "incarnation": 1,
            "pid": self.pid,
            "holder_pid": self.holder_pid,
            "command": list(self.command),
            "warnings": list(self.warnings),
        }


@events.recorded("run", operation_facts.begun, about=operation_facts.started)
def run(
    config: Config,
    argv: Sequence[str],
    *,
    name: str | None = None,
    size: tuple[int, int] = (24, 80),
    host_pids: bool = False,
    io_uring: bool = True,
    mptcp: bool = False,
    hooks: bool = True,
    labels: Mapping[str, str] | None = None,
    workspace: str | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    more_env: Mapping[str, str] | None = None,
    detached: bool = True,
) -> NewSession:
    """Start `argv` as a new session under its own holder; `size` is rows and columns.

    It starts in `cwd`, else in the folder `workspace`, which is carried along when the session
    moves to another host. It inherits from `env`, by default this process's environment, and gets
    `more_env` as it is; a `detached` one gets another TERM than `dumb`. With `hooks`, an
    interactive shell reports its prompts (`session.launch.shell_hooks`). Without `io_uring` or
    `mptcp` (Multipath TCP) it finds a kernel that lacks them.

    Raise `Conflict` when the name is taken or when this process runs inside a session, `NotFound`
    when there is no such command.
    """
    if not all(0 < number < _LARGEST for number in size):
        raise UsageError(f"a terminal cannot have {size[0]} rows and {size[1]} columns")
    folder, travelling = _folders(config, argv, cwd, workspace)
    variables = inherited(os.environ if env is None else env)
    variables = (for_terminal(variables) if detached else variables) | dict(more_env or {})
    carried = credentials(variables, config)
    with ExitStack() as reserved:
        chosen = (
            _free_name(config, argv[0], reserved)
            if name is None
            else _taken(config, names.check_name(name), reserved)
        )
        spec = HolderSpec(
            name=chosen,
            argv=list(argv),
            env=variables | {"PWD": folder},
            cwd=folder,
            rows=size[0],
            cols=size[1],
            labels=dict(labels or {}),
            facts={"workspace": travelling} if travelling is not None else {},
            spawner=SPAWNER,
            hooks=hooks,
            options={
                "host_pids": host_pids,
                "io_uring": io_uring,
                "mptcp": mptcp,
                "run_dir": config.run_dir,
                "umask": umask(),
            },
        )
        try:
            started = start_holder(config, spec)
        except NotFound as error:
            raise NotFound(
                f"{argv[0]}: no such command",
                hint=f"It is looked for in the PATH: {variables.get('PATH', '')}",
            ) from error
        assert started.pid is not None
        # a full disk: it runs, and its holder reports so until a dump records it
        with suppress(OSError):
            Registry(config).put(
                SessionRecord(
                    chosen,
                    started.id,
                    pid=started.pid,
                    start_time=started.start_time or 0,
                    boot_id=boot_id(),
                )
            )
    warnings = [_CARRIED.format(", ".join(carried))] if carried else []
    warnings += _obstacles(config)
    return NewSession(
        chosen, started.id, started.pid, started.holder_pid, tuple(argv), tuple(warnings)
    )


def _obstacles(config: Config) -> list[str]:
    """Return why no session of this host can be dumped yet: a new user should know it first."""
    from ..criu import binary, schema

    try:
        binary.find(config)
        schema.folder()
    except PlatformError as error:
        return [f"sessions cannot be dumped here yet: {error.message}. {error.hint}"]
    return []


def _folders(
    config: Config, argv: Sequence[str], cwd: str | None, workspace: str | None
) -> tuple[str, str | None]:
    """Return where the session starts, and its workspace; raise for a request that cannot be
    served.
    """
    check_open(config)
    around = inside(config)
    if around is not None:
        raise Conflict(
            f"this runs inside session {around!r}, whose checkpoints would then hold the new "
            "session's holder",
            hint="Start it from outside of any session.",
        )
    if not argv or not argv[0]:  # for example a variable that is not set
        raise UsageError("an empty command")
    # for example a variable that is not set: the whole current folder would be carried
    if "" in (workspace, cwd):
        raise UsageError("'' is no folder to start in")
    try:
        travelling = None if workspace is None else os.path.abspath(workspace)
        folder = os.path.abspath(cwd or workspace or os.getcwd())
    except FileNotFoundError:
        raise UsageError(
            "the current folder is gone",
            hint="Go to one that is there, or name one by --workspace.",
        ) from None
    for one in (folder, travelling):
        if one is not None and not os.path.isdir(one):
            raise UsageError(f"{one}: no such folder")
    return folder, travelling


def _taken(config: Config, name: str, reserved: ExitStack) -> str:
    """Reserve the name until `reserved` ends; raise `Conflict`."""
    try:
        reserved.enter_context(exclusive_session(config, name))
    except Conflict:
        _claim(config, name)  # if the session exists by now, that error is more precise
        raise
    return _claim(config, name)


def _claim(config: Config, name: str) -> str:
    """Reserve the name, if a new session may have it; remove the remains of an ended one."""
    record = Registry(config).get(name)
    state = state_of(config, name)
    if state is not None and state["holder_alive"]:
        if state["state"] not in ("exited", "lost"):
            raise Conflict(
                f"session {name!r} exists ({state['state']})",
                hint=f"`criuctl attach {quoted(name)}`, or choose another name.",
            )
        end_holder(config, name, state)
    if record is not None and (record.alive() or record.state == "checkpointed"):
        what = "is running" if record.alive() else "is checkpointed"
        raise Conflict(
            f"session {name!r} {what}",
            hint="Choose another name."
            if record.alive()
            else (
                f"{restore_command(config, name, record.store)} brings it back; or choose another "
                "name."
            ),
        )
    return name


def _free_name(config: Config, command: str, reserved: ExitStack) -> str:
    """Reserve a name after the command, until `reserved` ends: ``bash``, ``bash-2``, ..."""
    base = (
        re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(command)).strip("-._")[:56] or "session"
    )
    if not names.valid_name(base):
        base = f"run-{base}"
    taken = {s["session"] for s in sessions(config) if s["state"] not in ("exited", "lost")}
    for number in range(1, _MAX_COPIES):
        name = base if number == 1 else f"{base}-{number}"
        if name not in taken:
            # another process that starts a similar one may be faster
            with suppress(Conflict), ExitStack() as trying:
                _taken(config, name, trying)
                reserved.push(trying.pop_all())
                return name
    raise Conflict(
        f"{_MAX_COPIES} sessions are named after {base!r}", hint="Give a name: --name NAME."
    )
