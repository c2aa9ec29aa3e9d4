"""What sessions cost: a key's echo, the flow of output, memory, and the processor's time of many
that idle.

All ways hold the same program in terminals of the same size and stay open together; they take turns
in every round.  A flood's rate is what the program printed by the time until its last byte was
shown.  Its effect is reported next to the rate: tmux draws a screen and passes on less, and criuctl
lets a client that is too slow skip.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from .errors import BenchFailed
from .interrupts import waiting
from .report import Bound, Section
from .session_ways import BARE, CLIENT, Attached, Dtach, Host, Sessions, Tmux, bare, payload_argv

if TYPE_CHECKING:
    from .cases import Bench

# The bounds that criuctl is held to.
ECHO = Bound(1.0, BARE, "above")
OUTPUT = Bound(200, BARE, "least", of=CLIENT)
RSS_MIB = Bound(40)
IDLE_PERCENT = Bound(1.0)

_KEYS = (b"Q", b"X", b"Z")
_ECHOES = 200  # keys a round
_THINKING = 0.005  # seconds between two keys
_SETTLE = 1.0


def sessions(bench: Bench, number: int, flood: int, watch: float) -> Iterator[Section]:
    """All of it; `number` sessions idle and are watched for `watch` seconds, `flood` bytes are
    printed.
    """
    with _Hosts(bench) as hosts:
        yield from _attached(bench, hosts, flood)
    with _Hosts(bench) as hosts:
        yield _idling(bench, hosts, number, watch)


class _Hosts(ExitStack):
    """criuctl and its peers, whose sessions all end at the end of the block."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        run = Path(self.enter_context(TemporaryDirectory(dir=bench.tmpfs)))
        state = Path(self.enter_context(TemporaryDirectory(dir=bench.disk)))
        self.own = Sessions(bench.keeper, run, state, bench.program)
        self.peers: list[Host] = [Dtach(bench.keeper, run), Tmux(bench.keeper, run)]
        for host in self.all:
            self.callback(host.close)

    @property
    def all(self) -> list[Host]:
        return [self.own, *self.peers]


def _attached(bench: Bench, hosts: _Hosts, flood: int) -> Iterator[Section]:
    echo = Section("a key's echo", {"case": "sessions", "what": "echo"})
    output = Section(
        f"{flood >> 20} MiB of output", {"case": "sessions", "what": "output", "size": flood}
    )
    memory = Section("memory of what holds one session", {"case": "sessions", "what": "memory"})
    bench.say("sessions: one each")
    argv = payload_argv(flood)
    held: dict[str, Sequence[int]] = {}
    ends: list[Attached] = [hosts.enter_context(bare(bench.keeper, argv))]
    for host in hosts.all:
        held[host.name] = host.start("bench", argv)
        ends.append(hosts.enter_context(host.attach("bench")))
    hosts.own.start("client", argv)
    ends.insert(2, hosts.enter_context(hosts.own.client("client")))
    for end in ends:
        end.ready()
    _note_memory(memory, "attached", held)
    for number in range(bench.runs):
        bench.say(f"sessions: keys and output, round {number + 1} of {bench.runs}")
        for end in ends:
            times = []
            for count in range(_ECHOES):
                with waiting():
                    time.sleep(_THINKING)
                times.append(end.echo(_KEYS[count % len(_KEYS)]) * 1000)
            echo.row("median", "ms", ECHO).add(end.name, median(times))
            echo.row("95 of 100 in", "ms").add(end.name, sorted(times)[len(times) * 95 // 100])
        for end in ends:
            seconds, came = end.flood()
            output.row("rate", "MB/s", OUTPUT).add(end.name, flood / seconds / 1e6)
            output.row("of it came", "%").add(end.name, 100 * came / flood)
    _note_memory(memory, "after the output", held)
    yield from (echo, output, memory)


def _note_memory(section: Section, when: str, held: Mapping[str, Sequence[int]]) -> None:
    """Of the process that holds the terminal, and (Pss: what is shared is divided) of all that a
    session needs.
    """
    for name, pids in held.items():
        section.row(f"RSS, {when}", "MiB", RSS_MIB).add(
            name, _kilobytes(pids[0], "status", "VmRSS") / 1024
        )
        pss = sum(_kilobytes(pid, "smaps_rollup", "Pss") for pid in pids)
        section.row(f"Pss, with the session's init, {when}", "MiB").add(name, pss / 1024)


def _idling(bench: Bench, hosts: _Hosts, number: int, watch: float) -> Section:
    """Detached sessions in which nothing happens."""
    section = Section(
        f"{number} idle sessions", {"case": "sessions", "what": "idle", "sessions": number}
    )
    bench.say(f"sessions: starting {number} of each")
    held: dict[str, set[int]] = {}
    for host in hosts.all:
        began = time.monotonic()
        held[host.name] = {
            pid for n in range(number) for pid in host.start(f"idle{n}", ["sleep", "infinity"])
        }
        section.row("start of one", "ms").add(host.name, (time.monotonic() - began) / number * 1000)
    with waiting():
        time.sleep(_SETTLE)
    before = {name: (_used(pids), _switches(pids), time.monotonic()) for name, pids in held.items()}
    with waiting():
        time.sleep(watch)
    for name, pids in held.items():
        used, switches, since = before[name]
        seconds = time.monotonic() - since
        section.row("of one core", "%", IDLE_PERCENT).add(
            name, (_used(pids) - used) / seconds * 100
        )
        section.row("wakeups a second", "").add(name, (_switches(pids) - switches) / seconds)
    for name, pids in held.items():
        pss = sum(_kilobytes(pid, "smaps_rollup", "Pss") for pid in pids)
        section.row("Pss of one", "MiB").add(name, pss / number / 1024)
    return section


def _kilobytes(pid: int, file: str, key: str) -> int:
    for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    raise BenchFailed(f"process {pid} has no {key}")


def _used(pids: Iterable[int]) -> float:
    """Seconds on a processor; to the nanosecond, where /proc/PID/stat counts in ticks."""
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e9


def _switches(pids: Iterable[int]) -> int:
    """Times that they went to sleep, and so had been woken."""
    return sum(_kilobytes(pid, "status", "voluntary_ctxt_switches") for pid in pids)
