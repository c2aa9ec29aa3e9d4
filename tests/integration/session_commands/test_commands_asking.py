"""Queries of a program and the terminal that `run` and `attach` show it on: one answer to each,
never two.
"""

from __future__ import annotations

import sys

import pexpect
import pytest
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators

pytestmark = pytest.mark.integration

# Asks for the cursor at once, and then whenever Enter is pressed; whatever is read is shown.
ASKER = r"""
import os, tty
tty.setraw(0)
os.write(1, b"abc\x1b[6n")
while True:
    read = os.read(0, 100)
    os.write(1, ("<%r>" % read).encode() + (b"\x1b[6n" if read == b"\r" else b""))
"""


def test_each_query_is_answered_once_by_the_holder_or_the_terminal(operators: Operators) -> None:
    """Before anybody came by the holder, whatever is drawn then; by the terminal afterwards; by the
    holder again.
    """
    operators("run", "-d", "--name", "work", "--", sys.executable, "-I", "-S", "-c", ASKER)
    operators("wait", "work", "--match", "4R.>", "--since", 0, "--timeout", TIMEOUT)
    window = operators.window("attach", "work")
    window.expect(rb"abc.*1;4R'>")
    window.send(b"\r")
    window.expect(rb"r'>\x1b\[6n")
    window.send(b"\x1b[8;9R")
    window.expect(rb"8;9R'>")
    window.send(b"x")
    window.expect(rb"<b'x'>")  # and nothing else came in between
    window.send(b"\x1d")
    window.expect(pexpect.EOF)
    operators("send", "work", "--keys", "Enter")
    wait_until(lambda: printed(operators).rstrip().endswith("R'>"), TIMEOUT, "the holder answers")
    assert printed(operators).count("R'>") == 3


def test_a_session_that_run_shows_from_its_beginning(operators: Operators) -> None:
    """Its first query is before or after the terminal's coming, as it happens: there is one
    answer.
    """
    window = operators.window(
        "run", "--name", "work", "--", sys.executable, "-I", "-S", "-c", ASKER
    )
    if window.expect([rb"\x1b\[6n", rb"1;4R'>"]) == 0:
        window.send(b"\x1b[1;4R")
        window.expect(rb"1;4R'>")
    window.send(b"x")
    window.expect(rb"<b'x'>")
    assert printed(operators).count("R'>") == 1


def printed(operators: Operators) -> str:
    return operators.text("capture", "work", "--since", 0)
