"""What programs of a session ask for besides steps: who may, how much, and what comes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from support.keeper import wait_until

from criuctl.proc.tree import ProcessIdentity
from criuctl.session.holder import asked_checkpoints, callbacks, cgroup, inside_operations
from criuctl.session.holder.audit_log import AuditLog
from criuctl.session.holder.connection import Connection
from criuctl.session.holder.holder import Holder
from criuctl.session.holder.output_log import OutputLog
from criuctl.session.holder.session_files import SessionFiles
from criuctl.session.holder.session_state import Identity
from criuctl.session.holder.steps import Again, Peer
from criuctl.session.screen.modes import Modes
from criuctl.steps.states import StepRefused

ME = Peer(os.getuid(), os.getpid(), True, {})
STRANGER = Peer(4711, os.getpid(), True, {})
Message = dict[str, Any]


def make_holder(folder: Path) -> Holder:
    log, audit = OutputLog(folder / "output"), AuditLog(folder / "audit.jsonl")
    made = Holder(
        Identity("s", "0" * 32), SessionFiles(folder, folder, log, audit, "0" * 32), Modes()
    )
    made.session.state = "running"
    made.tree.root = ProcessIdentity.of(os.getpid())
    return made


def close(holder: Holder) -> None:
    holder.loop.close()
    holder.log.close()
    holder.audit.log.close()


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Holder]:
    monkeypatch.setattr(cgroup, "create", lambda _name: None)
    made = make_holder(tmp_path)
    yield made
    close(made)


def ask(holder: Holder, op: str, peer: Peer = ME, **message: Any) -> Message:
    """The answer to a program, or ``{"code", "message"}`` of a refusal, or ``{"again"}``."""
    try:
        return holder.inside.of_programs[op](peer, message)
    except Again:
        return {"again": True}
    except StepRefused as refused:
        return {"code": refused.code, "message": refused.message}


class Dump:
    """A client that dumps, as far as a holder notices."""

    def __init__(self) -> None:
        self.answers: list[Message] = []
        self.connection = cast("Connection", self)

    def answer(self, body: Message) -> None:
        self.answers.append(body)


def test_only_the_user_of_the_session_may_ask(holder: Holder) -> None:
    for op, message in (
        ("checkpoint", {"attempt": "t"}),
        ("invalidate-if", {"kind": "age", "argument": "7d"}),
        ("callbacks", {"events": ["after-fork"]}),
    ):
        assert ask(holder, op, STRANGER, **message)["code"] == "forbidden"
        assert "code" not in ask(holder, op, **message)


# -- conditions


@pytest.mark.parametrize(
    ("kind", "argument", "code"),
    [
        ("age", "7d", ""),
        ("age", "1d12h", ""),
        ("age", "0d", "bad-request"),
        ("age", "soon", "bad-request"),
        ("file", "/etc/app.conf", ""),
        ("file", "etc/app.conf", "bad-request"),
        ("file", "/a\0b", "bad-request"),
        ("file", "/" + "x" * 5000, "bad-request"),
        ("file", 7, "bad-request"),
        ("probe", "x", "bad-request"),
        ("output", " ", "bad-request"),
    ],
)
def test_what_a_condition_can_be(holder: Holder, kind: str, argument: Any, code: str) -> None:
    assert ask(holder, "invalidate-if", kind=kind, argument=argument).get("code", "") == code
    given = [one["argument"] for one in holder.inside.taken()["conditions"]]
    assert given == ([] if code else [argument])


def test_conditions_are_bounded_and_each_is_noted_once(holder: Holder) -> None:
    most = inside_operations._MAX_CONDITIONS
    for _ in range(2):
        for days in range(1, most + 1):
            assert "code" not in ask(holder, "invalidate-if", kind="age", argument=f"{days}d")
    assert ask(holder, "invalidate-if", kind="age", argument="99d")["code"] == "busy"
    assert len(holder.inside.taken()["conditions"]) == most


def test_a_command_is_accepted_from_root_only(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Message = {"kind": "output", "argument": "true"}
    monkeypatch.setattr(inside_operations, "_is_root", lambda pid: False)
    assert ask(holder, "invalidate-if", **asked)["code"] == "forbidden"
    monkeypatch.setattr(inside_operations, "_is_root", lambda pid: True)
    monkeypatch.setattr(holder.inside, "_user", lambda: 4711)
    assert ask(holder, "invalidate-if", **asked)["code"] == "forbidden"
    monkeypatch.setattr(holder.inside, "_user", lambda: 0)
    assert "code" not in ask(holder, "invalidate-if", **asked)


def test_root_without_all_capabilities_is_not_root() -> None:
    assert inside_operations._is_root(os.getpid())
    program = [sys.executable, "-c", "print(flush=True); input()"]
    for prefix in (["setpriv", "--bounding-set=-chown", "--inh-caps=-chown"], ["unshare", "-Ur"]):
        with subprocess.Popen(
            [*prefix, *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            assert child.stdin is not None and child.stdout is not None
            assert child.stdout.readline() == b"\n", prefix
            assert not inside_operations._is_root(child.pid)
            child.stdin.close()


def test_nothing_of_a_forged_checkpoint_is_believed(holder: Holder) -> None:
    connection = Dump().connection
    me = {7: ProcessIdentity.of(os.getpid())}
    forgeries: list[Any] = [
        None,
        [],
        {"conditions": 7, "callbacks": 7, "checkpoints": 7},
        {"conditions": [7, {"kind": [], "argument": {}}, {"kind": "age"}], "callbacks": [[[], 1]]},
        {"callbacks": [[7, ["x", []]], [7], 7], "checkpoints": [[], "a b"]},
    ]
    for forged in forgeries:
        holder.inside.returned(forged, connection, me)
        assert holder.inside.taken()["conditions"] == holder.inside.taken()["checkpoints"] == []
    holder.inside.returned({"environment": {"CRIUCTL_STORE": "/x"}}, connection, me)
    assert holder.asked.environment == {"CRIUCTL_STORE": "/x"}
    # a command is not this host's own unless the restore has found that out
    holder.inside.returned({"conditions": [{"kind": "output", "argument": "x"}]}, connection, me)
    assert holder.inside.taken()["conditions"][0]["foreign"] is True


# -- checkpoints


@pytest.fixture
def helped(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[int], None]]:
    """What to call with the wait status of each helper that was started."""
    started: list[Callable[[int], None]] = []

    def start(argv: Any, fds: dict[int, int], ended: Callable[[int], None], env: Any) -> int:
        assert argv[-2:] == ["snapshot", "s"]
        os.write(fds[1], b'[{"error": {"message": "no room", "hint": "make some"}}]')
        started.append(ended)
        return 1

    monkeypatch.setattr(holder.helpers, "start", start)
    monkeypatch.setattr(asked_checkpoints, "_PAUSE", 0.0)
    return started


def test_a_checkpoint_answers_all_that_waited_at_its_freeze(
    holder: Holder, helped: list[Callable[[int], None]]
) -> None:
    asked = holder.asked
    for token in "ab":
        assert ask(holder, "checkpoint", attempt=token, label=token) == {"again": True}
    asked.look()
    asked.look()
    assert len(helped) == 1
    taken = holder.inside.taken()
    assert (taken["checkpoints"], taken["label"]) == (["a", "b"], "a; b")
    assert ask(holder, "checkpoint", attempt="c", label="c") == {"again": True}
    asked.stored("id1")
    helped[0](0)
    for token in "ab":
        expected = {"checkpoint": "id1", "restored": False}
        assert ask(holder, "checkpoint", attempt=token) == expected
    asked._ready = 0
    asked.look()
    assert len(helped) == 2 and ask(holder, "checkpoint", attempt="c") == {"again": True}
    # a program that is restored may not have seen its answer yet
    assert holder.inside.taken()["checkpoints"] == ["a", "b", "c"]
    asked.returned(["a", "b", "c", 7], "id2")
    assert ask(holder, "checkpoint", attempt="a") == {"checkpoint": "id2", "restored": True}


def test_a_failed_checkpoint_is_the_answer(
    holder: Holder, helped: list[Callable[[int], None]]
) -> None:
    ask(holder, "checkpoint", attempt="a")
    holder.asked.look()
    holder.inside.taken()
    helped[0](5 << 8)
    answer = ask(holder, "checkpoint", attempt="a")
    assert answer == {"code": "failed", "message": "the checkpoint failed: no room (make some)"}


def test_another_criuctl_at_work_is_waited_for(
    holder: Holder, helped: list[Callable[[int], None]]
) -> None:
    ask(holder, "checkpoint", attempt="a")
    for count in range(1, 4):
        holder.asked._ready = 0
        holder.asked.look()
        assert len(helped) == count
        helped[-1](9 << 8)
        assert ask(holder, "checkpoint", attempt="a") == {"again": True}


def test_requests_are_bounded_in_number_length_and_rate(
    holder: Holder, helped: list[Callable[[int], None]]
) -> None:
    for number in range(asked_checkpoints._MAX_WAITING):
        assert ask(holder, "checkpoint", attempt=str(number)) == {"again": True}
    assert ask(holder, "checkpoint", attempt="more")["code"] == "busy"
    assert ask(holder, "checkpoint", attempt="0") == {"again": True}
    for label in ("x" * 201, "a\nb", 7):
        assert ask(holder, "checkpoint", attempt="y", label=label)["code"] == "bad-request"
    assert ask(holder, "checkpoint", attempt="a b")["code"] == "bad-request"
    asked = holder.asked
    asked._ready = time.monotonic() + 1000
    asked.look()
    assert helped == []
    asked._ready = 0
    asked.look()
    asked._began = time.monotonic() - 20  # it has taken so long
    holder.inside.taken()
    asked.stored("id")
    helped[0](0)
    assert asked._ready - time.monotonic() > 15
    for number in range(200):
        asked._known[str(number)] = asked_checkpoints._Asked(str(number), state="done")
    ask(holder, "checkpoint", attempt="last")
    assert len(asked._known) <= asked_checkpoints._MAX_KNOWN
    holder.session.state = "paused"
    assert ask(holder, "checkpoint", attempt="late")["code"] == "state"


def test_a_supervisor_is_asked_first(holder: Holder, helped: list[Callable[[int], None]]) -> None:
    asked = holder.asked
    told: list[list[str]] = []

    def on_asked() -> bool:
        told.append(asked.news())
        return True

    asked.on_asked = on_asked
    ask(holder, "checkpoint", attempt="a")
    asked.look()
    asked.look()
    assert (told, helped) == ([["a"]], [])
    asked.refuse("the disk is full")
    assert "the disk is full" in ask(holder, "checkpoint", attempt="a")["message"]
    asked._ready = 0
    ask(holder, "checkpoint", attempt="b")
    asked.look()
    asked.on_asked = lambda: False
    asked.supervisor_left()
    asked._ready = 0
    asked.look()
    assert len(helped) == 1


def test_all_of_it_goes_to_the_next_program(holder: Holder, tmp_path: Path) -> None:
    ask(holder, "callbacks", events=list(callbacks.EVENTS))
    ask(holder, "checkpoint", attempt="a", label="x")
    ask(holder, "invalidate-if", kind="age", argument="7d")
    holder.asked.environment = {"CRIUCTL_STORE": "/x"}
    state = json.loads(json.dumps(holder.inside.to_state()))
    (tmp_path / "next").mkdir()
    other = make_holder(tmp_path / "next")
    other.inside.restore(state)
    assert json.loads(json.dumps(other.inside.to_state())) == state
    other.inside.restore({})  # of an older version
    close(other)


# -- callbacks


PROGRAM = """
import signal, sys
signal.signal(signal.SIGURG, lambda *_: print("called", flush=True))
print("ready", flush=True)
for line in sys.stdin:
    signal.signal(signal.SIGURG, signal.SIG_DFL)
    print("reset", flush=True)
