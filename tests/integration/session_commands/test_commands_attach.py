"""`run` and `attach` on real terminals: coming, going, several at once; who stands still or is
killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pexpect
import psutil
import pytest
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators, ended, literally, pid_of

from criuctl.session.screen.screen import Screen

pytestmark = pytest.mark.integration
BASH = ("bash", "--norc", "--noprofile")


def test_run_ends_with_the_exit_code_of_the_session_and_prints_what_it_prints(
    operators: Operators,
) -> None:
    window = operators.window(
        "run",
        "--",
        "sh",
        "-c",
        "tty; stty size; printf 'x%sy\\n' \"$CRIUCTL_SESSION\"; exit 7",
        rows=31,
    )
    window.expect(rb"/dev/pts/\d+\r\n31 80\r\nxshy\r\n")
    assert ended(window) == 7
    (session,) = operators("ls")
    assert (session["session"], session["state"], session["exit_code"]) == ("sh", "exited", 7)


def test_detaching_and_coming_back(operators: Operators) -> None:
    window = operators.window("run", "--name", "work", "--", *BASH)
    window.expect(literally("$"))
    window.send(b"echo $((41+1)); stty size\r")
    window.expect(rb"42\r\n24 80\r\n[^\n]*\$ ")
    # In a paste the detach key is text, however the reads fall.
    for piece in (b"\x1b[20", b"0~echo pas", b"ted\x16\x1d", b"-here\x1b[2", b"01~\r"):
        window.send(piece)
    window.expect(rb"pasted.{0,40}-here\r\n")
    window.setwinsize(40, 100)
    wait_until(
        lambda: operators("status", "work")["rows"] == 40,
        TIMEOUT,
        "the session has the window's size",
    )
    operators("wait", "work", "--prompt", "--timeout", TIMEOUT)
    window.send(b"stty size\r")
    window.expect(rb"40 100\r\n")
    window.send(b"\x1d")
    window.expect(rb"detached from work")
    assert ended(window) == 0
    # Back: what was on the screen is drawn, and the session's window is ours.
    window = operators.window("attach", "work", rows=24, columns=90)
    window.expect(rb"40 100")
    window.send(b"clear; stty size\r")
    window.expect(
        rb"24 90(\r\n|\x1b\[2;1H)"
    )  # as it is printed, or in a screen that is drawn again
    window.send(b"exit 9\r")
    assert ended(window) == 9


def test_the_first_attach_names_the_detach_key(operators: Operators) -> None:
    named = rb"Ctrl-\] leaves work running"
    window = operators.window("run", "--name", "work", "--", *BASH)
    window.expect(named + rb"\]\r\n[^\n]*\$ ")  # before the session's own output
    window.send(b"\x1d")
    assert ended(window) == 0
    window = operators.window("attach", "work", env={"CRIUCTL_OPERATOR": "second"})
    window.expect(rb"\x1b\[24;1H[^\n]*" + named)  # not over the prompt in the first line
    window.send(b"\x1d")
    assert ended(window) == 0
    window = operators.window("attach", "work", env={"CRIUCTL_OPERATOR": "second"})
    window.expect(literally("$"))
    window.send(b"printf '\\033[?1049h\\033[Hfull'; read\r")
    window.expect(rb"full")
    window.send(b"\x1d")
    window.expect(rb"detached from work")
    assert ended(window) == 0
    assert not re.search(named, window.before or b"")
    third = operators.window("attach", "work", env={"CRIUCTL_OPERATOR": "third"})
    third.expect(rb"full")  # not over a full-screen program
    third.send(b"\x1d")
    third.expect(rb"detached from work")
    assert not re.search(named, third.before or b"")


def test_no_session_is_shown_within_itself(operators: Operators) -> None:
    """Neither directly nor in a circle through others, however many; `CRIUCTL_NESTED` overrides."""
    program = f"{sys.executable} -m criuctl"
    for name in ("one", "two", "three"):
        operators.shell(name)

    def attach(inside: str, target: str, more: str = "") -> None:
        text = f"clear; {more} {program} attach {target}"
        operators("send", inside, "--text", text, "--enter")

    def shows(name: str, pattern: str) -> None:
        operators("wait", name, "--match", pattern, "--timeout", TIMEOUT)

    attach("one", "one")
    shows("one", "inside session 'one'")
    for outer, inner in (("one", "two"), ("two", "three")):
        attach(outer, inner)
        wait_until(
            lambda inner=inner: any(
                o.get("within") for o in operators("status", inner)["operators"]
            ),
            TIMEOUT,
            f"{inner} is shown in {outer}",
        )
    attach("three", "two")
    shows("three", "'three', which is shown in 'two'")
    operators("wait", "three", "--prompt", "--timeout", TIMEOUT)
    attach("three", "one")
    shows("three", "'three', which is shown in 'one'")
    operators("wait", "three", "--prompt", "--timeout", TIMEOUT)
    # A terminal outside, and one inside of another session, are no circle.
    window = operators.window("attach", "one", "--read-only")
    window.expect(rb"which is shown in 'one'")
    attach("three", "three", "CRIUCTL_NESTED=1")
    wait_until(
        lambda: len(operators("status", "three")["operators"]) >= 2,
        TIMEOUT,
        "the override is obeyed",
    )


def test_the_clipboard_is_for_those_who_may_write(operators: Operators) -> None:
    """Also while roles change, and for what `capture --follow --ansi` shows."""
    operators.shell("work")
    copies = r"printf '\033]52;c;%s\007copied-%s\n' "

    def window(*more: str, **env: str) -> pexpect.spawn[bytes]:
        found = operators.window("attach", "work", *more, env=env)
        found.expect(literally("$"))
        return found

    writer, watcher = window(), window("--read-only")
    limited = window(CRIUCTL_OPERATOR="limited")
    everything = window("--read-only", CRIUCTL_CLIPBOARD="all")
    nothing = window(CRIUCTL_CLIPBOARD="none", CRIUCTL_OPERATOR="careful")
    follow = operators.window("capture", "work", "--follow", "--ansi", "--since", "0")

    def copied(number: int) -> list[bool]:
        line = f"{copies}QUJD{number} {number}"
        operators("send", "work", "--text", line, "--enter")
        shown = []
        for terminal in (writer, limited, everything, watcher, nothing, follow):
            terminal.expect(rb"copied-%d\r+\n" % number)
            shown.append(b"\x1b]52;c;QUJD%d\x07" % number in (terminal.before or b""))
        return shown

    assert copied(1) == [True, True, True, False, False, False]
    operators("role", "work", "human:limited", "observe")
    assert copied(2) == [True, False, True, False, False, False]
    operators("role", "work", "human:limited", "write")
    assert copied(3) == [True, True, True, False, False, False]


def test_without_a_terminal_nothing_is_typed(operators: Operators) -> None:
    """The end of standard input would be typed as ^D, which ends a shell."""
    operators("run", "-d", "--name", "work", "--", "cat")
    for given in (b"", b"typed\n"):
        done = subprocess.run(
            [sys.executable, "-m", "criuctl", "attach", "work"],
            env=operators.environment(),
            input=given,
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert done.returncode == 2
        assert b"capture work --follow" in done.stderr and b"send work" in done.stderr
    assert operators("status", "work")["offset"] == 0


def test_what_is_shown_goes_to_a_full_disk(operators: Operators) -> None:
    """It is not criuctl's own files that have no room."""
    operators(
        "run", "-d", "--name", "work", "--", "sh", "-c", "while sleep 0.05; do echo more; done"
    )
    argv = [sys.executable, "-m", "criuctl", "attach", "work", "--read-only"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            argv,
            env=operators.environment(),
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT,
            check=False,
        )
    assert done.returncode == 1 and b"could not be written: No space left" in done.stderr


