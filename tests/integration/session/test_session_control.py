"""Signals, standing still, ending, and the holder's part in checkpoints."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.command import Home
from support.holding import TIMEOUT, Holders, printed
from support.keeper import Keeper, wait_until

from criuctl.errors import CommandFailed, Conflict, NotFound, TimedOut, UsageError, WrongState
from criuctl.proc.tree import ProcessIdentity, children, read_tree
from criuctl.session.client.session import Event, Session
from criuctl.session.holder.cgroup import SessionGroup
from criuctl.session.holder.output_log import read_file
from criuctl.session.holder.processes import Tree
from criuctl.session.holder.timeline import records
from criuctl.session.launch.daemon import HolderSpec, start_holder
from criuctl.session.launch.plain_spawn import SpawnRequest, spawn_plain
from criuctl.session.names import BEGINNING, ENDED, state_folder
from criuctl.session.protocol import RESTORES
from criuctl.session.sessions import all_states, forget, inside, leftovers, state_of

pytestmark = pytest.mark.integration

COUNTER = "i=0; while :; do echo tick $i; i=$((i+1)); sleep 0.01; done"
DEEP = "trap '' TERM HUP; sleep 1000 & echo deep; while :; do sleep 0.1; done"
STUBBORN = f'trap "" INT TERM HUP; setsid sh -c "{DEEP}" & {COUNTER}'


def ticks(client: Session) -> int:
    return client.read("start").data.count(b"tick")


def test_an_agent_that_ignores_signals_is_halted_and_a_human_goes_on(holders: Holders) -> None:
    holders.start("sh", "-c", STUBBORN)
    agent, human = (
        holders.connect(kind="agent", operator="bot", role="write"),
        holders.connect(role="write", operator="eve"),
    )
    human.request("subscribe")
    human.wait_match("(?s)deep.*tick", since="start", timeout=TIMEOUT)
    agent.lease_request()
    halted = human.halt()
    status = human.status()
    assert (
        status["state"] == "paused"
        and status["paused_by"]["name"] == "eve"
        and status["lease"] is None
    )
    assert halted["processes"] >= 3
    assert halted["method"] == status["freezer"]
    before = human.wait_idle(0.5, TIMEOUT)  # which a counter that runs never is
    human.send("typed while it stands still\n")
    human.resume()
    printed(human, "still", since=before)
    assert human.status()["state"] == "running"


def test_a_pause_waits_for_what_only_lacks_a_processor(
    holders: Holders, home: Home, keeper: Keeper
) -> None:
    """It freezes once it is scheduled, which takes seconds under other load: no reason to send
    SIGSTOP, which can be seen.
    """
    # its session's, among others
    nice = "if [ -w /proc/self/autogroup ]; then echo {} > /proc/self/autogroup; fi"
    counts = "echo up; while :; do :; done"
    holders.start("sh", "-c", f"{nice.format(19)}; exec chrt --idle 0 sh -c '{counts}'")
    client = holders.connect(role="write")
    if client.status()["freezer"] == "SIGSTOP":
        pytest.skip("no freezer here")
    client.wait_match("up", since="start", timeout=TIMEOUT)
    environment = {"PATH": os.environ["PATH"], "CZOO_TOKEN": home.token}
    busy = ["nice", "-n", "-10", "sh", "-c", f"{nice.format(-10)}; {counts}"]
    load = [keeper.spawn(busy, env=environment) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        for _ in range(3):
            assert client.pause()["method"] == client.status()["freezer"]
            client.resume()
            time.sleep(0.3)
    finally:
        for one in load:
            one.kill()


def test_halt_drops_queued_input_of_agents_only(holders: Holders) -> None:
    """A raw terminal that is not read takes some 4 KiB; the rest queues in the holder."""
    holders.start("sh", "-c", "stty raw -echo; echo ready; read end")
    agent, human = (
        holders.connect(kind="agent", operator="bot", role="write"),
        holders.connect(operator="eve"),
    )
    human.wait_match("ready", since="start", timeout=TIMEOUT)
    human.signal("STOP", to="session")
    human.lease_yield()
    waiting = agent.submit_input(b"x" * 200_000, answered=True)
    wait_until(lambda: human.status()["queued_input"] > 0, TIMEOUT, "input is queued")
    dropped = human.halt()["dropped"]
    assert 0 < dropped < 200_000 and human.status()["queued_input"] == 0
    answer = agent.receive(TIMEOUT)
    assert (
        answer is not None
        and getattr(answer, "id", None) == waiting
        and isinstance(getattr(answer, "error", None), Conflict)
    )
    with pytest.raises(WrongState, match="only humans"):
        agent.send("again")
    human.resume()
    assert agent.lease_request()["operator"] == agent.operator


def test_what_the_terminal_has_not_taken_in_time_is_not_typed_later(holders: Holders) -> None:
    holders.start("sh", "-c", "stty raw -echo; echo ready; exec cat")
    client = holders.connect()
    client.wait_match("ready", since="start", timeout=TIMEOUT)
    client.signal("STOP", to="session")
    with pytest.raises(TimedOut, match=r"has taken [1-9]\d* of 200000 bytes in 3 s") as late:
        client.send(b"x" * 200_000, timeout=3.0)
    taken = int(late.value.message.split()[5])
    assert client.status()["queued_input"] == 0
    client.signal("CONT", to="session")
    client.send("END")
    printed(client, "x+END")
    assert client.read("start").data.count(b"x") == taken
    assert [entry["written"] for entry in client.audit() if entry["what"] == "cancel"] == [taken]


def test_pause_without_a_freezer_keeps_who_was_stopped_stopped(holders: Holders) -> None:
    """The walk that stops parents first, on a tree of this process's own."""
    environment = {"PATH": os.environ["PATH"], "TOKEN": holders.token}
    script = "sleep 1000 & kill -STOP $!; sh -c 'sleep 1001 & wait' & echo ready; wait"
    others = set(children(os.getpid()))  # servers and helpers of the whole test run
    spawned = spawn_plain(SpawnRequest(("sh", "-c", script), environment))
    tree = Tree(None)
    tree.helpers = others
    tree.root = ProcessIdentity.of(spawned.pid)
    wait_until(lambda: len(tree.members()) >= 4, TIMEOUT, "the tree is complete")
    wait_until(lambda: any(m.state() == "T" for m in tree.members()), TIMEOUT, "one is stopped")
    stopped = {member: member.state() == "T" for member in tree.members()}
    try:
        assert tree.freeze() == ("SIGSTOP", 4)
        wait_until(
            lambda: all(m.state() == "T" for m in tree.members()), TIMEOUT, "all stand still"
        )
        tree.thaw()
        wait_until(
            lambda: {m: m.state() == "T" for m in tree.members()} == stopped, TIMEOUT, "as it was"
        )
    finally:
        tree.signal(signal.SIGKILL, reversed(tree.members()))
        os.waitpid(spawned.pid, 0)
        os.close(spawned.master)


