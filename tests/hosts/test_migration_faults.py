"""Whatever happens to a migration: never two copies, never none, as observed on both hosts from
outside.

At every step one of the two criuctl is killed, the link is cut, or a person interrupts.  Afterwards
the program runs on exactly one host, or it stands still with a complete checkpoint and ``migrate
--resolve`` lets it run; and each of the numbers that it sends was sent once.
"""

from __future__ import annotations

import signal
import sys
import time

import pytest
from hosts_lab.host import PROJECT
from hosts_lab.observer import Observer, Teller
from hosts_lab.pauses import pausing
from support.hosts import Hosts
from support.keeper import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.crash]

SECONDS = 120
LINK_TIMEOUT = {"CRIUCTL_LINK_TIMEOUT": "3"}


LEFT = """
nft list tables | grep CRIU || true
ls /var/lib/criuctl/moves/out/* 2>/dev/null || true
grep -lE '"state": "(receiving|held|given-up)"' /var/lib/criuctl/moves/in/* 2>/dev/null || true
grep -lazE 'criu(ctl)?$' /proc/[0-9]*/comm 2>/dev/null | grep -v self || true
"""


class Moving:
    """Migrations of tellers from ``hosts.a`` to ``hosts.b``, and their outcomes."""

    def __init__(self, hosts: Hosts, observer: Observer) -> None:
        self.hosts, self.observer = hosts, observer

    def words(self, teller: Teller, *options: str) -> list[str]:
        """The arguments of criuctl."""
        return ["migrate", str(teller.pid), self.hosts.b.ssh_url, "--name", teller.name, *options]

    def steps(self, side: str) -> list[str]:
        """The steps that a migration goes through, on the side ``a`` or ``b``, when nothing is done
        to it.
        """
        teller = self.observer.launch(self.hosts.a)
        host = self.hosts.a if side == "a" else self.hosts.b
        with pausing(host, "*", command="migrate" if side == "a" else "receive") as pause:
            self.hosts.a.criuctl(*self.words(teller))
            wait_until(
                lambda: not self.hosts.b.processes("criuctl", "receive"),
                SECONDS,
                "the receiver has ended",
            )
            steps = pause.steps()
        teller.wait_heard(self.hosts.b)
        assert teller.check() == ["host-a", "host-b"]
        teller.end(self.hosts.b)
        return steps

    def settled(self, teller: Teller) -> str:
        """Where it is after all: ``stays``, ``moved``, or ``resolved`` when it stood still and
        `--resolve` let it run there.
        """
        a, b = self.hosts.a, self.hosts.b
        wait_until(
            lambda: not a.processes("criuctl", "migrate"), SECONDS, "the migration has ended"
        )
        fate = ""
        teller.check()
        if not teller.living(a):
            records = b.criuctl("list", "--store", "/var/lib/criuctl/inbox")
            assert [row["session"] for row in records].count(teller.name) == 1, (
                "neither it nor its checkpoint is anywhere"
            )
        answers = a.criuctl("migrate", "--resolve", teller.name, check=False)
        if answers["exit_code"] == 0:
            (answer,) = answers["list"]
            fate = {"stays": "stays", "moved": "resolved"}[answer["outcome"]]
        else:
            assert answers["exit_code"] == 3, str(answers)
        home = a if teller.living(a) else b
        teller.wait_heard(home)
        wait_until(
            lambda: teller.living(a, b) == [home.name], SECONDS, f"one copy: {teller.living(a, b)}"
        )
        journey = teller.check()
        assert journey == (["host-a"] if home is a else ["host-a", "host-b"])
        self._tidy(teller, stays=home is a)
        return fate or ("stays" if home is a else "moved")

    def _tidy(self, teller: Teller, *, stays: bool) -> None:
        """Wait until nothing of the migration is left: no criuctl, no firewall lock, no open
        record, no checkpoint there.
        """
        a, b = self.hosts.a, self.hosts.b

        def left() -> list[str]:
            found = [
                f"{host.name}: {text}" for host in (a, b) for text in host.sh(LEFT).splitlines()
            ]
            rows = (
                b.criuctl("list", "--store", "/var/lib/criuctl/inbox", check=False).get("list", ())
                if stays
                else ()
            )
            return found + [f"host-b: {row['id']}" for row in rows if row["session"] == teller.name]

        remains = left()
        if remains:
            wait_until(lambda: not left(), SECONDS, f"nothing is left; there were {remains}")