def test_attach_starts_a_session_that_is_not_there_and_finds_one_that_is(
    operators: Operators,
) -> None:
    assert ended(operators.window("attach", "work")) == 3
    first = operators.window("attach", "work", "--", *BASH)
    first.expect(literally("$"))
    first.send(b"marker=same; clear\r")
    second = operators.window("attach", "work", "--", "false")
    second.expect(literally("$"))
    first.send(b"echo $marker\r")
    first.expect(rb"same\r\n")
    second.expect(rb"same\r\n")


def test_one_writes_at_a_time(operators: Operators) -> None:
    operators.shell("work")
    first = operators.window("attach", "work", "--take")
    first.expect(literally("$"))
    second = operators.window("attach", "work", env={"CRIUCTL_OPERATOR": "second"})
    second.expect(rb"tester \(human\) writes in work")
    watcher = operators.window("attach", "work", "--read-only", rows=10, columns=20)
    watcher.expect(literally("$"))
    second.send(b"x")
    second.expect(rb"not typed")
    watcher.send(b"echo never\r")
    first.send(b"echo one two | tr a-z A-Z; stty size\r")
    for window in (first, second):
        window.expect(rb"ONE TWO\r\n24 80\r\n")  # nor did another window change the size
    watcher.expect(rb"ONE TWO[^\n]*24 80")  # drawn, because that window is smaller
    taker = operators.window("attach", "work", "--take", rows=33)
    taker.expect(rb"ONE TWO")
    taker.send(b"echo taken | tr a-z A-Z; stty size\r")
    first.expect(rb"TAKEN[^\n]*33 80")
    first.send(b"y")
    first.expect(rb"not typed")
    taker.send(b"\x1d")
    assert ended(taker) == 0
    first.send(b"echo again | tr a-z A-Z\r")  # the lease is free: who types has it
    first.expect(rb"AGAIN")
    assert "never" not in operators("capture", "work")["lines"]
    lease = operators("status", "work")["lease"]
    assert (lease["name"], lease["kind"]) == ("tester", "human")