def test_signals_reach_the_foreground_group_the_leader_or_all(holders: Holders) -> None:
    holders.start("bash", "--norc", "-i")
    client = holders.connect()
    client.send("sleep 1000\n")
    leader = client.status()["pid"]
    wait_until(
        lambda: [p.command for p in read_tree(leader)] == ["bash", "sleep"], TIMEOUT, "sleep runs"
    )
    assert client.signal(signal.SIGINT) == 1
    wait_until(lambda: len(read_tree(leader)) == 1, TIMEOUT, "sleep is interrupted")
    client.send("sleep 1000\n")
    wait_until(
        lambda: [p.command for p in read_tree(leader)] == ["bash", "sleep"],
        TIMEOUT,
        "sleep runs again",
    )
    assert client.signal("TERM") == 1  # which no key sends, so the terminal does not either
    wait_until(lambda: len(read_tree(leader)) == 1, TIMEOUT, "sleep is ended")
    for wrong in ("NOSUCH", 0, 10_000, "", None, True, 1.5):
        with pytest.raises(UsageError):
            client.request("signal", signal=wrong)
    assert client.signal("SIGHUP", to="leader") == 1
    assert client.wait_exit(TIMEOUT) | {"id": 0} == {
        "id": 0,
        "ok": True,
        "exit_code": 129,
        "exit_signal": 1,
        "state": "exited",
    }


