"""The wire between the hosts, as the tests treat it: cut, slow, lossy, whole again.

Frames between two hosts are dropped on the bridge, so both see silence: no carrier is lost, nothing is refused.  The rate is a
token bucket on the bridge's ports, the loss a random drop on the bridge; a delay needs the kernel's netem, which not every
machine has.
"""

from __future__ import annotations

import subprocess

TABLE = "hosts_lab"


class Bridge:
    """The bridge of one lab; `pid` lives in its network namespace."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._cuts: set[frozenset[str]] = set()
        self._loss = 0.0
        self._slowed: list[str] = []

    def cut(self, one: str, other: str) -> None:
        """Let every frame between two hosts vanish."""
        self._cuts.add(frozenset((one, other)))
        self._filter()

    def mend(self, one: str = "", other: str = "") -> None:
        """Undo `cut`: of these two hosts, or of all."""
        self._cuts -= {frozenset((one, other))} if one else set(self._cuts)
        self._filter()

    def slow(self, ports: list[str], rate: str, loss: str, delay: str) -> None:
        """Let no port carry more than `rate`, lose `loss` (as ``1%``) of the frames, hold each for `delay`; "" is no limit."""
        self.fast()
        self._loss = float(loss.rstrip("%") or 0) / 100
        self._filter()
        for port in ports if rate or delay else ():
            if delay:
                self._run("tc", "qdisc", "add", "dev", port, "root", "handle", "1:", "netem", "delay", delay, "limit", "20000")
            place = ["parent", "1:"] if delay else ["root"]
            if rate:
                self._run("tc", "qdisc", "add", "dev", port, *place, "tbf", "rate", rate, "burst", "256k", "latency", "100ms")
            self._slowed.append(port)

    def fast(self) -> None:
        """Undo `slow`."""
        for port in self._slowed:
            self._run("tc", "qdisc", "del", "dev", port, "root")
        self._slowed, self._loss = [], 0.0
        self._filter()

    def _filter(self) -> None:
        rules = []
        for pair in self._cuts:
            one, other = sorted(pair)
            rules += [f'iifname "port-{a}" oifname "port-{b}" drop' for a, b in ((one, other), (other, one))]
        if self._loss:
            rules.append(f"numgen random mod 10000 < {round(self._loss * 10000)} drop")
        chain = ["type filter hook forward priority 0; policy accept;", *rules]
        table = f"table bridge {TABLE}"
        text = f"{table} {{}}\ndelete {table}\n{table} {{\n chain wire {{\n  " + "\n  ".join(chain) + "\n }\n}\n"
        self._run("nft", "-f", "-", given=text)

    def _run(self, *argv: str, given: str = "") -> str:
        done = subprocess.run(
            ["nsenter", "--target", str(self.pid), "--net", *argv],
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}{given}"
        return done.stdout
