"""Copies of a session from one template in memory: they answer at once, diverge, and end alone."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from support import oracle
from support.api import program
from support.asking import Asked
from support.command import PROJECT, Home
from support.keeper import wait_until
from support.operating import TIMEOUT

pytestmark = pytest.mark.integration

_MIB = 48
_DIGEST = "digest(data)"


def _private(root: int) -> int:
    """The bytes of memory that the processes of a tree have for themselves."""
    total = 0
    for pid in oracle.tree(root):
        for line in oracle.read(f"/proc/{pid}/smaps_rollup").splitlines():
            if line.startswith(("Private_Dirty:", "Private_Clean:")):
                total += int(line.split()[1]) << 10
    return total


def _keeper_pids(home: Home) -> list[int]:
    """The keeper and its guardian, the keeper first: it is the guardian's parent."""
    parents: dict[int, int] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        words = oracle.read(f"/proc/{pid}/cmdline").split("\0")
        if "fork" in words and home.token in oracle.read(f"/proc/{pid}/environ"):
            fields = oracle.read(f"/proc/{pid}/stat").rpartition(")")[2].split()
            if fields and fields[0] != "Z":
                parents[pid] = int(fields[1])
    return sorted(parents, key=lambda pid: parents[pid] in parents)


def test_a_dump_with_another_run_folder(asked: Asked, tmp_path: Path) -> None:
    """It does not find the keeper, and says so; with the right one it is stored, whatever other
    keepers there are.
    """
    asked.begin("work")
    (copy,) = asked("fork", "work")["forks"]
    elsewhere = {"CRIUCTL_RUN_DIR": str(tmp_path / "run")}
    refused = asked("dump", copy["pid"], env=elsewhere, check=False)
    assert refused["exit_code"] == 5 and "another run folder" in str(refused["error"])
    place = tmp_path / "templates"
    place.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(place / "0123456789abcdef.socket"))
        other.listen()
        assert asked("dump", "work-1")["session"] == "work-1"


def test_copies_of_a_live_session(asked: Asked) -> None:
    asked.begin("work", mib=_MIB)
    digest = asked.ask("work", _DIGEST)
    body = asked("fork", "work", "-n", 3)
    assert body["from"] == "work" and body["frozen_ms"] > 0
    [warning] = body["warnings"]
    assert "random generators" in warning
    names = [one["session"] for one in body["forks"]]
    assert names == ["work-1", "work-2", "work-3"]
    assert {one["state"] for one in body["forks"]} == {"running"}
    for one in body["forks"]:
        assert asked.ask(one["session"], "len(data)") == str(_MIB << 20)
        assert _private(one["pid"]) < 12 << 20, "it answers, and has touched little"
    [stored] = asked("list", "work")
    assert stored["id"] == body["checkpoint"] and stored["labels"] == {"fork-of": "work"}

    # They have the memory of the original, and diverge.
    for number, name in enumerate(names):
        asked.ask(name, f"kept.append({number}) or data.__setitem__(0, {number})")
    assert asked.ask("work", "(kept, " + _DIGEST + ")") == str(([], digest))
    found = [asked.ask(name, "(kept, data[0], digest(data[1:]))") for name in names]
    rest = asked.ask("work", "digest(data[1:])")
    assert found == [str(([number], number, rest)) for number in range(3)]
    assert asked("status", "work-1")["forked_from"] == "work"
    assert asked("status", "work")["forked_from"] is None
    assert {one["session"]: one["forked_from"] for one in asked("ls")}["work-2"] == "work"
    assert "fork of" in asked.text("status", "work-1")

    # Names that are taken are passed over; what is ended by its origin leaves that.
    assert asked("fork", "work")["forks"][0]["session"] == "work-4"
    ended = asked("kill", "--forks-of", "work", "--timeout", 0)
    assert {one["session"] for one in ended["forks"]} == {*names, "work-4"}
    assert asked.names() == {"work"}
    assert asked("kill", "--forks-of", "work", check=False)["exit_code"] == 3


def test_a_snapshot_of_a_copy_has_all_of_its_memory(asked: Asked) -> None:
    """It stores only what differs, and is that of a session like any other."""
    asked.begin("work", mib=_MIB)
    rest = asked.ask("work", "digest(data[1 << 20:])")
    [one] = asked("fork", "work", "--as", "copy")["forks"]
    asked.ask("copy", "data.__setitem__(slice(0, 1 << 20), os.urandom(1 << 20))")
    digest = asked.ask("copy", _DIGEST)
    before = _private(one["pid"])
    stored = asked("snapshot", "copy")[0]
    assert before >= 1 << 20
    assert stored["bytes"]["memory"] > _MIB << 20
    assert stored["bytes"]["stored"] < 4 << 20
    wait_until(lambda: not asked.keepers(), TIMEOUT, "its keeper is not needed any more")
    assert asked.ask("copy", _DIGEST) == digest
    asked("dump", "copy")
    asked("restore", "copy")
    assert asked.ask("copy", _DIGEST) == digest
    assert asked.ask("copy", "digest(data[1 << 20:])") == rest
    assert asked("status", "copy")["forked_from"] == "work"
    asked("kill", "work")


