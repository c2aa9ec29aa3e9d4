"""Sessions dumped and restored in the middle of real work: what was typed, the jobs, the screen,
the status at the end.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command import Criuctl
from support.holding import TIMEOUT, Holders, until
from support.hooking import HookFolder
from support.keeper import wait_until
from support.pauses import paused
from support.travel import Desk, Travel

from criuctl.session.screen.replay import replay
from criuctl.session.sessions import state_of

pytestmark = pytest.mark.integration

ECHO_LINE = ("python3", "-I", "-S", "-u", "-c", "print('ready')\nwhile True: print(repr(input()))")


@pytest.fixture
def travel(criuctl: Criuctl, holders: Holders) -> Iterator[Travel]:
    travel = Travel(criuctl, holders)
    yield travel
    travel.close()


def bash(desk: Desk) -> None:
    """A job in the background, one that is stopped, a variable, and a half-typed line for a third
    that reads.
    """
    desk.expect(r"\$ ")
    desk.type("X=41; sleep 1000 &\r")
    desk.expect(r"(?s)\[1\] \d+.*\$ ")
    desk.type("cat\r")
    desk.expect("cat\r\n")
    desk.cooked()
    desk.type("in-cat\r")
    desk.expect("in-cat\r\nin-cat\r\n")
    desk.type("\x1a")
    desk.expect(r"(?s)\[2\]\+  Stopped +cat.*\$ ")
    desk.type("""python3 -c 'print("re" + "ady"); print(repr(input()))'\r""")
    desk.expect("ready\r\n")
    desk.cooked()
    desk.type("half-")
    desk.expect("half-")


def bash_goes_on(desk: Desk) -> None:
    desk.type("typed\r")
    desk.expect(r"(?s)'half-typed'.*\$ ")
    desk.type("jobs; echo X=$((X + 1)); stty size\r")
    desk.expect(r"(?s)\[1\]. +Running +sleep 1000.*\[2\]\+ +Stopped +cat.*X=42.*31 99.*\$ ")
    desk.type("fg\r")
    desk.expect(r"(?s)fg\r\n.*cat\r\n")
    desk.cooked()
    desk.type("again\r")
    desk.expect("again\r\nagain\r\n")
    desk.type("\x03")
    desk.expect(r"(?s)\^C.*\$ ")
    desk.type("kill %1; wait; echo over\r")
    desk.expect("over\r\n")


def zsh(desk: Desk) -> None:
    desk.expect(r"\$ ")
    desk.type("X=41; sleep 1000 &\r")
    desk.expect(r"(?s)\[1\] \d+.*\$ ")
    desk.type("echo $((X +")  # zle reads in raw mode: it has these already
    desk.expect(r"X \+")


def zsh_goes_on(desk: Desk) -> None:
    desk.type(" 1)) is it\r")
    desk.expect(r"(?s)42 is it\r.*\$ ")
    desk.type("jobs; kill %1\r")
    desk.expect(r"\[1\]  \+ running +sleep 1000")


def repl(desk: Desk) -> None:
    desk.expect(">>> ")
    desk.type("answer = 41\r")
    desk.expect(">>> ")
    desk.type("print(answer + ")
    desk.expect(r"answer \+ ")


def repl_goes_on(desk: Desk) -> None:
    desk.type("1)\r")
    desk.expect("42\r\n")


def vim(desk: Desk) -> None:
    desk.expect(r"\x1b\[\?1049h")
    desk.expect("New")
    desk.type("ifirst line")
    desk.expect("first line")
    assert desk.client.status()["modes"]["alternate"]


def vim_goes_on(desk: Desk) -> None:
    assert desk.client.status()["modes"]["alternate"]
    desk.type(", more\x1b:w\r")
    desk.expect("written")
    desk.type(":q\r")
    assert desk.client.wait_exit(TIMEOUT)["exit_code"] == 0


def less(desk: Desk) -> None:
    desk.expect("line 28")
    desk.type("/line 500\r")
    desk.expect("line 520")


def less_goes_on(desk: Desk) -> None:
    desk.type("G")
    desk.expect("line 999")
    desk.type("q")
    assert desk.client.wait_exit(TIMEOUT)["exit_code"] == 0


def top(desk: Desk) -> None:
    desk.expect("COMMAND")


def top_goes_on(desk: Desk) -> None:
    desk.type(" ")
    desk.expect("(?s)load average")
    desk.type("q")
    assert desk.client.wait_exit(TIMEOUT)["exit_code"] == 0


def password(desk: Desk) -> None:
    desk.expect("Password: ")
    desk.type("secr")


def password_goes_on(desk: Desk) -> None:
    desk.type("et\r")
    desk.expect(r"\('secret', True\)")
    assert "secr" not in desk.log().replace("('secret', True)", "")


def raw(desk: Desk) -> None:
    """The program sleeps and does not read: three keys wait in the raw queue."""
    desk.expect("ready")
    desk.type("a\r\x03")


def raw_goes_on(desk: Desk) -> None:
    desk.client.request("signal", signal="USR1", to="session")
    desk.expect(r"got b'a\\r\\x03'")


def signalled(desk: Desk) -> None:
    desk.expect("ready")
    desk.type("before\r")
    desk.expect(r"told of b'before\\n'")


def signalled_goes_on(desk: Desk) -> None:
    desk.type("after\r")
    desk.expect(r"told of b'after\\n'")


def tmux(desk: Desk) -> None:
    desk.expect(r"[#$] ")
    desk.type("Y=41; echo in-$((Y + 1))\r")
    desk.expect("in-42")
    # reads lines: tmux's own terminal inside holds what is typed
    desk.type("echo re''ading; cat\r")
    desk.expect("reading\r\n")  # so bash has given the terminal inside back
    desk.type("whole\r")
    # in between tmux may write the program's name into its status line
    desk.expect(r"(?s)whole\r\n.*whole\r\n")
    desk.type("half-")
    desk.expect("half-")


def tmux_goes_on(desk: Desk) -> None:
    desk.type("typed\r")
    desk.expect(r"(?s)typed\r\n.*half-typed\r\n")
    desk.type("\x04")
    desk.expect(r"[#$] ")
    desk.type("echo $((Y + 2)); exit\r")
    desk.expect(r"(?s)43.*\[exited\]")


PASSWORD = (
    "import getpass, sys, termios\np = getpass.getpass()\nprint((p, bool(termios.tcgetattr(0)[3] "
    "& termios.ECHO)))\ninput()"
)
RAW = """
import os, signal, tty
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
tty.setraw(0)
os.write(1, b"ready")
signal.sigwait([signal.SIGUSR1])
os.write(1, b"got %r" % os.read(0, 100))
os.read(0, 1)
"""
# Opens a terminal of its own, which controls two processes, and the session's, many times; a signal
# tells what is typed.
SIGNALLED = """
import fcntl, os, pty, select, signal
inside = os.ttyname(pty.openpty()[1])
for name, times in (("/dev/tty", 58), (inside, 40)):
    held = [os.open(name, os.O_RDWR | os.O_NOCTTY) for _ in range(times)]
