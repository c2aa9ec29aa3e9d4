"""Output is one log: all clients read the same bytes at the same offsets, and no client holds up
the session.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.holding import TIMEOUT, Holders, expected, numbers, until
from support.keeper import wait_until

from criuctl.errors import SessionGone, TimedOut
from criuctl.session.client.session import Event, Output, Session
from criuctl.session.holder.output_log import read_file
from criuctl.session.screen.replay import replay

pytestmark = pytest.mark.integration


def test_every_reader_sees_the_same_bytes_at_the_same_offsets(holders: Holders) -> None:
    holders.start(*numbers(20_000))
    early, late, capturing = holders.connect(), holders.connect(role="observe"), holders.connect()
    early.attach("start")
    offset, data = until(early, lambda seen: len(seen) >= 160_000)
    late.attach(80_000)
    assert until(late, lambda seen: len(seen) >= 80_000) == (80_000, data[80_000:])
    assert (offset, data) == (0, expected(20_000))
    assert capturing.read("start").data == data
    assert capturing.read(7, 15) == Output(7, data[7:15])
    assert capturing.read(-8) == Output(159_992, b"0019999\n")
    assert capturing.read(10**12) == Output(160_000, b"")


def test_a_stopped_client_blocks_no_other_and_finds_a_gap(holders: Holders) -> None:
    count = 1_200_000  # 9.6 MB: far more than the scrollback and what the sockets hold
    holders.start(*numbers(count), scrollback=2 << 20)
    slow, quick = holders.connect(), holders.connect()
    slow.attach("start")  # and reads nothing
    end = count * 8
    quick.wait_output(end - 1, 120)
    status = quick.status()
    assert status["base"] == end - (2 << 20)
    whole = expected(count)
    position, gaps = 0, []
    while position < end:
        message = slow.receive(TIMEOUT)
        assert message is not None
        if isinstance(message, Event) and message.name == "gap":
            assert message.body["from"] == position < message.body["to"]
            position = message.body["to"]
            gaps.append(position)
        elif isinstance(message, Output):
            assert (message.offset, message.data) == (position, whole[position : message.end])
            position = message.end
    assert len(gaps) == 1


def test_events_come_at_their_place_in_the_output(holders: Holders) -> None:
    holders.start("sh", "-c", "stty -echo; echo ready; read a; echo $a; read a; echo $a; exit 3")
    driver, reader = holders.connect(), holders.connect(role="observe")
    reader.attach("start")
    driver.wait_match("ready\n", since="start", timeout=TIMEOUT)
    mark = driver.send("one\n")["offset"]
    driver.wait_match("one\n", since=mark, timeout=TIMEOUT)
    driver.resize(31, 99)
    driver.send("two\n")
    assert driver.wait_exit(TIMEOUT)["exit_code"] == 3
    received: list[str | bytes] = []
    for message in reader.stream(TIMEOUT):
        if isinstance(message, Output):
            received.append(message.data)
        elif message.name in ("resize", "exit"):
            received.append(message.name)
    text = b"".join(t if isinstance(t, bytes) else t.encode() for t in received)
    assert text == b"ready\r\none\r\nresizetwo\r\nexit"


def test_the_scrollback_outlives_the_holder(holders: Holders) -> None:
    started = holders.start("sh", "-c", "printf 'last words'; exit 5")
    client = holders.connect()
    assert client.wait_exit(TIMEOUT)["exit_code"] == 5
    client.leave()
    holders.gone(started)
    state = holders.state()
    assert (state["state"], state["exit_code"]) == ("exited", 5)
    assert read_file(Path(state["log"])) == (0, b"last words")
    with pytest.raises(SessionGone):
        holders.connect()
    for name in ("state.json", "holder.log"):
        assert (
            Path(holders.config.run_dir) / "holders" / "s" / name
        ).stat().st_mode & 0o777 == 0o600


def test_waiting(holders: Holders) -> None:
    holders.start("cat")
    client = holders.connect()
    with pytest.raises(TimedOut):
        client.wait_exit(0.05)
    with pytest.raises(TimedOut):
        client.wait_match("never", since="start", timeout=0.05)
    mark = client.send("hello\n")["offset"]
    assert client.wait_match(r"^hel+o$", since=mark, timeout=TIMEOUT)
    # it came already, but after the input
    assert client.wait_match(r"^hel+o$", timeout=TIMEOUT)
    client.send("more\n")
    client.wait_match(r"^more\n", timeout=TIMEOUT)
    with pytest.raises(TimedOut):
        client.wait_match("hello", timeout=0.05)
    assert client.wait_idle(0.05, TIMEOUT) == client.status()["offset"]
    client.send("\x04")
    assert client.wait_exit(TIMEOUT)["exit_code"] == 0
    with pytest.raises(SessionGone, match="ended before"):
        client.wait_match("never", since="start", timeout=TIMEOUT)


def test_clients_that_are_killed_leave_the_session_alone(holders: Holders) -> None:
    """kill -9 of client after client in the middle of the output: a counter inside misses no
    tick.
    """
    holders.start(
        "sh", "-c", "i=0; while [ $i -lt 100000 ]; do echo tick $i; i=$((i+1)); done; read end"
    )
    witness = holders.connect()
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from criuctl.config import Config\n"
        "from criuctl.session.client.session import Session\n"
        "s = Session.connect('s', config=Config(run_dir=sys.argv[2]), kind='agent', "
        "operator='victim', role='write')\n"
        "s.attach('start', write=True, size=(30, 90))\n"
        "print('in', flush=True)\n"
        "while True: s.receive()\n"
    )
    project = str(Path(__file__).parents[3])
    for _ in range(5):
        argv = [sys.executable, "-I", "-c", script, project, holders.config.run_dir]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, env={"TOKEN": holders.token}) as victim:
            assert victim.stdout is not None and victim.stdout.readline() == b"in\n"
            victim.send_signal(signal.SIGKILL)
    witness.wait_match("tick 99999\n", since="start", timeout=120)
    lines = witness.read("start").data.split(b"\r\n")
    assert lines[:100_000] == [b"tick %d" % n for n in range(100_000)]
    wait_until(
        lambda: len(witness.status()["operators"]) == 1, TIMEOUT, "the dead are gone from the list"
    )
    assert witness.status()["lease"] is None
    assert holders.state()["state"] == "running"


def test_a_restart_by_reexec_under_load_loses_no_byte(holders: Holders) -> None:
    count = 1_500_000
    started = holders.start(*numbers(count), scrollback=32 << 20)
    reader, driver = holders.connect(), holders.connect()
    reader.attach("start")
    for _ in range(3):
        driver.request("reexec", timeout=TIMEOUT)
    for_exit: dict[str, Any] = {"for": "exit"}
    waiting = driver.submit("wait", **for_exit)
    driver.request("reexec", timeout=TIMEOUT)
    _, data = until(reader, lambda seen: len(seen) >= count * 8)
    assert data == expected(count)
    status = driver.status()
    assert status["holder_pid"] == started.holder_pid
    assert [entry["what"] for entry in driver.audit()].count("reexec") == 4
    driver.send("x")
    answer = driver.receive(TIMEOUT)
    while isinstance(answer, Event | Output):
        answer = driver.receive(TIMEOUT)
    assert answer is not None and answer.id == waiting and answer.body["exit_code"] == 0


def test_where_something_was_typed_last_the_next_program_knows(holders: Holders) -> None:
    holders.start("sh", "-c", "echo before; exec cat")
    client = holders.connect()
    client.wait_match("before\n", since="start", timeout=TIMEOUT)
    client.send("typed\n")
    client.reexec()
    assert client.status()["input_offset"] == len("before\r\n")


def test_a_new_program_that_does_not_start_is_not_tried(holders: Holders, tmp_path: Path) -> None:
    holders.start("cat")
    client = holders.connect()
    broken = tmp_path / "criuctl" / "session"
    broken.mkdir(parents=True)
    (broken / "entry.py").write_text("raise SystemExit(3)")
    with pytest.raises(Exception, match="does not start"):
        client.request("reexec", code=str(tmp_path))
    client.send("still here\n")
    assert client.wait_match("still here", since="start", timeout=TIMEOUT)


# A full-screen program that draws its frame once, then a counter again and again: 38 bytes each.
_DRAWING = r"""
import sys
sys.stdout.write("main\r\n\x1b[?1049h\x1b[H\x1b[1;38;5;200mframe\x1b[m\x1b[24;1Hfoot")
for number in range(int(sys.argv[1])):
    sys.stdout.write(f"\x1b[12;10H\x1b[3{number % 8}m{number:022}\x1b[m")
