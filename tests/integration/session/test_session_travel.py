"""Sessions dumped and restored in the middle of real work: what was typed, the jobs, the screen, the status at the end."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
from support.command import Criuctl
from support.holding import TIMEOUT, Holders
from support.travel import Desk, Travel

pytestmark = pytest.mark.integration

ECHO_LINE = ("python3", "-I", "-S", "-u", "-c", "print('ready')\nwhile True: print(repr(input()))")


@pytest.fixture
def travel(criuctl: Criuctl, holders: Holders) -> Iterator[Travel]:
    travel = Travel(criuctl, holders)
    yield travel
    travel.close()


def bash(desk: Desk) -> None:
    """A job in the background, one that is stopped, a variable, and a half-typed line for a third that reads."""
    desk.type("X=41; sleep 1000 &\r")
    desk.expect(r"\[1\] \d+")
    desk.type("cat\r")
    desk.expect("cat\r\n")
    desk.type("in-cat\r")
    desk.expect("in-cat\r\nin-cat\r\n")
    desk.type("\x1a")
    desk.expect(r"\[2\]\+  Stopped +cat")
    desk.type("""python3 -c 'print("re" + "ady"); print(repr(input()))'\r""")
    desk.expect("ready\r\n")
    desk.type("half-")
    desk.expect("half-")


def bash_goes_on(desk: Desk) -> None:
    desk.type("typed\r")
    desk.expect("'half-typed'")
    desk.type("jobs; echo X=$((X + 1)); stty size\r")
    desk.expect(r"(?s)\[1\]. +Running +sleep 1000.*\[2\]\+ +Stopped +cat.*X=42.*31 99")
    desk.type("fg\r")
    desk.expect(r"(?s)fg\r\n.*cat\r\n")
    desk.type("again\r")
    desk.expect("again\r\nagain\r\n")
    desk.type("\x03")
    desk.expect(r"\^C")
    desk.type("kill %1; wait; echo over\r")
    desk.expect("over\r\n")


def zsh(desk: Desk) -> None:
    desk.type("X=41; sleep 1000 &\r")
    desk.expect(r"\[1\] \d+")
    desk.type("echo $((X +")  # zle reads in raw mode: it has these already
    desk.expect(r"X \+")


def zsh_goes_on(desk: Desk) -> None:
    desk.type(" 1)) is it\r")
    desk.expect("42 is it\r")
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


def tmux(desk: Desk) -> None:
    desk.expect(r"[#$] ")
    desk.type("Y=41; echo in-$((Y + 1))\r")
    desk.expect("in-42")
    desk.type("echo half")
    desk.expect("half")


def tmux_goes_on(desk: Desk) -> None:
    desk.type("-typed $((Y + 2))\r")
    desk.expect("half-typed 43")
    desk.type("exit\r")
    desk.expect(r"\[exited\]")


PASSWORD = (
    "import getpass, sys, termios\np = getpass.getpass()\nprint((p, bool(termios.tcgetattr(0)[3] & termios.ECHO)))\ninput()"
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
PROGRAMS: dict[str, tuple[tuple[str, ...], Callable[[Desk], None], Callable[[Desk], None]]] = {
    "bash": (("bash", "--norc", "--noprofile"), bash, bash_goes_on),
    "zsh": (("zsh", "-f"), zsh, zsh_goes_on),
    "repl": (("python3", "-I", "-q"), repl, repl_goes_on),
    "vim": (("vim", "-u", "NONE", "-i", "NONE", "-n", "FOLDER/text"), vim, vim_goes_on),
    "less": (("sh", "-c", "seq -f 'line %g' 999 | less"), less, less_goes_on),
    "top": (("top", "-d", "100"), top, top_goes_on),
    "password": (("python3", "-I", "-S", "-c", PASSWORD), password, password_goes_on),
    "raw": (("python3", "-I", "-S", "-c", RAW), raw, raw_goes_on),
    "tmux": (("tmux", "-L", "TOKEN", "-f", "/dev/null", "new-session", "bash --norc --noprofile"), tmux, tmux_goes_on),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_real_programs_go_on_where_they_were(travel: Travel, name: str) -> None:
    argv, before, after = PROGRAMS[name]
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not installed")
    home = travel.criuctl.home
    words = [word.replace("FOLDER", str(home.path)).replace("TOKEN", home.token) for word in argv]
    desk = travel.start(*words)
    before(desk)
    offset = desk.client.status()["offset"]
    travel.away()
    assert desk.client.wait_state("checkpointed", timeout=TIMEOUT) == "checkpointed"
    told = travel.back()
    status = desk.client.status()
    assert (status["state"], status["pid"], status["incarnation"]) == ("running", told["pid"], 2)
    assert status["offset"] >= offset
    after(desk)