"""


class Program:
    """A process that catches the signal; it says when it was called."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.peer = Peer(os.getuid(), self.process.pid, True, {})
        assert self.says() == "ready"

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def resets(self) -> None:
        """It does not catch the signal any more."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.says() == "reset"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def program() -> Iterator[Program]:
    made = Program()
    yield made
    made.end()


def test_a_process_is_called_and_answers(holder: Holder, program: Program) -> None:
    events = [callbacks.BEFORE]
    assert ask(holder, "callbacks", program.peer, events=events) == {"events": events}
    dump = Dump()
    holder.callbacks.call(dump.connection, callbacks.BEFORE, 60, dump.answer)
    assert program.says() == "called" and dump.answers == []
    assert ask(holder, "callback-next") == {}  # this process is not concerned
    call = ask(holder, "callback-next", program.peer)
    assert call["event"] == callbacks.BEFORE
    assert ask(holder, "callback-done", program.peer, call="other") == {} and not dump.answers
    ask(holder, "callback-done", program.peer, call=call["call"], veto="not now")
    (answer,) = dump.answers
    veto = {"pid": program.process.pid, "reason": "not now"}
    assert answer == {"called": 1, "vetoes": [veto], "failures": []}
    assert ask(holder, "callback-next", program.peer) == {}
    assert holder.callbacks.in_tree() == [[program.process.pid, events]]


def test_one_that_does_not_ask_is_signalled_again(holder: Holder, program: Program) -> None:
    """It may have been about to wait when the signal came, and wait still."""
    ask(holder, "callbacks", program.peer, events=[callbacks.BEFORE])
    holder.callbacks.call(Dump().connection, callbacks.BEFORE, 60, lambda body: None)
    assert program.says() == "called"
    signals = 0

    def signal_again(call: callbacks._Call, to: Iterable[ProcessIdentity]) -> None:
        nonlocal signals
        signals += 1
        send(call, to)
        if signals == 2:
            ask(holder, "callback-next", program.peer)
            holder.loop.after(3 * callbacks._AGAIN, lambda: setattr(holder.loop, "running", False))

    send, holder.callbacks._send = holder.callbacks._send, signal_again  # type: ignore[method-assign]
    holder.loop.run()
    assert signals == 2 and program.says() == "called"


def test_one_that_does_not_answer_is_late(holder: Holder, program: Program) -> None:
    ask(holder, "callbacks", program.peer, events=[callbacks.BEFORE])
    dump = Dump()
    holder.callbacks.call(dump.connection, callbacks.BEFORE, 0.0, dump.answer)
    call = ask(holder, "callback-next", program.peer)
    holder.loop.after(0.05, lambda: setattr(holder.loop, "running", False))
    holder.loop.run()
    (answer,) = dump.answers
    reason = "it has not returned within 0 s"
    assert answer["failures"] == [{"pid": program.process.pid, "reason": reason}]
    assert ask(holder, "callback-done", program.peer, call=call["call"], veto="late") == {}


def test_who_cannot_be_called_is_not_waited_for(holder: Holder, program: Program) -> None:
    ask(holder, "callbacks", program.peer, events=[callbacks.BEFORE])
    process, dump = program.process, Dump()
    os.kill(process.pid, signal.SIGSTOP)
    me = ProcessIdentity.of(process.pid)
    wait_until(lambda: me.state() == "T", 60, "it is stopped")
    holder.callbacks.call(dump.connection, callbacks.BEFORE, 60, dump.answer)
    assert dump.answers[0]["failures"] == [{"pid": process.pid, "reason": "it is stopped"}]
    os.kill(process.pid, signal.SIGCONT)
    holder.session.state = "paused"
    holder.callbacks.call(dump.connection, callbacks.BEFORE, 60, dump.answer)
    assert dump.answers[1]["failures"][0]["reason"] == "the session is paused"
    holder.session.state = "running"
    known = holder.callbacks._registered[me]
    holder.callbacks._registered[me] = replace(known, program=(1, 1))  # it ran another one then
    assert callbacks._catches(me)
    holder.callbacks.call(dump.connection, callbacks.BEFORE, 60, dump.answer)
    assert dump.answers.pop() == {"called": 0, "vetoes": [], "failures": []}
    holder.callbacks._registered[me] = known
    program.resets()
    holder.callbacks.call(dump.connection, callbacks.BEFORE, 60, dump.answer)
    assert dump.answers[2] == {"called": 0, "vetoes": [], "failures": []}


def test_a_restored_process_is_called_when_the_restorer_has_left(
    holder: Holder, program: Program
) -> None:
    identity = ProcessIdentity.of(program.process.pid)
    restorer = Dump()
    given = [[7, list(callbacks.EVENTS)], [8, []], "nonsense"]
    holder.callbacks.returned(given, {7: identity}, restorer.connection, fork=True)
    assert ask(holder, "callback-next", program.peer) == {}
    root, holder.tree.root = holder.tree.root, identity  # that restore was taken back
    holder.callbacks.lost(restorer.connection, "bye")
    holder.loop.after(0.0, lambda: setattr(holder.loop, "running", False))
    holder.loop.run()
    assert ask(holder, "callback-next", program.peer) == {}
    holder.tree.root = root
    holder.callbacks.returned(given, {7: identity}, restorer.connection, fork=True)
    holder.callbacks.lost(restorer.connection, "bye")
    holder.loop.after(0.0, lambda: setattr(holder.loop, "running", False))
    holder.loop.run()
    assert program.says() == "called"
    call = ask(holder, "callback-next", program.peer)
    assert call["event"] == callbacks.FORKED
    # a checkpoint that is made before it has answered takes nothing away
    dump = Dump()
    holder.callbacks.call(dump.connection, callbacks.BEFORE, 60, dump.answer)
    assert ask(holder, "callback-next", program.peer) == call
    ask(holder, "callback-done", program.peer, call=call["call"])
    assert ask(holder, "callback-next", program.peer)["event"] == callbacks.BEFORE
    holder.callbacks.lost(dump.connection, "closed")
    assert dump.answers == [] and ask(holder, "callback-next", program.peer) == {}


def test_registrations_are_bounded_and_checked(holder: Holder, program: Program) -> None:
    for events in (None, "before-checkpoint", ["other"], [1]):
        assert ask(holder, "callbacks", program.peer, events=events)["code"] == "bad-request"
    known = holder.callbacks._registered
    me = ProcessIdentity.of(os.getpid())
    for number in range(callbacks._MAX_PROCESSES):
        gone = ProcessIdentity(1, -1 - number)
        known[gone] = callbacks._Registered(1, [], (0, 0))
    assert "code" not in ask(holder, "callbacks", program.peer, events=[callbacks.BEFORE])
    assert len(holder.callbacks._registered) == 1
    assert ask(holder, "callbacks", program.peer, events=[]) == {"events": []}
    assert me not in holder.callbacks._registered and not holder.callbacks._registered
