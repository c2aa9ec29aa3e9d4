"""A session has one home: the fate of the old one, back again, after another host has taken the
session over.

Two homes on this machine: each has a name in the leases, state and run folders of its own, and the
store in common.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from servers.common import free_ports
from servers.radosgw import RadosGateway
from support import oracle
from support.command import Criuctl, Home
from support.homes import Homes
from support.operating import Operators
from support.pauses import paused
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration


def taken_over(old: Criuctl, new: Criuctl, animal: Animal, zoo: Zoo) -> Animal:
    """`web`, which runs at `old` as `animal` and is in the store, comes to `new` by force."""
    refused = new("restore", "web", check=False)
    assert (refused["exit_code"], refused["error"]["code"]) == (9, "conflict")
    return zoo.adopt(new("restore", "web", "--take-over")["pid"], animal)


def only(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The one outcome of a `criuctl fence`."""
    assert len(found) == 1, found
    return found[0]


def test_the_old_home_writes_nothing_and_stops_its_copy(homes: Homes, zoo: Zoo) -> None:
    """By its next snapshot; and in the middle of a dump, at the last moment before anything is
    published.
    """
    a, b, c = homes("a"), homes("b"), homes("c")
    original = zoo.launch("counter.py", "1")
    a("dump", original.pid, "--name", "web", "--leave-running")
    a("snapshot", "web")  # by the lease that it has
    assert only(a("fence", "web"))["verdict"] == "home"
    copy = taken_over(a, b, original, zoo)
    refused = a("snapshot", "web", check=False)
    assert refused["exit_code"] == 9
    error = refused["list"][0]["error"]
    assert (error["code"], error["epoch"], error["lease"]["epoch"], error["lease"]["host_id"]) == (
        "fenced",
        1,
        2,
        "b",
    )
    assert "ended" in error["message"]
    assert not original.alive()
    status = a("status", "web")
    assert status["state"] == "lost" and "taken over" in status["reason"]
    assert len(a("list", "web")) == 2
    # The copy is the session now, and goes the same way while it is being dumped.
    b("snapshot", "web")
    with paused(b, "store", "dump", "web") as held:
        third = zoo.adopt(c("restore", "web", "--take-over")["pid"], original)
        held.go_on()
        assert held.command.process.wait(120) == 9, held.command.output()
    assert held.command.json()["error"]["code"] == "fenced"
    assert not copy.alive()
    assert len(a("list", "web")) == 3
    third.ask()
    assert only(c("fence", "--all"))["verdict"] == "home"
    # To end it for good gives its lease back.
    assert c("kill", "web", "--timeout", "0")["leases_kept"] == []
    zoo.adopt(a("restore", "web")["pid"], original).ask()


def test_the_old_home_was_only_cut_off(
    homes: Homes,
    home: Home,
    radosgw_server: RadosGateway,
    operators_window: Callable[[Operators], Any],
) -> None:
    """As long as the store does not answer nothing is stopped; when it does, attached clients get
    the reason.
    """
    radosgw_server.make_bucket(home.token)
    a, b = homes("a"), homes("b")
    for each in (a, b):
        each.extra |= {**radosgw_server.env, "CRIUCTL_STORE": f"s3://{home.token}/fence"}
    a("store", "init")
    a.shell("web")
    assert only(a("fence", "web"))["verdict"] == "unclaimed"
    a("exec", "web", "--", "export", "kept=yes")
    a("snapshot", "web")
    with_net = dict(a.extra)
    a.extra |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_ports(1)[0]}",
        "CRIUCTL_S3_RETRIES": "1",
    }
    b("restore", "web", "--take-over")
    cut = a("fence", "--all", check=False)
    assert cut["exit_code"] == 7
    assert (only(cut["list"])["verdict"], only(cut["list"])["done"]) == ("unknown", "nothing")
    assert a("status", "web")["state"] == "running"
    a("exec", "web", "--", "true")
    a.extra = with_net
    window = operators_window(a)
    found = only(a("fence", "web", "--freeze-only"))
    assert (found["verdict"], found["done"], found["epoch"], found["lease"]["epoch"]) == (
        "fenced",
        "frozen",
        1,
        2,
    )
    window.expect(rb"taken over by host")
    frozen = a("status", "web")
    assert frozen["state"] == "paused" and "taken over" in frozen["reason"]
    found = only(a("fence", "--all"))
    assert (found["done"], found["processes"] >= 1) == ("ended", True)
    lost = a("status", "web")
    assert (lost["state"], lost["exit_code"], lost["pid"]) == ("lost", None, None)
    assert "taken over" in lost["reason"]
    assert a("fence", "--all") == []
    assert b("exec", "web", "--", "printenv", "kept")["output"].strip() == "yes"
    # What is given back in the usual way may come here again.
    b("dump", "web")
    a("restore", "web")
    assert a("exec", "web", "--", "printenv", "kept")["output"].strip() == "yes"
    assert only(a("fence", "web"))["verdict"] == "home"