def test_a_full_screen_program_is_drawn_again_and_left_behind_clean(
    operators: Operators, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("".join(f"line {n} of the text\n" for n in range(1, 200)))
    operators(
        "run",
        "-d",
        "--name",
        "edit",
        "--",
        "vim",
        "-u",
        "NONE",
        "-N",
        "--cmd",
        "set mouse=a ruler",
        text,
    )
    operators("wait", "edit", "--match", "line 5 of", "--since", 0, "--timeout", TIMEOUT)
    at = operators("send", "edit", "--text", "17G5lihalf", "--keys", "Escape", "--text", "i")[
        "offset"
    ]
    operators("wait", "edit", "--match", "17,", "--since", at, "--timeout", TIMEOUT)

    def inserting() -> Any:
        """The screen once vim has read all of it, and inserts for the second time."""
        shown = operators("capture", "edit")
        cursor = (shown["cursor"]["row"], shown["cursor"]["column"])
        return (
            shown if cursor == (16, 8) and re.search(r"INSERT.*17,9", shown["lines"][-1]) else None
        )

    wait_until(inserting, TIMEOUT, "vim is in its insert mode again")
    operators("wait", "edit", "--idle", "0.3", "--timeout", TIMEOUT)
    shown = inserting()
    assert shown["alternate"] and shown["lines"][16] == "line half17 of the text"

    window = operators.window("attach", "edit", "--read-only")
    window.expect(rb"\x1b\[\?100[02]h.*\x1b\[17;9H")
    drawn = Screen(80, 24)
    drawn.feed((window.before or b"") + (window.after if isinstance(window.after, bytes) else b""))
    assert drawn.alternate and [line.rstrip() for line in drawn.text()] == shown["lines"]
    assert (drawn.cursor.y, drawn.cursor.x) == (16, 8)
    window.send(b"\x1d")
    window.expect(rb"\x1b\[\?1049l")
    window.expect(rb"\x1b\[\?1000l.*\x1b\[\?25h")
    assert ended(window) == 0


def test_a_stopped_client_blocks_no_other(operators: Operators) -> None:
    operators.shell("work")
    window = operators.window("attach", "work")
    window.expect(literally("$"))
    os.kill(pid_of(window), signal.SIGSTOP)
    at = operators(
        "send",
        "work",
        "--take",
        "--text",
        "yes 0123456789abcdef | head -c 100M; echo; echo do''ne",
        "--enter",
    )["offset"]
    operators("wait", "work", "--match", "^done$", "--since", at, "--timeout", 300, timeout=330)
    assert operators("status", "work")["offset"] > at + (100 << 20)
    os.kill(pid_of(window), signal.SIGCONT)
    # What it missed is skipped; what is shown at last is the screen as it is.
    window.expect(rb"done")
    window.send(b"\x1d")
    window.expect(rb"detached")


def test_killed_clients_leave_the_session_alone(operators: Operators) -> None:
    ticking = "i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.02; done"
    operators("run", "-d", "--name", "tick", "--", "sh", "-c", ticking)
    for _ in range(5):
        window = operators.window("attach", "tick")
        window.expect(rb"tick \d+\r\n")
        os.kill(pid_of(window), signal.SIGKILL)
        window.wait()
    operators("wait", "tick", "--match", r"tick \d+")
    assert operators("status", "tick")["state"] == "running"
    wait_until(
        lambda: not operators("status", "tick")["lease"], TIMEOUT, "the lease of the killed is free"
    )
    ticks = [
        int(n)
        for n in re.findall(
            r"tick (\d+)", "\n".join(operators("capture", "tick", "--scrollback")["lines"])
        )
    ]
    assert ticks == list(range(1, len(ticks) + 1)) and len(ticks) > 5


def test_without_a_terminal_the_streams_are_used_as_they_are(operators: Operators) -> None:
    # standard input is /dev/null
    answer = operators.text("run", "--", "sh", "-c", "cat; echo end", code=0)
    assert answer.replace("\r", "") == "end\n"


def test_a_session_on_another_host_by_ssh(operators: Operators, tmp_path: Path) -> None:
    """The system's ssh is a stand-in here that runs the command at once: what is tested is what we
    carry over it.
    """
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nfor last; do :; done\nexec sh -c "$last"\n'
    )
    program = tmp_path / "criuctl"
    lines = [
        f"export {key}={value!r}"
        for key, value in operators.environment().items()
        if key.startswith("CRIUCTL_")
    ]
    program.write_text(
        "\n".join(
            [
                "#!/bin/sh",
                *lines,
                f'PYTHONPATH={Path.cwd()} exec {sys.executable} -m criuctl "$@"',
                "",
            ]
        )
    )
    for path in (ssh, program):
        path.chmod(0o755)
    operators.shell("work")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    window = operators.window("attach", "ssh://me@far.example:2222/work", env=env)
    window.expect(literally("$"))
    window.send(b"echo far | tr a-z A-Z\r")
    window.expect(rb"FAR\r\n")
    # The connection breaks: it is made again, as the same operator, and nothing of the output is
    # missing.
    before = operators("status", "work")["lease"]["operator"]
    (link,) = psutil.Process(pid_of(window)).children()
    at = operators("status", "work")["offset"]
    window.send(b"sleep 0.3; echo still | tr a-z A-Z\r")
    wait_until(
        lambda: "sleep" in "".join(operators("capture", "work", "--since", at)["lines"]),
        TIMEOUT,
        "the shell has read it",
    )
    link.kill()
    window.expect(rb"STILL\r\n")
    window.send(b"echo back | tr a-z A-Z\r")
    window.expect(rb"BACK\r\n")
    assert operators("status", "work")["lease"]["operator"] == before
    window.send(b"exit 6\r")
    assert ended(window) == 6
    assert (
        "-p 2222 -- me@far.example criuctl attach --stdio work" in (tmp_path / "calls").read_text()
    )
    assert ended(operators.window("attach", "ssh://far/none", env=env)) == 3