if os.fork() == 0:
    os.setsid()
    os.open(inside, os.O_RDWR)
    os.fork()
    signal.pause()
def handler(number, frame):  # which may be in the middle of itself: such signals queue
    if select.select([0], [], [], 0)[0]:
        os.write(1, b"told of %r\\n" % os.read(0, 100))
signal.signal(signal.SIGRTMIN, handler)
fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
fcntl.fcntl(0, 10, signal.SIGRTMIN)
fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
print("ready", flush=True)
while True:
    signal.pause()
"""
PROGRAMS: dict[str, tuple[tuple[str, ...], Callable[[Desk], None], Callable[[Desk], None]]] = {
    "bash": (("bash", "--norc", "--noprofile"), bash, bash_goes_on),
    "zsh": (("zsh", "-f"), zsh, zsh_goes_on),
    "repl": (("python3", "-I", "-q"), repl, repl_goes_on),
    "vim": (("vim", "-u", "NONE", "-i", "NONE", "-n", "FOLDER/text"), vim, vim_goes_on),
    "less": (("sh", "-c", "seq -f 'line %g' 999 | less"), less, less_goes_on),
    "top": (("top", "-d", "100"), top, top_goes_on),
    "password": (("python3", "-I", "-S", "-c", PASSWORD), password, password_goes_on),
    "raw": (("python3", "-I", "-S", "-c", RAW), raw, raw_goes_on),
    "signalled": (("python3", "-I", "-S", "-c", SIGNALLED), signalled, signalled_goes_on),
    "tmux": (
        ("tmux", "-S", "FOLDER/tmux", "-f", "/dev/null", "new-session", "bash --norc --noprofile"),
        tmux,
        tmux_goes_on,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_real_programs_go_on_where_they_were(travel: Travel, name: str) -> None:
    argv, before, after = PROGRAMS[name]
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not installed")
    home = travel.criuctl.home
    words = [word.replace("FOLDER", str(home.path)) for word in argv]
    desk = travel.start(*words)
    before(desk)
    offset = desk.client.status()["offset"]
    travel.away()
    assert desk.client.wait_state("checkpointed", timeout=TIMEOUT) == "checkpointed"
    taken = [fd for _ in range(3) for fd in os.openpty()]  # terminals' numbers are others' now
    report = travel.back()
    for fd in taken:
        os.close(fd)
    status = desk.client.status()
    assert (status["state"], status["pid"], status["incarnation"]) == ("running", report["pid"], 2)
    assert status["offset"] >= offset
    after(desk)


def test_everything_of_a_session_comes_along(travel: Travel) -> None:
    """Twice: to the holder that waited, and to a new one, as on another host."""
    desk = travel.start("bash", "--norc", "--noprofile")
    started = travel.holders.started[-1]
    desk.client.set_role("agent", "bot", "observe")
    desk.expect(r"\$ ")
    desk.type(
        "ipcmk -M 4096 >/dev/null; (setsid sleep 1234 </dev/null >/dev/null 2>&1 &); cd /tmp; "
        "umask 027; ulimit -n 333\r"
    )
    desk.expect(r"333\r\n(?s:.*)\$ ")
    desk.type("echo scrollback-$((40 + 2)); bash --norc --noprofile\r")
    desk.expect("scrollback-42")
    desk.expect(r"\$ ")
    for incarnation in (2, 3):
        before = desk.client.status()
        desk.type("echo $((incarnation * 0 + 7))-half")
        desk.expect("-half")
        report = travel.away()
        assert report["processes"] == 4  # init, two shells, the daemon
        if incarnation == 3:
            desk.client.request("shutdown")
            travel.holders.gone(started)
        travel.back()
        if incarnation == 3:
            desk = Desk(travel.holders.connect())
        after = desk.client.status()
        assert (after["id"], after["incarnation"], after["state"]) == (
            before["id"],
            incarnation,
            "running",
        )
        assert after["base"] == before["base"] and after["offset"] >= before["offset"]
        assert after["command"] == ["bash", "--norc", "--noprofile"] and (
            after["rows"],
            after["cols"],
        ) == (31, 99)
        assert "scrollback-42" in desk.log()
        desk.type("-typed\r")
        desk.expect(r"7-half-typed\r\n(?s:.*)\$ ")
        desk.type(
            "ipcs -m | grep -c 4096; pgrep -f 'sleep 123[4]'; pwd; umask; ulimit -n; cat "
            "$CRIUCTL_SESSION_DIR/session.json\r"
        )
        found = desk.expect(
            r'(?s)[\r\n]1\r\n\d+\r\n/tmp\r\n0027\r\n333\r\n\{"session": "s".*"incarnation": (\d)'
        )
        assert int(found[1]) == incarnation
        desk.expect(r"\$ ")
    assert travel.holders.connect(kind="agent", operator="bot", role="admin").role == "observe"
    desk.type("sh -c 'echo runs-$((40 + 2)); exec sleep 100'\r")
    desk.expect("runs-42\r\n")
    desk.type("\x03")
    desk.expect(r"\$ ")
    desk.type("exit 3\r")
    desk.expect(r"\$ ")
    desk.type("exit 7\r")
    assert desk.client.wait_exit(TIMEOUT)["exit_code"] == 7


def test_with_the_pids_of_the_host(travel: Travel) -> None:
    desk = travel.start("bash", "--norc", "--noprofile", host_pids=True)
    desk.expect(r"\$ ")
    desk.type("echo pid-$$; (setsid sleep 1234 </dev/null >/dev/null 2>&1 &)\r")
    pid = desk.expect(r"pid-(\d+)\r\n(?s:.*)\$ ")[1]
    travel.away()
    assert travel.back()["pids"] == "same"
    desk.type("echo still-$$\r")
    desk.expect(rf"still-{pid}\r\n(?s:.*)\$ ")
    desk.type("kill -9 $$\r")
    ended = desk.client.wait_exit(TIMEOUT)
    assert (ended["exit_code"], ended["exit_signal"]) == (137, 9)


def test_a_snapshot_and_its_copy(travel: Travel) -> None:
    """The session goes on and never notices; the copy is a session of its own."""
    desk = travel.start(*ECHO_LINE)
    desk.expect("ready")
    desk.type("half-")
    desk.expect("half-")
    report = travel.away("s", "--leave-running")
    desk.type("typed\r")
    desk.expect("'half-typed'")
    assert [line for line in desk.client.audit() if line["what"].startswith("checkpoint")]
    travel.back(report["checkpoint"], "--as", "copy")
    copy = travel.desk("copy")
    assert "ready" in copy.log() and "half-typed" not in copy.log()
    copy.type("copied\r")
    copy.expect("'half-copied'")
    assert copy.client.status()["id"] != desk.client.status()["id"]
    desk.type("both\r")
    desk.expect("'both'")
    assert "copied" not in desk.log()


def test_the_kept_screen_of_a_full_screen_program_comes_along(travel: Travel) -> None:
    updates = "yes \"$(printf '\\033[5;5Hmore')\" | tr -d '\\n' | head -c 3M"
    program = f"printf '\\033[?1049h\\033[Hframe'; {updates}; printf '\\033[9;9Hready'; exec cat"
    desk = travel.start("sh", "-c", program)
    desk.expect("ready")

    def kept() -> dict[str, Any] | None:
        screen = desk.client.kept_screen()
        return screen if screen is not None and screen["offset"] > 2 << 20 else None

    before = wait_until(kept, TIMEOUT, "a screen is kept")
    travel.away()
    travel.back()
    client = travel.desk("s").client
    assert client.kept_screen() == before
    screen = replay(client, client.status())
    assert screen.alternate and screen.text()[0] == "frame" and screen.text()[8].endswith("ready")


COUNTING = """
import os, socket, sys
s = socket.socket(socket.AF_UNIX)
s.bind(sys.argv[1])
s.listen()
print("ready")
number = 0
while number < 3:
    number += 1
    s.accept()[0].send(b"%d" % number)
