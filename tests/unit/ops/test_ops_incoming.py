"""A session that arrives, where what goes wrong is on the receiving host's own side."""

from __future__ import annotations

import errno
import os
import signal
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import checkpoints as kit

from criuctl.checkpoint import key_files
from criuctl.checkpoint.repository import Repository
from criuctl.checkpoint.summary import CheckpointSummary
from criuctl.config import Config
from criuctl.host.moves import Incoming, Moves, new_id
from criuctl.host.registry import Registry, SessionRecord, boot_id
from criuctl.ops import receive
from criuctl.ops.moving import inbox, incoming
from criuctl.ops.moving.inbox_part import OwnPart
from criuctl.ops.moving.incoming import Arrival
from criuctl.proc.tree import ProcessIdentity
from criuctl.report import Reporter
from criuctl.restore.outcome import RestoreResult


class Site:
    """The inbox and the records of one host."""

    def __init__(self, path: Path) -> None:
        self.config = Config(state_dir=str(path), key_dir=str(path / "keys"))
        self.repository = inbox.opened(self.config)
        self.moves = Moves(self.config, Incoming)
        self.key = inbox.key_for(self.repository, new_id(), None)
        key_files.write_secret(path / "key", self.key.text())

    def part(self, session: str) -> OwnPart:
        return OwnPart(self.repository, self.key, session)

    def sent(self, session: str) -> CheckpointSummary:
        """A checkpoint that the other host has sent."""
        theirs = kit.config(Path(self.config.state_dir), key_file=f"{self.config.state_dir}/key")
        with Repository.open(self.part(session), theirs) as repository:
            repository.preflight_write()
            return kit.write(repository, session=session)

    def move(self, session: str, checkpoint: str = "", state: str = "receiving") -> Incoming:
        move = Incoming(
            new_id(),
            session,
            "ab" * 16,  # as `kit.write` has it
            origin="elsewhere",
            writer=self.key.id.hex(),
            checkpoint=checkpoint,
            state=state,
        )
        return self.moves.put(move)

    def arrival(self, move: Incoming) -> Arrival:
        return Arrival(
            self.config, Reporter(), self.repository, self.moves, move, self.part(move.session)
        )

    def runs(self, move: Incoming, checkpoint: str) -> None:
        """The session of this move runs here, as the very process that asks."""
        here = ProcessIdentity.of(os.getpid())
        record = SessionRecord(
            move.session,
            move.session_id,
            3,
            pid=here.pid,
            start_time=here.start_time,
            boot_id=boot_id(),
        )
        Registry(self.config).put(replace(record, checkpoint=checkpoint))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_the_only_copy_of_another_session_of_that_name_stays_in_the_inbox(site: Site) -> None:
    """Its home has ended it, and the word to let it run has not come yet: it lives nowhere else."""
    waits = site.move("work", site.sent("work").id, "given-up")
    old = site.sent("work")
    comes = site.move("work", site.sent("work").id)
    site.arrival(comes).clean()
    assert [one.id for one in site.repository.list("work")] == [
        waits.checkpoint
    ] and old.id != waits.checkpoint
    assert [move.id for move in site.moves.all()] == [waits.id]
    site.arrival(replace(waits, state="receiving")).clean()
    assert not site.repository.list("work")


def test_a_running_session_is_reported_though_that_cannot_be_recorded(
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


def test_a_visit_ends_when_its_link_does_whatever_cannot_be_written_down(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.sent("work")
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
        ends.join(60)
        assert not ends.is_alive()


def test_what_could_not_be_begun_is_undone_at_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its home says abort, and would wait for a restore that never begins."""
    sent = site.sent("work")
    arrival, put = site.arrival(site.move("work")), site.moves.put

    def full(_move: Incoming) -> Incoming:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(site.moves, "put", full)
    with pytest.raises(OSError, match="No space"):
        arrival.prepare({"checkpoint": sent.id})
    monkeypatch.setattr(site.moves, "put", put)
    undone = threading.Thread(target=arrival.decide, args=("abort",), daemon=True)
    undone.start()
    undone.join(60)
    assert not undone.is_alive()
    assert not list(site.moves.all()) and not site.repository.list("work")


class Interrupted(Exception):
    """What a signal's handler raises, as ^C does."""


def test_a_signal_when_it_was_let_run_waits_until_that_is_sent(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrival = site.arrival(site.move("work", "c" * 32))
    arrival.word = "go"

    def restored(*_args: Any, partners: Any, **_wishes: Any) -> RestoreResult:
        partners.held([])
        os.kill(os.getpid(), signal.SIGTERM)
        return RestoreResult("c" * 32, "work", 2, 4711, 4711, 1.0, False, "same", [], [])

    def interrupt(*_: Any) -> None:
        raise Interrupted

    monkeypatch.setattr(incoming, "restore", restored)
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with pytest.raises(Interrupted):
            arrival.restore()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert arrival.wait_done()["result"]["pid"] == 4711
    assert [move.state for move in site.moves.all()] == ["running"]


def test_what_fails_when_it_runs_is_no_failure_of_its_restore(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its home must not get the answer that it does not run, nor lose an address that came
    along.
    """
    move = site.move("work", "c" * 32)
    arrival = site.arrival(move)
    arrival.word = "go"
    taken_away: list[str] = []

    def restored(*_args: Any, partners: Any, **_wishes: Any) -> RestoreResult:
        partners.held([])
        site.runs(move, "c" * 32)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(incoming, "restore", restored)
    monkeypatch.setattr(arrival, "_undo_addresses", lambda: taken_away.append("all"))
    arrival.restore()
    result = arrival.wait_done()["result"]
    assert (result["pid"], result["incarnation"], result["degraded"]) == (os.getpid(), 3, True)
    assert "Too many open files" in result["warnings"][-1]
    assert [move.state for move in site.moves.all()] == ["running"] and not taken_away


def test_a_session_that_was_dumped_since_it_came_is_reported_as_running(site: Site) -> None:
    """Its receiver was killed before it had written down that it runs; its home asks much later,
    again and again.
    """
    move = site.move("work", "c" * 32, "held")
    site.runs(move, "d" * 32)
    replies: list[Any] = []
    with ExitStack() as stack:
        visit = receive._Visit(site.config, Reporter(), 1.0, stack)
        asked = {"id": move.id, "word": "go", "writer": inbox.proof(site.key, move.id)}
        settling = threading.Thread(
            target=lambda: replies.append(visit._settle(asked)), daemon=True
        )
        settling.start()
        settling.join(60)
    assert replies == [{"result": {"pid": os.getpid(), "incarnation": 3}}]
    assert [one.state for one in site.moves.all()] == ["running"]