@pytest.fixture
def moving(hosts: Hosts, observer: Observer) -> Moving:
    return Moving(hosts, observer)


def test_it_moves_there_and_back(moving: Moving, hosts: Hosts) -> None:
    """Without faults: a plain tree goes to the other host and home again; what it left is not in
    anybody's way.
    """
    teller = moving.observer.launch(hosts.a)
    report = hosts.a.criuctl(*moving.words(teller))
    assert report["session"] == teller.name
    assert report["host"] == "host-b"
    teller.wait_heard(hosts.b)
    assert teller.living(hosts.a, hosts.b) == ["host-b"]
    hosts.b.criuctl("migrate", teller.name, hosts.a.ssh_url)
    teller.wait_heard(hosts.a)
    assert teller.check() == ["host-a", "host-b", "host-a"]


def test_kill_9_of_the_source(moving: Moving, hosts: Hosts) -> None:
    """Until the tree is let go it stays; from then on it stands still until it is resolved, unless
    the word was said.
    """
    steps = moving.steps("a")
    # What comes before the hand-over is a dump's, and killed in tests/crash; one step of it stands
    # for all.
    fates: dict[str, str] = {}
    for step in [
        "freeze",
        *(step for step in steps[steps.index("hand-over") :] if not step.startswith("there")),
    ]:
        teller = moving.observer.launch(hosts.a)
        with pausing(hosts.a, step) as pause:
            command = hosts.a.start_criuctl(*moving.words(teller), env=pause.env)
            pause.wait(command)
            command.process.kill()
            command.process.wait(SECONDS)
        fates[step] = moving.settled(teller)
        teller.end(hosts.a, hosts.b)
    early = [fates[step] for step in ("freeze", "hand-over", "decide", "kill")]
    assert early == ["stays"] * 4, fates
    assert {fates[step] for step in list(fates)[4:]} == {"resolved"}, fates


def test_kill_9_of_the_target(moving: Moving, hosts: Hosts) -> None:
    """Before it got the word to go, the tree stays where it was; after that it is restored once
    more, or runs already.
    """
    steps = moving.steps("b")
    fates: dict[str, str] = {}
    for step in [
        "pages",
        "restore",
        *(step for step in steps[steps.index("held") :] if not step.startswith("gc")),
    ]:
        teller = moving.observer.launch(hosts.a)
        with pausing(hosts.b, step, command="receive") as pause:
            command = hosts.a.start_criuctl(*moving.words(teller))
            pause.wait(command)
            hosts.b.set_command_environment("receive", {})  # the next one is not held
            hosts.b.kill("criuctl", "receive")
        code = command.process.wait(SECONDS)
        fates[step] = moving.settled(teller)
        assert (code == 0) == (fates[step] == "moved"), (step, fates[step], command.output())
        teller.end(hosts.a, hosts.b)
    assert [fates[step] for step in ("pages", "restore", "held")] == ["stays"] * 3, fates
    assert {fates[step] for step in list(fates)[3:]} == {"moved"}, fates


# Half a second's work, over and over: is the memory what it was? Each time that it is, a line is
# printed.
WHOLE = """
import hashlib, threading
def look(good=hashlib.sha1(heap).digest()):
    looks = 0
    while hashlib.sha1(heap).digest() == good:
        looks += 1
        with open("/tmp/looks", "w") as file:
            file.write(str(looks))
    os._exit(1)
threading.Thread(target=look).start()
"""


def test_kill_9_of_the_target_while_memory_follows(moving: Moving, hosts: Hosts) -> None:
    """A large tree runs before its memory is there, and runs on without the criuctl that received
    it.
    """
    teller = moving.observer.launch(hosts.a, mib=257, more=WHOLE)
    with pausing(hosts.b, "pages-follow", command="receive") as pause:
        command = hosts.a.start_criuctl(*moving.words(teller))
        pause.wait(command)
        hosts.b.set_command_environment("receive", {})
        hosts.b.kill("criuctl", "receive")
    assert command.process.wait(SECONDS) == 0, command.output()
    looks = hosts.b.path("/tmp/looks")

    def count() -> int:
        return int(looks.read_text() or 0) if looks.exists() else 0

    wait_until(count, SECONDS, "it looks at its memory there")
    before = count()
    wait_until(lambda: count() > before + 1, SECONDS, "all of its memory is there")
    assert moving.settled(teller) == "moved"


