"""What dumps and restores of a small process cost: the command line, and the Python API, whose
process is warm.

Compared with another criuctl (``--former COMMAND``), as an earlier one of this project.  The API's
calls are those that `criuctl.sdk.worker` performs for `Session`, of a process that is no session,
so that all have the same tree.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from criuctl.config import Config
from criuctl.sdk import worker

from .cases import MIB, subject_of
from .program import Tree
from .report import SUBJECT, Bound, Section
from .ways import Criuctl, Dumped, Restored, Way

if TYPE_CHECKING:
    from .cases import Bench

FORMER, API = "former", "API"
COMMAND_LINE = Bound(0.6, FORMER)
CALLS = Bound(0.35, FORMER, of=API)
_SIZE = 9 * MIB
_LEAST = 5  # rounds


class Api(Way):
    """The Python API."""

    name = API

    def __init__(self, shown: Criuctl) -> None:
        """`shown`: the command line with the same store and folders."""
        self._shown = shown
        env = shown.environment()
        self._config = Config(
            store=env["CRIUCTL_STORE"],
            state_dir=env["CRIUCTL_STATE_DIR"],
            cache_dir=env["CRIUCTL_CACHE_DIR"],
            key_dir=env["CRIUCTL_KEY_DIR"],
            files_small_mib=0,
            shared_memory_max_mib=0,
        )

    def dump(self, tree: Tree, *, leave_running: bool = False, memory: bool = False) -> Dumped:
        self._shown.prepare()
        os.sync()
        began = time.monotonic()
        answer = worker.perform("dump", self._config, target=str(tree.pid), request={"name": API})
        seconds = time.monotonic() - began
        return Dumped(seconds, answer["frozen_ms"] / 1000, answer["bytes"]["stored"])

    def restore(self, tree: Tree, *, memory: bool = False) -> Restored:
        os.sync()
        tree.arm()
        began, clock = time.time(), time.monotonic()
        worker.perform("restore", self._config, ref=API, request={"files": "keep"})
        ended = time.monotonic() - clock
        return Restored(tree.resumed_at() - began, ended)

    def cool(self) -> None:
        self._shown.cool()

    def clean(self) -> None:
        self._shown.clean()


def small(bench: Bench, former: Sequence[str]) -> Iterator[Section]:
    """A process of 9 MiB, dumped and restored by each way in turn."""
    place = bench.places[0]
    section = Section(
        f"small, 9 MiB in 1 process, {place.name}", {"case": "small", "store": place.name}
    )
    programs = {SUBJECT: bench.program, **({FORMER: former} if former else {})}
    ways: list[Way] = [
        Criuctl(bench.commands, bench.disk / name, place, program, name=name)
        for name, program in programs.items()
    ]
    ways.append(Api(Criuctl(bench.commands, bench.disk / API, place, bench.program)))
    with subject_of(bench, _SIZE, 1) as subject:
        try:
            for number in range(max(bench.runs, _LEAST) + 1):
                bench.say(f"small, round {number}")  # the first one is for the caches
                for way in ways:
                    if not subject.plays(way):
                        continue
                    with subject.turn(way, section) as tree:
                        dumped = way.dump(tree)
                        tree.gone()
                        restored = way.restore(tree)
                        if number:
                            _note(section, way, dumped.seconds, restored.ended)
                    way.clean()
        finally:
            for way in ways:
                way.clean()
            worker.close()
    yield section


def _note(section: Section, way: Way, dump: float, restore: float) -> None:
    for what, seconds in (("dump", dump), ("restore", restore)):
        section.row(what, bound=COMMAND_LINE).add(way.name, seconds)
        if way.name != SUBJECT:  # the second bound needs a row of its own
            section.row(f"{what}, of the API", bound=CALLS).add(way.name, seconds)