sys.stdout.write("\x1b[13;1Hdrawn")
sys.stdout.flush()
for line in sys.stdin:
    sys.stdout.write("\x1b[14;1H" + line)
    sys.stdout.flush()
"""


def test_a_full_screen_program_that_has_printed_much_is_drawn_as_it_is(holders: Holders) -> None:
    """Its frame is in the output no more; the screen is kept, across a re-exec too."""
    count = 120_000
    holders.start(sys.executable, "-c", _DRAWING, str(count), scrollback=2 << 20)
    client = holders.connect()
    client.wait_output(count * 38, 120)

    def kept() -> bool:
        screen, end = client.kept_screen(), client.status()["offset"]
        return screen is not None and end - screen["offset"] < 1 << 20

    wait_until(kept, 120, "the screen is kept, not long ago")
    status = client.status()
    assert status["base"] > status["modes"]["alternate_since"]
    for _ in range(2):
        screen = replay(client, client.status())
        assert screen.alternate and screen.end == client.status()["offset"]
        assert (screen.text()[0], screen.text()[23]) == ("frame", "foot")
        assert screen.ansi()[0] == "\x1b[0;1;38;5;200mframe\x1b[m"
        assert screen.text()[11:13] == [" " * 9 + f"{count - 1:022}", "drawn"]
        assert screen.scrollback() == ["main"]
        client.reexec()
    status = client.status()
    assert status["rows"] == 24


def test_long_folders_do_not_matter(holders: Holders) -> None:
    deep = Path(holders.config.run_dir) / ("d" * 100)
    deep.mkdir()
    holders.config = replace(holders.config, run_dir=str(deep))
    holders.start("cat")
    assert isinstance(holders.connect(), Session)