INTERRUPTS = {
    "reach": signal.SIGINT,
    "frozen": signal.SIGTERM,
    "hand-over": signal.SIGINT,
    "decide": signal.SIGTERM,
}


def test_an_operator_interrupts(moving: Moving, hosts: Hosts) -> None:
    """Before the decision it stays and nothing is left there; after it, it is too late and it
    moves.
    """
    for step, number in (INTERRUPTS | {"go": signal.SIGINT}).items():
        teller = moving.observer.launch(hosts.a)
        with pausing(hosts.a, step) as pause:
            command = hosts.a.start_criuctl(*moving.words(teller), env=pause.env)
            pause.wait(command)
            command.process.kill(number)
        code = command.process.wait(SECONDS)
        expected = ("moved", 0) if step == "go" else ("stays", 128 + number)
        assert (moving.settled(teller), code) == expected, (step, command.output())
        teller.end(hosts.a, hosts.b)


@pytest.mark.parametrize("step", ["hand-over", "go"])
def test_the_link_is_cut_for_a_second(step: str, moving: Moving, hosts: Hosts) -> None:
    """It is not noticed: the session moves."""
    teller = moving.observer.launch(hosts.a)
    with pausing(hosts.a, step) as pause:
        command = hosts.a.start_criuctl(*moving.words(teller), env=pause.env)
        pause.wait(command)
        hosts.cut(hosts.a, hosts.b)
    time.sleep(1)  # how long the cut is, not how long something takes
    hosts.mend()
    assert command.process.wait(SECONDS) == 0, command.output()
    assert moving.settled(teller) == "moved"


@pytest.mark.parametrize("step", ["hand-over", "go"])
def test_the_link_is_cut_for_longer(step: str, moving: Moving, hosts: Hosts) -> None:
    """Before the decision it stays; after it, it moves as soon as there is a link again."""
    teller = moving.observer.launch(hosts.a)
    with pausing(hosts.a, step) as pause:
        command = hosts.a.start_criuctl(*moving.words(teller, "-v"), env=pause.env | LINK_TIMEOUT)
        pause.wait(command)
        hosts.cut(hosts.a, hosts.b)
    if step == "go":
        wait_until(
            lambda: "link-lost" in command.err.read_text(), SECONDS, "the link is known to be lost"
        )
    else:
        assert command.process.wait(SECONDS) != 0
        teller.wait_heard(hosts.a)
    hosts.mend()
    code = command.process.wait(SECONDS)
    assert (moving.settled(teller), code == 0) == (
        ("moved", True) if step == "go" else ("stays", False)
    ), command.output()


@pytest.mark.parametrize("step", ["restore", "held"])
def test_the_target_is_too_slow(step: str, moving: Moving, hosts: Hosts) -> None:
    """The restore there takes longer than the source may be frozen: the source goes on at once, and
    nothing runs there.
    """
    teller = moving.observer.launch(hosts.a)
    with pausing(hosts.b, step, command="receive") as pause:
        command = hosts.a.start_criuctl(*moving.words(teller, "--max-freeze", "3"))
        pause.wait(command)
        count = len(moving.observer.heard(teller.name).numbers)
        wait_until(
            lambda: len(moving.observer.heard(teller.name).numbers) > count + 1,
            30,
            "it goes on here",
        )
        assert teller.living(hosts.a, hosts.b)[0] == "host-a"
    assert command.process.wait(SECONDS) == 12, command.output()
    error = command.json()["error"]
    assert error["code"] == "frozen-too-long"
    assert "the restore on the other host" in error["message"]
    assert moving.settled(teller) == "stays"


def test_the_disk_there_is_full(moving: Moving, hosts: Hosts) -> None:
    teller = moving.observer.launch(hosts.a, mib=16)
    hosts.b.sh("mount -t tmpfs -o size=4m,mode=0700 small /var/lib/criuctl")
    answer = hosts.a.criuctl(*moving.words(teller), check=False)
    assert answer["exit_code"] not in (0, 1), answer
    assert "space" in str(answer["error"]), answer
    assert moving.settled(teller) == "stays"
    wait_until(
        lambda: not hosts.b.processes("criuctl", "receive"),
        SECONDS,
        "the disk is not used any more",
    )
    hosts.b.sh("umount /var/lib/criuctl")
    hosts.a.criuctl(*moving.words(teller))
    assert moving.settled(teller) == "moved"


