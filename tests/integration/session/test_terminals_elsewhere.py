"""Trees on a terminal that criuctl knows nothing of (ssh, a window): dumped, and restored under a
holder of their own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.command import Criuctl
from support.holding import TIMEOUT, Holders
from support.keeper import Keeper, start_time, wait_until
from support.obstacles import running
from support.pauses import paused
from support.travel import Travel, Window

from criuctl.session.sessions import state_of

pytestmark = pytest.mark.integration

SLEEPER = """
import signal, sys
signal.signal(signal.SIGUSR1, lambda number, frame: None)
print("ready", flush=True)
signal.pause()
while line := sys.stdin.readline(): print(repr(line), flush=True)
"""
READER = """
import sys
print("ready", flush=True)
sys.stdin.readline() == "go\\n" or sys.exit("no")
while line := sys.stdin.readline(): print(repr(line), flush=True)
"""


@pytest.fixture
def travel(criuctl: Criuctl, holders: Holders) -> Iterator[Travel]:
    travel = Travel(criuctl, holders)
    yield travel
    travel.close()


@pytest.fixture
def window(keeper: Keeper, criuctl: Criuctl) -> Iterator[Callable[..., Window]]:
    """Opens windows; they are closed with the test."""
    opened: list[Window] = []

    def open_one(*argv: str) -> Window:
        opened.append(Window(keeper, criuctl.home.token, *argv))
        return opened[-1]

    yield open_one
    for one in opened:
        one.process.kill()
        one.close()


def test_a_shell_comes_back_under_a_holder(window: Callable[..., Window], travel: Travel) -> None:
    """Its jobs, a shell inside the shell, the window's size, and a line that was half typed."""
    there = window("bash", "--norc", "--noprofile")
    there.expect(r"\$ ")
    there.type("bash --norc --noprofile\r")
    there.expect(r"(?s)profile\r\n.*\$ ")
    there.type("sleep 1000 &\r")
    there.expect(r"(?s)\[1\] \d+.*\$ ")
    there.type("""python3 -c 'print("re" + "ady"); print(repr(input()))'\r""")
    there.expect("ready\r\n")
    there.type("half-")
    there.expect("half-")
    report = travel.criuctl("dump", there.pid, "--name", "mine")
    (terminal,) = report["terminals"]
    assert (terminal["master"], terminal["queued"], terminal["rows"], terminal["columns"]) == (
        "outside",
        5,
        31,
        99,
    )
    assert "half" not in str(report)
    travel.back("mine")
    desk = travel.desk("mine")
    desk.type("typed\r")
    desk.expect(r"(?s)'half-typed'.*\$ ")
    desk.type("jobs; stty size; echo $SHLVL\r")
    desk.expect(r"(?s)Running +sleep 1000.*31 99.*\$ ")
    desk.type("sh -c 'echo runs-$((40 + 2)); exec sleep 500'\r")
    desk.expect("runs-42\r\n")
    desk.type("\x03")  # the inner shell's own job control: the terminal is its controlling terminal
    desk.expect(r"(?s)\^C.*\$ ")
    desk.type("exit\r")
    desk.expect(r"(?s)exit\r\n.*\$ ")
    desk.type("echo out </dev/tty >/dev/tty; exit 5\r")
    desk.expect("out\r\n")
    assert desk.client.wait_exit(TIMEOUT)["exit_code"] == 5


def test_a_shells_job_takes_along_what_was_typed_for_it(
    window: Callable[..., Window], travel: Travel
) -> None:
    """The shell, which gets its terminal back, must not run what was meant for the job."""
    there = window("bash", "--norc", "--noprofile")
    stray = travel.criuctl.home.path / "stray"
    program = travel.criuctl.home.path / "reader.py"
    program.write_text(SLEEPER)
    there.expect(r"\$ ")
    there.type(f"python3 -I -S {program} &\r")
    there.expect(r"(?s)^(?=.*\[1\] \d+.*\$ )(?=.*ready\r\n)")  # in whichever order
    there.type("fg\r")
    there.expect(r"fg\r\n")
    (job,) = _children(there.pid)
    wait_until(
        lambda: os.tcgetpgrp(there.master) == job and there.cooked,
        TIMEOUT,
        "the job has the terminal",
    )
    there.type(f"go\rtouch {stray}\rha")
    there.expect(f"touch {stray}\r\nha")
    report = travel.criuctl("dump", job, "--name", "job")
    there.expect(r"\$ $")
    there.type("echo the-shell-$((40 + 2))\r")
    there.expect("the-shell-42")
    assert not stray.exists()
    answer = travel.back("job")
    desk = travel.desk("job")
    assert report["terminals"][0]["led_outside"]
    status = Path(f"/proc/{answer['pid']}/stat").read_text().rpartition(")")[2].split()
    # group, session and foreground group
    assert status[2] == status[3] == status[5] == str(answer["pid"])
    desk.type("lf\r")
    desk.client.request("signal", signal="USR1", to="session")
    desk.expect(rf"(?s)'touch {stray}.*'half")


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_snapshot_loses_no_typed_input(window: Callable[..., Window], travel: Travel) -> None:
    there = window("python3", "-I", "-S", "-c", READER)
    there.expect("ready")
    there.type("go\rwhole line\r\x16\x03h")
    there.expect("'whole line")
    for _ in range(2):
        travel.criuctl("dump", there.pid, "--name", "snap", "--leave-running")
    there.type("alf\r")
    there.expect(r"'\\x03half\\n'")
    assert "go" not in there.seen  # nothing was echoed again
    travel.back("snap", "--as", "copy")
    desk = travel.desk("copy")
    desk.type("opied\r")
    desk.expect(r"'\\x03hopied\\n'")
    there.type("still here\r")
    there.expect("'still here")


