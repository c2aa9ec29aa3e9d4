"""Simulate a fleet of spot machines: ``python -m bench.spot_fleet``; see `scripts/spot-fleet`.

Sessions are spread over hosts. Each host is taken away at random moments (a Poisson process), with
the cloud's notice; its sessions are dumped within that time in the order that criuctl chooses
(`criuctl.ops.spot.plan`, the same function), and go on elsewhere. What was not stored goes on from
its last snapshot, or from its beginning: the processor time since then is lost.

The time of a dump is

    START + REQUESTS x latency + the longer of: reading its bytes, sending what is stored of them

A session has a resident memory (log-normal, median 300 MiB, 5 % above 4 GiB) and a share of a
processor (half of them idle). A first dump stores all of its memory, compressed to `RATIO`; a later
one what was written since, which grows with time up to a tenth of the memory; one CPU core hashes
and compresses 250 MiB/s. A request's latency is drawn anew for each dump (log-normal, median and
99th percentile of the store), and one of a hundred dumps meets a store that stalls for some
seconds. START and REQUESTS are what `measure` found: it times real dumps of real trees into an S3
server whose answers are delayed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
import sys
from dataclasses import dataclass, field

from criuctl.ops.spot.plan import SPARE, Worth, plan

MIB = 1 << 20
START = 2.0  # seconds of a dump that stores nothing, on two busy cores
REQUESTS = 25  # in sequence, with the round trips of new connections
HASHED = 250 * MIB  # bytes of memory a second that are hashed and compressed
RATIO = 0.5  # of what is stored to what is read
UPLINK = 120 * MIB  # bytes a second of a host
LATENCY, SLOW = 0.040, 0.250  # seconds of a request: median, 99th percentile
STALL, STALLS = 5.0, 0.01  # seconds (mean) for which a store stalls, and of how many dumps
REPLACED = 120.0  # seconds until a machine that was taken away is replaced
NOTICES = 4.0  # hours between two notices of one host, on average


@dataclass(eq=False)
class Session:
    """One session: what it is, and what it has done."""

    name: str
    memory: float
    cpu: float
    priority: int
    stored: float = -math.inf  # when its newest checkpoint was taken
    began: float = 0.0
    last: float = 0.0  # seconds that its last dump took

    def size(self, now: float) -> float:
        """Bytes that a dump has to read and store now."""
        if self.stored == -math.inf:
            return self.memory
        written = 0.002 * self.memory * max(self.cpu, 0.01) * (now - self.stored)
        return min(self.memory / 10, written)

    def age(self, now: float) -> float:
        """Seconds of work that a loss costs."""
        return now - max(self.stored, self.began)


@dataclass
class Way:
    """One way to run the fleet, and what it has lost."""

    title: str
    window: float  # seconds
    every: float  # seconds between snapshots; 0: none
    valuable: bool = True  # by `plan`; otherwise by name, as a list comes
    jobs: int = 4
    notices: int = 0
    dumped: int = 0
    late: int = 0  # sessions that were not stored in time
    foreseen: int = 0  # of them, those that were reported before
    from_nothing: int = 0  # of them, those without any snapshot
    lost: float = 0.0  # processor seconds
    lost_ranked: float = 0.0  # of sessions with a priority
    work: float = 0.0  # processor seconds in all
    worst: list[float] = field(default_factory=list)  # wall seconds lost by each late session


def sessions(random_: random.Random, count: int) -> list[Session]:
    """A fleet's sessions."""
    made = []
    for number in range(count):
        memory = min(32 * 1024 * MIB, random_.lognormvariate(math.log(300 * MIB), 1.6))
        cpu = 0.0 if random_.random() < 0.5 else random_.uniform(0.1, 2.0)
        made.append(Session(f"s{number:04}", memory, cpu, 1 if random_.random() < 0.1 else 0))
    return made


def seconds(random_: random.Random, session: Session, now: float, jobs: int) -> float:
    """How long a dump takes that is begun now, while `jobs` share the host."""
    size = session.size(now)
    spread = math.log(SLOW / LATENCY) / 2.326
    latency = random_.lognormvariate(math.log(LATENCY), spread)
    stall = random_.expovariate(1 / STALL) if random_.random() < STALLS else 0.0
    took = START + REQUESTS * latency + stall
    return took + max(size / HASHED * max(1.0, jobs / 2), size * RATIO / (UPLINK / jobs))


def snapshot(random_: random.Random, session: Session, now: float) -> None:
    """A snapshot of a running session."""
    session.last = seconds(random_, session, now, 1)
    session.stored = now


