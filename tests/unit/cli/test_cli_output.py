"""What is printed while an operation runs: lines, JSON lines, bars on a real terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.program import clean_environment

PROVOKE = (sys.executable, str(Path(__file__).with_name("provoke.py")))
Run = Callable[..., subprocess.CompletedProcess[str]]


def test_plain_lines_are_warnings_and_under_v_steps_too(provoke: Run) -> None:
    plain, verbose = provoke("tell"), provoke("tell", "-v")
    assert plain.stdout == verbose.stdout == "done\n"
    assert plain.stderr == "criuctl: warning: odd \\x1b[2J thing\n  hint: look at it\n"
    assert "s  freezing  pid=7\n" in verbose.stderr
    assert plain.stderr in verbose.stderr


def test_quiet_tells_nothing_but_the_essential(provoke: Run) -> None:
    done = provoke("tell", "-q")
    assert (done.stdout, done.stderr) == ("d\n", "")


def test_json_is_alone_on_stdout_and_under_v_events_are_json_lines(provoke: Run) -> None:
    done = provoke("tell", "--json", "-v")
    assert json.loads(done.stdout) == {"done": True}
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert [e["event"] for e in events if e["event"] != "progress"] == ["step", "warning"]
    assert events[0]["facts"] == {"pid": 7}
    assert ("pages", 100 << 20) in [
        (e["name"], e["done"]) for e in events if e["event"] == "progress"
    ]
    last = next(e for e in events if e["event"] == "progress" and e["name"] == "upload")
    assert (last["name"], last["done"], last["total"], last["unit"]) == ("upload", 0, None, "bytes")


def on_a_terminal(
    *args: str, gate: Path | None = None, until: str = "", **env: str
) -> tuple[int, str]:
    """Run provoke.py with a terminal at all three streams; its exit code and all that the terminal
    got.

    Makes the file `gate` once the terminal has got `until`.
    """
    master, slave = pty.openpty()
    try:
        seen = b""
        environment = clean_environment(TERM="xterm", COLUMNS="80", **env)
        with subprocess.Popen(
            [*PROVOKE, *args], env=environment, stdin=slave, stdout=slave, stderr=slave
        ) as child:
            os.close(slave)
            while True:
                try:
                    chunk = os.read(master, 65536)
                except OSError:  # EIO: all is read and no process holds the other end
                    break
                seen += chunk
                if gate is not None and until.encode() in seen:
                    gate.touch()
    finally:
        os.close(master)
    return child.returncode, seen.decode()


def test_bars_on_a_terminal_are_drawn_and_taken_away(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    code, seen = on_a_terminal("tell", gate=gate, until="of 100 MiB", PROVOKE_GATE=str(gate))
    assert code == 0
    assert "freezing" in seen
    assert "memory read" in seen
    assert "50.0 MiB" in seen
    assert "odd \\x1b[2J thing" in seen
    assert "\x1b[2J" not in seen
    # Transient: the cursor is shown again, and what remains at the end is the result.
    assert seen.rindex("\x1b[?25h") > seen.rindex("memory read")
    assert seen.endswith("done\r\n")


def test_a_terminal_that_goes_away_does_not_fail_the_operation(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    master, slave = pty.openpty()
    environment = clean_environment(TERM="xterm", COLUMNS="80", PROVOKE_GATE=str(gate))
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*PROVOKE, "tell"], env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=slave
    ) as child:
        os.close(slave)
        seen = b""
        while b"of 100 MiB" not in seen:
            seen += os.read(master, 65536)
        os.close(master)
        gate.touch()
        assert child.stdout is not None
        assert child.stdout.read() == b"done\n"
    assert child.returncode == 0


@pytest.mark.parametrize("args", [("tell", "-q"), ("tell", "--json")])
def test_no_bars_when_none_are_wanted(args: tuple[str, ...]) -> None:
    code, seen = on_a_terminal(*args)
    assert code == 0
    assert "memory read" not in seen


def test_an_error_is_red_on_a_terminal_unless_no_color_is_set() -> None:
    assert "\x1b[31mcriuctl:" in on_a_terminal("fail", "Damaged")[1]
    assert "\x1b[" not in on_a_terminal("fail", "Damaged", NO_COLOR="1")[1]
