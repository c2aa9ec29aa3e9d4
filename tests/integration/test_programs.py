"""Every program of the zoo, there and back: gone after the dump, equal after the restore, and going
on correctly.

Each runs through a dump that ends it, restored with its old PIDs. Those whose state could be
touched by being left running, or by PIDs of a namespace of their own, run through those too.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from support import oracle
from support.command import Criuctl
from support.keeper import wait_until
from support.trip import RECORDED, Trip
from support.zoo import Animal, Zoo

from criuctl.proc.syscalls import borrowed

pytestmark = pytest.mark.integration

# program -> arguments; ticker and server are never quiet and have tests of their own
QUIET = {
    "brusque.py": (),
    "counter.py": (),
    "database.py": (),
    "events.py": (),
    "family.py": (),
    "files.py": (),
    "followed.py": (),
    "locks.py": (),
    "manners.py": (),
    "masters.py": (),
    "memory.py": (),
    "nowhere.py": (),
    "options.py": (),
    "orphans.py": (),
    "over.py": (),
    "pairs.py": (),
    "queues.py": (),
    "rights.py": (),
    "run_out.py": (),
    "settings.py": (),
    "signal_driven.py": (),
    "sockets.py": (),
    "watchers.py": (),
}


@pytest.mark.parametrize("program", QUIET)
def test_there_and_back(program: str, zoo: Zoo, trip: Trip) -> None:
    trip.round(zoo.launch(program, *QUIET[program]))


def test_how_criuctl_is_served_is_not_handed_on(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """A restore by a cron job with ionice, say."""
    original = zoo.launch("manners.py")
    report = trip.dump(original)
    criuctl.prefix = ["ionice", "-c", "2", "-n", "7", "setarch", "-R"]
    restored = trip.restore(report, original)
    assert restored.answer["warnings"] == []
    restored.ask()


@pytest.mark.parametrize(
    "program",
    [
        "brusque.py",
        "database.py",
        "events.py",
        "family.py",
        "files.py",
        "masters.py",
        "memory.py",
        "queues.py",
        "sockets.py",
    ],
)
def test_left_running(program: str, zoo: Zoo, trip: Trip) -> None:
    """The original goes on as if nothing had happened; once it is gone the checkpoint comes back
    with what was queued then.
    """
    original = zoo.launch(program, *QUIET[program])
    report = trip.snapshot(original)
    kept = {
        path: path.read_bytes()
        for path in original.folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }
    original.ask()
    original.end()
    for path in original.folder.rglob("*"):
        if path not in kept and path.is_file() and not path.is_symlink():
            path.unlink()
    # files are not part of a checkpoint unless asked for: put the folder back
    for path, content in kept.items():
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
    restored = trip.restore(report, original, equal=False)
    restored.ask()


@pytest.mark.parametrize(
    "program", ["family.py", "memory.py", "sockets.py", "events.py", "files.py", "watchers.py"]
)
def test_with_pids_of_its_own(program: str, zoo: Zoo, trip: Trip) -> None:
    """In a private PID namespace the tree sees the same PIDs, and everything else is as it was."""
    original = zoo.launch(program, *QUIET[program])
    restored = trip.restore(trip.dump(original), original, "--pids", "private")
    assert restored.answer["inner_pid"] == original.pid
    assert restored.pid != original.pid
    restored.ask()
    again = trip.restore(trip.dump(restored), restored)
    again.ask()


def test_pids_of_children_that_have_ended_are_not_given_again_at_once(zoo: Zoo, trip: Trip) -> None:
    original = zoo.launch("children.py")
    restored = trip.restore(trip.dump(original), original, "--pids", "private")
    restored.ask()
    again = trip.restore(trip.dump(restored), restored)
    again.ask()


def test_dev_tty_of_terminals_inside(zoo: Zoo, trip: Trip) -> None:
    """It comes back by the terminal's own name, with that one's mode."""
    original = zoo.launch("controlled.py")
    trip.round(original, ignore=("*/descriptors/*/mode", "*/descriptors/*/target"))


def test_terminals_inside_take_no_numbers_from_each_other(zoo: Zoo, trip: Trip) -> None:
    """A number that another tree has is changed, to none that another one of this tree had: a tmux
    would take one pane for the other.
    """
    original = zoo.launch("followed.py")
    with ExitStack() as stack:
        before = _numbers(original.pid)
        report = trip.dump(original)
        while not os.path.exists(f"/dev/pts/{before[0]}"):
            for fd in os.openpty():
                stack.callback(os.close, fd)
        restored = trip.restore(report, original, equal=False)
        after = restored.ask()["terminals"]
        assert after[0] != before[0]
        assert [
            new for new, old in zip(after, before, strict=True) if new != old and new in before
        ] == []


def test_a_terminal_whose_number_another_tree_has_keeps_its_mode(zoo: Zoo, trip: Trip) -> None:
    code = (
        "import os, signal\nm, s = os.openpty()\nos.fchmod(s, "
        "0o622)\nos.mkdir('up')\nsignal.pause()"
    )
    original = zoo.launch([sys.executable, "-S", "-c", code], name="mode")
    wait_until((original.folder / "up").exists, 60, "it is up")
    (number,) = _numbers(original.pid)
    report = trip.dump(original)
    with ExitStack() as stack:
        while not os.path.exists(f"/dev/pts/{number}"):
            for fd in os.openpty():
                stack.callback(os.close, fd)
        restored = trip.restore(report, original, equal=False)
    (now,) = _numbers(restored.pid)
    assert now != number
    assert os.stat(f"/dev/pts/{now}").st_mode & 0o777 == 0o622


def _numbers(pid: int) -> list[int]:
    """Of the terminals whose masters it has."""
    fdinfo = [
        path.read_text().split()
        for path in sorted(Path(f"/proc/{pid}/fdinfo").iterdir(), key=lambda path: int(path.name))
    ]
    return [int(words[words.index("tty-index:") + 1]) for words in fdinfo if "tty-index:" in words]


def test_signals_timers_and_system_calls(compiled: Path, zoo: Zoo, trip: Trip) -> None:
    """Threads inside system calls, queued real-time signals, POSIX timers, an alternate stack."""
    folder = zoo.home / "signals"
    original = zoo.launch([str(compiled / "signals"), str(folder)], quiet=False)
    wait_until((folder / "ready").exists, 60, "signals ready")
    trip.round(original)


def test_a_big_heap(zoo: Zoo, trip: Trip) -> None:
    """200 MiB, copied on write by a child."""
    trip.round(zoo.launch("memory.py", "200"))


def test_a_big_deleted_file(zoo: Zoo, trip: Trip) -> None:
    """80 MiB that exist only as a descriptor: far beyond CRIU's default limit of 1 MiB."""
    trip.round(zoo.launch("files.py", "80"))


