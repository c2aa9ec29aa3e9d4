"""The table of rights: every operation on a session has a line, and every door goes by it."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import click
import pytest

from criuctl.cli.main import cli
from criuctl.config import Config
from criuctl.errors import Forbidden, UsageError
from criuctl.host.rights import RIGHTS, check
from criuctl.mcp.tools import TOOLS
from criuctl.ops.acting import Direct, acting, undoing
from criuctl.sdk import AsyncSession, Session
from criuctl.session import names
from criuctl.session.client import caller
from criuctl.session.holder.tree_operations import TreeOperations
from criuctl.session.protocol import ROLES
from criuctl.web.actions import _COMMANDS

# Commands that act on sessions by the operations of the table alone, each session for itself.
COMPOSED = {
    *("acp", "maintenance", "mcp", "metrics", "prune", "ps", "recover", "schedule", "slurm"),
    *("ui", "unit"),
}
# Commands that are about this host, a store, or nothing: no session's admin limits them.
HOST_WIDE = {
    *("bugreport", "check", "completion", "config", "doctor", "events", "fence", "gc", "help"),
    *("hooks", "import", "key", "receive", "store", "tls-relay", "version"),
}
# Names of the Python API that differ from those of the commands, or are no operation.
API = {
    "aclose": "",
    "capture": "capture",
    "checkpoints": "checkpoints",
    "close": "",
    "command": "output",
    "connect": "attach",
    "fork_from": "fork",
    "keys": "send",
    "list": "ls",
    "paste": "send",
    "reconnect": "",
    "resolve_step": "step resolve",
    "screen": "capture",
    "steps": "step list",
}
MCP = {"interrupt": "signal", "list": "ls"}


def _words(command: click.Command, ctx: click.Context) -> list[str]:
    if not isinstance(command, click.Group):
        return []
    return list(command.list_commands(ctx))


def test_every_command_has_a_line() -> None:
    ctx = click.Context(cli, info_name="criuctl")
    for name in _words(cli, ctx):
        if name in COMPOSED | HOST_WIDE:
            assert name not in RIGHTS, name
            continue
        command = cli.get_command(ctx, name)
        assert command is not None
        for word in _words(command, click.Context(command)) or [""]:
            line = f"{name} {word}".strip()
            assert any(one == line or one.startswith(f"{line} -") for one in RIGHTS), line


@pytest.mark.parametrize("api", [Session, AsyncSession])
def test_every_call_of_the_python_api_has_a_line(api: type) -> None:
    for name, _call in inspect.getmembers(api, callable):
        if not name.startswith("_"):
            operation = API.get(name, "wait" if name.startswith("wait_") else name)
            assert not operation or operation in RIGHTS, name


def test_every_tool_and_every_action_of_the_page_has_a_line() -> None:
    for name, tool in TOOLS.items():
        right = RIGHTS[MCP.get(name, name)]
        # one command of a session may be ended by who may not end the session
        assert tool.role == (right if name != "kill" else RIGHTS["kill --command"]), name
    for name in (*_COMMANDS, "pause", "resume"):
        assert name in RIGHTS


def test_the_holder_needs_the_same_roles() -> None:
    source = inspect.getsource(TreeOperations)
    for name in ("signal", "pause", "resume", "halt", "kill"):
        assert f'"{name}": ("{RIGHTS[name]}"' in source


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A host whose session ``work`` limits an agent, and all services."""
    config = Config(run_dir=str(tmp_path / "run"), state_dir=str(tmp_path / "state"))
    folder = names.run_folder(config.run_dir, "work")
    folder.mkdir(parents=True, mode=0o700)
    roles = [
        {"kind": "agent", "name": "builder", "role": "observe"},
        {"kind": "service", "name": "*", "role": "write"},
    ]
    state = {"session": "work", "holder": None, "roles": roles}
    (folder / "state.json").write_text(json.dumps(state))
    return config


@pytest.mark.parametrize("operation", RIGHTS)
def test_each_operation_needs_its_right(operation: str, config: Config) -> None:
    right = ROLES.index(RIGHTS[operation])
    for kind, name, role in (
        *(("agent", "builder", "observe"), ("agent", "other", "admin")),
        *(("service", "cron", "write"), ("human", "builder", "admin")),
        ("service", "criuctl-dump", "admin"),
    ):
        with acting(Direct(kind, name)):
            if ROLES.index(role) >= right:
                check(config, operation, "work")
                continue
            with pytest.raises(Forbidden, match=f"{name}' has '{role}'"):
                check(config, operation, "work")
            with undoing():
                check(config, operation, "work")


def test_a_session_without_a_state_here_is_judged_by_its_checkpoint(config: Config) -> None:
    roles = [("agent", "builder", "observe")]
    with acting(Direct("agent", "builder")):
        check(config, "kill", "another")
        with pytest.raises(Forbidden):
            check(config, "kill", "another", lambda: roles)
        check(config, "status", "another", lambda: roles)


def test_a_server_s_command_may_do_what_its_client_may(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ((caller.KIND, "human"), (caller.NAME, "ann"), (caller.ROLE, "write")):
        monkeypatch.setenv(name, value)
    check(config, "snapshot", "work")
    with pytest.raises(Forbidden, match="'ann' has 'write'"):
        check(config, "dump", "work")
    monkeypatch.setenv(caller.ROLE, "root")
    with pytest.raises(UsageError, match="is no role"):
        check(config, "dump", "work")
