"""Look for a wrong byte: ``scripts/memory-campaign``.

A program writes to its memory in every way that Linux has, all at once, and knows what each byte
should be (``writer.c``). It is snapshotted up to ten times in a row, ended, restored (eagerly,
lazily, under a dump that ends it), copied, and snapshotted again, while commands and keepers are
killed at random. The program itself, after each restore, checks all of its memory. The campaign
ends with 1 at the first wrong byte, and leaves the folder with the store.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import time
import uuid
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from support.command import Criuctl, Home
from support.keeper import Keeper
from support.memory_writer import Subject, written
from support.tracking import keepers
from support.zoo import Zoo

from campaign.machine import Machine

ALWAYS = ("store", "restless", "huge", "read", "slow-pread")
OFTEN = (
    *("shared", "merged", "swap", "mapping", "fork", "readv", "vmsplice", "recv", "recvmsg"),
    *("recvmmsg", "slow-pread-2", "slow-preadv", "sibling", "other"),
)
SELDOM = ("direct", "own-table", "aio")  # the memory of such a process is read frozen, mostly


class Wrong(Exception):
    """A byte is not as it was written."""


class Turn:
    """One program, from its start to its end."""

    def __init__(
        self,
        criuctl: Criuctl,
        zoo: Zoo,
        ways: list[str],
        dice: random.Random,
        seen: Counter[str],
    ) -> None:
        self.criuctl, self.zoo, self.ways, self.dice, self.seen = criuctl, zoo, ways, dice, seen

    def run(self, subject: Subject, until: float) -> None:
        """Snapshot it, end it and restore it, a few times."""
        for _ in range(self.dice.randint(1, 3)):
            report = None
            for _ in range(self.dice.choice((1, 1, 2, 2, 3, 10))):
                report = self._snapshot(subject) or report
                time.sleep(self.dice.random() / 2)
            if report is None or time.monotonic() > until:
                return
            # In its PID namespace a copy has the PID of its original, for the other process, too.
            if self.dice.random() < 0.3 and "other" not in self.ways:
                self._copies(subject, report)
            if self.dice.random() < 0.3:
                report = self._asked(subject, "dump", subject.animal.pid) or report
            subject.end()
            lazy = self.dice.random() < 0.4
            answer = self.criuctl(
                "restore", report["checkpoint"], *(["--lazy"] if lazy else []), timeout=300
            )
            self.seen["lazy restores" if lazy else "restores"] += 1
            subject.animal = self.zoo.adopt(answer["pid"], subject.animal)
            self._check(subject)

    def _check(self, subject: Subject) -> None:
        before = subject.status()[2]
        subject.checks(1, 300)
        self.seen["cells of 64 KiB checked after a restore"] += subject.status()[2] - before

    def _asked(self, subject: Subject, *arguments: str | int) -> dict[str, Any] | None:
        """Run a command about the tree; None if it was refused, which may be."""
        answer: dict[str, Any] = self.criuctl(*arguments, check=False, timeout=300)
        if subject.errors():
            raise Wrong(subject.errors())
        if answer["exit_code"] not in (0, 11):
            if not subject.animal.alive():
                raise Wrong(f"the tree has ended: {answer}")
            self.seen[f"refused: {arguments[0]}"] += 1
            print(f"  {arguments[0]}: {str(answer.get('error'))[:300]}", flush=True)
            return None
        self.seen[str(arguments[0])] += 1
        return dict(answer["list"][0]) if "list" in answer else answer

    def _snapshot(self, subject: Subject) -> dict[str, Any] | None:
        if self.dice.random() < 0.1:
            self._killed(subject)
        report = self._asked(subject, "snapshot", subject.animal.pid)
        if report is not None:
            how = self.criuctl("show", report["checkpoint"])["criu"]["memory"]
            self.seen["tracked" if how["way"] == "tracked" else "frozen"] += 1
            self.seen["with known pages"] += bool(how.get("known"))
            self.seen["in part read frozen for a call"] += "read frozen" in how.get("why", "")
        return report

    def _killed(self, subject: Subject) -> None:
        """Kill a snapshot, with its page server, or a keeper."""
        if self.dice.random() < 0.5:
            for keeper in keepers(self.criuctl.home):
                with suppress(ProcessLookupError):
                    os.kill(keeper, signal.SIGKILL)
                    self.seen["killed keepers"] += 1
            return
        command = self.criuctl.start("snapshot", subject.animal.pid)
        time.sleep(self.dice.uniform(0.2, 2.0))
        with suppress(ProcessLookupError):
            os.kill(command.process.pid, signal.SIGKILL)
        command.process.wait(60)
        self.seen["killed snapshots"] += 1
        time.sleep(1.0)

    def _copies(self, subject: Subject, report: dict[str, Any]) -> None:
        answer = self._asked(subject, "fork", report["checkpoint"], "-n", 2)
        for copy in answer["forks"] if answer else ():
            if copy["pid"]:
                animal = self.zoo.adopt(copy["pid"], subject.animal)
                self._check(Subject(subject.folder, animal))
                animal.end()
                self.seen["copies"] += 1


def turn(
    keeper: Keeper, machine: Machine, seed: int, until: float, seen: Counter[str]
) -> list[Path]:
    """Run one program; return the folders that it has left, which the caller removes."""
    dice = random.Random(seed)
    ways = [*ALWAYS, *dice.sample(OFTEN, dice.randint(4, 10))]
    ways += dice.sample(SELDOM, dice.choice((0, 0, 0, 1)))
    token = f"czoo{uuid.uuid4().hex[:10]}"
    home = Home(token, machine.folder / token, Path("/dev/shm") / token)
    for path in (home.path, home.run):
        path.mkdir(mode=0o700)
    zoo, criuctl = Zoo(keeper, home.path, token), Criuctl(keeper, home)
    criuctl.extra["CRIUCTL_TRACK_WRITES_MIB"] = "1"
    print(f"seed {seed}: {' '.join(ways)}", flush=True)
    delay = dice.choice((0.05, 0.2, 1.5))  # of 1.5 s: some reads do not end in time
    with written(zoo, home.path, ways, delay) as subject:
        if dice.random() < 0.25 and machine.limit(subject.animal.pid):
            seen["programs at the limit of their cgroup"] += 1
        Turn(criuctl, zoo, ways, dice, seen).run(subject, until)
    seen.update({f"way {way}": 1 for way in ways})
    return [home.path, home.run]


def main() -> int:
    """Run turns for as long as it is asked."""
    parser = argparse.ArgumentParser(prog="memory-campaign", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="default: 10")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first turn")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="on a disk")
    options = parser.parse_args()
    if os.geteuid():
        parser.error("needs root")
    folder = options.folder / f"memory-campaign-{os.getpid()}"
    folder.mkdir(mode=0o700)
    until, seen, seed = time.monotonic() + options.minutes * 60, Counter[str](), options.seed
    keeper = Keeper()
    with ExitStack() as stack:
        stack.callback(keeper.close)
        machine = Machine(folder, stack)
        print(f"switched on: {', '.join(machine.on)}")
        for name, why in machine.lacking.items():
            print(f"not here: {name}: {why}", flush=True)
        while time.monotonic() < until:
            try:
                for path in turn(keeper, machine, seed, until, seen):
                    shutil.rmtree(path)
            except (Wrong, AssertionError, TimeoutError) as error:
                print(f"WRONG, seed {seed}, see {folder}: {error}")
                _table(seen)
                return 1
            seen["programs"] += 1
            seed += 1
    _table(seen)
    shutil.rmtree(folder)
    return 0


def _table(seen: Counter[str]) -> None:
    print("\n| what | how often |\n|---|---|")
    for name in sorted(seen):
        print(f"| {name} | {seen[name]} |")


sys.exit(main())
