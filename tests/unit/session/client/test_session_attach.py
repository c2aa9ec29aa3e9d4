"""The pieces of being attached that need no session: the detach key, keys by name, plain text,
marks, recordings.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from criuctl.config import Config
from criuctl.errors import TimedOut, UsageError
from criuctl.session import names
from criuctl.session.client import keys
from criuctl.session.client.attach import Attachment
from criuctl.session.client.keyboard import DetachKey
from criuctl.session.client.notices import restored_text
from criuctl.session.client.remote import Remote
from criuctl.session.client.session import Answer, Session
from criuctl.session.client.shown_screen import ShownScreen
from criuctl.session.client.typed_commands import Marks, command_line
from criuctl.session.screen.asciicast import cast as recording
from criuctl.session.screen.plain_text import strip
from criuctl.session.screen.screen import Screen


def typed(key: str, data: bytes, cuts: list[int]) -> tuple[bytes, bool]:
    """What is passed on of `data`, read in pieces."""
    watch, out = DetachKey(key), b""
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in pairwise(edges):
        piece, detached = watch.feed(data[begin:end])
        out += piece
        if detached:
            return out, True
    return out, False


CUTS = st.lists(st.integers(0, 60), max_size=8)


@given(CUTS)
def test_the_detach_key_however_the_reads_fall(cuts: list[int]) -> None:
    assert typed("C-]", b"abc\x1d never", cuts) == (b"abc", True)
    assert typed("C-a d", b"x\x01y\x01\x01dnever", cuts) == (b"x\x01y\x01", True)
    assert typed("C-a d", b"\x01x", cuts) == (b"\x01x", False)
    assert typed("", b"\x1d all", cuts) == (b"\x1d all", False)


@given(CUTS)
def test_no_key_inside_of_a_paste(cuts: list[int]) -> None:
    paste = b"a\x1b[200~text\x1dmore\x1b[93;5u\x1b[201~"
    assert typed("C-]", paste + b"b", cuts) == (paste + b"b", False)
    assert typed("C-]", paste + b"b\x1dc", cuts) == (paste + b"b", True)


def test_terminals_that_spell_control_keys_out() -> None:
    for sequence in (b"\x1b[93;5u", b"\x1b[27;5;93~"):
        assert typed("C-]", b"ab" + sequence + b"c", []) == (b"ab", True)
        assert typed("C-]", b"ab" + sequence + b"c", list(range(20)))[1]
    assert typed("C-]", b"\x1b", []) == (b"\x1b", False)  # a lone escape does not wait


@pytest.mark.parametrize(
    ("word", "sent"),
    [
        ("C-c", b"\x03"),
        ("C-Space", b"\x00"),
        ("M-x", b"\x1bx"),
        ("C-M-x", b"\x1b\x18"),
        ("Enter", b"\r"),
        ("S-Tab", b"\x1b[Z"),
        ("BSpace", b"\x7f"),
        ("Up", b"\x1b[A"),
        ("C-Up", b"\x1b[1;5A"),
        ("Home", b"\x1b[H"),
        ("PageDown", b"\x1b[6~"),
        ("F1", b"\x1bOP"),
        ("F12", b"\x1b[24~"),
        ("é", "é".encode()),
        ("\udcff", b"\xff"),  # of an argument that is not UTF-8
        ("-", b"-"),
    ],
)
def test_keys_by_name(word: str, sent: bytes) -> None:
    assert keys.encode(word) == sent
    assert keys.encode("Up", cursor_keys=True) == b"\x1bOA"


@pytest.mark.parametrize(
    ("key", "shown"),
    [("C-]", "Ctrl-]"), ("C-a d", "Ctrl-a d"), ("C-M-x", "Ctrl-Alt-x"), ("F12", "F12"), ("-", "-")],
)
def test_keys_as_people_write_them(key: str, shown: str) -> None:
    assert keys.spoken(key) == shown


@pytest.mark.parametrize("word", ["Nonsense", "C-", "C-é", "C-ß", "C-\udcff", "ab", "C-1x"])
def test_what_is_no_key(word: str) -> None:
    with pytest.raises(UsageError):
        keys.encode(word)


@given(
    st.lists(
        st.sampled_from(
            [
                b"a\r\n",
                b"\x1b[31;1m",
                b"\x1b]0;t\x07",
                b"\x1bPq\x1b\\",
                b"b",
                b"\x1b(B",
                b"\x07",
                b"\r\n",
            ]
        )
    ),
    CUTS,
)
def test_text_without_sequences_however_it_comes(pieces: list[bytes], cuts: list[int]) -> None:
    data = b"".join(pieces)
    out, carry = b"", b""
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in pairwise(edges):
        plain, carry = strip(carry + data[begin:end])
        out += plain
    assert out + carry == b"".join(p for p in pieces if p in (b"a\r\n", b"b", b"\r\n")).replace(
        b"\r\n", b"\n"
    )


def test_strings_that_never_end_take_no_time() -> None:
    """A program decides what it prints: who looks at it must not be busy with that for minutes."""
    data, began = b"\x1bP" * 60_000 + b"end", time.monotonic()
    strip(data)
    screen = Screen(80, 24)
    screen.feed(data)
    screen.feed(b"\x1b\\")
    assert time.monotonic() - began < 5


@given(CUTS)
def test_the_output_between_two_marks(cuts: list[int]) -> None:
    other = b"\x1b]133;D;1;aid=other\x07"
    data = b"echo \x1b]133;C;aid=n0\x07" + b"\x1b[1mout" + other + b"\r\n\x1b]133;D;17;aid=n0\x07$ "
    marks, out = Marks("n0", 100), b""
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in pairwise(edges):
        if marks.exit_code is None:
            out += marks.feed(data[begin:end], 100 + begin)
    assert (out, marks.exit_code) == (b"\x1b[1mout" + other + b"\r\n", 17)
    assert data[marks.begin - 100 : marks.end - 100] == out


def test_a_command_is_one_line_of_harmless_characters() -> None:
    line = command_line(["printf", "%s", "a'b\n\x1b\x03é!"], "n0")
    assert all(32 <= byte < 127 for byte in line)
    assert b"!" not in line.replace(b"\\041", b"")
    with pytest.raises(UsageError):
        command_line([" "], "n0")


def test_all_that_is_typed_has_one_time() -> None:
    class Slow(Session):
        """Its terminal takes each piece in a moment."""

        def __init__(self) -> None:
            self.left: list[float] = []

        def submit_input(self, data: bytes, *, answered: bool = False) -> int:
            return 1

        def _await(self, request: int, what: str, timeout: float | None) -> Answer:
            assert timeout is not None
            self.left.append(timeout)
            time.sleep(0.01)
            return Answer(request, {"offset": len(self.left), "held": len(self.left) == 1})

    session = Slow()
    assert session.send(b"x" * (300 << 10), timeout=60) == {"offset": 1, "held": True}
    assert len(session.left) == 5 and session.left[0] - session.left[-1] >= 0.04


def test_addresses_of_sessions_elsewhere() -> None:
    remote = Remote.parse("ssh://me@host.example:2222/work", Config())
    assert (remote.host.address.destination, remote.host.address.port, remote.name) == (
        "me@host.example",
        "2222",
        "work",
    )
    assert (
        Remote.parse("ssh://[fe80::1%eth0]/work", Config()).host.address.destination
        == "fe80::1%eth0"
    )
    configured = {
        "far": {
            "url": "ssh://me@host.example:2222",
            "command": "sudo criuctl",
            "options": ["ProxyJump=gate"],
        }
    }
    known = Remote.parse("ssh://me@host.example:2222/work", Config(hosts=configured)).host
    assert (known.command, known.options) == ("sudo criuctl", ("ProxyJump=gate",))
    for bad in (
        "ssh://-oProxyCommand=x/work",
        "ssh://host",
        "ssh://host/",
        "ssh://a b/work",
        "ssh://host/we ird",
    ):
        with pytest.raises(UsageError):
            Remote.parse(bad, Config())


def test_a_holder_at_which_many_wait_already_is_there_all_the_same(tmp_path: Path) -> None:
    path = names.run_folder(str(tmp_path), "s") / "socket"
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as holder, ExitStack() as stack:
        with names.socket_address(path) as address:
            holder.bind(address)
            holder.listen(0)
            with suppress(BlockingIOError):
                while True:
                    waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                    waiting.setblocking(False)
                    waiting.connect(address)
        with pytest.raises(TimedOut, match="takes no connection"):
            Session.connect("s", config=Config(run_dir=str(tmp_path)), kind="human", timeout=0.1)

        def take() -> None:
            holder.accept()[0].close()

        taking = threading.Timer(0.1, take)
        taking.start()
        names.connect(path, 60).close()
        taking.join()


RELAY = """
import sys
from criuctl.config import Config
from criuctl.errors import CriuctlError
from criuctl.session.client.remote import relay
try:
    relay(Config(run_dir=sys.argv[1]), "s")
