"""Hooks around real dumps and restores: their requests, what a veto stops, and that their failures
harm no tree.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support.aftermath import Aftermath
from support.command import Criuctl, Home
from support.hooking import HookFolder
from support.keeper import start_time, wait_until
from support.trip import Trip
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration


@pytest.fixture
def hooks(home: Home, criuctl: Criuctl) -> HookFolder:
    """The configured folder."""
    folder = HookFolder(home.path / "hooks")
    criuctl.extra |= {"CRIUCTL_HOOK_DIRS": str(folder.path), "CRIUCTL_HOOK_TIMEOUT_FROZEN": "60"}
    return folder


@pytest.fixture
def greeter() -> Iterator[tuple[str, list[bytes]]]:
    """A server that says welcome and notes the first line of each connection."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def talk(connection: socket.socket) -> None:
            with connection:
                heard.append(connection.recv(64))
                connection.sendall(b"welcome")
                while data := connection.recv(64):
                    connection.sendall(data)

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                threading.Thread(target=talk, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}", heard
        listening.shutdown(socket.SHUT_RDWR)


def hanging(hooks: HookFolder, phase: str) -> Path:
    """A hook that starts a process in a session of its own, notes both PIDs, and hangs."""
    noted = hooks.path / f"hangs-{phase}"
    hooks.sh(
        phase,
        "hangs",
        f"setsid sleep 1000 & echo $$ $! > {noted}.new; mv {noted}.new {noted}; exec sleep 1000",
    )
    return noted


def gone(noted: Path) -> None:
    pids = [int(word) for word in noted.read_text().split()]
    wait_until(
        lambda: not any(map(start_time, pids)), 60, f"no process of the hook is left: {pids}"
    )


def runs_on(animal: Animal) -> None:
    assert animal.alive()
    assert animal.differences(animal) == []
    animal.ask()
    animal.remember()