def test_kill_ends_daemons_and_those_who_ignore_it(holders: Holders) -> None:
    started = holders.start("sh", "-c", STUBBORN)
    client = holders.connect()
    client.wait_match("deep", since="start", timeout=TIMEOUT)
    assert started.pid is not None
    # a frozen tree dies as well, and none of its processes comes or goes while it is looked at
    client.pause()
    members = [process.identity for process in read_tree(started.pid)]
    assert client.kill(grace=0.2) >= len(members) >= 3
    assert not any(member.alive() for member in members)
    assert client.wait_exit(TIMEOUT)["exit_code"] == 128 + signal.SIGKILL
    assert holders.state()["state"] == "exited"
    client.leave()
    holders.gone(started)


def test_the_group_of_a_session_goes_with_it(holders: Holders) -> None:
    started = holders.start("cat")
    path = holders.state()["cgroup"]
    if path is None:
        pytest.skip("no freezer here that may be written")
    group = SessionGroup(path, 2)
    assert group.pids() == [started.pid]
    client = holders.connect()
    client.kill(grace=0)
    client.wait_exit(TIMEOUT)
    client.leave()
    holders.gone(started)
    assert not os.path.exists(group.path)


def test_a_session_knows_that_it_is_one(holders: Holders) -> None:
    holders.start("cat", name="outer")
    assert [state["session"] for state in all_states(holders.config)] == ["outer"]
    assert inside(holders.config) is None
    project = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from criuctl.config import Config; from criuctl.session.sessions import inside;"
        "print('inside', inside(Config(run_dir=sys.argv[2])))"
    )
    argv = (sys.executable, "-I", "-c", code, project, holders.config.run_dir)
    holders.start("sh", "-c", 'read started; exec env - "$0" "$@"', *argv, name="inner")
    inner = holders.connect("inner")  # whose holder has reported by now that it is there
    inner.send("\n")
    assert inner.wait_match("inside inner", since="start", timeout=TIMEOUT)


# -- checkpoints, with a tree that ends and another that comes
# ----------------------------------------


def collect(client: Session, name: str) -> dict[str, Any]:
    """The next event of this name."""
    while True:
        message = client.receive(TIMEOUT)
        assert message is not None, f"no event {name}"
        if isinstance(message, Event) and message.name == name:
            return message.body


def test_while_a_checkpoint_is_made_input_waits_and_output_is_recorded_to_the_last_byte(
    holders: Holders,
) -> None:
    holders.start("sh", "-c", "echo before; cat")
    dumper, writer = holders.connect(), holders.connect(operator="writer")
    writer.wait_match("before\n", since="start", timeout=TIMEOUT)
    facts = dumper.request("checkpoint-begin")
    assert facts["offset"] == len(b"before\r\n") and facts["pending_input"] == []
    with pytest.raises(Conflict, match="checkpoint"):
        writer.request("checkpoint-begin")
    with pytest.raises(Conflict, match="checkpoint"):
        writer.request("reexec")
    assert writer.send("later\n")["held"]
    assert writer.status()["held_input"] == 6
    with pytest.raises(WrongState):
        writer.request("checkpoint-abort")  # not his
    dumper.request("checkpoint-done", checkpoint="c1", ended=False)
    writer.wait_match("later", since="start", timeout=TIMEOUT)
    assert (
        writer.status()["checkpoint"] == holders.state()["checkpoint"] == "c1"
        and writer.status()["state"] == "running"
    )


@pytest.mark.parametrize("how", ["done", "abort", "lost"])
def test_while_a_checkpoint_is_stored_the_session_is_as_any_other(
    holders: Holders, how: str
) -> None:
    """That may take minutes: a client that wants to stop it, or to know how it ended, does not wait
    for them.
    """
    holders.start("sh", "-c", "read line; exit 7")
    dumper, operator = holders.connect(), holders.connect(operator="person")
    operator.attach("start")
    dumper.request("checkpoint-prepare")
    dumper.request("checkpoint-begin")
    for verb in ("pause", "resume", "halt", "kill"):
        with pytest.raises(Conflict, match="checkpoint"):
            operator.request(verb)
    dumper.request("checkpoint-thawed")
    operator.pause()
    operator.resume()
    assert operator.signal("CONT", "session")
    operator.send("\n")
    assert collect(operator, "exit")["exit_code"] == 7
    assert operator.wait_exit(TIMEOUT)["exit_code"] == 7
    if how == "done":
        dumper.request("checkpoint-done", checkpoint="c1", ended=False)
        assert (
            collect(operator, "checkpoint")["checkpoint"] == holders.state()["checkpoint"] == "c1"
        )
    else:
        dumper.request("checkpoint-abort") if how == "abort" else dumper.close()
        assert collect(operator, "checkpoint-aborted")
    assert (operator.status()["state"], operator.status()["exit_code"]) == ("exited", 7)


