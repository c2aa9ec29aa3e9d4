"""The tools: what a client may ask for, with the role that each needs.

Their docstrings are what the client's model reads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec

from mcp.server.mcpserver import ElicitationResult, MCPServer, Resolve
from mcp_types import ToolAnnotations
from pydantic import Field

from ..errors import UsageError
from ..session.client.commands import New
from ..session.protocol import ROLES
from . import bounds
from .bounds import DATA, DEFAULT_LIMIT, MAX_LIMIT
from .confirmations import Consent, Ending, check, may_kill, may_take, what_ends
from .operations import of_list
from .service import ANSWER, Asked, Service, as_tool_error, known, service_of

P = ParamSpec("P")
Answer = dict[str, Any]
_NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"  # no path, no PID, no unit
Name = Annotated[str, Field(description="The session's name", pattern=_NAME)]
NewName = Annotated[str, Field(description="A name that no session has", pattern=_NAME)]
Seconds = Annotated[
    float,
    Field(ge=0, le=ANSWER, description="Answer after so long, whether it is done or not"),
]
Limit = Annotated[
    int, Field(ge=100, le=MAX_LIMIT, description="The most characters of each text in the answer")
]
CommandId = Annotated[str, Field(max_length=32, description="The id that exec has answered")]
Offset = Annotated[int, Field(ge=0, description="The cursor of an earlier answer")]
Take = Annotated[
    bool, Field(description="Take the write lease from another operator; asks for confirmation")
]
Confirm = Annotated[
    str | None, Field(max_length=100, description="Only as the error of an earlier call says")
]
Ref = Annotated[
    str,
    Field(
        description="NAME (its newest checkpoint), NAME@N, or an id",
        pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(@-?[0-9]{1,9})?$",
    ),
]
_MOST_WARNINGS = 20
_OF_DUMP = (
    *("checkpoint", "session", "number", "incarnation", "store", "bytes"),
    *("frozen_ms", "total_ms"),
)
_OF_RESTORE = (
    *("checkpoint", "session", "number", "incarnation", "pid", "age_s", "store", "newer"),
    "elapsed_ms",
)
Labels = Annotated[dict[str, str] | None, Field(max_length=32)]


async def list_(asked: Asked) -> Answer:
    """List the sessions of this host. Start here: a session may have been left by you before."""
    return await _off(asked, service_of(asked).access.list)


async def status(asked: Asked, name: Name) -> Answer:
    """Show the state of a session: what is in the foreground, whether it waits for input, who
    writes, its durable steps, its newest checkpoint.
    """
    return await _off(asked, service_of(asked).access.status, name)


async def capture(
    asked: Asked,
    name: Name,
    what: Annotated[Literal["screen", "scrollback"], Field(description="Without since")] = "screen",
    since: Offset | None = None,
    limit: Limit = DEFAULT_LIMIT,
) -> Answer:
    """Read what a session shows on its screen, or its kept output; or with since its output from
    that cursor on, piece by piece without a gap: go on with the answer's cursor while more is true.
    """
    access = service_of(asked).access
    if since is not None:
        return await _off(asked, access.read, name, since, limit)
    return await _off(asked, access.capture, name, what, limit)


async def wait(
    asked: Asked,
    name: Annotated[str, Field(description="The session; not needed for an operation")] = "",
    until: Literal["command", "exit", "idle", "match", "prompt", "reading", "operation"] = "prompt",
    command_id: CommandId | None = None,
    pattern: Annotated[
        str | None, Field(max_length=1000, description="Of match: a regular expression")
    ] = None,
    idle: Annotated[float, Field(ge=0, le=40, description="Seconds of silence")] = 2.0,
    operation: Annotated[str | None, Field(max_length=64)] = None,
    since: Offset | None = None,
    seconds: Seconds = ANSWER,
    limit: Limit = DEFAULT_LIMIT,
) -> Answer:
    """Wait until a command has ended (until=command with command_id), the session has ended
    (exit), is silent (idle), has printed a pattern (match; searched from since, else from the last
    input on), is at a shell's prompt (prompt), waits for input (reading), or a snapshot or restore
    is done (operation). running=true in the answer: not yet; wait again with its cursor as since.
    """
    service = service_of(asked)
    if until == "operation":
        return await known(service.operations.wait(operation or "", seconds))
    if until == "command":
        if command_id is None:
            raise as_tool_error(UsageError("until=command needs a command_id"))
        work = service.access.wait_command
        return await _off(asked, work, name, command_id, since, seconds, limit)
    return await _off(
        asked,
        service.access.wait,
        name,
        until,
        seconds,
        pattern=pattern,
        idle=idle,
        since=since,
    )


async def checkpoints(
    asked: Asked, name: Name, newest: Annotated[int, Field(ge=1, le=500)] = 50
) -> Answer:
    """List the stored checkpoints of a session, oldest first."""
    service = service_of(asked)

    async def work() -> Answer:
        found = of_list(await service.command(asked, "list", name))
        keys = ("id", "session", "number", "incarnation", "created", "host", "pinned")
        shown = [{key: one.get(key) for key in keys} for one in found[-newest:]]
        return {"checkpoints": shown, "left_out": len(found) - len(shown)}

    return await known(service.operations.start(work, ANSWER))


async def diff(asked: Asked, before: Ref, after: Ref, limit: Limit = DEFAULT_LIMIT) -> Answer:
    """Show what differs between two checkpoints: processes, descriptors, connections, files,
    memory by region.
    """
    from .differences import bounded

    service = service_of(asked)

    async def work() -> Answer:
        return bounded(await service.command(asked, "diff", "--", before, after), limit)

    return await known(service.operations.start(work, ANSWER))


async def run(
    asked: Asked,
    name: NewName | None = None,
    command: Annotated[
        list[str] | None,
        Field(max_length=1000, description="Words, not a line of shell. By default bash"),
    ] = None,
    cwd: Annotated[str | None, Field(max_length=4096, description="An absolute path")] = None,
    env: Annotated[
        dict[str, str] | None, Field(max_length=200, description="Besides the server's")
    ] = None,
    labels: Labels = None,
) -> Answer:
    """Start a command, by default a shell, as a new session with a terminal of its own. It outlives
    you, this server and the login, and can be dumped and restored.
    """
    words = ["bash"] if command is None else command
    work = service_of(asked).access.run
    return await _off(asked, work, words, name, cwd, env or {}, labels or {})


async def send(
    asked: Asked,
    consent: Annotated[ElicitationResult[Consent], Resolve(may_take)],
    name: Name,
    text: Annotated[str, Field(max_length=1 << 18, description="Typed as it is")] = "",
    keys: Annotated[str, Field(max_length=1000, description="Then keys: C-c Up Enter F1")] = "",
    enter: Annotated[bool, Field(description="Then Enter")] = False,
    take: Take = False,
    confirm: Confirm = None,
) -> Answer:
    """Type into a session: text, then keys, then Enter. To run commands, exec is better."""
    check(consent, "taking the write lease")
    parts = [("text", text)] if text else []
    parts += [("keys", keys)] if keys else []
    parts += [("enter", "")] if enter else []
    return await _off(asked, service_of(asked).access.send, name, parts, take=take)


async def exec_(
    asked: Asked,
    consent: Annotated[ElicitationResult[Consent], Resolve(may_take)],
    name: Name,
    command: Annotated[
        str, Field(min_length=1, max_length=1 << 16, description="A line of shell, or a script")
    ],
    new: Annotated[
        bool,
        Field(description="Run it next to the terminal, in a shell of its own, with two streams"),
    ] = False,
    cwd: Annotated[str | None, Field(max_length=4096, description="With new")] = None,
    env: Annotated[dict[str, str] | None, Field(max_length=200, description="With new")] = None,
    stdin: Annotated[str | None, Field(max_length=1 << 20, description="With new")] = None,
    seconds: Seconds = ANSWER,
    limit: Limit = DEFAULT_LIMIT,
    take: Take = False,
    confirm: Confirm = None,
) -> Answer:
    """Run a command in the session's live shell (cd and variables stay), or next to it with new;
    the answer has its exit code and output. A command that takes longer runs on: running=true, and
    wait(until=command, command_id, since=cursor) goes on; seconds=0 answers at once.
    """
    check(consent, "taking the write lease")
    if not new and (cwd or env or stdin is not None):
        raise as_tool_error(UsageError("cwd, env and stdin need new: the live shell has its own"))
    how = New(cwd, env or {}, None, None if stdin is None else stdin.encode()) if new else None
    work = service_of(asked).access.exec
    return await _off(asked, work, name, [command], how, seconds, limit, take=take)


async def interrupt(
    asked: Asked, name: Name, command_id: CommandId | None = None, limit: Limit = DEFAULT_LIMIT
) -> Answer:
    """Interrupt the program in the foreground, as ^C does, or one command of exec."""
    return await _off(asked, service_of(asked).access.interrupt, name, command_id, limit)


async def halt(asked: Asked, name: Name) -> Answer:
    """Freeze a session at once, for an emergency. Only a person lets it go on
    (`criuctl resume`).
    """
    return await _off(asked, service_of(asked).access.halt, name)


async def snapshot(asked: Asked, name: Name, labels: Labels = None) -> Answer:
    """Store a checkpoint of a session, which runs on: before a risky step, say."""
    service = service_of(asked)
    await known(service.off(asked, service.access.check_lives, name))
    given = (labels or {}).items()
    marks = [word for key, value in given for word in ("--label", f"{key}={value}")]

    async def work() -> Answer:
        words = ("dump", "--leave-running", *marks, "--", name)
        return _stored(await service.command(asked, *words))

    return await known(service.operations.start(work, ANSWER))


async def restore(
    asked: Asked,
    ref: Ref,
    new_name: NewName | None = None,
    older: Annotated[
        bool, Field(description="Although this host knows of a newer checkpoint that is gone")
    ] = False,
) -> Answer:
    """Bring a checkpoint back to life, as its session or, with a new name, as a copy. A session
    that runs is never replaced.
    """
    service = service_of(asked)
    options = (["--as", new_name] if new_name else []) + (["--older"] if older else [])

    async def work() -> Answer:
        return _restored(await service.command(asked, "restore", *options, "--", ref))

    return await known(service.operations.start(work, ANSWER))


async def fork(
    asked: Asked,
    name: Ref,
    new_name: Annotated[
        NewName | None,
        Field(description="The copy's name; of several its begin: -1, -2 follow"),
    ] = None,
    count: Annotated[int, Field(ge=1, le=100, description="So many copies")] = 1,
) -> Answer:
    """Make copies of a live session, or of a checkpoint (name is then a REF as for restore), as
    other sessions: to try several things out at once.
    The original runs on. Each copy gets its own of the files that it has open for writing;
    other files are shared. With several, some may fail: see state.
    """
    service = service_of(asked)
    options = ["-n", str(count)]
    if new_name is not None:
        options += ["--as" if count == 1 else "--prefix", new_name]

    async def work() -> Answer:
        body = await service.command(asked, "fork", *options, "--", name)
        keys = ("session", "pid", "state")
        copies = [{key: one[key] for key in keys} for one in body["forks"]]
        facts = {key: body[key] for key in ("from", "checkpoint", "frozen_ms", "elapsed_ms")}
        return facts | {"forks": copies, DATA: _warnings(body)}

    return await known(service.operations.start(work, ANSWER))


async def kill(
    asked: Asked,
    ending: Annotated[Ending, Resolve(what_ends)],
    consent: Annotated[ElicitationResult[Consent], Resolve(may_kill)],
    name: Name,
    command_id: CommandId | None = None,
    grace: Annotated[
        float, Field(ge=0, le=10, description="Seconds between SIGTERM and SIGKILL")
    ] = 5.0,
    confirm: Confirm = None,
) -> Answer:
    """End every process of a session, which asks for confirmation; or one command of exec."""
    check(consent, "ending the session")
    access = service_of(asked).access
    if command_id is not None:
        return await _off(asked, access.kill_command, name, command_id, grace, DEFAULT_LIMIT)
    return await _off(asked, access.kill, name, ending.identity, grace)


class Offered(NamedTuple):
    """A tool, its name, and what it takes and does."""

    function: Callable[..., Awaitable[Answer]]
    role: str
    reads: bool = False  # changes nothing
    destroys: bool = False


TOOLS = {
    "run": Offered(run, "write"),
    "list": Offered(list_, "observe", reads=True),
    "status": Offered(status, "observe", reads=True),
    "send": Offered(send, "write", destroys=True),
    "capture": Offered(capture, "observe", reads=True),
    "exec": Offered(exec_, "write", destroys=True),
    "wait": Offered(wait, "observe", reads=True),
    "interrupt": Offered(interrupt, "write", destroys=True),
    "halt": Offered(halt, "write"),
    "snapshot": Offered(snapshot, "write"),
    "checkpoints": Offered(checkpoints, "observe", reads=True),
    "restore": Offered(restore, "write"),
    "fork": Offered(fork, "write"),
    "diff": Offered(diff, "observe", reads=True),
    "kill": Offered(kill, "write", destroys=True),
}


def add_tools(server: MCPServer[Service], role: str) -> None:
    """Add the tools that a client of this role may use."""
    for name, offered in TOOLS.items():
        if ROLES.index(offered.role) <= ROLES.index(role):
            hints = ToolAnnotations(
                read_only_hint=offered.reads,
                destructive_hint=offered.destroys,
                open_world_hint=not offered.reads,
            )
            server.add_tool(offered.function, name=name, annotations=hints)
            tool = server._tool_manager.get_tool(name)
            assert tool is not None
            model = tool.fn_metadata.arg_model
            model.model_config["extra"] = "forbid"  # the SDK ignores what it does not know
            model.model_rebuild(force=True)
            tool.parameters = model.model_json_schema(by_alias=True)


async def _off(
    asked: Asked, function: Callable[P, Answer], *args: P.args, **kwargs: P.kwargs
) -> Answer:
    """Call what blocks in a thread, and return its answer; an expected error is the tool's."""
    return await known(service_of(asked).off(asked, function, *args, **kwargs))


def _stored(body: Answer) -> Answer:
    """Return a dump's result, without its lists."""
    answer = {key: body[key] for key in _OF_DUMP if key in body}
    return answer | {"processes": _count(body.get("processes")), DATA: _warnings(body)}


def _restored(body: Answer) -> Answer:
    """Return a restore's result, without its lists."""
    answer = {key: body[key] for key in _OF_RESTORE if key in body}
    connections = body.get("connections") or []
    outcomes = [one.get("outcome") for one in connections]
    answer["connections"] = {one: outcomes.count(one) for one in sorted(set(outcomes))}
    return answer | {DATA: _warnings(body)}


def _warnings(body: Answer) -> Answer:
    """Return the warnings, which name paths and programs."""
    found = body.get("warnings") or []
    return {"warnings": [bounds.short(one, 500) for one in found[:_MOST_WARNINGS]]}


def _count(value: Any) -> Any:
    return len(value) if isinstance(value, list) else value
