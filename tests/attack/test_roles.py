"""An operator that a person has limited, at every door: it looks, and does nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
from support.api import in_this_process
from support.browsing import serving
from support.command import Home
from support.keeper import Keeper
from support.mcp_clients import over_stdio
from support.operating import Operators

from criuctl import AsyncSession, CriuctlError, Session
from criuctl.errors import Forbidden

pytestmark = pytest.mark.integration

AGENT = {"CRIUCTL_KIND": "agent", "CRIUCTL_OPERATOR": "builder"}
FORBIDDEN = 10
COMMANDS = (
    *(
        "cp NAME:/etc/passwd OUT",
        "dump NAME",
        "exec NAME -- true",
        "export NAME OUT",
    ),
    *("exec NAME --new -- true", "forget NAME", "fork NAME -n 1", "halt NAME", "kill NAME"),
    *("lease request NAME", "lease take NAME", "migrate NAME ssh://127.0.0.1", "pause NAME"),
    *("pin NAME", "restore NAME --as other", "resume NAME", "resume NAME --agent-stays-out"),
    *("rm NAME", "role NAME builder admin", "send NAME --text x", "signal NAME TERM"),
    *(
        "share open NAME --via ssh://127.0.0.1 --role write",
        "snapshot NAME",
    ),
    *("supervise NAME", "unpin NAME"),
)
STORED = ("cp NAME:/etc/passwd OUT", "export NAME OUT", "kill NAME", "restore NAME", "rm NAME")


@pytest.fixture
def operators(keeper: Keeper, home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operators]:
    """criuctl's command line, and the API in this process."""
    yield from in_this_process(keeper, home, monkeypatch)


@pytest.fixture
def limited(operators: Operators) -> Operators:
    """A session ``work`` with a pinned checkpoint, in which the agent ``builder`` may only look."""
    operators.shell("work")
    operators("snapshot", "work")
    operators("pin", "work")
    operators("role", "work", "agent:builder", "observe", env={"CRIUCTL_KIND": "human"})
    return operators


def _refused(operators: Operators, command: str, out: Path) -> None:
    words = [word.replace("NAME", "work").replace("OUT", str(out)) for word in command.split()]
    answer = operators(*words, check=False, env=AGENT)
    each = answer.get("list") or answer.get("sessions") or [answer]
    error = answer.get("error") or each[0]["error"]
    assert (answer["exit_code"], error["code"]) == (FORBIDDEN, "forbidden"), (command, answer)
    assert not out.exists()


def test_the_command_line(limited: Operators, tmp_path: Path) -> None:
    before = limited("list", "work")
    for command in COMMANDS:
        _refused(limited, command, tmp_path / "out")
    for command in ("status work", "capture work", "restore work --as twin --dry-run", "list work"):
        limited(*command.split(), env=AGENT)
    assert limited("list", "work") == before
    assert limited("status", "work")["state"] == "running"
    assert [body["session"] for body in limited("ls")] == ["work"]


def test_a_checkpointed_session(limited: Operators, tmp_path: Path) -> None:
    """Its holder says so; after a reboot, the checkpoint."""
    limited("unpin", "work")
    limited("dump", "work")
    for command in STORED:
        _refused(limited, command, tmp_path / "out")
    limited("restore", "work")  # as another operator; the limit came with it
    _refused(limited, "dump NAME", tmp_path / "out")
    limited("dump", "work")
    elsewhere = {"CRIUCTL_STATE_DIR": str(tmp_path / "s"), "CRIUCTL_RUN_DIR": str(tmp_path / "r")}
    for command in set(STORED) - {"kill NAME"}:  # not known there
        line = command.replace("NAME", "work").replace("OUT", str(tmp_path / "out"))
        answer = limited(*line.split(), check=False, env=AGENT | elsewhere)
        assert answer["exit_code"] == FORBIDDEN, (command, answer)


def test_the_python_api(limited: Operators) -> None:
    calls: dict[str, Callable[[Session], Any]] = {
        name: methodcaller(name)
        for name in ("dump", "snapshot", "fork", "kill", "pause", "halt", "resume", "forget")
    }
    calls |= {
        "send": lambda s: s.send("x"),
        "exec": lambda s: s.exec("true"),
        "migrate": lambda s: s.migrate("ssh://127.0.0.1"),
        "restore": lambda s: Session.restore("work", as_name="other", operator="builder"),
        "fork_from": lambda s: Session.fork_from("work@1", operator="builder"),
    }
    allowed: dict[str, Literal["observe", "admin"]] = {"builder": "admin", "another": "observe"}
    for who, role in allowed.items():
        with Session.connect("work", kind="agent", name=who, role=role) as session:
            for name, call in calls.items():
                if who != "builder" and name in ("restore", "fork_from"):
                    continue
                with pytest.raises(Forbidden):
                    call(session)
                assert limited("status", "work")["state"] == "running", name

    async def work() -> None:
        async with await AsyncSession.connect("work", kind="agent", name="builder") as session:
            for call in (session.dump, session.snapshot, session.fork, session.kill):
                with pytest.raises(Forbidden):
                    await call()

    asyncio.run(work())
    with Session.connect("work", kind="agent", name="other", role="write") as session:
        session.snapshot()
        with pytest.raises(Forbidden):
            session.dump()
        with pytest.raises(CriuctlError):
            session.kill()


def test_mcp(limited: Operators) -> None:
    """Under the name of its program, and with the role of its server."""

    async def conversation() -> None:
        limited("role", "work", "agent:agent", "observe", env={"CRIUCTL_KIND": "human"})
        async with over_stdio(limited, "--role", "admin") as agent:
            for tool, arguments in (
                *(("snapshot", {"name": "work"}), ("fork", {"name": "work"})),
                *(("restore", {"ref": "work", "new_name": "other"}), ("halt", {"name": "work"})),
                *(("kill", {"name": "work"}), ("exec", {"name": "work", "command": "true"})),
            ):
                error = await agent.fails(tool, **arguments)
                assert error["code"] == "forbidden", (tool, error)

    asyncio.run(asyncio.wait_for(conversation(), 240))
    assert [body["session"] for body in limited("ls")] == ["work"]


def test_the_page(limited: Operators) -> None:
    """A person uses it, whatever has started it."""
    limited("role", "work", "human:*", "observe", env={"CRIUCTL_KIND": "human"})

    async def act(root: str, headers: dict[str, str]) -> None:
        async with aiohttp.ClientSession(root, headers=headers) as client:
            for action in ("snapshot", "fork", "dump", "kill", "forget", "pause"):
                fields = {"action": action, "session": "work"}
                async with client.post("/api/actions", json=fields) as answer:
                    text = await answer.text()
                    assert answer.status != 200 and "forbidden" in text, (action, text)

    with serving(limited) as served:
        asyncio.run(act(served.root, {"Authorization": f"Bearer {served.token}"}))
    assert limited("status", "work")["state"] == "running"