def test_who_ends_just_when_the_tree_is_let_go_has_ended(holders: Holders) -> None:
    started = holders.start("sleep", "1000")
    dumper, operator = holders.connect(), holders.connect(operator="person")
    operator.attach("start")
    dumper.request("checkpoint-begin")
    assert started.pid is not None
    os.kill(started.pid, signal.SIGTERM)
    wait_until(lambda: not os.path.exists(f"/proc/{started.pid}"), TIMEOUT, "the holder reaps it")
    assert operator.status()["state"] == "running"
    dumper.request("checkpoint-thawed")
    assert collect(operator, "exit")["exit_signal"] == signal.SIGTERM


@pytest.mark.parametrize("how", ["abort", "lost"])
def test_a_checkpoint_that_comes_to_nothing_changes_nothing(holders: Holders, how: str) -> None:
    holders.start("cat")
    dumper, writer = holders.connect(), holders.connect(operator="writer")
    writer.request("subscribe")
    dumper.request("checkpoint-begin")
    assert writer.send("held\n")["held"]
    if how == "abort":
        dumper.request("checkpoint-abort")
    else:
        dumper.close()
    assert collect(writer, "checkpoint-aborted")
    writer.wait_match("held", since="start", timeout=TIMEOUT)
    assert writer.status()["state"] == "running"


@pytest.mark.parametrize("outcome", ["done", "lost"])
def test_a_session_goes_into_a_checkpoint_and_comes_back(holders: Holders, outcome: str) -> None:
    started = holders.start("sh", "-c", "echo first life; cat")
    dumper, operator = holders.connect(), holders.connect(operator="stays")
    operator.attach("start", write=True)
    operator.wait_match("first life\n", since="start", timeout=TIMEOUT)
    dumper.request("checkpoint-begin")
    dumper.request("checkpoint-commit", checkpoint="c7")
    assert operator.send("typed in between\n")["held"]
    assert started.pid is not None
    os.kill(started.pid, signal.SIGKILL)  # as CRIU does
    if outcome == "done":
        wait_until(
            lambda: not os.path.exists(f"/proc/{started.pid}"), TIMEOUT, "the holder reaps it"
        )
        dumper.request("checkpoint-done", checkpoint="c7", ended=True)
    else:
        dumper.close()
    assert collect(operator, "checkpointed")["checkpoint"] == "c7"
    assert (
        operator.status()["state"] == "checkpointed" and holders.state()["state"] == "checkpointed"
    )
    with pytest.raises(WrongState, match="checkpointed"):
        operator.send("nobody reads this\n")

    spawned = spawn_plain(
        SpawnRequest(
            ("sh", "-c", "echo second life; cat"),
            {"PATH": os.environ["PATH"], "TOKEN": holders.token},
        )
    )
    start_time = ProcessIdentity.of(spawned.pid).start_time
    restorer = holders.connect()
    restored = {
        "host": "elsewhere",
        "checkpoint": "c7",
        "created": 1.5,
        "dropped": ["one connection"],
    }
    facts: dict[str, Any] = {"pid": spawned.pid, "incarnation": 2, "restored": restored}
    with pytest.raises(NotFound, match="another process"):
        restorer.request("adopt", fds=[spawned.master], **facts, start_time=start_time + 1)
    with pytest.raises(UsageError, match="master"):
        restorer.request("adopt", **facts)
    restorer.request("adopt", fds=[spawned.master], **facts, start_time=start_time)
    os.close(spawned.master)
    event = collect(operator, "restored")
    assert (event["incarnation"], event["host"], event["dropped"], event["held_input"]) == (
        2,
        "elsewhere",
        ["one connection"],
        17,
    )
    printed(operator, "(?s)typed in between\r\n.*typed in between")
    data = operator.read("start").data
    assert data.startswith(b"first life\r\n") and b"second life" in data
    with pytest.raises(WrongState):
        restorer.request("adopt", **facts)
    operator.send("\x04")
    os.waitpid(spawned.pid, 0)  # ours, not the holder's: it learns of the end by its pidfd
    assert operator.wait_exit(TIMEOUT)["state"] in ("exited", "lost")


