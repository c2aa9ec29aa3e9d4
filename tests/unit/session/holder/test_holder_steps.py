"""Steps of a session: the same rules for the holder's journal and for a program's own file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from criuctl import inside
from criuctl.proc.tree import ProcessIdentity
from criuctl.session.holder import cgroup
from criuctl.session.holder.audit_log import AuditLog
from criuctl.session.holder.holder import Holder
from criuctl.session.holder.output_log import OutputLog
from criuctl.session.holder.session_files import SessionFiles
from criuctl.session.holder.session_state import Identity
from criuctl.session.holder.steps import Again, Peer
from criuctl.session.screen.modes import Modes
from criuctl.steps.states import StepRefused

Message = dict[str, Any]


class Journal:
    """What a program asks, of either journal; `living` is whether the process of attempts lives."""

    def __init__(self, ask: Callable[[Message], Message]) -> None:
        self._ask = ask
        self.living = True

    def __call__(self, op: str, step: str = "x", token: str = "t1", **facts: Any) -> Message:
        """The answer, or the error as ``{"code": ...}``."""
        try:
            return self._ask({"op": f"step-{op}", "step": step, "attempt": token, **facts})
        except (StepRefused, inside.StepError) as error:
            return {"code": error.code}

    def begin(self, kind: str = "once", token: str = "t1", **facts: Any) -> tuple[str, bool]:
        """State and whether the body is to run; or code and False."""
        answer = self("begin", token=token, kind=kind, **facts)
        return str(answer.get("state", answer.get("code"))), answer.get("run", False) is True


def make_holder(tmp_path: Path, session: str = "0" * 32) -> Holder:
    log, audit = OutputLog(tmp_path / "output"), AuditLog(tmp_path / "audit.jsonl")
    identity = Identity("s", session)
    made = Holder(identity, SessionFiles(tmp_path, tmp_path, log, audit, identity.id), Modes())
    made.session.state = "running"
    return made


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Holder]:
    monkeypatch.setattr(cgroup, "create", lambda _name: None)
    made = make_holder(tmp_path)
    yield made
    made.loop.close()
    made.log.close()
    made.audit.log.close()


ME = Peer(os.getuid(), os.getpid(), True, {})


@pytest.fixture(params=["holder", "file"])
def journal(
    request: pytest.FixtureRequest,
    holder: Holder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Journal:
    if request.param == "holder":
        operations = holder.step_socket._operations
        made = Journal(lambda message: operations[message["op"]](ME, message))
        monkeypatch.setattr(holder.steps, "lives", lambda step: made.living and step.owner)
    else:
        made = Journal(inside._File(str(tmp_path / "own.steps")).ask)
        monkeypatch.setattr(inside, "_lives", lambda owner: made.living and owner is not None)
    return made


def test_done_is_done(journal: Journal) -> None:
    first = journal("begin", kind="once")
    assert (first["state"], first["run"], first["attempts"], first["result"]) == (
        "began",
        True,
        1,
        None,
    )
    assert journal("done", result={"a": 1})["state"] == "done"
    again = journal("begin", token="t2", kind="once")
    assert (again["state"], again["run"], again["result"]) == ("done", False, {"a": 1})
    assert again["key"] == first["key"] and len(first["key"]) == 32
    assert journal("done", token="t2", result="other")["result"] == {"a": 1}
    assert journal("failed", token="t1", error="late", unknown=True)["state"] == "done"


def test_a_repeated_request(journal: Journal) -> None:
    assert journal.begin() == journal.begin() == ("began", True)
    assert journal.begin(token="t2") == ("busy", False)
    assert journal("done", result=1) == journal("done", result=1)


def test_an_attempt_that_was_lost(journal: Journal) -> None:
    journal.begin()
    journal.living = False
    assert journal.begin(token="t2") == ("unknown", False)
    assert journal("show")["step"]["state"] == "unknown"
    assert journal("done", token="t9", result=1) == {"code": "state"}
    assert journal.begin(token="t3", again=True) == ("began", True)
    assert journal("begin", token="t3", kind="once")["attempts"] == 2


def test_an_effect_that_was_found(journal: Journal) -> None:
    journal.begin()
    journal.living = False
    journal.begin(token="t2")
    assert journal("done", token="t2", result=7, verified=True)["result"] == 7


@pytest.mark.parametrize("kind", ["safe", "resumable"])
def test_a_lost_attempt_of_another_kind_runs_again(journal: Journal, kind: str) -> None:
    journal.begin(kind, cursor=1)
    journal("progress", fraction=0.5, cursor=[2])
    journal.living = False
    answer = journal("begin", token="t2", kind=kind)
    assert (answer["run"], answer["attempts"]) == (True, 2)
    assert (answer["cursor"], answer["progress"]) == ([2], 0.5)


@pytest.mark.parametrize(
    ("kind", "unknown", "state"),
    [("once", True, "unknown"), ("once", False, "failed"), ("safe", True, "failed")],
)
def test_a_failure(journal: Journal, kind: str, unknown: bool, state: str) -> None:
    journal.begin(kind)
    assert journal("failed", error="no", unknown=unknown)["state"] == state
    assert journal("failed", error="no", unknown=unknown)["state"] == state
    wanted = ("unknown", False) if state == "unknown" else ("began", True)
    assert journal.begin(kind, token="t2") == wanted


def test_progress(journal: Journal) -> None:
    assert journal("progress", fraction=0.4, cursor=1200)["state"] == "began"
    assert journal("progress", fraction=0.3, cursor=1)["cursor"] == 1200
    shown = journal("show")["step"]
    assert (shown["kind"], shown["progress"], shown["cursor"]) == ("resumable", 0.4, 1200)
    assert journal("done", result=None)["progress"] == 1.0
    assert journal("progress", fraction=2, cursor=None) == {"code": "bad-request"}


@pytest.mark.parametrize(
    ("op", "facts", "code"),
    [
        ("show", {"step": "never"}, "not-found"),
        ("done", {"step": "never", "result": 1}, "not-found"),
        ("begin", {"step": "a b", "kind": "once"}, "bad-request"),
        ("begin", {"kind": "often"}, "bad-request"),
        ("begin", {"step": "y", "kind": "once", "cursor": "x" * 5000}, "bad-request"),
        ("begin", {"kind": "safe"}, "state"),
        ("done", {"result": "x" * (65 << 10)}, "bad-request"),
        ("done", {"result": float("nan")}, "bad-request"),
        ("done", {"token": "t5", "result": 1}, "state"),
        ("failed", {"token": "t5", "error": "", "unknown": False}, "state"),
    ],
)
def test_refusals(journal: Journal, op: str, facts: Message, code: str) -> None:
    journal.begin()
    journal.living = op != "begin" or "kind" not in facts
    assert journal(op, **facts) == {"code": code}


# -- the holder's alone ---------------------------------------------------------------------------


def begin(holder: Holder, step: str = "x", token: str = "t1", peer: Peer = ME) -> Message:
    return holder.steps.begin(peer, {"step": step, "attempt": token, "kind": "once"})


def test_a_step_belongs_to_its_user(holder: Holder) -> None:
    begin(holder)
    other = Peer(1234, os.getpid(), True, {})
    for what in (holder.steps.begin, holder.steps.done, holder.steps.progress, holder.steps.show):
        with pytest.raises(StepRefused, match="belongs to the user"):
            what(other, {"step": "x", "attempt": "t1", "fraction": 0.1})
    operator = Peer(1234, os.getpid(), False, {})
    assert holder.steps.done(operator, {"step": "x", "attempt": "t1"})["state"] == "done"


def test_a_process_that_is_gone_is_noticed(holder: Holder) -> None:
    pid = os.posix_spawn("/bin/sleep", ["sleep", "100"], {})
    begin(holder, peer=Peer(0, pid, True, {}))
    assert holder.steps.counts() == {"running": 1, "done": 0, "unknown": 0, "failed": 0}
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    assert holder.steps.counts()["unknown"] == 1
    events = [e for e in holder.audit.log.entries(0, 10) if e["what"] == "step"]
    assert [(e["how"], e["state"]) for e in events] == [("began", "began"), ("lost", "unknown")]
    assert {e["step_kind"] for e in events} == {"once"} and "kind" not in events[0]


def test_steps_outlive_the_holder_and_not_the_session(holder: Holder, tmp_path: Path) -> None:
    begin(holder)
    holder.steps.done(ME, {"step": "x", "attempt": "t1", "result": 5})
    assert begin(make_holder(tmp_path), token="t2")["result"] == 5
    other = make_holder(tmp_path, "1" * 32)
    assert other.steps.journal is None
    assert begin(other, token="t2")["run"]


def test_a_dump_waits_for_steps_that_must_not_be_repeated(holder: Holder) -> None:
    said: list[str] = []
    dumping: Any = SimpleNamespace()
    begin(holder)
    holder.steps.begin(ME, {"step": "s", "attempt": "t1", "kind": "safe"})
    holder.steps.quiet(dumping, 60, lambda: said.append("quiet"))
    assert not said
    with pytest.raises(Again):
        begin(holder, "y")
    assert begin(holder)["run"], "a repeated request is answered"
    holder.steps.done(ME, {"step": "x", "attempt": "t1"})
    assert said == ["quiet"]
    with pytest.raises(Again):
        begin(holder, "y")
    holder.steps.lost(dumping)
    assert begin(holder, "y")["run"]
    holder.steps.quiet(dumping, 0, lambda: said.append("late"))
    holder.loop.after(0.05, lambda: setattr(holder.loop, "running", False))
    holder.loop.run()
    assert said == ["quiet", "late"]


def steps_of(holder: Holder) -> list[Message]:
    return [{key: one[key] for key in one if key != "sequence"} for one in holder.steps.listed(0)]


@pytest.mark.parametrize("lives", [True, False])
def test_a_restore_brings_an_attempt_back(
    holder: Holder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    begin(holder, "before")
    checkpoint = steps_of(holder)
    begin(holder, "after")
    begin(holder, "finished")
    holder.steps.done(ME, {"step": "finished", "attempt": "t1"})
    again = make_holder(tmp_path)
    again.session.identity.incarnation = 2
    monkeypatch.setattr(
        again.tree, "members", lambda: [ProcessIdentity.of(os.getpid())] if lives else []
    )
    again.steps.merge(checkpoint, checkpoint=True)
    came = again.steps.came_back()
    assert came == {"in_flight": ["before"] if lives else [], "repeated": []}
    found = {one["id"]: one["state"] for one in steps_of(again)}
    wanted = "began" if lives else "unknown"
    assert found == {"before": wanted, "after": "unknown", "finished": "done"}
    if lives:
        assert again.steps.done(ME, {"step": "before", "attempt": "t1"})["state"] == "done"


def test_an_attempt_that_comes_back_after_it_was_done_is_reported(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(holder)
    checkpoint = steps_of(holder)
    holder.steps.done(ME, {"step": "x", "attempt": "t1", "result": 1})
    monkeypatch.setattr(holder.tree, "members", lambda: [ProcessIdentity.of(os.getpid())])
    holder.steps.merge(checkpoint, checkpoint=True)
    assert holder.steps.came_back() == {"in_flight": [], "repeated": ["x"]}
    assert steps_of(holder)[0]["result"] == 1


def test_a_fork_keeps_what_was_done_and_gets_new_keys(holder: Holder, tmp_path: Path) -> None:
    for step in ("x", "y"):
        begin(holder, step)
        holder.steps.done(ME, {"step": step, "attempt": "t1", "result": step})
    (tmp_path / "fork").mkdir()
    fork = make_holder(tmp_path / "fork", "1" * 32)
    assert fork.steps.merge(steps_of(holder), checkpoint=True) == 2
    assert (
        begin(fork, "x")["result"] == "x" and begin(fork, "x")["key"] == begin(holder, "x")["key"]
    )
    assert begin(fork, "new")["key"] != begin(holder, "new")["key"]


def test_a_merge_of_nonsense(holder: Holder) -> None:
    with pytest.raises(StepRefused):
        holder.steps.merge([{"id": "x"}])


def test_a_damaged_journal_is_reported(holder: Holder, tmp_path: Path) -> None:
    for step in ("x", "y", "z"):
        begin(holder, step)
    data = bytearray((tmp_path / "steps").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "steps").write_bytes(data)
    again = make_holder(tmp_path)
    assert "damaged" in again.steps.counts()["error"]
    with pytest.raises(OSError, match="damaged"):
        begin(again)


# -- the store ------------------------------------------------------------------------------------


class Client:
    """A connection that remembers what it was sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.dead = False
        self.operator = SimpleNamespace(pid=os.getpid(), who=dict)
        self.pid = os.getpid()

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def close(self, why: str) -> None:
        self.dead = True