def test_a_smaller_window_shows_the_part_around_the_cursor(operators: Operators) -> None:
    program = r"""
        stty -echo; printf '\033[2J\033[Htop left\033[2;100Htop right\033[34;101Hbottom right'
        read line; printf '\033[1;3H'
        read line; printf '\033[34;110Hend'
        read line
    """
    writer = operators.window(
        "run", "--name", "wide", "--", "sh", "-c", program, rows=34, columns=120
    )
    writer.expect(rb"bottom right")
    window, drawn = operators.window("attach", "wide", "--read-only"), Screen(80, 24)

    def shows(text: str, row: int, column: int) -> bool:
        with contextlib.suppress(pexpect.TIMEOUT):
            drawn.feed(window.read_nonblocking(65536, timeout=0.1))
        return drawn.text()[row][column:].startswith(text)

    wait_until(lambda: shows("bottom right", 23, 67), TIMEOUT, "the part with the cursor")
    assert not any("top" in line for line in drawn.text())
    assert (drawn.cursor.y, drawn.cursor.x) == (23, 79)
    writer.send(b"\r")
    wait_until(
        lambda: shows("top left", 0, 0), TIMEOUT, "the part with the cursor, which went home"
    )
    assert not any("right" in line for line in drawn.text())
    # A window that is large enough shows all of it, and a writer's window is the session's size.
    window.setwinsize(34, 120)
    drawn = Screen(120, 34)
    wait_until(lambda: shows("top right", 1, 99), TIMEOUT, "all of it")
    window.setwinsize(24, 80)
    drawn = Screen(80, 24)
    wait_until(lambda: shows("top left", 0, 0), TIMEOUT, "a part again")
    writer.setwinsize(24, 80)
    wait_until(lambda: operators("status", "wide")["cols"] == 80, TIMEOUT, "the new size")
    writer.send(b"\r\r")
    assert ended(writer) == 0 and ended(window) == 0


def test_what_a_program_changed_comes_back_and_is_undone_again(operators: Operators) -> None:
    """Kitty's keyboard modes, colours, synchronized output, links; printed before the attach."""
    program = r"""
        printf '\033]11;#102030\007\033[?1049h\033[>5u\033[?2004h\033]8;;http://a.example/\007link'
        printf '\033]8;;\007 \033[4:3;38;5;200mcurly\033[m \033[?2026hready'
        exec cat
    """
    operators("run", "-d", "--name", "work", "--", "sh", "-c", program)
    operators("wait", "work", "--match", "ready", "--since", 0, "--timeout", TIMEOUT)
    window = operators.window("attach", "work")
    window.expect(literally("\x1b]11;#102030\x1b\\"))
    window.expect(literally("\x1b[?2004h\x1b[>5u"))
    window.expect(literally("\x1b]8;;http://a.example/\x1b\\link\x1b]8;;\x1b\\"))
    window.expect(literally("\x1b[0;4:3;38;5;200mcurly\x1b[m ready"))
    window.send(b"\x1d")
    window.expect(literally("\x1b[<64u\x1b[=0u\x1b[?1049l\x1b[<64u\x1b[=0u\x1b]111\x1b\\"))
    window.expect(literally("\x1b[?2026l"))
    window.expect(literally("\x1b[?2004l"))
    assert ended(window) == 0