def test_a_restored_sessions_holder_has_the_old_scrollback(holders: Holders) -> None:
    memory = os.memfd_create("scrollback")
    os.write(memory, b"from the other host\r\n")
    os.lseek(memory, 0, os.SEEK_SET)
    started = holders.start(
        "cat", spawner="", id="feed" * 8, incarnation=4, log_fd=memory, base=5000, events=70,
        audit=30, input_offset=5007, modes={"alternate": True},
        roles=[["agent", "bot", "observe"]], checkpoint="c9", rows=33, cols=77,
    )  # fmt: skip
    os.close(memory)
    client = holders.connect()
    status = client.status()
    assert (status["state"], status["incarnation"], status["id"], status["pid"]) == (
        "checkpointed",
        4,
        "feed" * 8,
        None,
    )
    assert (status["base"], status["offset"], status["input_offset"], status["checkpoint"]) == (
        5000,
        5021,
        5007,
        "c9",
    )
    assert (status["rows"], status["cols"], status["modes"]["alternate"]) == (33, 77, True)
    assert client.read("start").data == b"from the other host\r\n"
    assert holders.connect(kind="agent", operator="bot").role == "observe"
    assert client.request("subscribe")["sequence"] > 70 and client.audit()[0]["sequence"] == 31
    client.request("shutdown")
    holders.gone(started)


def test_the_holder_of_a_restore_that_comes_to_nothing_ends_also_as_another_program(
    holders: Holders,
) -> None:
    started = holders.start("cat", spawner="")
    restorer = holders.connect(operator=RESTORES)
    restorer.reexec()
    assert restorer.status()["state"] == "checkpointed"
    restorer.close()
    holders.gone(started)


def _come(holders: Holders, restorer: Session, **facts: Any) -> int:
    """A tree comes to a holder that waits; its root's PID."""
    spawned = spawn_plain(
        SpawnRequest(("cat",), {"PATH": os.environ["PATH"], "TOKEN": holders.token})
    )
    restorer.request("adopt", fds=[spawned.master], pid=spawned.pid, incarnation=2, **facts)
    os.close(spawned.master)
    return spawned.pid


def test_a_holder_that_one_restore_has_left_stays_with_the_tree_of_the_next(
    holders: Holders,
) -> None:
    started = holders.start("cat", spawner="")
    operator = holders.connect(operator="waits")
    holders.connect(operator=RESTORES).close()
    wait_until(lambda: len(operator.status()["operators"]) == 1, TIMEOUT, "the first one is gone")
    root = _come(holders, restorer := holders.connect(operator=RESTORES))
    restorer.leave()
    operator.leave()
    time.sleep(0.5)
    assert ProcessIdentity.of(started.holder_pid).alive() and holders.state()["state"] == "running"
    os.kill(root, signal.SIGKILL)
    os.waitpid(root, 0)


