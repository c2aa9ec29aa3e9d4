"""A tree of processes that does what chance says: ``random_tree.py FOLDER SEED [KIND,...]``.

Each process takes random steps (`steps`), some before it forks, so that parent and child share what
they have made.  Two trees of one seed are alike: asked for what they find, they must answer alike,
though only one of them was dumped and restored.  KIND names the steps to choose from; without it
all of them are.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import sys
from collections.abc import Generator
from typing import Any

import steps
import steps.carried  # each makes its steps known
import steps.children
import steps.events
import steps.files
import steps.ipc
import steps.memory
import steps.network
import steps.pipes
import steps.settings
import steps.signals
import steps.terminals
from animal import FOLDER, Check, serve

SEED = sys.argv[2]
KINDS = sys.argv[3].split(",") if len(sys.argv) > 3 else sorted(steps.KINDS)
DEPTH, WIDTH = 2, 2  # seven processes at most
CONTROL = 500  # descriptors from here on are those by which parents and children talk

Step = tuple[str, Generator[Any, None, None]]


class Cell:
    """One process of the tree: its steps, and its children, each with a pipe to ask and one to
    answer.
    """

    def __init__(self, name: str, inherited: list[Step]) -> None:
        self.name = name
        self.random = random.Random(f"{SEED}/{name}")
        self.steps = inherited
        self.children: list[tuple[int, int]] = []
        self.failed: dict[str, str] = {}

    def grow(self) -> None:
        """Take steps and fork."""
        depth = self.name.count(".")
        for number in range(self.random.randint(2, 6)):
            forks = depth < DEPTH and len(self.children) < WIDTH and self.random.random() < 0.3
            if forks:
                self.fork()
                continue
            kind = self.random.choice(KINDS)
            label = f"{self.name}/{number} {kind}"
            place = steps.Place(FOLDER, label, random.Random(f"{SEED}/{label}"))
            step = steps.KINDS[kind](place)
            found = _next(step)
            if found is None:
                self.steps.append((label, step))
            else:
                self.failed[label] = found  # not on this machine, or not after what was done before

    def fork(self) -> None:
        """A child that keeps some of what its parent has made, and grows by itself."""
        name = f"{self.name}.{len(self.children)}"
        asked, ask = _pipe()
        answered, answer = _pipe()
        if os.fork():
            os.close(asked)
            os.close(answer)
            self.children.append((ask, answered))
            assert os.read(answered, 1) == b"."
            return
        for fd in (ask, answered, *(fd for pair in self.children for fd in pair)):
            os.close(fd)
        child = Cell(name, [])
        for label, step in self.steps:
            if child.random.random() < 0.5:
                child.steps.append((f"{label} in {name}", step))
            else:
                step.close()
        child.grow()
        os.write(answer, b".")
        while os.read(asked, 1):
            os.write(answer, json.dumps(child.look()).encode() + b"\n")
        os._exit(0)

    def look(self) -> dict[str, Any]:
        """What every step finds, of this process and of those below; one after the other, so that
        all is settled.
        """
        found = self.failed | {label: _next(step) for label, step in self.steps}
        for ask, answered in self.children:
            os.write(ask, b"?")
            answer = b""
            while not answer.endswith(b"\n"):
                part = os.read(answered, 1 << 16)
                assert part, "a process of the tree has ended"
                answer += part
            found |= json.loads(answer)
        return found


def _pipe() -> list[int]:
    """A pipe by numbers that no step has to do with."""
    moved = []
    for fd in os.pipe():
        moved.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, CONTROL))
        os.close(fd)
    return moved


def _next(step: Generator[Any, None, None]) -> Any:
    try:
        return next(step, "nothing more")
    except OSError as error:
        return f"{type(error).__name__} {error.errno}"


root = Cell("0", [])
with contextlib.suppress(KeyboardInterrupt):
    root.grow()


def check(found: Check) -> None:
    found.facts["found"] = root.look()


serve(check)