LISTENING = """
held = socket.socket()
held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
held.bind(("0.0.0.0", 8099))
held.listen()
"""


def test_a_port_is_taken_there(moving: Moving, hosts: Hosts) -> None:
    """When it is taken already, before anything is done; when it is taken in the last moment,
    before anything is lost.
    """
    teller = moving.observer.launch(hosts.a, more=LISTENING)
    with hosts.b.open_socket() as taken:
        taken.bind(("0.0.0.0", 8099))
        taken.listen()
        answer = hosts.a.criuctl(*moving.words(teller), check=False)
    assert answer["exit_code"] == 4, answer
    assert "8099" in str(answer["error"]), answer
    assert moving.settled(teller) == "stays"
    with pausing(hosts.a, "hand-over") as pause, hosts.b.open_socket() as taken:
        command = hosts.a.start_criuctl(*moving.words(teller), env=pause.env)
        pause.wait(command)
        taken.bind(("0.0.0.0", 8099))
        taken.listen()
        pause.go_on()
        assert command.process.wait(SECONDS) != 0
    assert "8099" in str(command.json()["error"]), command.output()
    assert moving.settled(teller) == "stays"
    hosts.a.criuctl(*moving.words(teller))
    assert moving.settled(teller) == "moved"


def test_another_build_of_a_library_is_there(moving: Moving, hosts: Hosts) -> None:
    """A library that is mapped must be the same there, to the byte: the error names the path, and
    nothing was frozen.
    """
    found = hosts.a.sh("ls /usr/lib/*/libz.so.1.*").split()[0]
    for host in (hosts.a, hosts.b):
        host.sh(f"mkdir -p /srv/lib && cp {found} /srv/lib/libown.so")
    teller = moving.observer.launch(
        hosts.a, more='import ctypes\nctypes.CDLL("/srv/lib/libown.so")'
    )
    other = hosts.b.sh("ls /usr/lib/*/libbz2.so.1.0.* /usr/lib/*/liblzma.so.5.*").split()[0]
    hosts.b.sh(f"cp /srv/lib/libown.so /srv/lib/right; cp {other} /srv/lib/libown.so")
    answer = hosts.a.criuctl(*moving.words(teller), check=False)
    assert answer["exit_code"] == 4, answer
    assert "/srv/lib/libown.so" in str(answer["error"]), answer
    assert moving.settled(teller) == "stays"
    hosts.b.sh("mv /srv/lib/right /srv/lib/libown.so")
    hosts.a.criuctl(*moving.words(teller))
    assert moving.settled(teller) == "moved"


# A person's patience, in place of the minute for which a broken link is made again.
IMPATIENT = (
    "import criuctl.ops.moving.delivery as m; m.SETTLE = 2.0; from criuctl.cli.main import "
    "program; program()"
)


# The tree is killed, one of its processes takes its time to end, and what was made for the dump
# cannot be taken down.
SLOW_END = """
import errno
from criuctl.cli.main import program
from criuctl.connections.closing import Farewell
from criuctl.dump import commit, ending
from criuctl.host import moves
wait_ended = ending.wait_ended

def still_ending(tree, timeout):
    tree = list(tree)
    wait_ended(tree, timeout)
    return tree

def read_only(_work):
    raise OSError(errno.EROFS, "Read-only file system")

ending.wait_ended = commit.wait_ended = still_ending
Farewell.say, moves.Outgoing.alive = read_only, lambda move: True
program()
"""


def test_what_fails_when_it_is_ended_does_not_undo_it_there(moving: Moving, hosts: Hosts) -> None:
    teller = moving.observer.launch(hosts.a)
    words = [sys.executable, "-c", SLOW_END, *moving.words(teller), "--json"]
    command = hosts.a.start(words, env={"PYTHONPATH": str(PROJECT)})
    code = command.process.wait(SECONDS)
    assert (moving.settled(teller), code) == ("moved", 11), command.output()  # as its warnings say


