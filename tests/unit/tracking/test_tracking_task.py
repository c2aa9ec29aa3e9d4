"""What is known of the pages of a process whose writes are tracked."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from criuctl.criu.pages import PAGE, WINDOW
from criuctl.proc.memory import TaskMemory
from criuctl.proc.tree import ProcessIdentity
from criuctl.tracking.task import Task

PAGES = WINDOW // PAGE  # of a window


@pytest.mark.parametrize("seed", range(40))
def test_known_pages_of_any_range(seed: int) -> None:
    """As a model of single pages has it, also between notes, and in as few parts as possible."""
    chance = random.Random(seed)
    memory = TaskMemory.__new__(TaskMemory)  # nothing is read of it
    task = Task(ProcessIdentity(1, 0), 1, -1, memory, [])
    model: dict[int, bool] = {}
    for _ in range(30):
        first = chance.randrange(4 * PAGES)
        last = min(first + chance.randrange(1, PAGES), (first // PAGES + 1) * PAGES)
        number = chance.choice([-1, 100])
        task.note([(first * PAGE, last * PAGE)], number)
        model |= dict.fromkeys(range(first, last), number >= 0)
        if chance.random() < 0.2:  # a call writes to all but the ends of two pages
            low = chance.randrange(4 * PAGES)
            high = chance.randrange(low, 5 * PAGES) + 1
            task.doubt(low * PAGE + 7, high * PAGE - 9)
            model |= dict.fromkeys(range(low, high), False)
        start = chance.randrange(4 * PAGES)
        end = chance.randrange(start, 5 * PAGES) + 1
        parts = list(task.known(start * PAGE, end * PAGE))
        pages = [known for low, high, known in parts for _ in range(low, high, PAGE)]
        assert pages == [model.get(page, False) for page in range(start, end)]
        assert [low for low, _, _ in parts[1:]] == [high for _, high, _ in parts[:-1]]
        assert all(one[2] != other[2] for one, other in pairwise(parts))