def test_an_address_that_a_hook_is_to_add(
    hooks: HookFolder, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """As of a service that takes its address along; only then is it known whether it is there."""
    address = ["203.0.113.78/32", "dev", "lo"]
    run = partial(subprocess.run, check=True)
    run(["ip", "address", "replace", *address])
    try:
        animal = zoo.launch("port.py", "203.0.113.78")
        animal.ask()
        report = trip.dump(animal)
        run(["ip", "address", "del", *address])
        hooks.noting("pre-restore")
        failed = criuctl("restore", report["checkpoint"], check=False)
        assert (
            failed["exit_code"] == 6 and "nor has a hook made it one" in failed["error"]["message"]
        )
        hooks.sh("pre-restore", "10-address", f"ip address replace {' '.join(address)}")
        restored = trip.restore(report, animal)
        assert restored.answer["warnings"] == []
        restored.ask()
    finally:
        run(["ip", "address", "replace", *address])
        run(["ip", "address", "del", *address])


def test_requests_of_hooks(hooks: HookFolder, zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    dump_phases = ("pre-dump", "frozen", "post-dump", "post-commit")
    restore_phases = ("pre-restore", "post-restore", "post-resume")
    for phase in (*dump_phases, *restore_phases, "dump-failed", "restore-failed"):
        hooks.noting(
            phase, more=f"""echo '{{"warnings": ["w-{phase}"], "data": {{"from": "{phase}"}}}}'"""
        )
    animal = zoo.launch("counter.py", "1")
    report = trip.dump(animal, "--name", "web", "--label", "role=web")
    assert [(r["phase"], r["name"], r["ok"], r["data"]) for r in report["hooks"]] == [
        (phase, "note", True, {"from": phase}) for phase in dump_phases
    ]
    assert [w for w in report["warnings"] if "w-" in w] == [
        f"{p} hook 'note': w-{p}" for p in dump_phases
    ]
    answer = trip.restore(report, animal).answer
    assert [(r["phase"], r["ok"]) for r in answer["hooks"]] == [
        (phase, True) for phase in restore_phases
    ]
    before, frozen, after, committed = (hooks.requests(phase)[0] for phase in dump_phases)
    common = {
        "version": 1,
        "session": "web",
        "incarnation": 1,
        "pid": animal.pid,
        "inner_pid": animal.pid,
        "leave_running": False,
    }
    common |= {"store": str(criuctl.store), "labels": {"role": "web"}}
    for phase, body in zip(dump_phases, (before, frozen, after, committed), strict=True):
        assert body.items() >= {**common, "phase": phase}.items()
    assert [body["checkpoint"] for body in (before, frozen, after, committed)] == [
        None,
        None,
        *[report["checkpoint"]] * 2,
    ]
    assert len(frozen["processes"]) == report["processes"]
    assert committed["number"] == 1
    placed = hooks.requests("post-restore")[0]
    assert (
        placed.items()
        >= {
            "session": "web",
            "incarnation": 2,
            "pid": answer["pid"],
            "checkpoint": report["checkpoint"],
        }.items()
    )
    # What the hooks of a name said at the dump is in the manifest, and in the request of those of
    # that name at the restore.
    kept = criuctl("show", report["checkpoint"])["hooks"]
    assert [r["data"] for r in kept] == [{"from": phase} for phase in dump_phases[:3]]
    assert placed["recorded"] == kept
    assert not hooks.requests("dump-failed")
    assert not hooks.requests("restore-failed")


@pytest.mark.parametrize("how", ["ends", "left running"])
def test_a_veto_of_a_dump(
    how: str, hooks: HookFolder, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """Whenever it comes: the tree goes on, nothing is listed, and the requests of dump-failed hooks
    say why.
    """
    options = ["--leave-running"] if how == "left running" else []
    hooks.noting("dump-failed")
    animal = zoo.launch("counter.py", "1")
    animal.remember()
    for phase in ("pre-dump", "frozen", "post-dump"):
        hook = hooks.sh(phase, "guard", f"echo 'not during {phase}' >&2; exit 10")
        answer = criuctl("dump", animal.pid, *options, check=False)
        assert (answer["exit_code"], answer["error"]["code"]) == (10, "vetoed")
        assert answer["error"]["message"] == f"{phase} hook 'guard' says no: not during {phase}"
        assert answer["error"]["hook"]["veto"] == f"not during {phase}"
        runs_on(animal)
        assert criuctl("list") == []
        assert hooks.requests("dump-failed")[-1]["error"]["message"] == answer["error"]["message"]
        hook.unlink()
    assert len(hooks.requests("dump-failed")) == 3
    trip.restore(trip.dump(animal), animal).ask()


@pytest.mark.parametrize("phase", ["frozen", "post-dump"])
def test_what_a_terminal_holds_is_back_before_the_tree_goes_on(
    phase: str, hooks: HookFolder, zoo: Zoo, criuctl: Criuctl, trip: Trip
) -> None:
    """Else a multiplexer reads what is printed next first."""
    animal = zoo.launch("chatter.py")
    hook = hooks.sh(phase, "guard", "exit 10")
    for _ in range(4):
        assert criuctl("dump", animal.pid, check=False)["exit_code"] == 10
        animal.ask()
    hook.unlink()
    for _ in range(3):
        animal = trip.restore(criuctl("dump", animal.pid), animal, equal=False)
        animal.ask()


def test_a_veto_of_a_restore(hooks: HookFolder, zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """Nothing is left of it, and the next attempt succeeds."""
    hooks.noting("restore-failed")
    animal = zoo.launch("counter.py", "1")
    report = trip.dump(animal)
    for phase in ("pre-restore", "post-restore"):
        hook = hooks.sh(phase, "guard", 'echo \'{"veto": "not here"}\'')
        answer = criuctl("restore", report["checkpoint"], check=False)
        assert (answer["exit_code"], answer["error"]["message"]) == (
            10,
            f"{phase} hook 'guard' says no: not here",
        )
        assert zoo.find(animal) == []
        assert hooks.requests("restore-failed")[-1]["error"]["code"] == "vetoed"
        # A look is not a restore.
        assert criuctl("restore", report["checkpoint"], "--dry-run")["ok"]
        hook.unlink()
    assert len(hooks.requests("restore-failed")) == 2
    trip.restore(report, animal).ask()


def test_optional_failures_are_reported_with_exit_11(
    hooks: HookFolder, zoo: Zoo, criuctl: Criuctl
) -> None:
    """A hook that crashes, one that prints garbage, one that hangs while the tree is frozen: the
    dump goes on.
    """
    hooks.sh("frozen", "1-crashes", "kill -SEGV $$")
    noted = hanging(hooks, "frozen")
    hooks.sh("post-dump", "garbage", "echo garbage")
    hooks.sh("post-commit", "fails", "exit 1")
    criuctl.extra["CRIUCTL_HOOK_TIMEOUT_FROZEN"] = "4"
    animal = zoo.launch("counter.py", "1")
    animal.remember()
    answer = criuctl("dump", animal.pid, check=False)
    gone(noted)
    assert answer["exit_code"] == 11
    errors = {(r["phase"], r["name"]): r["error"] for r in answer["hooks"]}
    assert errors == {
        ("frozen", "1-crashes"): "it was ended by signal 11",
        ("frozen", "hangs"): "it was ended after 4 s",
        ("post-dump", "garbage"): "it printed something that is not JSON: 'garbage\\n'",
        ("post-commit", "fails"): "it ended with exit code 1",
    }
    assert len([w for w in answer["warnings"] if " failed: " in w]) == 4
    hooks.sh("post-resume", "fails", "exit 1")
    restored = criuctl("restore", answer["checkpoint"], check=False)
    assert (restored["exit_code"], [r["ok"] for r in restored["hooks"]]) == (11, [False])
    zoo.adopt(restored["pid"], animal).ask()


def test_policy_makes_a_hang_a_veto(hooks: HookFolder, zoo: Zoo, criuctl: Criuctl) -> None:
    noted = hanging(hooks, "frozen")
    criuctl.extra |= {"CRIUCTL_HOOK_TIMEOUT_FROZEN": "4", "CRIUCTL_HOOK_FAILURE": "frozen=veto"}
    animal = zoo.launch("counter.py", "1")
    animal.remember()
    answer = criuctl("dump", animal.pid, check=False)
    assert (answer["exit_code"], answer["error"]["message"]) == (
        10,
        "frozen hook 'hangs' failed: it was ended after 4 s",
    )
    gone(noted)
    runs_on(animal)


def test_refused_before_anything_is_touched(hooks: HookFolder, zoo: Zoo, criuctl: Criuctl) -> None:
    """A hook that others can change is not run, and a policy that cannot be had is reported."""
    path = hooks.sh("pre-dump", "open", f"touch {hooks.path}/ran")
    path.chmod(0o777)
    animal = zoo.launch("counter.py", "1")
    animal.remember()
    answer = criuctl("dump", animal.pid, check=False)
    assert (answer["exit_code"], answer["error"]["hint"]) == (10, f"chmod go-w {path}")
    assert str(path) in answer["error"]["message"]
    (finding,) = [
        f for f in criuctl("doctor", check=False)["findings"] if f["code"] == "hook-refused"
    ]
    assert (finding["level"], finding["hint"]) == ("warning", f"chmod go-w {path}")
    (listed,) = [h for h in criuctl("hooks", "list") if h["origin"] == "configured"]
    assert (listed["phase"], listed["name"], listed["hint"]) == (
        "pre-dump",
        "open",
        f"chmod go-w {path}",
    )
    criuctl.extra["CRIUCTL_HOOK_FAILURE"] = "post-commit=veto"
    assert criuctl("dump", animal.pid, check=False)["exit_code"] == 2
    assert not (hooks.path / "ran").exists()
    runs_on(animal)


@pytest.mark.crash
def test_kill_9_while_a_connection_is_in_a_hook_s_hands(
    greeter: tuple[str, list[bytes]], hooks: HookFolder, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """The hook and the half-restored tree go with criuctl."""
    rule = {"match": {"peer": "127.0.0.1"}, "policy": "reconnect", "application": "hangs"}
    criuctl.extra["CRIUCTL_CONNECTION_RULES"] = json.dumps([rule])
    animal = zoo.launch("peer.py", "tcp", greeter[0])
    report = trip.dump(animal)
    noted = hanging(hooks, "reconnect")
    command = criuctl.start("restore", report["checkpoint"])
    wait_until(noted.exists, 60, "the hook runs")
    command.process.kill()
    command.process.wait(120)
    gone(noted)
    assert zoo.find(animal) == []
    assert criuctl("restore", report["checkpoint"], "--connections", "hangup", "--dry-run")["ok"]


@pytest.mark.crash
@pytest.mark.parametrize("phase", ["pre-dump", "frozen", "post-dump", "post-restore"])
def test_kill_9_while_a_hook_runs(
    phase: str, hooks: HookFolder, zoo: Zoo, trip: Trip, criuctl: Criuctl, aftermath: Aftermath
) -> None:
    """The hook goes with criuctl, its children in other sessions too; the tree is whole."""
    animal = zoo.launch("counter.py", "1")
    restoring = phase == "post-restore"
    checkpoint = trip.dump(animal)["checkpoint"] if restoring else ""
    if not restoring:
        animal.remember()
    noted = hanging(hooks, phase)
    words = (
        ("restore", checkpoint) if restoring else ("dump", animal.pid, "--name", animal.folder.name)
    )
    command = criuctl.start(*words)
    wait_until(noted.exists, 60, f"the {phase} hook runs")
    command.process.kill()
    command.process.wait(120)
    gone(noted)
    (hooks.path / phase / "hangs").unlink()
    fate = (
        aftermath.of_restore(animal, checkpoint)
        if restoring
        else aftermath.of_dump(animal, again=phase == "frozen")
    )
    assert fate == ("nothing" if restoring else "alive")


def test_interrupted_while_a_hook_runs(
    hooks: HookFolder, zoo: Zoo, criuctl: Criuctl, aftermath: Aftermath
) -> None:
    hooks.noting("dump-failed")
    noted = hanging(hooks, "frozen")
    animal = zoo.launch("counter.py", "1")
    animal.remember()
    command = criuctl.start("dump", animal.pid, "--name", animal.folder.name)
    wait_until(noted.exists, 60, "the hook runs")
    command.process.kill(signal.SIGTERM)
    assert command.process.wait(60) == 128 + signal.SIGTERM
    gone(noted)
    assert hooks.requests("dump-failed")[0]["error"]["code"] == "interrupted"
    (hooks.path / "frozen" / "hangs").unlink()
    assert aftermath.of_dump(animal, again=False) == "alive"


def test_snapshot_failed(hooks: HookFolder, zoo: Zoo, criuctl: Criuctl) -> None:
    hooks.noting("snapshot-failed")
    animal = zoo.launch("counter.py", "1")
    answer = criuctl("snapshot", animal.pid, "nonesuch", check=False)
    assert answer["exit_code"] == 3
    (request,) = hooks.requests("snapshot-failed")
    assert (request["target"], request["session"], request["error"]["exit_code"]) == (
        "nonesuch",
        "nonesuch",
        3,
    )
    animal.ask()


def test_tried_by_hand(hooks: HookFolder, zoo: Zoo, criuctl: Criuctl) -> None:
    """Against a live tree and against a checkpoint; nothing is frozen, dumped or stopped."""
    animal = zoo.launch("counter.py", "1")
    animal.remember()
    checkpoint = criuctl("dump", animal.pid, "--leave-running", "--name", "web")["checkpoint"]
    hooks.noting("frozen")
    trial = criuctl("hooks", "run", "frozen", "--target", "web")
    assert trial["verdict"] == "ok"
    assert hooks.requests("frozen") == trial["requests"]
    assert (trial["requests"][0]["pid"], trial["requests"][0]["trial"]) == (animal.pid, True)
    hooks.sh("post-restore", "guard", "exit 10")
    answer = criuctl("hooks", "run", "post-restore", "guard", "--ref", "web", check=False)
    assert (answer["exit_code"], answer["verdict"]) == (10, "veto")
    assert answer["requests"][0]["checkpoint"] == checkpoint
    hooks.sh("post-commit", "fails", "exit 3")
    assert (
        criuctl("hooks", "run", "post-commit", "--target", animal.pid, check=False)["exit_code"]
        == 11
    )
    for words in (
        ("nonesuch", "--ref", "web"),
        ("frozen", "nonesuch", "--ref", "web"),
        ("frozen", "connections", "--ref", "web"),
        ("frozen",),
        ("reconnect", "--ref", "web"),
    ):
        assert criuctl("hooks", "run", *words, check=False)["exit_code"] == 2, words
    assert len(criuctl("list")) == 1
    runs_on(animal)


RECONNECT = """
import json, socket, sys
request = json.load(sys.stdin)
host, _, port = request["connection"]["peer"].rpartition(":")
sock = socket.socket(fileno=3)
sock.connect((host, int(port)))
if not request.get("trial"):
    assert request["recorded"][0]["data"] == {"from": "frozen"}, request
    assert (request["session"], request.get("connections")) == ("peer", None), request
sock.sendall(request["options"]["greeting"].encode())
assert sock.recv(7) == b"welcome"
secret = open(4).read().strip()
print(json.dumps({"outcome": "reconnected", "data": {"secret": secret == "s3cret"}}))
"""


def test_a_connection_handed_to_a_hook(
    greeter: tuple[str, list[bytes]],
    hooks: HookFolder,
    zoo: Zoo,
    trip: Trip,
    criuctl: Criuctl,
    home: Home,
) -> None:
    """First by hand, on a new socket next to the program's; then for real: the program talks on
    over the very socket.
    """
    address, heard = greeter
    hooks.python("reconnect", "greet", RECONNECT)
    hooks.sh("frozen", "greet", 'echo \'{"data": {"from": "frozen"}}\'')
    secret = home.path / "secret"
    secret.write_text("s3cret\n")
    secret.chmod(0o600)
    rule = {
        "match": {"peer": "127.0.0.1"},
        "policy": "reconnect",
        "application": "greet",
        "secret": {"file": str(secret)},
    }
    criuctl.extra["CRIUCTL_CONNECTION_RULES"] = json.dumps(
        [{**rule, "options": {"greeting": "again"}}]
    )
    animal = zoo.launch("peer.py", "tcp", address)
    assert animal.ask()["outcome"] == "echo"
    fd = _tcp_descriptor(animal.pid)
    trial = criuctl("hooks", "run", "reconnect", "greet", "--target", animal.pid, "--fd", fd)
    assert (trial["results"][0]["outcome"], trial["results"][0]["data"]) == (
        "reconnected",
        {"secret": True},
    )
    assert heard == [b"hello\n", b"again"]
    assert animal.ask()["outcome"] == "echo"
    report = trip.dump(animal, "--name", "peer")
    restored = trip.restore(report, animal, equal=False)
    assert [(c["policy"], c["outcome"]) for c in restored.answer["connections"]] == [
        ("reconnect", "reconnected")
    ]
    assert heard == [b"hello\n", b"again", b"again"]
    assert restored.ask()["outcome"] == "echo"
    assert "s3cret" not in json.dumps([report, restored.answer, trial])


BAD_HOOKS = {
    "lies": ("print(json.dumps({'outcome': 'reconnected'}))", "but it is not connected"),
    "crashes": ("os.kill(os.getpid(), 11)", "ended by signal 11"),
    "garbage": ("print('done')", "not JSON"),
    "hangs": ("time.sleep(1000)", "it was ended after"),
}


def test_hooks_that_do_not_connect(
    greeter: tuple[str, list[bytes]], hooks: HookFolder, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """The program sees the end of the connection, and the report says why; nothing is called
    reconnected that is not.
    """
    rule = {
        "match": {"peer": "127.0.0.1"},
        "policy": "reconnect",
        "application": "bad",
        "deadline": 6,
    }
    criuctl.extra |= {"CRIUCTL_CONNECTION_RULES": json.dumps([rule]), "CRIUCTL_HOOK_TIMEOUT": "6"}
    animal = zoo.launch("peer.py", "tcp", greeter[0])
    assert animal.ask()["outcome"] == "echo"
    report = trip.dump(animal)
    for how, (program, reason) in BAD_HOOKS.items():
        hooks.python("reconnect", "bad", f"import json, os, time\n{program}")
        answer = criuctl("restore", report["checkpoint"], check=False)
        (connection,) = answer["connections"]
        assert (how, answer["exit_code"], connection["outcome"]) == (how, 11, "failed")
        assert reason in connection["reason"]
        assert "the hook 'bad'" in connection["reason"]
        restored = zoo.adopt(answer["pid"], animal)
        assert restored.ask()["outcome"] in (
            "eof",
            "BrokenPipeError+eof",
            "ConnectionResetError+eof",
        )
        restored.end()


def _tcp_descriptor(pid: int) -> int:
    known = Path(f"/proc/{pid}/net/tcp").read_text().split()
    links = ((path.name, str(path.readlink())) for path in Path(f"/proc/{pid}/fd").iterdir())
    return next(
        int(fd) for fd, target in links if target.startswith("socket:[") and target[8:-1] in known
    )
