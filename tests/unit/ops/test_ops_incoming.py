"""A session that arrives, where what goes wrong is on the receiving host's own side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support import checkpoints as kit

from criuctl.config import Config
from criuctl.ops.incoming import Arrival
from criuctl.ops.moves import Incoming, Moves, new_id
from criuctl.report import Reporter


class Site:
    """The inbox and the records of one host."""

    def __init__(self, path: Path) -> None:
        self.config = Config(state_dir=str(path))
        self.repository = kit.repository(path)
        self.moves = Moves(self.config, Incoming)

    def move(self, session: str, checkpoint: str = "", state: str = "receiving") -> Incoming:
        move = Incoming(new_id(), session, new_id(), origin="elsewhere", checkpoint=checkpoint, state=state)
        return self.moves.put(move)

    def arrival(self, move: Incoming) -> Arrival:
        return Arrival(self.config, Reporter(), self.repository, self.moves, move)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_the_only_copy_of_another_session_of_that_name_stays_in_the_inbox(site: Site) -> None:
    """Its home has ended it, and the word to let it run has not come yet: it lives nowhere else."""
    waits = site.move("work", kit.write(site.repository, session="work").id, "given-up")
    old = kit.write(site.repository, session="work")
    comes = site.move("work", kit.write(site.repository, session="work").id)
    site.arrival(comes).clean()
    assert [one.id for one in site.repository.list("work")] == [waits.checkpoint] and old.id != waits.checkpoint
    assert [move.id for move in site.moves.all()] == [waits.id]
    site.arrival(replace(waits, state="receiving")).clean()
    assert not site.repository.list("work")
