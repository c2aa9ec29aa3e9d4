"""Attached to a session on another host, by a real ssh: over a wire that is cut meanwhile, and
after one that moves.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import termios
from collections.abc import Iterator

import pytest
from hosts_lab.host import Host
from pexpect import fdpexpect
from support.hosts import Hosts
from support.keeper import Launched

pytestmark = pytest.mark.integration

_TIMEOUT = 60
# One process, which a ^C is sure to end: a shell's loop may go on if it comes just when a command
# has ended.
_TICKING = """import itertools, signal, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
for i in itertools.count(1):
    print(f"tick {i}.", flush=True)
    time.sleep(0.05)
"""
_TICKS = f"{sys.executable} -S -c {shlex.quote(f'exec({_TICKING!r})')}"


class Desk:
    """A user at a terminal on a host, attached."""

    def __init__(self, host: Host, name: str) -> None:
        self._master, slave = os.openpty()
        termios.tcsetwinsize(self._master, (31, 99))
        self.process: Launched = host.spawn(
            ["criuctl", "attach", name], stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)
        self.sees = fdpexpect.fdspawn(self._master, timeout=_TIMEOUT)

    def types(self, text: str) -> None:
        os.write(self._master, text.encode())

    def close(self) -> None:
        self.process.kill()
        os.close(self._master)


@pytest.fixture
def desks() -> Iterator[list[Desk]]:
    """Those that the test opens."""
    desks: list[Desk] = []
    yield desks
    for desk in desks:
        desk.close()


def _ticks(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"tick (\d+)\.", text)]


def test_a_cut_wire_holds_up_the_terminal_and_loses_nothing(
    hosts: Hosts, desks: list[Desk]
) -> None:
    hosts.b.criuctl("run", "-d", "--name", "work", "--", "bash", "--norc", "--noprofile")
    desks.append(desk := Desk(hosts.a, f"{hosts.b.ssh_url}/work"))
    desk.sees.expect(rb"# ")
    desk.types(f"clear; {_TICKS}\r")
    desk.sees.expect(rb"tick 20\.")
    hosts.cut(hosts.a, hosts.b)
    at = max(_ticks("\n".join(hosts.b.criuctl("capture", "work", "--scrollback")["lines"])))
    later = at + 100  # five seconds, at the least
    hosts.b.criuctl("wait", "work", "--match", rf"tick {later}\.", "--timeout", _TIMEOUT)
    desk.types("\x03")
    hosts.mend()
    desk.sees.expect(rb"\^C")
    assert isinstance(desk.sees.before, bytes)
    seen = _ticks(desk.sees.before.decode())
    assert seen[-1] >= later and seen == list(range(seen[0], seen[-1] + 1)) and seen[0] <= at
    desk.types("echo so''-far\r")
    desk.sees.expect(rb"so-far\r\n")
    desk.types("\x1d")
    assert desk.process.wait(_TIMEOUT) == 0
    assert hosts.b.criuctl("status", "work")["state"] == "running"


def test_who_is_attached_goes_along_with_a_migration(hosts: Hosts, desks: list[Desk]) -> None:
    hosts.a.criuctl("run", "-d", "--name", "work", "--", "bash", "--norc", "--noprofile")
    desks.append(desk := Desk(hosts.a, "work"))
    desk.sees.expect(rb"# ")
    desk.types("X=41; echo so''-far\r")
    desk.sees.expect(rb"so-far\r\n")
    hosts.a.criuctl("pause", "work")  # it moves standing still
    hosts.a.criuctl("migrate", "work", hosts.b.ssh_url)
    desk.sees.expect(rb"criuctl: moved to host-b")
    assert hosts.b.criuctl("status", "work")["state"] == "paused"
    hosts.b.criuctl("resume", "work")
    desk.types("echo $((X + 1)) on $(hostname)\r")
    desk.sees.expect(rb"42 on ")
    assert hosts.b.criuctl("status", "work")["lease"]["name"] == "root"
    there = hosts.a.criuctl("status", "work")
    assert (there["home"], there["moved_to"]) == ("host-b", f"{hosts.b.ssh_url}/work")
    desk.types("exit 6\r")
    assert desk.process.wait(_TIMEOUT) == 6
