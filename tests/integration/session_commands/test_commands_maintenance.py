"""Maintenance of a host: everything is stored and ended, nothing begins meanwhile, all comes back;
and what a host has lost.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.command import Home
from support.homes import Homes
from support.hooking import HookFolder
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators
from support.pauses import paused
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration


@pytest.fixture
def tree(zoo: Zoo, operators: Operators) -> Animal:
    """A tree that the configuration calls ``db``."""
    animal = zoo.launch("counter.py", "1")
    command = rf"counter\.py {animal.folder} "
    operators.extra["CRIUCTL_TREES"] = json.dumps(
        {"db": {"command": command, "order": 20, "labels": {"tier": "data"}}}
    )
    return animal


def _states(items: list[dict[str, Any]]) -> dict[str, tuple[str, int]]:
    return {item["session"]: (item["state"], item["tries"]) for item in items}


def test_everything_is_ended_and_comes_back(
    operators: Operators, zoo: Zoo, tree: Animal, home: Home
) -> None:
    """`begin` is killed in the middle; later, one restore is refused by a hook until the hook is
    gone.
    """
    hooks = HookFolder(home.path / "hooks")
    for name, order, label in (("first", "10", "web"), ("last", "50", "data")):
        operators.shell(name, "--label", f"order={order}", "--label", f"tier={label}")
        operators("exec", name, "--", f"remembered={name}-{home.token}")
    assert {answer["target"] for answer in operators("snapshot", "--label", "tier=data")} == {
        "db",
        "last",
    }
    with paused(operators, "frozen", "maintenance", "begin", "--reason", "a new kernel") as held:
        held.kill()  # and the process that has the session frozen lets it go
        held.wait_settled()
    operators("exec", "last", "--", "true")
    with paused(operators, "noted", "maintenance", "begin", "--jobs", "1") as held:
        held.kill()
        held.command.process.wait(TIMEOUT)
    status = operators("maintenance", "status")
    assert (status["maintenance"], status["phase"], status["reason"]) == (
        True,
        "storing",
        "a new kernel",
    )
    assert _states(status["sessions"]) == {
        "first": ("waiting", 0),
        "db": ("waiting", 0),
        "last": ("stored", 0),
    }
    tree.ask()
    answer = operators("maintenance", "begin")
    # the highest order was stored before
    assert [item["session"] for item in answer] == ["db", "first"]
    assert not tree.alive()
    assert {state["session"]: state["state"] for state in operators("ls")} == dict.fromkeys(
        ("first", "db", "last"), "checkpointed"
    )
    for words in (("run", "-d", "--", "sleep", "1000"), ("restore", "first")):
        refused = operators(*words, check=False)
        assert refused["exit_code"] == 9
        assert "maintenance end" in refused["error"]["hint"]
    hooks.sh("pre-restore", "no", """if grep -q '"session": *"last"'; then exit 10; fi""")
    answer = operators("maintenance", "end", "--retry-after", "0s", check=False)
    assert answer["exit_code"] == 10
    assert _states(answer["list"]) == {
        "first": ("back", 1),
        "db": ("back", 1),
        "last": ("given-up", 3),
    }
    (finding,) = answer["list"][-1]["findings"]
    assert finding["level"] == "error"
    again = operators("maintenance", "end", check=False)
    assert (again["exit_code"], _states(again["list"])["last"]) == (10, ("given-up", 3))
    assert operators("maintenance", "status")["maintenance"] is False  # so new sessions may begin
    (hooks.path / "pre-restore" / "no").unlink()
    assert _states(operators("maintenance", "end", "--again"))["last"] == ("back", 1)
    assert operators("maintenance", "status")["sessions"] == []
    for name in ("first", "last"):
        assert (
            operators("exec", name, "--", "echo $remembered")["output"].strip()
            == f"{name}-{home.token}"
        )
    zoo.adopt(operators("status", "db")["pid"], tree).ask()
    answer = [
        event for event in operators("events") if event["operation"].startswith("maintenance-")
    ]
    assert [(event["operation"], event["exit_code"], event.get("states")) for event in answer] == [
        *[("maintenance-begin", 137, None)] * 2,  # reported by the next one
        ("maintenance-begin", 0, {"stored": 2}),
        ("maintenance-end", 10, {"back": 2, "given-up": 1}),
        ("maintenance-end", 10, {"given-up": 1}),
        ("maintenance-end", 0, {"back": 1}),
    ]


def test_what_a_host_has_lost(operators: Operators, zoo: Zoo, tree: Animal, home: Home) -> None:
    """`recover` alone brings back nothing of it; with --all it does, but not what had ended of
    itself.
    """
    operators("run", "-d", "--name", "over", "--", "sh", "-c", "read line")
    operators("store", "init", "--store", operators.store.name, "--no-encrypt")
    # as it is called in this folder
    operators("snapshot", "--all", "--store", operators.store.name)
    operators("send", "over", "--enter")
    operators("wait", "over", "--exit", "--timeout", TIMEOUT)
    tree.end()
    operators.prefix = ["env", "--chdir=/"]  # as a boot has it
    for path in (home.path / "state" / "sessions").glob("*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"boot_id": "another"}))
    assert operators("recover") == []
    (back,) = operators("recover", "--all")
    assert (back["session"], back["state"], back["tries"]) == ("db", "back", 1)
    restored = zoo.adopt(back["pid"], tree)
    restored.ask()
    assert operators("recover", "--all") == []
    wait_until(restored.alive, TIMEOUT, "it runs")
    events = [event for event in operators("events") if event["operation"] == "recover"]
    assert [(event["sessions"], event["states"]) for event in events] == [(["db"], {"back": 1})]


def test_what_another_host_has_recovered(homes: Homes) -> None:
    """It has moved, and is no failure; also if it was given up here before.  Messages name the
    host as it is configured.
    """
    alpha, beta = homes("alpha"), homes("beta")
    for name in ("one", "two"):
        alpha.shell(name, "--label", "pool=web")
    alpha("maintenance", "begin", "--reason", "moving out")
    refused = alpha("run", "-d", "--", "true", check=False)
    assert refused["error"]["message"].startswith("alpha is in maintenance")
    beta("restore", "one")
    path = alpha.home.path / "state" / "maintenance.json"
    record = json.loads(path.read_text())
    error = {"code": "conflict", "exit_code": 9, "message": "held", "hint": ""}
    for item in record["items"]:
        if item["session"] == "one":
            item |= {"state": "given-up", "tries": 3, "error": error}
    path.write_text(json.dumps(record))
    beta("restore", "two")
    answer = alpha("maintenance", "end", "--retry-after", "0s")
    assert {item["session"]: item["state"] for item in answer} == {"one": "moved", "two": "moved"}
    assert not path.exists()
    assert "held by host beta" in alpha("restore", "one", check=False)["error"]["message"]
    assert alpha("list")[0]["host"] == "alpha"