except CriuctlError as error:
    sys.exit(error.exit_code)
"""


def test_a_relay_whose_other_side_takes_nothing_is_no_bug(tmp_path: Path) -> None:
    path = names.run_folder(str(tmp_path), "s") / "socket"
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as holder, open("/dev/full", "wb") as full:
        with names.socket_address(path) as address:
            holder.bind(address)
        holder.listen()
        holder.settimeout(60)
        words = [sys.executable, "-c", RELAY, str(tmp_path)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=full) as relaying:
            connection, _ = holder.accept()
            with connection:
                connection.sendall(b"x")
                assert relaying.wait(60) == 3


def test_a_recording_has_markers_and_no_dead_time() -> None:
    status = {
        "session": "s",
        "command": ["sh"],
        "cols": 80,
        "rows": 24,
        "created": 100.0,
        "exit_code": 3,
    }
    records: list[tuple[float, int, str, dict[str, Any]]] = [
        (100.0, 0, "resize", {"rows": 10, "cols": 40}),
        (101.0, 0, "", {}),
        (102.5, 3, "", {}),
        (103.0, 5, "checkpointed", {"checkpoint": "0123456789abcdef"}),
        (9000.0, 5, "restored", {"host": "other"}),
        (9001.0, 5, "", {}),
        (9002.0, 7, "exit", {"exit_code": 3}),
    ]
    header, *events = (
        json.loads(line) for line in recording(status, "é1é3".encode() + b"z", 0, records)
    )
    assert header["version"] == 3 and header["term"] == {
        "cols": 40,
        "rows": 10,
        "type": "xterm-256color",
    }
    assert [code for _, code, _ in events] == ["r", "o", "o", "m", "m", "o", "x"]
    assert "".join(data for _, code, data in events if code == "o") == "é1é3z"
    assert [interval for interval, _, _ in events] == [0.0, 0.0, 1.5, 0.5, 2.0, 1.0, 1.0]
    assert events[3][2] == "checkpointed 0123456789ab" and events[4][2] == "restored, from other"


def test_a_recording_of_an_unobserved_end_names_no_exit_code() -> None:
    status = {"session": "s", "command": [], "created": 100.0, "exit_code": None}
    _, *events = (
        json.loads(line)
        for line in recording(
            status, b"z", 0, [(100.0, 0, "", {}), (101.0, 1, "exit", {"exit_code": None})]
        )
    )
    assert [code for _, code, _ in events] == ["o"]


def test_the_banner() -> None:
    text = restored_text(
        "s", 3, {"host": "a", "created": "2020-01-01T00:00:00Z", "dropped": ["2 connections"]}
    )
    assert text.startswith("s: restored, incarnation 3, from a, as it was 2020-01-01T00:00:00Z (")
    assert text.endswith(" d ago); dropped: 2 connections")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_others_are_called_is_no_control_sequence(
    is_terminal: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    drawn = bytearray()
    attached = Attachment("s", lambda _resume: cast("Session", None), "C-]")
    terminal = SimpleNamespace(is_terminal=is_terminal, size=(24, 80, 0, 0), put=drawn.extend)
    attached._terminal = terminal  # type: ignore[assignment]
    attached._shown = ShownScreen(attached._terminal)
    attached._notice(
        restored_text("s", 2, {"host": "evil\x1b]52;c;ZXZpbA==\x07\x9b2J\n", "created": "\ud800"})
    )
    shown = drawn.decode() if is_terminal else capfd.readouterr().err
    assert "from evil?]52;c;ZXZpbA==??2J?" in shown and "\x1b]52" not in shown