def test_system_v_ipc_in_a_namespace_of_its_own(zoo: Zoo, trip: Trip) -> None:
    trip.round(
        zoo.launch("sysv.py", prefix=["unshare", "--ipc", "--"], ignore=["*/namespaces/ipc"])
    )


def test_a_signal_for_a_process_outside(zoo: Zoo, trip: Trip) -> None:
    """A process that gets signals about input gets them after the restore, too, while it lives;
    criuctl reports one that has ended.
    """
    lives, ends = (
        zoo.launch(["sleep", "1000"], name=name, quiet=False) for name in ("lives", "ends")
    )
    code = (
        "import fcntl, os, signal, sys\nfor who in sys.argv[1:]: fcntl.fcntl(os.pipe()[0], "
        "fcntl.F_SETOWN, int(who))\n"
    )
    code += "os.mkdir('up')\nsignal.pause()"
    owners = [str(lives.pid), str(ends.pid), str(-ends.pid), str(ends.pid)]
    original = zoo.launch([sys.executable, "-S", "-c", code, *owners], name="owners")
    wait_until((original.folder / "up").exists, 60, "it is up")
    report = trip.dump(original)
    ends.end()
    restored = trip.restore(report, original)
    warnings = [w for w in restored.answer["warnings"] if "F_SETOWN" in w]
    assert len(warnings) == 2
    assert f"PID {ends.pid}, outside" in warnings[0] and "and 1 more" in warnings[0]
    assert f"process group {ends.pid}, outside" in warnings[1]
    assert _owners(restored.pid) == [lives.pid]


