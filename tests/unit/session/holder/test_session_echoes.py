"""Which parts of the output only repeat what was typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from criuctl.session.holder.echoes import Echoes, behind_echo
from criuctl.session.holder.output_log import OutputLog
from criuctl.session.screen.shell_marks import ShellMarks

NONCE = "n"


class Terminal:
    """A log, marks and echoes, fed like a holder's."""

    def __init__(self, path: Path) -> None:
        self.log = OutputLog(path, 1 << 20)
        self.marks = ShellMarks()
        self.echoes = Echoes(self.log, self.marks)
        self.marks.on_mark = self.echoes.on_mark

    def prints(self, data: bytes) -> None:
        at = self.log.end
        self.log.append(data)
        self.marks.feed(memoryview(data), at)
        self.echoes.look(self.log.end)

    def types(self, data: bytes, *, echoes: bool = True, line_mode: bool = True) -> None:
        self.echoes.typed(data, echoes=echoes, line_mode=line_mode)

    @property
    def found(self) -> list[bytes]:
        return [self.log.read(begin, end) for begin, end in self.echoes.report()]


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    return Terminal(tmp_path / "output")


def mark(kind: str, number: int) -> bytes:
    fields = f"aid={NONCE};n={number};pid=7" if kind == "A" else f"aid={NONCE};n={number}"
    return f"\x1b]133;{'D;0' if kind == 'D' else kind};{fields}\x07".encode()


def test_the_terminal_s_echo_comes_once(terminal: Terminal) -> None:
    terminal.prints(b"hello before\r\n")
    terminal.types(b"hello\n")
    terminal.prints(b"busy\r\nhel")
    terminal.prints(b"lo\r\nhello\r\n")  # the second is what cat prints
    assert terminal.echoes.report() == [(20, 25)]
    terminal.types(b"y\ny\n")
    terminal.prints(b"y\r\ny\r\ny\r\n")
    assert terminal.found == [b"hello", b"y", b"y"]


def test_one_that_is_still_coming_is_known(terminal: Terminal) -> None:
    terminal.types(b"echo DONE\n")
    terminal.prints(b"echo DO")
    assert terminal.found == [b"echo DO"]
    terminal.prints(b"NE\r\nDONE\r\n")
    assert terminal.found == [b"echo DONE"]


def test_a_line_editor_colours_and_wraps_its_echo(terminal: Terminal) -> None:
    terminal.types(b"print(1)\r", echoes=False, line_mode=False)
    terminal.prints(b"\x1b[?25l\x1b[32mprint\x1b[m(")
    terminal.prints(b" \r1)\r\n1\r\n")
    assert terminal.found == [b"\x1b[32mprint\x1b[m( \r1)"[5:]]


def test_a_program_that_reads_keys_may_print_something_else(terminal: Terminal) -> None:
    terminal.types(b"END", echoes=False, line_mode=False)
    terminal.prints(b"b'END'\r\n")
    assert terminal.found == []


def test_nothing_is_expected_of_a_prompt_for_a_password(terminal: Terminal) -> None:
    terminal.types(b"secret\n", echoes=False, line_mode=True)
    terminal.prints(b"secret is too short\r\n")
    assert terminal.found == [] and "secret" not in repr(vars(terminal.echoes))


def test_a_shell_prints_what_was_typed_ahead_again(terminal: Terminal) -> None:
    terminal.marks.begin("bash", NONCE)
    terminal.types(b"echo DONE\n")  # before its first prompt
    terminal.prints(b"echo DONE\r\n" + mark("A", 1) + b"$ ")
    terminal.prints(b"echo DONE\r\n" + mark("C", 1) + b"DONE\r\necho DONE\r\n" + mark("D", 1))
    assert terminal.found == [b"echo DONE", b"echo DONE"]
    terminal.prints(mark("A", 2) + b"$ ")
    terminal.types(b"true DONE\r", echoes=False, line_mode=False)
    terminal.prints(b"a job is DONE\r\n$ true DONE\r\n" + mark("C", 2) + b"true DONE\r\n")
    assert terminal.found[2:] == [b"true DONE"]


def test_keys_that_are_typed_one_by_one_are_one_echo(terminal: Terminal) -> None:
    for key in b"make":
        terminal.types(bytes((key,)))
        terminal.prints(bytes((key,)))
    assert terminal.found == [b"make"]


def test_an_echo_that_does_not_come_is_given_up(terminal: Terminal) -> None:
    terminal.types(b"lost\n")
    for _ in range(70):
        terminal.prints(b"x" * 1000 + b"\r\n")
    terminal.prints(b"lost\r\n")
    assert terminal.found == []
    terminal.types(b"late\n")
    terminal.prints(b"x" * 100_000)
    terminal.prints(b"late\r\n")
    assert terminal.found == []


def test_the_places_survive_a_re_exec_and_the_text_does_not(terminal: Terminal) -> None:
    terminal.types(b"one\ntwo\n")
    terminal.prints(b"one\r\n")
    state = terminal.echoes.to_state()
    assert state == {"echoes": [[0, 3]]}
    after = Echoes(terminal.log, terminal.marks)
    after.restore(state)
    assert after.report() == [(0, 3)]


def test_where_an_answer_may_begin() -> None:
    spans = [(3, 8), (20, 25), (40, 41)]
    assert [behind_echo(offset, spans) for offset in (20, 9, 41)] == [25, 25, 41]
