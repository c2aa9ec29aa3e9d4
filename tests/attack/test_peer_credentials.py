"""SO_PEERCRED of restored unix sockets: which user a program takes its peer for."""

from __future__ import annotations

import socket
import struct
from ast import literal_eval

import pytest
from support.laboratory import USER, Laboratory

pytestmark = pytest.mark.integration

CRED = f"s.getsockopt({socket.SOL_SOCKET}, {socket.SO_PEERCRED}, 12)"
MAKE = (
    "(l := __import__('socket').socket(1), l.bind('{0}'), l.listen(), c := "
    "__import__('socket').socket(1), c.connect('{0}'),"
    " a := l.accept()[0], globals().update(socks=(l, c, a))) and 0"
)


def test_a_user_s_peers_are_taken_for_root_and_it_is_said(lab: Laboratory) -> None:
    """CRIU makes the sockets as root, so root is what a program that asks later, or a client of a
    restored listener, gets.
    """
    pid = lab.start()
    lab.ask(pid, MAKE.format(lab.folder / "sock"))
    asked = f"[{CRED} for s in socks]"
    assert [struct.unpack("3i", one)[1:] for one in literal_eval(lab.ask(pid, asked))] == [
        (USER, USER)
    ] * 3
    report = lab.dump(pid)
    (warning,) = [text for text in report["warnings"] if "SO_PEERCRED" in text]
    assert "3 unix sockets" in warning and str(lab.folder / "sock") in warning and "root" in warning
    restored = lab.restore(report["checkpoint"])["pid"]
    assert [struct.unpack("3i", one)[1:] for one in literal_eval(lab.ask(restored, asked))] == [
        (0, 0)
    ] * 3