def test_steps_wait_for_the_store(holder: Holder) -> None:
    supervisor, program = Client(), Client()
    operations = holder.requests._operations

    def ask(client: Any, request: int, op: str, **facts: Any) -> Message | None:
        return operations[op][1](client, client.operator, {"id": request, **facts})

    assert ask(program, 1, "step-begin", step="x", attempt="t1", kind="once")["state"] == "began"  # type: ignore[index]
    news = ask(supervisor, 1, "step-replicate", stored=0)
    assert news is not None and [one["id"] for one in news["steps"]] == ["x"]
    ask(supervisor, 2, "step-replicate", stored=news["sequence"])
    assert supervisor.sent == []
    ask(program, 2, "step-done", step="x", attempt="t1", result=5)
    (news,) = supervisor.sent
    assert news["id"] == 2 and news["steps"][0]["state"] == "done" and program.sent == []
    assert holder.report.status()["steps"]["waiting"] == 1
    # the supervisor is killed, and another one begins again
    holder.replication.lost(supervisor)  # type: ignore[arg-type]
    other = Client()
    news = ask(other, 1, "step-replicate", stored=0)
    assert program.sent == [] and news is not None
    ask(other, 2, "step-replicate", stored=news["sequence"])
    assert program.sent[0]["id"] == 2 and program.sent[0]["result"] == 5
    # what may run again needs not be stored before it begins; what may not does
    assert ask(program, 3, "step-begin", step="s", attempt="t1", kind="safe")["run"]  # type: ignore[index]
    ask(program, 4, "step-begin", step="y", attempt="t1", kind="once")
    assert len(program.sent) == 1
    ask(other, 3, "step-replica-stop")
    assert [answer["id"] for answer in program.sent] == [2, 4]
    assert ask(program, 5, "step-done", step="y", attempt="t1")["state"] == "done"  # type: ignore[index]


def test_the_need_for_the_store_outlives_the_holder(holder: Holder, tmp_path: Path) -> None:
    client: Any = Client()
    begin(holder)
    holder.replication.replicate(client, 0, 1)
    again = make_holder(tmp_path)
    assert again.replication.needed("x") > 0