@pytest.fixture
def operators_window() -> Callable[[Operators], Any]:
    """Attaches to `web`."""

    def attach(operators: Operators) -> Any:
        window = operators.window("attach", "web", "--read-only")
        window.expect(rb"\$")
        return window

    return attach


@pytest.mark.parametrize("held", [True, False], ids=["session", "tree"])
def test_kill_9_of_fence_and_again(held: bool, homes: Homes, zoo: Zoo) -> None:
    """Whatever was done, doing it again does the rest; who was never stopped goes on untouched."""
    a, b = homes("a"), homes("b")
    if held:
        a.shell("web")
        a("snapshot", "web")
        stale = Animal(a("status", "web")["pid"], zoo.home)
        b("restore", "web", "--take-over")
    else:
        stale = zoo.launch("counter.py", "1")
        a("dump", stale.pid, "--name", "web", "--leave-running")
        taken_over(a, b, stale, zoo)
    other = zoo.launch("counter.py", "1", name="other")
    a("dump", other.pid, "--name", "other", "--leave-running")
    for step in ("fence", "end"):
        with paused(a, step, "fence", "web") as killed:
            killed.kill()
            killed.command.process.wait(120)
        assert a("status", "web")["state"] in ("running", "paused")
    found = {row["session"]: (row["verdict"], row["done"]) for row in a("fence", "--all")}
    assert found == {"web": ("fenced", "ended"), "other": ("home", "nothing")}
    assert a("status", "web")["state"] == "lost" and "taken over" in a("status", "web")["reason"]
    assert not stale.alive()
    other.ask()
    assert b("status", "web")["state"] == "running"


def test_of_two_homes_that_restore_at_once_one_wins(homes: Homes, zoo: Zoo) -> None:
    a, b, c = homes("a"), homes("b"), homes("c")
    original = zoo.launch("counter.py", "1")
    a("dump", original.pid, "--name", "web")  # it lives nowhere now
    with paused(b, "pages", "restore", "web") as held:  # it has the lease, and nothing else yet
        loser = c("restore", "web", check=False)
        assert (loser["exit_code"], loser["error"]["code"]) == (9, "conflict")
        # a take-over that comes to nothing is undone
        with paused(c, "pages", "restore", "web", "--take-over") as forced:
            forced.kill(signal.SIGTERM)
            forced.go_on()
            assert forced.command.process.wait(120) == 128 + signal.SIGTERM
        held.go_on()
        assert held.command.process.wait(120) == 0, held.command.output()
    winner = zoo.adopt(held.command.json()["pid"], original)
    assert only(b("fence", "web"))["verdict"] == "home"
    winner.ask()
    # And who is overtaken while it restores does not let its copy run.
    b("dump", "web")
    with paused(b, "pages", "restore", "web", "--pids", "private") as held:
        forced_copy = zoo.adopt(c("restore", "web", "--take-over")["pid"], original)
        held.go_on()
        assert held.command.process.wait(120) == 9, held.command.output()
    assert {other.pid for other in zoo.find(original)} <= set(oracle.tree(forced_copy.pid))
    forced_copy.ask()