def _owners(pid: int) -> list[int]:
    """The processes that get signals about input on its descriptors."""
    found = []
    for fd in oracle.listdir(f"/proc/{pid}/fd"):
        with borrowed(pid, int(fd)) as copy:
            found.append(fcntl.fcntl(copy, fcntl.F_GETOWN))
    return [owner for owner in found if owner]


def test_a_tree_that_is_never_still(zoo: Zoo, trip: Trip) -> None:
    """A counter that ticks every few milliseconds misses none and repeats none, over a dump, a
    restore and a snapshot.
    """
    animal = zoo.launch("ticker.py", quiet=False)
    animal = trip.restore(trip.dump(animal), animal)
    animal.ask()
    trip.snapshot(animal)
    number = animal.ask()["number"]
    wait_until(lambda: animal.ask()["number"] > number, 60, "the counter goes on")
    animal.end()
    ticks = [int(line) for line in (animal.folder / "ticks").read_text().splitlines()]
    assert ticks == list(range(1, len(ticks) + 1))


def test_a_web_server(zoo: Zoo, trip: Trip) -> None:
    """An asyncio server keeps its counter, its port, its futures and its timers."""
    from urllib.request import urlopen

    animal = zoo.launch("server.py", quiet=False)
    url = f"http://127.0.0.1:{(animal.folder / 'port').read_text()}/hit"
    assert [urlopen(url, timeout=60).read() for _ in range(3)] == [b"1", b"2", b"3"]
    # it may still be closing the connections of just now
    animal = trip.restore(trip.dump(animal), animal, equal=False)
    assert urlopen(url, timeout=60).read() == b"4"
    ticks = animal.ask()["ticks"]
    wait_until(lambda: animal.ask()["ticks"] > ticks, 60, "the loop's timers go on")


def test_a_child_of_a_shell(zoo: Zoo, trip: Trip) -> None:
    """What ``program &`` in a script makes: no session of its own, no group of its own."""
    script = '"$@" & echo $! > shell-started; wait'
    folder = zoo.home / "counter"
    folder.mkdir()
    program = [
        sys.executable,
        "-S",
        str(Path(__file__).parent / "programs" / "counter.py"),
        str(folder),
    ]
    shell = zoo.launch(["sh", "-c", script, "sh", *program], name="counter")
    pid = int(
        wait_until(
            lambda: (folder / "ready").exists() and (folder / "ready").read_text(), 60, "ready"
        )
    )
    wait_until((folder / "shell-started").exists, 60, "the shell has done its part")
    # Its session and group are led by a shell that is outside: another one leads them afterwards.
    trip.round(zoo.adopt(pid, shell), ignore=("*/group", "*/session"))


def test_a_tree_below_a_shell(zoo: Zoo, trip: Trip) -> None:
    """A shell script as the root, its background job inside the tree."""
    folder = zoo.home / "counter"
    folder.mkdir()
    program = [
        sys.executable,
        "-S",
        str(Path(__file__).parent / "programs" / "counter.py"),
        str(folder),
    ]
    shell = zoo.launch(
        ["bash", "-c", 'set -m; "$@" & wait; wait; exit 3', "sh", *program], name="counter"
    )
    wait_until((folder / "ready").exists, 60, "ready")
    restored = trip.restore(trip.dump(shell), shell)
    child = Animal(int((folder / "ready").read_text()), folder)
    child.ask()
    child.end()
    wait_until(lambda: not restored.alive(), 60, "the shell sees its job end")


