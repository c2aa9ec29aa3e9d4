"""`criuctl supervise`: what dies comes back, from the newest good checkpoint, on this host or on
another; but not for ever.

Two homes on this machine: each has a name in the leases, state and run folders of its own, and the
store in common.  Hosts that are lost as a whole are in ``tests/hosts/test_supervise_hosts.py``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import oracle
from support.homes import Homes
from support.hooking import HookFolder
from support.keeper import start_time, wait_until
from support.operating import Operators
from support.supervising import COUNTER, PATIENCE, Supervised

from criuctl.config import Config
from criuctl.session.client.session import Session

pytestmark = pytest.mark.integration

QUICK = ("--backoff", "0.01s", "--lease", "2s")


def supervise(operators: Operators, *options: str) -> Supervised:
    """Begin to look after `web`."""
    return Supervised(operators.start("supervise", "web", *QUICK, *options))


def counting(operators: Operators) -> Path:
    """The session `web`, which counts into the file whose path this is."""
    program, out = operators.home.path / "counter.py", operators.home.path / "counted"
    program.write_text(COUNTER)
    operators("run", "-d", "--name", "web", "--", sys.executable, "-S", program, out)
    wait_until(lambda: out.exists() and out.stat().st_size, PATIENCE, "it counts")
    return out


def end_by_itself(out: Path, code: int) -> None:
    """Have it end with an exit code, now and whenever it is restored."""
    written = out.with_name("end")
    written.write_text(str(code))
    written.replace(f"{out}.end")


def kill(pid: int) -> None:
    """As the kernel does it when memory runs out."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: oracle.stat_of(pid)[:1] in ([], ["Z"], ["X"]), PATIENCE, f"{pid} is dead")


def test_each_kill_costs_no_more_than_what_came_after_the_newest_snapshot(homes: Homes) -> None:
    """A kill by an operator is another matter; and so is one of the supervisor."""
    a = homes("a")
    out = counting(a)
    watch = supervise(a, "--every", "0.4s", "--stable-after", "0.01s", "--keep-last", "2")
    pid = watch.wait("home")["pid"]
    for round_ in range(1, 3):
        watch.wait(
            "snapshot", 2, lambda event: event["sequence"] > watch.events("home")[-1]["sequence"]
        )
        kill(pid)
        back = watch.wait("recovered", round_)
        stored = [
            event for event in watch.events("snapshot") if event["sequence"] < back["sequence"]
        ]
        # higher, if it died when one had just been stored
        assert back["number"] >= stored[-1]["number"]
        assert (back["incarnation"], back["passed_over"]) == (round_ + 1, [])
        assert back["recovered_ms"] >= back["restore_ms"] > 0 and back["lost_s"] >= 0
        pid = watch.wait("home", round_ + 1)["pid"]
        assert pid == back["pid"]
    assert {event["exit_signal"] for event in watch.events("died")} == {signal.SIGKILL}
    size = out.stat().st_size
    wait_until(lambda: out.stat().st_size > size, PATIENCE, "it counts on")
    # One supervisor of a session at a time; when it is killed, the next goes on where it was.
    second = a("supervise", "web", check=False)
    assert (second["exit_code"], second["error"]["code"]) == (9, "conflict")
    watch.stop(signal.SIGKILL)
    stored = a("list", "web")
    assert len(stored) < stored[-1]["number"]  # the others were pruned
    again = supervise(a, "--every", "1h")
    assert again.wait("home")["pid"] == pid
    kill(pid)
    assert (
        again.wait("recovered")["checkpoint"] == stored[-1]["id"] and again.events("snapshot") == []
    )
    again.wait("home", 2)
    a("kill", "web", "--timeout", "0")
    assert again.command.process.wait(PATIENCE) == 0
    assert [event["by"] for event in again.events("ended")] == ["killed"]