@pytest.mark.crash
@pytest.mark.parametrize("step", ["frozen", "collect", "commit", "kill"])
def test_kill_9_loses_nothing_that_was_typed(
    window: Callable[..., Window], travel: Travel, step: str
) -> None:
    """criuctl is killed in the middle of a dump: the program goes on and reads the whole line."""
    there = window("python3", "-I", "-S", "-c", READER)
    there.expect("ready")
    there.type("go\rhalf-")
    there.expect("half-")
    with paused(travel.criuctl, step, "dump", there.pid, "--name", "hit") as held:
        held.kill()
    held.wait_settled()
    assert start_time(there.pid) == there.process.start_time
    there.type("typed\r")
    there.expect("'half-typed")


def test_a_window_that_is_closed_already(window: Callable[..., Window], travel: Travel) -> None:
    """A program that ignored the hang-up keeps a dead terminal, here and there; it needs no
    holder.
    """
    file = travel.criuctl.home.path / "lives"
    program = (
        "import signal, time\nsignal.signal(1, signal.SIG_IGN)\nprint('ready', flush=True)\nf = "
        f"open('{file}', 'w')\n"
    )
    there = window(
        "python3",
        "-I",
        "-S",
        "-c",
        program + "while True: f.write('x'); f.flush(); time.sleep(0.02)",
    )
    there.expect("ready")
    os.close(there.master)
    there.master = os.open("/dev/null", os.O_RDWR)
    wait_until(file.exists, TIMEOUT, "it lives on")
    report = travel.criuctl("dump", there.pid, "--name", "orphan")
    assert [t["master"] for t in report["terminals"]] == ["gone"]
    size = file.stat().st_size
    master, slave = os.openpty()  # takes its number, so it comes back under another one
    answer = travel.back("orphan")
    os.close(master)
    os.close(slave)
    wait_until(lambda: file.stat().st_size > size, TIMEOUT, "it lives on there")
    assert os.readlink(f"/proc/{answer['pid']}/fd/0").endswith("(deleted)")
    assert state_of(travel.holders.config, "orphan") is None
    os.kill(answer["pid"], signal.SIGKILL)


CLOSED = """
import termios
master, slave = os.openpty()
r, w = os.pipe()
if os.fork() == 0:
    os.close(READY)
    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for fd in (master, slave, r, w):
        os.close(fd)
    sleep()
os.close(w)
os.read(r, 1)
os.close(slave)
os.write(master, b"half")
"""


def test_input_of_a_terminal_inside_that_no_process_has_open(
    criuctl: Criuctl, tmp_path: Path
) -> None:
    """It controls a session and no more: no process could read that, and the tree comes back
    without it.
    """
    with running(CLOSED, tmp_path) as program:
        report = criuctl("dump", program.pid, "--name", "closed")
    (terminal,) = report["terminals"]
    assert (terminal["master"], terminal["queued"], terminal["holders"]) == ("inside", 4, [])
    assert criuctl("restore", "closed")["session"] == "closed"
    assert criuctl("kill", "closed")["killed"] == 2


# A number above those in use: the kernel gives the lowest free one, and others open terminals, too.
NAMED = """
below = [fd for _ in range(10) for fd in os.openpty()]
master, slave = os.openpty()
for fd in below:
    os.close(fd)
os.symlink(os.ttyname(slave), sys.argv[1])
"""


@pytest.mark.parametrize("taken", [False, True])
def test_a_terminal_inside_whose_number_is_taken_is_reported(
    taken: bool, criuctl: Criuctl, tmp_path: Path
) -> None:
    """What the program has noted of its name, a link to it, is another's then: socat writes such
    links.
    """
    link = tmp_path / "link"
    with running(NAMED.replace("sys.argv[1]", repr(str(link))), tmp_path) as program:
        criuctl("dump", program.pid, "--name", "named")
    taker: list[int] = []
    try:
        while taken and not link.exists():
            taker += os.openpty()
        report = criuctl("restore", "named")
        warned = [
            text for text in report["warnings"] if f"{os.readlink(link)} is /dev/pts/" in text
        ]
        assert len(warned) == taken
    finally:
        for fd in taker:
            os.close(fd)
    criuctl("kill", "named")