# CRIU is taken along by the private PID namespace that it was a guest of, and a process takes its
# time to end.
NO_ANSWER = """
from criuctl.cli.main import program
from criuctl.criu.driver import CriuFailed, Dumper
from criuctl.dump import commit, ending
from criuctl.host import moves
wait_ended, finish = ending.wait_ended, Dumper.dump

def still_ending(tree, timeout):
    tree = list(tree)
    wait_ended(tree, timeout)
    return tree

def gone(self, *arguments):
    finish(self, *arguments)
    raise CriuFailed("CRIU ended without an answer", "")

ending.wait_ended = commit.wait_ended = still_ending
Dumper.dump, moves.Outgoing.alive = gone, lambda move: True
program()
"""


def test_a_tree_that_takes_its_time_to_end_moves(moving: Moving, hosts: Hosts) -> None:
    teller = moving.observer.launch(hosts.a)
    words = [sys.executable, "-c", NO_ANSWER, *moving.words(teller), "--json"]
    command = hosts.a.start(words, env={"PYTHONPATH": str(PROJECT)})
    code = command.process.wait(SECONDS)
    assert (moving.settled(teller), code) == ("moved", 0), command.output()


# CRIU takes all of the tree, and then refuses it for what passes by itself.
FIRST_REFUSED = """
from criuctl.cli.main import program
from criuctl.criu.driver import CriuFailed, Dumper, DumpSteps
finish = Dumper.dump

def refused(self, options, sink, steps):
    Dumper.dump = finish
    try:
        finish(self, options, sink, DumpSteps(steps.frozen, veto))
    except ZeroDivisionError:
        why = "(00.04) Error (compel/src/lib/infect.c:323): "
        why += "Can't dump the 7 thread with a pending SIGTRAP."
        raise CriuFailed("", why, undone=True) from None

def veto(memory):
    raise ZeroDivisionError

Dumper.dump = refused
program()
"""


def test_a_tree_that_is_refused_for_a_moment_moves(moving: Moving, hosts: Hosts) -> None:
    """What of it was sent at the first try is not used twice."""
    teller = moving.observer.launch(hosts.a)
    words = [sys.executable, "-c", FIRST_REFUSED, "-v", *moving.words(teller), "--json"]
    command = hosts.a.start(words, env={"PYTHONPATH": str(PROJECT)})
    code = command.process.wait(SECONDS)
    assert (moving.settled(teller), code) == ("moved", 0), command.output()
    assert "a SIGTRAP pending" in command.output()


def test_the_link_is_cut_for_ever(moving: Moving, hosts: Hosts) -> None:
    """In the very moment between the two: it stands still, whole, and the error says so; later, one
    word lets it run.
    """
    teller = moving.observer.launch(hosts.a)
    with pausing(hosts.a, "go") as pause:
        words = [sys.executable, "-c", IMPATIENT, *moving.words(teller), "--json"]
        env = {"PYTHONPATH": str(PROJECT), "CRIUCTL_SSH_COMMAND": "ssh -o ConnectTimeout=2"}
        command = hosts.a.start(words, env=pause.env | LINK_TIMEOUT | env)
        pause.wait(command)
        hosts.cut(hosts.a, hosts.b)
    assert command.process.wait(SECONDS) == 12, command.output()
    assert "--resolve" in command.json()["error"]["hint"]
    assert teller.check() == ["host-a"]
    # The other host cannot know either.  Even if its criuctl ends, the checkpoint is there.
    hosts.b.kill("criuctl", "receive")
    wait_until(
        lambda: not teller.living(hosts.a, hosts.b), SECONDS, "it stands still as a checkpoint only"
    )
    hosts.mend()
    assert moving.settled(teller) == "resolved"


def test_the_other_host_is_lost_while_it_holds_the_session(moving: Moving, hosts: Hosts) -> None:
    """Its power goes before the decision: the session goes on where it was, and moves when there is
    a host again.
    """
    teller = moving.observer.launch(hosts.a)
    with pausing(hosts.b, "held", command="receive") as pause:
        command = hosts.a.start_criuctl(*moving.words(teller), env=LINK_TIMEOUT)
        pause.wait(command)
        hosts.lose(hosts.b)
        assert command.process.wait(SECONDS) != 0
    assert moving.settled(teller) == "stays"
    hosts.a.criuctl(*moving.words(teller))
    assert moving.settled(teller) == "moved"
