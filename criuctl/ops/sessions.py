"""Sessions by name: finding one, and starting a new one.

The state of a session comes from three sources; the first one found wins: its holder, if one
answers; the files that its holder left in the run folder; the registry, which also has trees that
were dumped or restored without a terminal. `describe` and `sessions` merge them into the one shape
that `ls` and `status` print.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ..config import Config
from ..errors import Conflict, InvalidName, NotFound, NotHeld, SessionGone, UsageError
from ..host.holders import end_holder
from ..host.journal import events
from ..host.maintenance import check_open
from ..host.registry import Registry, SessionRecord, boot_id, exclusive_session, restore_command
from ..quoting import quoted
from ..report import utc_text
from ..session import names
from ..session.sessions import all_states, inside, state_of
from . import acting
from .environment import credentials, inherited

if TYPE_CHECKING:
    from ..session.client.session import Session

SPAWNER = "criuctl.session.launch.spawn:spawn_session"
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


# -- starting


@events.recorded("run", events.begun, about=events.started)
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
) -> NewSession:
    """Start `argv` as a new session under its own holder; `size` is rows and columns.

    It starts in `cwd`, by default the current folder; or in the folder `workspace`, which is
    carried along when the session moves to another host. With `hooks`, an interactive shell reports
    its prompts and takes commands (`session.launch.shell_hooks`). Without `io_uring` or `mptcp`
    (Multipath TCP) the session finds a kernel that lacks them.

    Raise `Conflict` when the name is taken or when this process runs inside a session, `NotFound`
    when there is no such command.
    """
    from ..session.launch.daemon import HolderSpec, start_holder

    folder = _starting_folder(config, argv, workspace, cwd)
    variables = inherited(os.environ if env is None else env)
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
            facts={"workspace": folder} if workspace is not None else {},
            spawner=SPAWNER,
            hooks=hooks,
            options={
                "host_pids": host_pids,
                "io_uring": io_uring,
                "mptcp": mptcp,
                "run_dir": config.run_dir,
                "umask": _umask(),
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
    warnings = (_CARRIED.format(", ".join(carried)),) if carried else ()
    return NewSession(chosen, started.id, started.pid, started.holder_pid, tuple(argv), warnings)


def _starting_folder(
    config: Config, argv: Sequence[str], workspace: str | None, cwd: str | None
) -> str:
    """Return where the session starts; raise for a request that cannot be served."""
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
    if workspace == "":
        raise UsageError("'' is no folder to start in")
    try:
        folder = os.path.abspath(workspace or cwd or os.getcwd())
    except FileNotFoundError:
        raise UsageError(
            "the current folder is gone",
            hint="Go to one that is there, or name one by --workspace.",
        ) from None
    if not os.path.isdir(folder):
        raise UsageError(f"{folder}: no such folder")
    return folder


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


# -- looking


def sessions(config: Config) -> list[dict[str, Any]]:
    """Return every session that this host knows, by name. No holder is asked, so nothing
    can hang.
    """
    states = {state["session"]: state for state in all_states(config)}
    records = {record.name: record for record in Registry(config).all()}
    return [
        known_of(states.get(name), records.get(name))
        for name in sorted(states.keys() | records.keys())
    ]


def describe(config: Config, name: str) -> dict[str, Any]:
    """Return all facts about one session; its holder's answer wins. Raise `NotFound`."""
    try:
        with connect(config, name, role="observe") as session:
            return shown(session.hello["status"])
    except SessionGone:
        state, record = state_of(config, name), Registry(config).get(name)
        if state is None and record is None:
            raise NotFound(
                f"no session {name!r} is known to this host",
                hint="`criuctl ls` shows those that are.",
            ) from None
        return known_of(state, record)


def status(config: Config, name: str) -> dict[str, Any]:
    """Return `describe`, with the last checkpoint as an object: id, number, age_s, store."""
    from ..host import latest_checkpoints

    body = describe(config, name)
    body["checkpoint"] = latest_checkpoints.described(
        config, name, body["id"], body.get("checkpoint") or None, time.time()
    )
    return body


def ended(config: Config, name: str) -> bool:
    """Return whether there is no live session of this name, so that one may be started."""
    known = next(
        (body for body in sessions(config) if body["session"] == names.check_name(name)), None
    )
    return known is None or known["state"] in ("exited", "lost")


