"""The calls of `Session`, with a real holder and real shells."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.api import BASH, Shell
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators

from criuctl import Session
from criuctl.errors import (
    Conflict,
    Forbidden,
    LeaseHeld,
    NotFound,
    TimedOut,
    UsageError,
    WrongState,
)

pytestmark = pytest.mark.integration


def test_what_a_session_starts_with(operators: Operators, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    with Session.run(
        BASH,
        name="work",
        cwd="/usr",
        env={"A": "1"},
        labels={"tier": "dev"},
        workspace=str(tmp_path / "work"),
        size=(31, 99),
    ) as s:
        s.wait_prompt(timeout=TIMEOUT)
        assert s.exec('pwd; echo "$A $HOME"').output == f"/usr\n1 {os.environ['HOME']}\n"
        status = s.status()
        assert (status.state, status.incarnation, status.labels) == ("running", 1, {"tier": "dev"})
        assert (status.name, status.id) == (s.name, s.id) == ("work", s.id)
        assert status.facts["facts"]["workspace"] == str(tmp_path / "work")
        assert (s.screen().rows, s.screen().columns) == (31, 99)
        assert [(one.name, one.pid) for one in Session.list()] == [("work", status.pid)]
    assert operators("status", "work")["operators"] == []
    with pytest.raises(NotFound):
        Session.run(["no-such-command-1"])


def test_commands(shell: Shell) -> None:
    s = shell("work")
    done = s.exec("cd /; echo out; echo err >&2; false", timeout=TIMEOUT)
    assert (done.state, done.exit_code, done.ok) == ("done", 1, False)
    assert (done.output, done.error) == ("out\nerr\n", None)
    assert (done.truncated, done.missing) == (False, 0) and done.end > done.offset
    assert s.exec(["printf", "%s|", "a b", "$HOME"]).output == "a b|$HOME|"
    assert s.exec(["echo"]).output == "\n" and s.exec("pwd").output == "/\n"
    new = s.exec(
        "pwd; echo $B; cat; echo err >&2; exit 7", new=True, cwd="/usr", env={"B": "2"}, stdin="in"
    )
    assert (new.stdout, new.stderr, new.exit_code) == ("/usr\n2\nin", "err\n", 7)
    assert s.exec("printf '\\377'", new=True).output_bytes == b"\xff"
    late = s.exec("echo first; sleep 1000", timeout=0.3, on_timeout="interrupt")
    assert (late.state, late.exit_code, late.output[:6]) == ("timed-out", None, "first\n")
    assert isinstance(late.error, TimedOut) and late.error.exit_code == 12
    with pytest.raises(UsageError):
        s.exec("true", cwd="/")
    with pytest.raises(UsageError):
        s.exec("true", detach=True, timeout=1)  # type: ignore[call-overload]


def test_a_command_that_is_left_alone(shell: Shell) -> None:
    s = shell("work")
    c = s.exec("echo one; read x; echo $x; exit 3", new=True, detach=True)
    assert c.wait(TIMEOUT).stdout == "one\n\n"
    c = s.exec("echo one; sleep 1000; echo two", detach=True)
    wait_until(lambda: c.output().output == "one\n", TIMEOUT, "the first line")
    part = c.output(since=c.output().offset + 2)
    assert (part.output, part.state, part.exit_code) == ("e\n", "running", None)
    with pytest.raises(Conflict) as busy:
        s.exec("true")
    assert busy.value.exit_code == 9
    assert s.exec("echo next to it", new=True).output == "next to it\n"
    assert c.wait(0).state == "timed-out"
    assert s.command(c.id).kill().state in ("interrupted", "done")
    with pytest.raises(NotFound):
        s.command("c999").output()


def test_typing_looking_and_waiting(shell: Shell) -> None:
    s = shell("work")
    mark = s.send("echo typed; cat\n")
    assert s.wait_match("^typed$", since=mark.offset, timeout=TIMEOUT).text == "typed"
    assert s.wait_reading(timeout=TIMEOUT)["argv"] == ["cat"]
    with pytest.raises(WrongState) as busy:
        s.exec("true")
    assert busy.value.exit_code == 9 and "wait_prompt" in busy.value.hint
    s.paste("pasted")
    s.keys("Enter")
    found = s.wait_match("^past(ed)$", timeout=TIMEOUT)
    assert found.groups == ["ed"]
    assert "pasted" in s.capture(since=mark.offset).text and "pasted" in s.screen().text
    with pytest.raises(TimedOut) as late:
        s.wait_match("never", timeout=0.1)
    assert late.value.exit_code == 12
    with pytest.raises(TimedOut):
        s.wait_prompt(timeout=0.1)
    s.keys("C-c")
    assert s.wait_prompt(timeout=TIMEOUT) <= s.wait_idle(0.1, timeout=TIMEOUT)
    with pytest.raises(UsageError):
        s.keys("NoKey")
    s.send("sleep 1000", enter=True)
    wait_until(lambda: s.status().facts["foreground"]["argv"][0] == "sleep", TIMEOUT, "sleep")
    assert s.signal("INT") == 1
    s.wait_prompt(timeout=TIMEOUT)
    s.send("exit 3", enter=True)
    assert s.wait_exit(timeout=TIMEOUT).exit_code == 3


def test_durable_steps(shell: Shell) -> None:
    s = shell("work")
    done = s.exec([sys.executable, "-m", "criuctl", "step", "run", "load-1", "--", "true"])
    assert done.ok, done.output
    [step] = s.steps()
    assert (step["id"], step["state"], step["session"]) == ("load-1", "done", "work")
    with pytest.raises(NotFound):
        s.resolve_step("no-such-step", "done")


def test_pausing(shell: Shell) -> None:
    s = shell("work")
    assert s.pause()["state"] == s.status().state == "paused"
    assert s.resume()["state"] == s.status().state == "running"
    assert s.halt()["state"] == "paused"
    with pytest.raises(Forbidden):
        s.resume()
    with Session.connect("work", kind="human") as person:
        person.resume()
    with pytest.raises(Conflict):
        s.forget()
    assert s.kill(0)["killed"] > 0
    assert s.status().state == "exited" and s.wait_exit().exit_code == 137
    s.forget()
    assert Session.list() == []
    with pytest.raises(NotFound):
        s.forget()


def test_the_lease_and_roles(shell: Shell) -> None:
    s = shell("work")
    other = Session.connect("work", kind="service", name="other", role="write")
    looking = Session.connect("work", kind="agent", name="looking", role="observe")
    with other, looking:
        with s.lease.hold(600):
            owner = s.lease.owner()
            assert owner is not None and (owner["kind"], owner["soft"]) == ("agent", False)
            with pytest.raises(LeaseHeld) as held:
                other.send("x")
            assert held.value.exit_code == 9
            with pytest.raises(LeaseHeld):
                other.lease.request()
            assert s.exec("echo mine").output == "mine\n"
            owner = s.lease.owner()
            assert owner is not None and not owner["soft"]
        assert other.lease.request(60)["name"] == "other"
        with pytest.raises(LeaseHeld):
            s.send("x")
        assert s.exec("echo taken", take=True).output == "taken\n"
        s.lease.yield_()
        assert s.lease.owner() is None
        for call in (
            lambda: looking.send("x"),
            looking.pause,
            looking.snapshot,
            looking.kill,
            other.kill,
        ):
            with pytest.raises(Forbidden) as forbidden:
                call()
            assert forbidden.value.exit_code == 10
        assert "taken" in looking.screen().text
