"""The wire between the hosts, as the tests treat it: cut, slow, lossy, whole again.

Frames between two hosts are dropped on the bridge, so both see silence: no carrier is lost, nothing
is refused.  The rate is a token bucket on the bridge's ports, the loss a random drop on the bridge,
the delay a program between port and bridge (see `delay`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .supervisor import BRIDGE

TABLE = "hosts_lab"
DELAY = Path(__file__).with_name("delay.py")


class Bridge:
    """The bridge of one lab; `pid` lives in its network namespace."""

    def __init__(self, pid: int) -> None:
        self._enter = ["nsenter", "--target", str(pid), "--net"]
        self._pid = pid
        self._cuts: set[frozenset[str]] = set()
        self._filtered = False
        self._loss = 0.0
        self._limited: list[str] = []
        self._late: subprocess.Popen[bytes] | None = None
        self._delayed: list[str] = []

    def cut(self, one: str, other: str) -> None:
        """Let every frame between two hosts vanish."""
        self._cuts.add(frozenset((one, other)))
        self._filter()

    def mend(self, one: str = "", other: str = "") -> None:
        """Undo `cut`: of these two hosts, or of all."""
        self._cuts -= {frozenset((one, other))} if one else set(self._cuts)
        self._filter()

    def slow(self, hosts: list[str], rate: str, loss: float, delay: float) -> None:
        """Let no port carry more than `rate` (as tc says it), lose this part of the frames, hold
        each this many seconds.
        """
        self.fast()
        self._loss = loss
        self._filter()
        if rate:
            bucket = ["tbf", "rate", rate, "burst", "256k", "latency", "100ms"]
            for host in hosts:
                self._run("tc", "qdisc", "add", "dev", f"port-{host}", "root", *bucket)
            self._limited = hosts
        if delay:
            self._delay(hosts, delay)

    def fast(self) -> None:
        """Undo `slow`."""
        for host in self._limited:
            self._run("tc", "qdisc", "del", "dev", f"port-{host}", "root")
        if self._late is not None:
            self._late.communicate(timeout=60)
            for host in self._delayed:
                self._run("ip", "link", "del", f"late-{host}")
                self._run("ip", "link", "set", f"port-{host}", "master", BRIDGE)
        self._limited, self._delayed, self._late, self._loss = [], [], None, 0.0
        self._filter()

    def _delay(self, hosts: list[str], delay: float) -> None:
        """Take each port off the bridge, and put a link in its place whose other end is joined to
        it by a program.
        """
        for host in hosts:
            self._run("ip", "link", "set", f"port-{host}", "nomaster")
            self._run(
                "ip", "link", "add", f"late-{host}", "type", "veth", "peer", "name", f"join-{host}"
            )
            self._run("ip", "link", "set", f"late-{host}", "master", BRIDGE, "up")
            self._run("ip", "link", "set", f"join-{host}", "up")
        self._delayed = hosts
        pairs = [f"port-{host}:join-{host}" for host in hosts]
        self._late = subprocess.Popen(
            [*self._enter, sys.executable, "-I", "-S", str(DELAY), str(delay), *pairs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._late.stdout is not None
        assert self._late.stdout.readline() == b"ready\n"

    def _filter(self) -> None:
        if not (self._cuts or self._loss or self._filtered):
            return
        self._filtered = True
        rules = []
        for pair in self._cuts:
            one, other = sorted(pair)
            ends = [[f"{kind}-{host}" for kind in ("port", "late")] for host in (one, other)]
            rules += [
                f'iifname "{i}" oifname "{o}" drop'
                for x, y in (ends, ends[::-1])
                for i in x
                for o in y
            ]
        if self._loss:
            rules.append(f"numgen random mod 10000 < {round(self._loss * 10000)} drop")
        chain = ["type filter hook forward priority 0; policy accept;", *rules]
        table = f"table bridge {TABLE}"
        text = (
            f"{table} {{}}\ndelete {table}\n{table} {{\n chain wire {{\n  "
            + "\n  ".join(chain)
            + "\n }\n}\n"
        )
        self._run("nft", "-f", "-", given=text)

    def _run(self, *argv: str, given: str = "") -> str:
        assert not os.path.samefile(f"/proc/{self._pid}/ns/net", "/proc/self/ns/net"), (
            "the bridge's network is not made yet"
        )
        done = subprocess.run(
            [*self._enter, *argv],
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}{given}"
        return done.stdout