def test_what_a_tree_that_is_taken_back_would_have_been_typed_is_the_next_ones(
    holders: Holders,
) -> None:
    started = holders.start("cat")
    dumper, operator = holders.connect(), holders.connect(operator="stays")
    dumper.request("checkpoint-begin")
    assert operator.send("typed in between\n")["held"]
    dumper.request("checkpoint-commit", checkpoint="c7")
    assert started.pid is not None
    os.kill(started.pid, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{started.pid}"), TIMEOUT, "the holder reaps it")
    dumper.request("checkpoint-done", checkpoint="c7", ended=True)
    operator.request("moved", to="ssh://there/s", host="there")

    root = _come(holders, holders.connect(), settles=True)
    assert (operator.status()["state"], operator.status()["home"]) == (
        "running",
        os.uname().nodename,
    )
    os.kill(root, signal.SIGKILL)
    os.waitpid(root, 0)
    operator.wait_state("checkpointed", timeout=TIMEOUT)
    assert (operator.status()["home"], operator.status()["moved_to"]) == ("there", "ssh://there/s")

    root = _come(holders, restorer := holders.connect(), settles=True)
    restorer.request("settle")
    printed(operator, "(?s)typed in between\r\n.*typed in between")
    assert operator.status()["moved_to"] is None
    os.kill(root, signal.SIGKILL)
    os.waitpid(root, 0)


def test_what_is_still_rolled_back_does_not_keep_the_control_group(holders: Holders) -> None:
    """CRIU, or what it was restoring, comes to the holder when who started it is gone; none of that
    is in the session's group.
    """
    started = holders.start("cat", spawner="")
    group = holders.state()["cgroup"]
    restorer = holders.connect(operator=RESTORES)
    environment = {"PATH": os.environ["PATH"], "TOKEN": holders.token}
    starter = restorer.spawn(["sh", "-c", "sleep 600 &"], environment, [])
    wait_until(
        lambda: not Path(f"/proc/{starter}").exists(),
        TIMEOUT,
        "what it has started is the holder's child",
    )
    (left,) = children(started.holder_pid)
    restorer.close()
    holders.gone(started)
    os.kill(left, signal.SIGKILL)
    assert group is None or not Path(group).exists()


def test_with_a_session_whose_holder_was_killed_its_control_group_is_forgotten(
    holders: Holders,
) -> None:
    started = holders.start("cat")
    group = holders.state()["cgroup"]
    os.kill(started.holder_pid, signal.SIGKILL)
    wait_until(
        lambda: not holders.state()["holder_alive"] and not leftovers(holders.state()),
        TIMEOUT,
        "its terminal hangs up",
    )
    assert forget(holders.config, "s")
    assert group is None or not Path(group).exists()


def test_a_session_that_came_too_late_for_who_wanted_it_ends(holders: Holders) -> None:
    spec = HolderSpec(
        "s", argv=["sleep", "600"], env={"PATH": os.environ["PATH"], "TOKEN": holders.token}
    )
    with pytest.raises(TimedOut):
        start_holder(holders.config, spec, timeout=0.01)
    wait_until(
        lambda: (state := state_of(holders.config, "s")) is not None and not state["holder_alive"],
        20,
        "it has ended",
    )
    state = holders.state()
    assert (
        state["state"] == "exited"
        and not ProcessIdentity(state["pid"] or 1, state["start_time"] or 0).alive()
    )


def test_a_holder_whose_files_are_gone_does_not_become_another_program(holders: Holders) -> None:
    """That one could not open them, and would end; with it the session."""
    holders.start("cat")
    client = holders.connect()
    shutil.rmtree(state_folder(holders.config.state_dir, "s"))
    with pytest.raises(CommandFailed, match="output"):
        client.reexec()
    client.send("still here\n")
    printed(client, "still here\r\nstill here")


def test_a_program_that_the_holder_starts_for_a_restore_is_its_child(holders: Holders) -> None:
    started = holders.start("cat")
    client = holders.connect()
    client.request("subscribe")
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            script = "echo parent $PPID >&7; exit 6"
            client.request(
                "spawn",
                fds=[theirs.fileno()],
                argv=["sh", "-c", script],
                env={"PATH": os.environ["PATH"]},
                numbers=[7],
            )
        assert ours.recv(100) == b"parent %d\n" % started.holder_pid
    event = collect(client, "child-exited")
    assert event["exit_code"] == 6
    with pytest.raises(NotFound, match="no-such"):
        client.request("spawn", argv=["no-such"])


def test_a_host_that_goes_down_does_not_wait_for_holders(holders: Holders) -> None:
    """It asks holder and tree to end; a session whose holder reports that it has ended by itself
    would not be brought back.
    """
    graceful = holders.start(
        "sh", "-c", "trap 'exit 0' TERM; echo ready; while :; do sleep 0.1; done"
    )
    holders.connect().wait_match("ready", since="start", timeout=TIMEOUT)
    for pid in (graceful.holder_pid, graceful.pid):
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
    holders.clients.pop().close()
    holders.gone(graceful)
    assert holders.state()["state"] == "exited"
    assert not (state_folder(holders.config.state_dir, "s") / ENDED).exists()
    waiting = holders.start("cat", name="stored", spawner="")
    os.kill(waiting.holder_pid, signal.SIGTERM)
    holders.gone(waiting)


def test_a_session_whose_holder_is_killed_is_reported_as_lost(holders: Holders) -> None:
    """The terminal hangs up; who ignores that is found, and the name can be used again."""
    started = holders.start("sh", "-c", "trap '' HUP; echo ready; while :; do sleep 0.1; done")
    holders.connect().wait_match("ready", since="start", timeout=TIMEOUT)
    os.kill(started.holder_pid, signal.SIGTERM)  # asked, it stays as long as there is a session
    assert holders.connect().status()["state"] == "running"
    os.kill(started.holder_pid, signal.SIGKILL)
    holders.gone(started)
    assert holders.state()["state"] == "lost"
    left = leftovers(holders.state())
    assert started.pid in [identity.pid for identity in left]
    for identity in left:
        with contextlib.suppress(ProcessLookupError):  # a sleep that is over
            os.kill(identity.pid, signal.SIGKILL)
    wait_until(lambda: not leftovers(holders.state()), TIMEOUT, "they are gone")
    holders.start("cat")
    assert holders.state()["state"] == "running"


def test_what_a_session_has_left_stays_until_another_one_of_its_name_stands(
    holders: Holders,
) -> None:
    """A command that is not there, say, is no reason to lose it."""
    folder = state_folder(holders.config.state_dir, "s")
    first = holders.start("echo", "what", "it", "printed")
    holders.connect().wait_exit(TIMEOUT)
    holders.clients.pop().close()
    holders.gone(first)
    left = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {"output", "timeline", "audit.jsonl"} <= left.keys()
    with pytest.raises(NotFound, match="no-such-command"):
        holders.start("no-such-command")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == left
    (folder / BEGINNING).mkdir()  # of a holder that was killed
    (folder / BEGINNING / "output").write_text("half")
    second = holders.start("cat")
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert (
        kept.pop(f"audit-{first.id[:16]}.jsonl") == left["audit.jsonl"]
        and kept.keys() == left.keys()
    )
    assert all(kept[name] != left[name] for name in ("output", "timeline", "audit.jsonl"))
    client = holders.connect()
    client.reexec()
    assert client.status()["audit"] == str(folder / "audit.jsonl")
    assert [entry["session"] for entry in client.audit() if entry["what"] == "opened"] == [
        second.id
    ]


def test_times_from_before_the_first_output_outlive_another_program(holders: Holders) -> None:
    holders.start("sleep", "600", rows=31, cols=99)
    client = holders.connect()
    client.pause()
    timeline = state_folder(holders.config.state_dir, "s") / "timeline"
    before = list(records(timeline))
    assert [record[2] for record in before] == ["session", "resize", "paused"]
    client.reexec()
    client.resume()
    assert list(records(timeline))[:3] == before


def test_what_its_last_life_has_printed_outlives_a_restore_that_comes_to_nothing(
    holders: Holders,
) -> None:
    """And gives way to what the checkpoint has when the tree is there."""
    folder = state_folder(holders.config.state_dir, "s")
    first = holders.start("echo", "after the checkpoint")
    holders.connect().wait_exit(TIMEOUT)
    holders.clients.pop().close()
    holders.gone(first)
    printed = (0, b"after the checkpoint\r\n")
    assert read_file(folder / "output") == printed
    with open(folder.parent / "scrollback", "w+b", buffering=0) as stored:
        stored.write(b"before it\r\n")
        for adopted in (False, True):
            stored.seek(0)
            waiting = holders.start(
                "cat", spawner="", id=first.id, incarnation=2, log_fd=stored.fileno()
            )
            client = holders.connect()
            client.reexec()
            assert (
                client.read("start").data == b"before it\r\n"
                and read_file(folder / "output") == printed
            )
            if adopted:
                spawned = spawn_plain(
                    SpawnRequest(
                        ("echo", "again"), {"PATH": os.environ["PATH"], "TOKEN": holders.token}
                    )
                )
                client.request("adopt", fds=[spawned.master], pid=spawned.pid, incarnation=2)
                os.close(spawned.master)
                os.waitpid(spawned.pid, 0)
                client.wait_exit(TIMEOUT)
            client.request("shutdown")
            client.close()
            holders.gone(waiting)
            assert (
                holders.state()["log"] == str(folder / "output")
                and not (folder / BEGINNING).exists()
            )
    assert read_file(folder / "output") == (0, b"before it\r\nagain\r\n")


def test_what_another_session_has_left_outlives_a_restore_under_its_name_that_comes_to_nothing(
    holders: Holders,
) -> None:
    folder = state_folder(holders.config.state_dir, "s")
    first = holders.start("echo", "what", "it", "printed")
    holders.connect().wait_exit(TIMEOUT)
    holders.clients.pop().close()
    holders.gone(first)
    left = {path.name: path.read_bytes() for path in folder.iterdir()}
    waiting = holders.start("cat", spawner="", id="c" * 32, incarnation=2)
    client = holders.connect()
    client.reexec()
    client.request("shutdown")
    client.close()
    holders.gone(waiting)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == left