def test_a_damaged_checkpoint_is_passed_over_and_a_crash_loop_ends(homes: Homes) -> None:
    a = homes("a")
    out = counting(a)
    hooks = HookFolder(a.home.path / "hooks")
    hooks.noting("gave-up")
    watch = supervise(a, "--every", "1h", "--max-restores", "2", "--stable-after", "1h")
    good = watch.wait("snapshot")["checkpoint"]
    packs = set(a.store.glob("packs/*/*"))
    damaged = a("snapshot", "web")[0]["checkpoint"]
    for pack in set(a.store.glob("packs/*/*")) - packs:
        data = bytearray(pack.read_bytes())
        data[len(data) // 3 : len(data) // 3 * 2] = os.urandom(len(data) // 3 * 2 - len(data) // 3)
        pack.write_bytes(data)
    kill(a("status", "web")["pid"])
    back = watch.wait("recovered")
    assert (back["checkpoint"], back["passed_over"]) == (good, [damaged])
    assert watch.wait("passed-over")["error"]["exit_code"] == 8
    watch.wait("home", 2)
    # From now on it ends by itself as soon as it is back: the restore above was the first that came
    # to nothing.
    end_by_itself(out, 3)
    assert watch.command.process.wait(PATIENCE) == 6
    assert [event.get("exit_code") for event in watch.events("died")] == [None, 3, 3]
    gave_up = watch.events("gave-up")[-1]
    assert (gave_up["failures"], gave_up["error"]["code"]) == (2, "gave-up")
    assert len(watch.events("recovered")) == 2
    (request,) = hooks.requests("gave-up")
    assert request["session"] == "web" and request["error"]["code"] == "gave-up"
    # A session that is not wanted back is over.
    Path(f"{out}.end").unlink()
    a("restore", good)
    last = supervise(a, "--every", "1h", "--restart", "never")
    last.wait("home")
    end_by_itself(out, 3)
    assert last.command.process.wait(PATIENCE) == 0, last.command.output()
    assert [event["exit_code"] for event in last.events("ended")] == [3]


def test_of_two_standbys_one_takes_over_and_the_old_home_is_fenced(homes: Homes) -> None:
    """Its supervisor is gone, its session runs on: for the others it is lost, until it is back."""
    a, b, c = homes("a"), homes("b"), homes("c")
    counting(a)
    home = supervise(a, "--every", "1h", "--lease", "1h")
    stored = home.wait("snapshot")["checkpoint"]
    others = {"b": supervise(b, "--lease", "16s"), "c": supervise(c, "--lease", "16s", "--standby")}
    for other in others.values():
        other.wait("standby")
    assert home.stop() == 0  # the lease does not run out any more
    assert home.events("stopped")[-1]["runs"]
    home = supervise(a, "--every", "1h", "--lease", "2s")
    stale = home.wait("home")["pid"]
    began = start_time(stale)
    home.stop(signal.SIGKILL)

    def winners() -> list[str]:
        return [name for name, other in others.items() if other.events("recovered")]

    wait_until(winners, PATIENCE, "another host has taken over")
    (winner,) = winners()
    loser = "c" if winner == "b" else "b"
    back = others[winner].wait("recovered")
    assert (back["checkpoint"], back["incarnation"], back["from_host"]) == (stored, 2, "a")
    assert (
        back["recovered_ms"] >= 2000 and others[winner].events("lease-expired")[-1]["silent_s"] >= 2
    )
    assert began is not None and start_time(stale) == began
    home = supervise(a, "--every", "1h")
    fenced = home.wait("fenced")
    assert (fenced["done"], "taken over" in fenced["text"]) == ("ended", True)
    home.wait("standby")
    wait_until(lambda: start_time(stale) != began, PATIENCE, "the stale copy is reaped")
    assert others[loser].events("recovered") == [] and others[loser].command.process.poll() is None
    assert start_time(others[winner].wait("home")["pid"]) is not None


def test_a_home_that_is_cut_off_stands_still(homes: Homes) -> None:
    """Until it has renewed its lease, also when its supervisor is killed; or until a person has it
    go on.
    """
    a = homes("a")
    out = counting(a)
    a("snapshot", "web")
    store, road = a.store, a.home.path / "road"
    road.symlink_to(store)
    a.store = road
    watch = supervise(a, "--every", "1h", "--self-fence")
    pid = watch.wait("home")["pid"]

    def is_in(state: str) -> Callable[[], bool]:
        return lambda: a("status", "web")["state"] == state

    road.unlink()
    wait_until(is_in("paused"), PATIENCE, "it stands still")
    assert watch.wait("self-fenced")["lease_s"] == 2
    status, size = a("status", "web"), out.stat().st_size
    assert (status["paused_by"]["name"], status["self_fence"], watch.events("snapshot")) == (
        "self-fence",
        True,
        [],
    )
    road.symlink_to(store)
    watch.wait("goes-on")
    wait_until(lambda: out.stat().st_size > size, PATIENCE, "it counts on")
    watch.stop(signal.SIGKILL)
    wait_until(is_in("paused"), PATIENCE, "its holder knows that the lease is not renewed any more")
    # The next supervisor has the lease, and does not want that.
    again = supervise(a, "--every", "1h")
    assert again.wait("home")["pid"] == pid and a("status", "web")["self_fence"] is False
    wait_until(is_in("running"), PATIENCE, "it goes on")
    with Session.connect(
        "web", config=Config(run_dir=str(a.home.run)), kind="service", role="admin"
    ) as session:
        session.request("self-fence", seconds=0.01)
        wait_until(is_in("paused"), PATIENCE, "the time is over")
    a("resume", "web")
    size = out.stat().st_size
    wait_until(lambda: out.stat().st_size > size, PATIENCE, "it counts on")
    operations = [event["operation"] for event in a("events", "--session", "web")]
    assert [name for name in operations if name.startswith("self-fence")][:2] == [
        "self-fence",
        "self-fence-end",
    ]
    assert "supervise" in operations  # the one that was killed