def test_a_lease_is_not_broken(zoo: Zoo, criuctl: Criuctl) -> None:
    """No file is opened that no other process may have open; what its own descriptor does not let
    us read is reported.
    """
    animal = zoo.launch("leases.py")
    report = criuctl("dump", animal.pid, "--leave-running")
    assert [w for w in report["warnings"] if "lease" in w and "/written:" in w]
    animal.ask()
    # it would open them
    refused = criuctl("restore", report["checkpoint"], "--as", "copy", check=False)
    assert (refused["exit_code"], {f["code"] for f in refused["error"]["findings"]}) == (
        4,
        {"file-leased"},
    )
    animal.ask()
    report = criuctl("dump", animal.pid, "--with-files", animal.folder / "both", env=RECORDED)
    assert report["bytes"]["files"] == (animal.folder / "both").stat().st_size
    (animal.folder / "both").unlink()
    zoo.adopt(criuctl("restore", report["checkpoint"])["pid"], animal).ask()


def test_a_lease_that_is_being_broken(zoo: Zoo, trip: Trip) -> None:
    """A process that opens the file waits for its holder, which is frozen: criuctl does not."""
    code = (
        "import fcntl, os, signal, time; signal.signal(signal.SIGIO, signal.SIG_IGN); fd = "
        "os.open('f', os.O_CREAT | os.O_RDWR)\n"
    )
    code += (
        "os.write(fd, b'precious'); fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK); "
        "open('ready', 'w')\n"
    )
    code += "while True: time.sleep(1)"
    animal = zoo.launch([sys.executable, "-S", "-c", code], name="broken", quiet=False)
    wait_until((animal.folder / "ready").exists, 60, "it has its lease")
    with pytest.raises(BlockingIOError):
        os.open(animal.folder / "f", os.O_RDONLY | os.O_NONBLOCK)
    report = trip.criuctl(
        "dump", animal.pid, "--leave-running", "--with-files", animal.folder / "f", env=RECORDED
    )
    assert report["bytes"]["files"] == len("precious")
    assert report["frozen_ms"] < int(Path("/proc/sys/fs/lease-break-time").read_text()) * 1000 / 2


def test_a_session_that_a_virtual_console_controls(zoo: Zoo, trip: Trip) -> None:
    console = Path("/dev/tty58")
    if not console.exists():
        pytest.skip("this kernel has no virtual consoles (CONFIG_VT)")
    code = (
        f"import fcntl, os, termios, time; fd = os.open('{console}', os.O_RDWR); fcntl.ioctl(fd, "
        "termios.TIOCSCTTY, 0)\n"
    )
    code += "open('ready', 'w')\nwhile True: time.sleep(1)"
    animal = zoo.launch([sys.executable, "-S", "-c", code], name="console", quiet=False)
    wait_until((animal.folder / "ready").exists, 60, "it has its terminal")
    controlling = oracle.stat_of(animal.pid)[4]
    assert controlling == str(os.makedev(4, 58))
    restored = trip.restore(trip.dump(animal), animal, equal=False)
    assert oracle.stat_of(restored.pid)[4] == controlling


def test_shared_memory_that_is_open_as_a_file(zoo: Zoo, trip: Trip) -> None:
    """CRIU restores it as a memfd, which is called otherwise and has seals."""
    trip.round(zoo.launch("nameless.py"), ignore=("*/seals", "*/target", "*/maps/*"))


def test_outside_a_lock_is_felt(zoo: Zoo, trip: Trip) -> None:
    """A stranger is refused the lock before the dump and after the restore, and gets it in
    between.
    """
    animal = zoo.launch("locks.py")

    def free() -> bool:
        with (animal.folder / "exclusive").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    assert not free()
    report = trip.dump(animal)
    assert free()
    trip.restore(report, animal)
    assert not free()


def test_a_clock_that_stood_still(zoo: Zoo, trip: Trip) -> None:
    """A second between dump and restore: the monotonic clock goes on, nothing fires twice, no timer
    is lost.
    """
    animal = zoo.launch("events.py")
    report = trip.dump(animal)
    time.sleep(1)  # the time that passes is what is tested
    trip.restore(report, animal).ask()
