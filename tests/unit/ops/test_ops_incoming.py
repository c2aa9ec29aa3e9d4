"""A session that arrives, where what goes wrong is on the receiving host's own side."""

from __future__ import annotations

import errno
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support import checkpoints as kit

from criuctl.config import Config
from criuctl.ops import incoming, receive
from criuctl.ops.arrival import RestoreResult
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


def test_a_session_that_runs_is_told_to_run_also_where_that_cannot_be_written_down(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = RestoreResult("c" * 32, "work", 2, 4711, 4711, 1.0, False, "same", [], [])
    arrival, put = site.arrival(site.move("work", "c" * 32, "held")), site.moves.put
    taken_away: list[str] = []

    def full(move: Incoming) -> Incoming:
        if move.state == "running":
            raise OSError(errno.ENOSPC, "No space left on device")
        return put(move)

    monkeypatch.setattr(incoming, "restore", lambda *_args, **_wishes: result)
    monkeypatch.setattr(site.moves, "put", full)
    monkeypatch.setattr(arrival, "_undo_addresses", lambda: taken_away.append("all"))
    arrival.restore()
    assert arrival.wait_done()["result"]["pid"] == 4711
    assert [move.state for move in site.moves.all()] == ["held"] and not taken_away


def test_a_visit_ends_when_its_link_does_whatever_cannot_be_written_down(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.write(site.repository, session="work")
    arrival = site.arrival(site.move("work"))

    def full(_move: Incoming) -> Incoming:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(site.moves, "put", full)
    with ExitStack() as stack:
        visit = receive._Visit(site.config, Reporter(), 1.0, stack)
        visit._arrival = arrival
        with suppress(OSError):
            visit.left()
        ends = threading.Thread(target=visit.run, daemon=True)
        ends.start()
        ends.join(5)
        assert not ends.is_alive()