def test_copies_of_a_stored_checkpoint(asked: Asked) -> None:
    asked.begin("work", mib=_MIB)
    asked.ask("work", "kept.append(1)")
    asked("dump", "work")
    body = asked("fork", "work@1", "-n", 4, "--prefix", "branch")
    assert body["frozen_ms"] is None
    for number in range(1, 5):
        assert asked.ask(f"branch-{number}", "(kept, len(data))") == str(([1], _MIB << 20))
    assert asked("fork", "nothing", check=False)["exit_code"] == 3
    asked("restore", "work")
    assert asked.ask("work", "kept") == "[1]"


def test_copies_have_ports_of_their_own(asked: Asked) -> None:
    asked.begin("work", mib=_MIB)
    port = asked.ask(
        "work", "kept.append(socket.create_server(('127.0.0.1', 0))) or kept[0].getsockname()[1]"
    )
    body = asked("fork", "work", "-n", 2)
    spaces = {os.readlink(f"/proc/{one['pid']}/ns/net") for one in body["forks"]}
    assert len(spaces) == 2 and os.readlink("/proc/self/ns/net") not in spaces
    for one in body["forks"]:
        assert one["ports"] == {f"127.0.0.1:{port}": f"127.0.0.1:{port}"}
        assert any("network of its own" in text for text in one["warnings"])
        assert asked.ask(one["session"], "kept[0].getsockname()[1]") == port


def test_one_copy_fails(asked: Asked) -> None:
    asked.begin("work", mib=_MIB)
    asked.hook("work-2) exit 10;;")
    command = asked.start("fork", "work", "-n", 3)
    assert command.process.wait(120) == 11, command.output()
    states = {one["session"]: one["state"] for one in command.json()["forks"]}
    assert states == {"work-1": "running", "work-2": "failed", "work-3": "running"}
    [failed] = [one for one in command.json()["forks"] if one["state"] == "failed"]
    assert failed["error"]["exit_code"] == 10 and failed["pid"] is None
    assert asked.ask("work-1", "len(data)") == asked.ask("work-3", "len(data)")
    assert {one["session"] for one in asked("ls")} == {"work", "work-1", "work-3"}


def test_all_copies_fail(asked: Asked) -> None:
    """Then the checkpoint that was made for them goes, too."""
    asked.begin("work", mib=_MIB)
    asked.hook("*) exit 10;;")
    refused = asked("fork", "work", "-n", 2, check=False)
    assert refused["exit_code"] == 10
    assert {one["session"] for one in asked("ls")} == {"work"}
    assert asked("list", "work", check=False)["exit_code"] == 3


def test_an_interrupted_fork_leaves_nothing(asked: Asked) -> None:
    asked.begin("work", mib=_MIB)
    gate = asked.home.path / "gate"
    os.mkfifo(gate)
    asked.hook(f"work-2) read nothing < '{gate}';;")
    command = asked.start("fork", "work", "-n", 2)
    wait_until(lambda: "work-1" in asked.names(), TIMEOUT, "the first copy runs")
    command.process.kill(signal.SIGINT)
    assert command.process.wait(TIMEOUT) == 130, command.output()
    assert {one["session"] for one in asked("ls")} == {"work"}
    assert asked("list", "work", check=False)["exit_code"] == 3
    wait_until(lambda: not asked.keepers(), TIMEOUT, "no keeper is left")
    assert asked.ask("work", "len(data)") == str(_MIB << 20)


def test_a_killed_keeper_ends_its_copies(asked: Asked) -> None:
    """They must not go on with zeros; the original does not need it."""
    asked.begin("work", mib=_MIB)
    body = asked("fork", "work", "-n", 2)
    first, _guardian = _keeper_pids(asked.home)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: asked.names() == {"work"}, TIMEOUT, "the copies have ended")
    told = [one for one in asked("events") if one["operation"] == "template"]
    assert {one["session"] for one in told} == {one["session"] for one in body["forks"]}
    assert {one["error"] for one in told} == {"template-lost"}
    assert asked.ask("work", "len(data)") == str(_MIB << 20)


