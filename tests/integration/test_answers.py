"""What criuctl answers when it cannot: the exit code, one JSON object, a hint, and nothing
touched.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
from support.command import Criuctl
from support.keeper import wait_until
from support.pauses import paused
from support.trip import Trip
from support.zoo import Zoo

from criuctl.config import Config
from criuctl.host.registry import Registry, SessionRecord

pytestmark = pytest.mark.integration


def test_no_such_process(criuctl: Criuctl) -> None:
    answer = criuctl("dump", 4194000, check=False)
    assert (answer["exit_code"], answer["error"]["exit_code"]) == (3, 3)
    assert "4194000" in answer["error"]["message"]


def test_nothing_to_move(criuctl: Criuctl) -> None:
    """The other host is not asked for it, which does not answer."""
    for options in ((), ("--dry-run",)):
        assert (
            criuctl("migrate", "nobody", "ssh://127.0.0.1:1", *options, check=False)["exit_code"]
            == 3
        )


def test_no_such_checkpoint(criuctl: Criuctl) -> None:
    criuctl("store", "init")
    for command in ("restore", "show", "verify", "rm"):
        answer = criuctl(command, "nobody@7", check=False)
        assert (command, answer["exit_code"], answer["error"]["exit_code"]) == (command, 3, 3)
    assert "four of its digits" in criuctl("show", "abc", check=False)["error"]["hint"]
    # One answer per REF, each with its own error, and the exit code of the worst.
    answer = criuctl("rm", "nobody@7", "nobody@8", check=False)
    assert (answer["exit_code"], [one["error"]["exit_code"] for one in answer["list"]]) == (
        3,
        [3, 3],
    )


def test_the_progress_of_a_dump_has_a_total(zoo: Zoo, criuctl: Criuctl) -> None:
    animal = zoo.launch("counter.py", "1")
    command = criuctl.start("dump", animal.pid, "--name", "counter", "--leave-running", "-v")
    assert command.process.wait(120) == 0, command.output()
    events = [json.loads(line) for line in command.err.read_text().splitlines()]
    read = [e for e in events if e["event"] == "progress" and e["name"] == "pages"]
    memory = command.json()["bytes"]["memory"]
    assert memory / 2 < read[0]["total"] < memory * 2
    assert all(one["done"] <= one["total"] for one in read)
    assert [e["total"] for e in read] == sorted(e["total"] for e in read)


@pytest.mark.parametrize("name", ["", "../up", "with space", "a/b", "-x", "x" * 300, "new\nline"])
def test_a_bad_name(name: str, zoo: Zoo, criuctl: Criuctl) -> None:
    animal = zoo.launch("counter.py", "1")
    answer = criuctl("dump", animal.pid, f"--name={name}", check=False)
    assert answer["exit_code"] == 2
    assert not criuctl.store.exists()
    animal.ask()


def test_bad_usage(criuctl: Criuctl) -> None:
    for arguments in (
        ("dump",),
        ("restore", "x", "--pids", "odd"),
        ("dump", "1", "--connections", "odd"),
        ("nonsense",),
    ):
        assert criuctl(*arguments, check=False)["exit_code"] == 2


def test_itself_and_init(criuctl: Criuctl) -> None:
    """Not the whole machine, and not the branch one sits on."""
    assert criuctl("dump", 1, check=False)["exit_code"] == 4


def test_a_traced_tree(zoo: Zoo, criuctl: Criuctl, keeper: object) -> None:
    """The tracer is named, and the tree is not touched."""
    animal = zoo.launch("counter.py", "1")
    # PTRACE_SEIZE (0x4206) by a helper that then waits.
    code = (
        f"import ctypes, time; print(ctypes.CDLL(None).ptrace(0x4206, {animal.pid}, 0, 0), "
        "flush=True); time.sleep(600)"
    )
    tracer = zoo.launch([sys.executable, "-S", "-c", code], name="tracer")
    wait_until(lambda: "0" in tracer.output(), 60, "attached")
    answer = criuctl("dump", animal.pid, check=False)
    assert answer["exit_code"] == 4
    assert str(tracer.pid) in answer["error"]["message"]
    tracer.end()
    animal.ask()


def test_a_store_that_is_none(zoo: Zoo, criuctl: Criuctl) -> None:
    """A mistyped store: found before the tree is frozen."""
    animal = zoo.launch("counter.py", "1")
    criuctl.extra["CRIUCTL_STORE"] = str(zoo.home / "file")
    (zoo.home / "file").write_text("not a folder")
    animal.remember()
    assert criuctl("dump", animal.pid, check=False)["exit_code"] == 7
    criuctl.extra["CRIUCTL_STORE"] = "s3://bucket/prefix"
    criuctl.extra["CRIUCTL_S3_ENDPOINT"] = "http://127.0.0.1:9"
    criuctl.extra["AWS_ACCESS_KEY_ID"] = criuctl.extra["AWS_SECRET_ACCESS_KEY"] = "x"
    criuctl.extra["CRIUCTL_S3_RETRIES"] = "1"
    answer = criuctl("dump", animal.pid, check=False)
    assert answer["exit_code"] == 7
    assert animal.differences(animal) == []
    animal.ask()


def test_a_name_that_is_taken(zoo: Zoo, criuctl: Criuctl) -> None:
    """Two living trees cannot be one session."""
    first, second = (zoo.launch("counter.py", "1", name=name) for name in ("one", "two"))
    criuctl("dump", first.pid, "--leave-running", "--name", "taken")
    assert (
        criuctl("dump", second.pid, "--leave-running", "--name", "taken", check=False)["exit_code"]
        == 9
    )
    assert len(criuctl("list")) == 1


def test_a_name_whose_session_is_stored(zoo: Zoo, criuctl: Criuctl) -> None:
    """A warning with the way back to the former tree; not when the same tree is dumped again, or a
    service that was started again.
    """
    first, second, third = (
        zoo.launch("counter.py", "1", name=name) for name in ("one", "two", "three")
    )
    stored = criuctl("dump", first.pid, "--name", "mine")
    (warning,) = criuctl("dump", second.pid, "--leave-running", "--name", "mine")["warnings"]
    assert "another tree" in warning and f"checkpointed as {stored['checkpoint'][:12]}" in warning
    second.end()
    assert criuctl("dump", third.pid, "--name", "mine")["warnings"] == []
    back = criuctl("restore", "mine")
    assert criuctl("dump", back["pid"], "--name", "mine")["warnings"] == []
    assert [entry["number"] for entry in criuctl("list", "mine")] == [1, 2, 3, 4]


def test_a_name_whose_session_has_moved_away(zoo: Zoo, criuctl: Criuctl) -> None:
    """Another tree that takes it has moved nowhere."""
    registry = Registry(
        Config(state_dir=str(criuctl.home.path / "state"), run_dir=str(criuctl.home.run))
    )
    registry.put(
        SessionRecord("mine", state="checkpointed", moved_to="ssh://there/mine", home="there")
    )
    animal = zoo.launch("counter.py", "1")
    (warning,) = criuctl("dump", animal.pid, "--name", "mine")["warnings"]
    assert "has moved to there, and this is another tree" in warning
    assert (status := criuctl("status", "mine"))["state"] == "checkpointed"
    assert status["moved_to"] is None and status["home"] != "there"


def test_no_criu(zoo: Zoo, criuctl: Criuctl) -> None:
    """The wrong CRIU is said to be wrong."""
    animal = zoo.launch("counter.py", "1")
    criuctl.extra["CRIUCTL_CRIU"] = "/proc/nonexistent/criu"
    assert criuctl("dump", animal.pid, check=False)["exit_code"] == 13
    criuctl.extra["CRIUCTL_CRIU"] = "/bin/true"
    assert criuctl("dump", animal.pid, check=False)["exit_code"] in (5, 13)
    animal.ask()


def test_everything_about_a_checkpoint(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """list, show, verify, rm and check: each one JSON value, none with a trace of the environment's
    secrets.
    """
    criuctl.extra["ZOO_SECRET"] = "hunter2-in-the-environment"
    animal = zoo.launch("counter.py")
    checked = criuctl("check", animal.pid)
    assert checked["ok"] is True
    report = trip.snapshot(animal, "--name", "one", "--label", "a=b")
    shown = criuctl("show", "one")
    assert report["checkpoint"] in json.dumps(shown)
    assert "hunter2" not in json.dumps(shown)
    criuctl("verify", "one")
    criuctl("verify", "--all")
    assert criuctl("version")
    assert "findings" in criuctl("doctor", check=False)
    criuctl("rm", "one")
    assert criuctl("list") == []
    assert criuctl("restore", "one", check=False)["exit_code"] == 3


def test_the_store_is_private(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """Folders 0700 and files 0600, whatever the umask says."""
    trip.snapshot(zoo.launch("counter.py", "1"))
    wrong = [path for path in criuctl.store.rglob("*") if path.lstat().st_mode & 0o077]
    assert wrong == []
    assert criuctl.store.stat().st_mode & 0o077 == 0


def test_without_json_it_is_for_people(zoo: Zoo, criuctl: Criuctl, home: object) -> None:
    """Results on stdout, everything else on stderr."""
    animal = zoo.launch("counter.py", "1")
    command = criuctl.start(
        "dump", animal.pid, "--leave-running", "--name", "people", json_output=False
    )
    assert command.process.wait(60) == 0, command.output()
    assert "people" in command.out.read_text()
    missing = criuctl.start("restore", "nobody", json_output=False)
    assert missing.process.wait(60) == 3
    assert missing.out.read_text() == ""
    assert "nobody" in missing.err.read_text()
    assert "Traceback" not in missing.err.read_text()


def test_what_became_of_a_tree_whose_dump_is_stopped(zoo: Zoo, criuctl: Criuctl) -> None:
    animal = zoo.launch("counter.py", "1")
    fate = f"PID {animal.pid} was not ended and runs on"
    with paused(criuctl, "frozen", "dump", animal.pid, "--name", "mine") as held:
        held.kill(signal.SIGINT)
        held.go_on()
        assert held.command.process.wait(120) == 128 + signal.SIGINT
    assert held.command.json()["error"]["message"] == f"stopped by SIGINT; {fate}"
    animal.ask()
    with paused(criuctl, "store", "dump", animal.pid, "--name", "mine") as held:
        away = criuctl.store.with_name("away")
        criuctl.store.rename(away)
        criuctl.store.write_text("no folder")
        held.go_on()
        assert held.command.process.wait(120) == 7
    error = held.command.json()["error"]
    assert fate in error["message"] or "the tree runs on" in error["message"], error
    animal.ask()


def test_a_dump_says_that_the_tree_has_ended_and_how_it_comes_back(
    zoo: Zoo, criuctl: Criuctl
) -> None:
    animal = zoo.launch("counter.py", "1")
    kept = criuctl.start("dump", animal.pid, "--name", "mine", "--leave-running", json_output=False)
    assert kept.process.wait(120) == 0 and "has ended" not in kept.output()
    command = criuctl.start("dump", animal.pid, "--name", "mine", json_output=False)
    assert command.process.wait(120) == 0
    line = next(line for line in command.output().splitlines() if "has ended" in line)
    assert line == f"  PID {animal.pid} has ended. Bring it back with: criuctl restore mine"


def test_the_first_dumps_make_one_store_and_its_key(zoo: Zoo, criuctl: Criuctl) -> None:
    """Two at the same moment; where the key is is said once."""
    animals = [zoo.launch("counter.py", "1", name=name) for name in ("one", "two")]
    pids = [animal.pid for animal in animals]
    command = criuctl.start("snapshot", *pids, "--jobs", 2, json_output=False)
    assert command.process.wait(120) == 0, command.output()
    (key,) = (criuctl.home.path / "keys").iterdir()
    assert command.err.read_text().count(f"encrypted by the key in {key}") == 1
    assert len(criuctl("list")) == 2
    answer = criuctl("dump", pids[0], "--no-encrypt", check=False)
    assert answer["exit_code"] == 9 and "exists and is encrypted" in answer["error"]["message"]
    key.rename(key.with_suffix(".away"))
    answer = criuctl("dump", pids[0], check=False)
    assert answer["exit_code"] == 7 and answer["error"]["code"] == "key-missing"
    assert str(key) in answer["error"]["hint"] and str(criuctl.store) in answer["error"]["message"]
    for animal in animals:
        animal.ask()
    criuctl.extra["CRIUCTL_STORE"] = str(criuctl.home.path / "plain")
    criuctl("dump", pids[0], "--no-encrypt", "--leave-running")
    assert not criuctl("store", "info")["encrypted"]


def test_a_copy_in_the_folder_of_its_original(zoo: Zoo, criuctl: Criuctl) -> None:
    animal = zoo.launch("counter.py", "1")
    criuctl("dump", animal.pid, "--name", "mine", "--leave-running")
    plan = criuctl("restore", "mine", "--as", "other", "--dry-run")
    found = [one for one in plan["findings"] if one["code"] == "shared-folder"]
    assert len(found) == 1 and os.readlink(f"/proc/{animal.pid}/cwd") in found[0]["text"]


def test_a_store_that_is_named_is_not_made(zoo: Zoo, criuctl: Criuctl) -> None:
    """Its name may be mistyped, or be another option."""
    animal = zoo.launch("counter.py", "1")
    other = criuctl.home.path / "other"
    for name in (other, "-q"):
        answer = criuctl("dump", animal.pid, "--store", name, check=False)
        assert answer["exit_code"] == 7
        assert f"PID {animal.pid} was not ended and runs on" in answer["error"]["message"]
        assert "store init --store" in answer["error"]["hint"]
    assert not other.exists() and not (criuctl.home.path / "-q").exists()
    criuctl("store", "init", "--store", other)
    assert criuctl("dump", animal.pid, "--name", "mine", "--store", other)["number"] == 1