def take_away(random_: random.Random, way: Way, here: list[Session], now: float) -> None:
    """One host's notice: what is stored within the window, and what is not."""
    way.notices += 1
    guesses = [
        Worth(
            s.name,
            priority=s.priority,
            cpu=s.cpu,
            age=s.age(now),
            seconds=s.last * SPARE if s.last else 1.0 + s.memory / (100 * MIB),
        )
        for s in here
    ]
    chosen = plan(guesses, way.window, way.jobs)
    order = [name for group in chosen.groups for name in group]
    if not way.valuable:
        order = sorted(s.name for s in here)
    named = {s.name: s for s in here}
    places = [0.0] * way.jobs
    for name in order:
        session = named[name]
        took = seconds(random_, session, now, way.jobs)
        end = heapq.heappop(places) + took
        heapq.heappush(places, end)
        if end <= way.window:
            way.dumped += 1
            session.stored, session.last = now, took
            continue
        way.late += 1
        way.foreseen += name in chosen.late
        way.from_nothing += session.stored == -math.inf
        way.lost += session.cpu * session.age(now)
        way.lost_ranked += session.cpu * session.age(now) if session.priority else 0.0
        way.worst.append(session.age(now))
        if session.stored == -math.inf:
            session.began = now  # it starts from nothing
        else:
            session.began = now - 1e-9
            session.stored = now  # what it goes on from is what it has now


def simulate(way: Way, hosts: int, count: int, hours: float, seed: int) -> Way:
    """Run the fleet for so long; all ways meet the same sessions and the same notices."""
    random_ = random.Random(seed)
    fleet = sessions(random_, count)
    homes = [fleet[number::hosts] for number in range(hosts)]
    until = hours * 3600
    # (when, what, host): notices, and snapshots of each host at its own minute
    due: list[tuple[float, int, int]] = []
    for host in range(hosts):
        now = random_.expovariate(1 / (NOTICES * 3600))
        while now < until:
            due.append((now, 1, host))
            now += REPLACED + random_.expovariate(1 / (NOTICES * 3600))
        moment = random_.uniform(0, way.every) if way.every else until
        while moment < until:
            due.append((moment, 0, host))
            moment += way.every
    dice = random.Random(seed + 1)
    for now, what, host in sorted(due):
        for session in homes[host] if what == 0 else ():
            snapshot(dice, session, now)
        if what == 1:
            take_away(dice, way, homes[host], now)
    way.work = sum(s.cpu for s in fleet) * until
    return way


WAYS = (
    Way("2 min, hourly snapshots", 120, 3600),
    Way("2 min, no snapshots", 120, 0),
    Way("30 s, snapshots every 10 min", 30, 600),
    Way("30 s, hourly snapshots", 30, 3600),
    Way("30 s, hourly, by name", 30, 3600, valuable=False),
    Way("30 s, no snapshots", 30, 0),
    Way("30 s, none, by name", 30, 0, valuable=False),
    Way("no notice, hourly snapshots", 0, 3600),
)


def row(way: Way) -> dict[str, object]:
    """One way as JSON."""
    return {
        "way": way.title,
        "notices": way.notices,
        "stored": way.dumped,
        "not_stored": way.late,
        "foreseen": way.foreseen,
        "from_nothing": way.from_nothing,
        "lost_cpu_h": round(way.lost / 3600, 1),
        "lost_percent": round(100 * way.lost / way.work, 3),
        "lost_ranked_cpu_h": round(way.lost_ranked / 3600, 2),
        "median_lost_min": round(statistics.median(way.worst) / 60, 1) if way.worst else 0.0,
    }


def main(argv: list[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(description="See scripts/spot-fleet.")
    parser.add_argument("--hosts", type=int, default=20)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("what", nargs="?", choices=["measure"])
    asked = parser.parse_args(argv)
    if asked.what == "measure":
        from . import spot_measure

        return spot_measure.main()
    rows = [
        row(simulate(way, asked.hosts, asked.sessions, asked.hours, asked.seed)) for way in WAYS
    ]
    if asked.json:
        print(json.dumps(rows))
        return 0
    print(
        f"{asked.sessions} sessions on {asked.hosts} hosts, {asked.hours:g} hours, "
        f"{rows[0]['notices']} notices"
    )
    heads = ("stored", "not stored", "foreseen", "from nothing", "CPU h lost", "% of work")
    print(f"{'':30}" + "".join(f"{head:>14}" for head in heads))
    keys = ("stored", "not_stored", "foreseen", "from_nothing", "lost_cpu_h", "lost_percent")
    for one in rows:
        print(f"{one['way']:30}" + "".join(f"{one[key]:>14}" for key in keys))
    return 0


if __name__ == "__main__":
    sys.exit(main())