os.unlink(sys.argv[1])
"""


def _counted(path: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(TIMEOUT)
        client.connect(path)
        return client.recv(64)


def test_a_copy_of_a_server_of_a_unix_socket(travel: Travel, criuctl: Criuctl) -> None:
    """As of tmux, say: the copy has a path of its own, and does not remove the other one when it
    ends.
    """
    path = str(criuctl.home.path / "server.sock")
    desk = travel.start("python3", "-I", "-S", "-u", "-c", COUNTING, path)
    desk.expect("ready")
    report = travel.away("s", "--leave-running")
    copied = criuctl("restore", report["checkpoint"], "--as", "copy")
    travel.names.add("copy")
    (own,) = (f["own_copy"] for f in copied["files"])
    assert [_counted(path), _counted(own), _counted(path), _counted(own)] == [
        b"1",
        b"1",
        b"2",
        b"2",
    ]
    copy = travel.desk("copy")
    assert _counted(own) == b"3"
    copy.expect("Device or resource busy")
    assert _counted(path) == b"3"


@pytest.mark.slow
def test_twenty_times_there_and_back(travel: Travel) -> None:
    """One operator stays attached all the time: every byte once, every line whole."""
    desk = travel.start(*ECHO_LINE)
    desk.expect("ready\r\n")
    watcher = travel.holders.connect(operator="watcher", role="observe")
    watcher.attach("start")
    for cycle in range(20):
        desk.type(f"cycle-{cycle}-")
        desk.expect(f"cycle-{cycle}-")
        travel.away()
        travel.back()
        desk.type(f"{cycle * 7}\r")
        desk.expect(f"'cycle-{cycle}-{cycle * 7}'\r\n")
    assert desk.client.status()["incarnation"] == 21
    log = desk.log()
    assert until(watcher, lambda data: len(data) >= len(log))[1].decode() == log
    lines = [f"cycle-{n}-{n * 7}" for n in range(20)]
    assert log.replace("\r", "").splitlines() == [
        "ready",
        *(text for line in lines for text in (line, repr(line))),
    ]


def test_a_restore_that_fails_leaves_the_holder_waiting(travel: Travel) -> None:
    """And where none waited, none is left."""
    desk = travel.start(*ECHO_LINE)
    desk.expect("ready")
    checkpoint = travel.away()["checkpoint"]
    hooks = HookFolder(travel.criuctl.home.path / "hooks")
    veto = hooks.sh("post-restore", "veto", "exit 1")
    for ref in (("s",), (checkpoint, "--as", "copy")):
        assert travel.criuctl("restore", *ref, check=False)["exit_code"] == 10
    assert desk.client.status()["state"] == "checkpointed"
    state = state_of(travel.holders.config, "copy")
    assert state is None or not state["holder_alive"]
    veto.unlink()
    travel.back()
    desk.type("on\r")
    desk.expect("'on'")


@pytest.mark.crash
def test_a_restore_that_is_killed_leaves_no_holder(travel: Travel) -> None:
    """The one that it had started for the tree ends; the checkpoint is restored again as if nothing
    had been.
    """
    desk = travel.start(*ECHO_LINE)
    desk.expect("ready")
    travel.away()
    started = travel.holders.started[-1]
    desk.client.request("shutdown")
    travel.holders.gone(started)
    with paused(travel.criuctl, "post-restore", "restore", "s") as held:
        state = state_of(travel.holders.config, "s")
        assert state is not None and state["holder_alive"]
        held.kill()
        held.command.process.wait(TIMEOUT)
    wait_until(lambda: not _held(travel), TIMEOUT, "the holder has ended")
    travel.back()
    desk = travel.desk("s")
    desk.type("on\r")
    desk.expect("'on'")


def _held(travel: Travel) -> bool:
    state = state_of(travel.holders.config, "s")
    return state is not None and bool(state["holder_alive"])


def test_what_has_passed_of_time_limits_in_a_session_of_many_threads(
    travel: Travel, tmp_path: Path
) -> None:
    """Its threads are stopped twice for a dump: by the session's group, and by CRIU."""
    program = Path(__file__).parents[1] / "programs" / "limited.py"
    desk = travel.start(sys.executable, "-S", str(program), str(tmp_path), "20")
    wait_until((tmp_path / "ready").exists, TIMEOUT, "it is ready")
    init = desk.client.status()["pid"]

    def limits() -> list[int]:
        pid = Path(f"/proc/{init}/task/{init}/children").read_text().split()[0]
        calls = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/syscall")]
        return [int(words[3], 16) for words in calls if words[0] == "7"]

    wait_until(lambda: len(limits()) == 21, TIMEOUT, "all wait")
    before = limits()
    time.sleep(0.1)  # longer than the scheduler's clock is inexact
    travel.away("s", "--leave-running")
    assert max(limits()) < min(before)