def shown(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return a holder's status as `criuctl status --json` prints it."""
    body = dict(status)
    body["home"] = body.get("home") or body.get("host")
    if body["state"] not in ("running", "paused"):
        body["pid"] = None
    for key in ("since", "created"):
        body[key] = utc_text(body.get(key))
    body["operators"] = [
        {**operator, "since": utc_text(operator.get("since"))}
        for operator in body.get("operators") or ()
    ]
    body["holder"] = True
    first = ("session", "state", "home", "pid", "incarnation", "exit_code", "since", "operators")
    return {key: body[key] for key in first} | {
        key: value for key, value in body.items() if key not in first
    }


def known_of(state: Mapping[str, Any] | None, record: SessionRecord | None) -> dict[str, Any]:
    """Return the status from the records that were left: the state file if it is of the same, or of
    a later, life than the registry's record.
    """
    if state is not None and not state["holder_alive"] and record is not None:
        ended = record.hidden and state["state"] == "exited" and record.id == state["id"]
        later = (
            record.state == "checkpointed"
            and state["state"] != "lost"
            and record.updated >= state["since"]
        )
        if (record.alive() and not ended) or later:
            state = None
    if state is not None:
        body = {
            "session": state["session"],
            "state": state["state"],
            "home": os.uname().nodename,
            "pid": state["pid"] if state["state"] in ("running", "paused") else None,
            "incarnation": state["incarnation"],
            "exit_code": state["exit_code"],
            "exit_signal": state.get("exit_signal"),
            "reason": state.get("reason") or (record.reason if record is not None else "") or None,
            "since": utc_text(state["since"]),
            "id": state["id"],
            "created": utc_text(state.get("created")),
            "command": state["command"],
            "labels": state["labels"],
            "checkpoint": state.get("checkpoint") or None,
            "holder": state["holder_alive"],
        }
    else:
        assert record is not None
        alive = record.alive()
        body = {
            "session": record.name,
            "state": "running"
            if alive
            else "checkpointed"
            if record.state == "checkpointed"
            else "lost",
            "home": os.uname().nodename,
            "pid": record.pid if alive else None,
            "incarnation": record.incarnation,
            "exit_code": None,
            "exit_signal": None,
            "reason": record.reason
            or ("it cannot be seen from inside of a session" if record.hidden else None),
            "since": utc_text(record.updated),
            "id": record.id,
            "created": None,
            "command": _command(record.pid) if alive and not record.hidden else [],
            "labels": {},
            "checkpoint": record.checkpoint or None,
            "holder": False,
        }
    body["operators"] = []
    moved_to = (
        (state or {}).get("moved_to") or (record.moved_to if record is not None else "")
    ) or None
    if body["state"] == "checkpointed" and moved_to:
        known = record.home if record is not None and record.moved_to else ""
        body["home"] = (state or {}).get("home") or known or _host_of(moved_to)
    body["moved_to"] = moved_to if body["state"] == "checkpointed" else None
    return body


def _host_of(url: str) -> str:
    """Return the host of an ``ssh://`` address, without user and port."""
    from urllib.parse import urlsplit

    return urlsplit(url).hostname or url


def _command(pid: int) -> list[str]:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return []
    return [os.fsdecode(word) for word in words]


# -- talking


def connect(
    config: Config,
    name: str,
    *,
    kind: str = "human",
    role: str = "write",
    operator: str = "",
    resume: tuple[str, str] | None = None,
) -> Session:
    """Connect to the holder of session `name`. `NotFound` says why there is none, `NotHeld` that it
    runs without one.

    Inside a call of a client (`acting`), as that client: it decides kind, operator and `resume`,
    and limits the role.
    """
    from ..session.client.session import Session

    def open_(role: str, resume: tuple[str, str] | None) -> Session:
        return Session.connect(
            name, config=config, kind=kind, role=role, operator=operator, resume=resume
        )

    try:
        names.check_name(name)
    except InvalidName as error:
        raise NotFound(f"no session can be named {name!r}", hint=error.hint) from error
    call = acting.current()
    try:
        if call is None:
            return open_(role, resume)
        kind, operator = "agent", call.client.name
        return call.connect(name, role, open_)
    except SessionGone as error:
        state, record = state_of(config, name), Registry(config).get(name)
        if state is None and record is None:
            raise SessionGone(f"no session {name!r} is known to this host") from error
        known = known_of(state, record)
        if known["moved_to"]:
            hint = f"`criuctl attach {quoted(known['moved_to'])}`"
            raise SessionGone(
                why_not(known), hint=hint, moved_to=known["moved_to"], home=known["home"]
            ) from error
        if known["state"] == "running":
            hint = (
                "Sessions that `criuctl run` has started have one."
                f" `criuctl dump`, `wait {quoted(name)} --exit` and `kill` need none."
            )
            raise NotHeld(why_not(known), hint=hint) from error
        raise SessionGone(why_not(known), hint=error.hint) from error


def why_not(known: Mapping[str, Any]) -> str:
    """Return why there is no holder to connect to, as text."""
    name, state = known["session"], known["state"]
    if known["moved_to"]:
        return f"session {name!r} has moved to {known['home']}"
    if state == "checkpointed":
        return (
            f"session {name!r} is checkpointed and its terminal has no holder; `criuctl restore "
            f"{quoted(name)}` brings it back"
        )
    if state == "exited":
        code = known["exit_code"]
        return f"session {name!r} has ended" + (
            f" with exit code {code}" if code is not None else ""
        )
    if state == "running":
        return f"session {name!r} runs as PID {known['pid']}, and criuctl holds no terminal of it"
    ended = (
        "its holder ended without a word"
        if known["created"]
        else "it ended, and without a holder its exit status is unknown"
    )
    return f"session {name!r} is lost: {known.get('reason') or ended}"


def _umask() -> int:
    """Return this process's umask, which the session is to have as well."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))