def test_a_killed_guardian_is_replaced(asked: Asked) -> None:
    asked.begin("work", mib=_MIB)
    digest = asked.ask("work", _DIGEST)
    asked("fork", "work")
    _first, guardian = _keeper_pids(asked.home)
    os.kill(guardian, signal.SIGKILL)
    wait_until(
        lambda: len(found := _keeper_pids(asked.home)) == 2 and guardian not in found,
        TIMEOUT,
        "there is another guardian",
    )
    assert asked.ask("work-1", _DIGEST) == digest
    first, _guardian = _keeper_pids(asked.home)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: asked.names() == {"work"}, TIMEOUT, "the copy has ended")


def test_copies_have_workspaces_of_their_own(asked: Asked) -> None:
    """Open files, deleted ones, working folders and sockets are there, and not the original's."""
    work = asked.home.path / "work"
    work.mkdir()
    (work / "data").mkdir()
    (work / "data" / "note").write_text("old")
    (work / "link").symlink_to("data/note")
    asked.begin("work", "--workspace", str(work), mib=_MIB)
    asked.ask(
        "work",
        "kept.extend([open('log', 'w'), open('gone', 'w+'), socket.socket(socket.AF_UNIX), "
        "os.unlink('gone'), os.chdir('data')])",
    )
    asked.ask("work", f"kept[2].bind('{work}/socket') or kept[2].listen()")
    body = asked("fork", "work", "-n", 2, "--fork-workspace")
    assert len(body["warnings"]) == 1
    for one in body["forks"]:
        name, own = one["session"], Path(f"{work}.{one['session']}")
        assert one["workspace"] == str(own)
        assert not any("works in the folder" in text for text in one["warnings"])
        assert asked.ask(name, f"os.getcwd() == '{own}/data'") == "True"
        assert asked.ask(name, f"kept[2].getsockname() == '{own}/socket'") == "True"
        asked.ask(name, f"(kept[0].write('{name}'), kept[0].flush(), open('new', 'w'))")
        assert asked.ask(name, "kept[1].write(open('../link').read()), kept[1].tell()") == "(3, 3)"
        assert (own / "log").read_text() == name and (own / "data" / "new").exists()
    assert (work / "log").read_text() == "" and not (work / "data" / "new").exists()
    assert sorted(os.listdir(work)) == ["data", "link", "log", "socket"]
    # What is dumped later is what the copy has.
    asked("dump", "work-1")
    asked("restore", "work-1")
    assert asked.ask("work-1", f"os.getcwd() == '{work}.work-1/data'") == "True"
    taken = asked("fork", "work", "--as", "work-3", "--fork-workspace")["forks"]
    asked("kill", "work-3")
    asked("forget", "work-3")
    again = asked("fork", "work", "--as", "work-3", "--fork-workspace", check=False)
    assert again["exit_code"] == 9 and taken[0]["workspace"] in again["error"]["message"]
    asked.shell("bare")
    assert asked("fork", "bare", "--fork-workspace", check=False)["exit_code"] == 2


def test_a_copy_that_fails_leaves_no_workspace(asked: Asked) -> None:
    work = asked.home.path / "work"
    work.mkdir()
    asked.begin("work", "--workspace", str(work), mib=_MIB)
    asked.hook("work-2) exit 10;;")
    command = asked.start("fork", "work", "-n", 2, "--fork-workspace")
    assert command.process.wait(120) == 11, command.output()
    assert [one.name for one in work.parent.glob("work.*")] == ["work.work-1"]


def test_the_time_to_live_ends_a_copy(asked: Asked) -> None:
    asked.begin("work", mib=_MIB)
    asked("fork", "work", "--ttl", "2s")
    asked("wait", "work-1", "--exit", "--timeout", TIMEOUT, check=False)
    assert asked.names() == {"work"}
    assert "time-to-live" in str(asked("log", "work-1"))


def test_the_example_keeps_the_best_branch(asked: Asked) -> None:
    example = PROJECT / "hooks" / "examples" / "forks" / "tree_search.py"
    searched = program(asked, f"import sys; sys.argv[1:] = ['3']\n{example.read_text()}")
    assert searched.process.wait(TIMEOUT * 4) == 0, searched.output()
    said = re.match(r"(\S+) is kept, with (\d+) of \[(.*)\]", searched.out.read_text())
    assert said is not None
    scores = said[3].split(", ")
    assert len(scores) == 3 and said[2] == scores[-1]
    assert asked.names() == {said[1]}


def test_what_it_refuses(asked: Asked) -> None:
    asked.shell("work")
    for options in (["-n", "2", "--as", "one"], ["--prefix", "no/name"], ["--as", "7"]):
        assert asked("fork", "work", *options, check=False)["exit_code"] == 2
    both: Any = asked("kill", "--forks-of", "--command", "c1", "work", check=False)
    assert both["exit_code"] == 2
