"""A session lives on one host: of several hosts that claim it one gets it, and the others get an
error that names that host.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import checkpoints as kit
from support.faulty_store import FaultyStore

from criuctl.checkpoint import heads, leases
from criuctl.checkpoint.manifest import SessionRef
from criuctl.checkpoint.repository import Repository
from criuctl.errors import Conflict, Damaged, StoreUnreachable, UnsupportedFormat
from criuctl.store.base import Capabilities, Data, ObjectInfo
from criuctl.store.memory import MemoryStore

SESSION = "ab" * 16
A, B = "a" * 32, "b" * 32


def claim(repo: Repository, host: str, incarnation: int = 2) -> leases.Claim:
    return leases.claim(repo, "web", SESSION, incarnation, host=host, host_name=f"host-{host[0]}")


def test_a_session_is_held_until_it_is_released(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path, encrypted=True)
    assert leases.read_head(repo, "web") is None and not leases.release(repo, "web", host=A)
    first = claim(repo, A)
    first.keep()
    first.release_unless_kept()
    with pytest.raises(Conflict, match="held by host host-a"):
        claim(repo, B)
    assert not leases.release(repo, "web", host=B) and leases.release(repo, "web", host=A)
    second = claim(repo, B, 3)
    assert (second.head.epoch, second.head.incarnation, second.leased, second.warning) == (
        2,
        3,
        True,
        "",
    )
    second.release_unless_kept()
    second.release_unless_kept()
    head = leases.read_head(repo, "web")
    assert head is not None and (head.state, head.epoch) == ("released", 2)


def test_a_host_takes_over_what_it_holds_itself(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    old = claim(repo, A)
    new = claim(repo, A)
    assert new.head.epoch == old.head.epoch + 1
    new.keep()
    old.release_unless_kept()  # the older claim has nothing to give back any more
    head = leases.read_head(repo, "web")
    assert head is not None and (head.state, head.nonce) == ("held", new.head.nonce)


def test_of_many_claims_one_wins(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    start, won, lost = threading.Barrier(12), [], []

    def race(n: int) -> None:
        start.wait()
        try:
            won.append(claim(repo, f"{n:032x}"))
        except Conflict:
            lost.append(n)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(lost) == 11


@pytest.mark.parametrize(("letter", "held"), [("A", True), ("E", False)])
def test_an_unknown_outcome_is_resolved_by_the_store(
    tmp_path: Path, letter: str, held: bool
) -> None:
    repo = kit.repository(tmp_path)
    store = FaultyStore(repo.store, put=letter)
    opened = Repository.open(store, repo.config)
    if held:
        assert claim(opened, A).leased
    else:
        with pytest.raises(StoreUnreachable):
            claim(opened, A)
    head = leases.read_head(repo, "web")
    assert (head is not None) is held


@pytest.mark.parametrize("letter", ["E", "D", "F"])
def test_a_lease_that_cannot_be_given_back_hides_no_failure(tmp_path: Path, letter: str) -> None:
    """A failed restore is reported as that, also when the store has become full or read-only
    meanwhile.
    """
    repo = kit.repository(tmp_path)
    store = FaultyStore(repo.store, put="." + letter)
    made = claim(Repository.open(store, repo.config), A)
    made.release_unless_kept()
    assert [was for _verb, _name, was in store.calls].count(letter) == 1
    with pytest.raises(Conflict, match="held by host host-a"):
        claim(repo, B)
    assert claim(repo, A, 3).leased


@pytest.mark.parametrize("before", ["", A, B])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_signal_while_it_is_claimed_leaves_the_lease_as_it_was(
    tmp_path: Path, nth: int, before: str
) -> None:
    """It comes when the record is in the store: before its answer, or at one of the looks that
    follow.
    """

    class Interrupted(FaultyStore):
        left = -1

        def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
            super().put(name, data, if_absent=if_absent)
            if self.left < 0:
                self.left = nth
                self.step()

        def step(self) -> None:
            if self.left > 0:
                self.left -= 1
                if not self.left:
                    raise KeyboardInterrupt

        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            self.step()
            return super().list(prefix)

        def get(self, name: str, limit: int | None = None) -> bytes:
            self.step()
            return super().get(name, limit)

    repo = kit.repository(tmp_path)
    if before:
        claim(repo, before).keep()
    opened = Repository.open(Interrupted(repo.store), repo.config)
    with pytest.raises(KeyboardInterrupt):
        leases.claim(opened, "web", SESSION, 2, host=A, host_name="host-a", take_over=before == B)
    head = leases.read_head(repo, "web")
    assert head is not None and (head.state, head.host) == (
        ("held", before) if before else ("released", A)
    )


def test_a_weak_store_gives_no_lease_and_says_so(tmp_path: Path) -> None:
    class Weak(MemoryStore):
        def probe(self) -> Capabilities:
            return Capabilities(conditional_create=False, kind="weak")

    repo = kit.repository(tmp_path, store=Weak())
    made = claim(repo, A)
    assert not made.leased and "conditional" in made.warning
    made.release_unless_kept()
    assert not list(repo.store.list("sessions/")) and not leases.release(repo, "web", host=A)
    kit.check(repo, kit.write(repo))


def test_records_do_not_pile_up_and_are_not_forged(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path, encrypted=True)
    for _turn in range(6):
        claim(repo, A).release_unless_kept()
    names = [info.name for info in repo.store.list("sessions/")]
    assert 4 <= len(names) <= 8 and names[-1].endswith("0012")
    data = repo.store.get(names[-1])
    # an older record passed off as the newest; damage
    for wrong in (data, data[:-1], data[:-1] + bytes([data[-1] ^ 1])):
        repo.store.put(names[-1][:-2] + "13", wrong)
        with pytest.raises(Damaged) as caught:
            claim(repo, B)
        # and not what helps where a checkpoint is damaged
        assert "restore --as NAME" in caught.value.hint


def test_the_end_of_a_session_is_not_that_of_another_one_of_its_name(tmp_path: Path) -> None:
    """As where two state folders of a host have one each."""
    repo = kit.repository(tmp_path)
    lives = claim(repo, A)
    assert not leases.end(repo, SessionRef("web", "cd" * 16), 1, host=A)
    assert leases.read_head(repo, "web") == lives.head
    assert leases.end(repo, SessionRef("web", SESSION), 2, host=A)


def records(repo: Repository) -> list[str]:
    return [info.name for info in repo.store.list("sessions/")]


@pytest.mark.parametrize("before", [0, 2])
def test_a_take_over_goes_over_a_damaged_record(tmp_path: Path, before: int) -> None:
    repo = kit.repository(tmp_path, encrypted=True)
    for _turn in range(before):
        claim(repo, B).release_unless_kept()
    # whose records were lost once, say
    home = leases.claim(repo, "web", SESSION, 2, host=A, above=9)
    home.keep()
    repo.store.put(records(repo)[-1], b"what a broken disk left")
    repo.store.put(records(repo)[0][:-20] + "zz" + "9" * 20, b"put to be in the way")
    for turn in range(2):
        damaged = records(repo)[-2]
        with pytest.raises(Damaged) as caught:
            claim(repo, B)
        assert "restore --take-over" in caught.value.hint
        taken = leases.claim(repo, "web", SESSION, 3, host=B, take_over=True)
        assert taken.head.epoch > home.head.epoch and leases.read_head(repo, "web") == taken.head
        if turn:
            taken.keep()
        taken.release_unless_kept()
        assert turn or records(repo)[-2] == damaged  # as it was: its owner is unknown
    home = taken
    repo.store.put(heads.record_name(repo, taken.head), b"once more")
    taken = leases.claim(repo, "web", SESSION, 4, host=A, take_over=True)
    assert taken.head.epoch > home.head.epoch


def test_a_take_over_does_not_go_over_what_only_cannot_be_opened(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    name = heads.record_name(repo, claim(repo, A).head)
    # of a later version
    repo.store.put(name, repo.store.get(name)[:8] + b"\xff" + repo.store.get(name)[9:])
    with pytest.raises(UnsupportedFormat):
        leases.claim(repo, "web", SESSION, 3, host=B, take_over=True)


@pytest.mark.parametrize("field", ["epoch", "sequence"])
def test_the_highest_possible_number_is_reported_and_not_followed(
    tmp_path: Path, field: str
) -> None:
    """A host with write access could put it; a record that follows it would be unreadable."""
    repo = kit.repository(tmp_path)
    most = {"epoch": 1 << 62, "sequence": 10**19}[field]
    last = claim(repo, A).head.with_use(**{"state": "released", "sequence": 2, field: most})
    assert leases.put_record(repo, last)
    before = [info.name for info in repo.store.list("sessions/")]
    with pytest.raises(Damaged, match=before[-1]) as caught:
        claim(repo, B)
    assert "remove it" in caught.value.hint and leases.read_head(repo, "web") == last
    repo.store.delete(before[-1])
    claim(repo, A).keep()


def held(repo: Repository) -> leases.Head:
    """The current lease, which a host holds."""
    head = leases.read_head(repo, "web")
    assert head is not None and head.state == "held"
    return head


def expired(repo: Repository, host: str, seen: leases.Head) -> leases.Claim:
    return leases.claim(
        repo, "web", SESSION, 3, host=host, host_name=f"host-{host[0]}", ttl=9000, instead_of=seen
    )


def test_a_beat_is_the_same_claim_and_a_take_over_needs_the_beat_that_was_seen(
    tmp_path: Path,
) -> None:
    repo = kit.repository(tmp_path)
    session = SessionRef("web", SESSION)
    assert leases.renew(repo, session, host=A, ttl=9000) is None
    mine = claim(repo, A)
    mine.keep()
    assert (mine.head.beat, mine.head.ttl) == (0, 0)
    for beat in range(1, 8):
        found = leases.renew(repo, session, host=A, ttl=9000)
        assert found is not None and (found.epoch, found.beat, found.ttl) == (
            mine.head.epoch,
            beat,
            9000,
        )
        assert found.time == mine.head.time and found.beaten
    assert len(list(repo.store.list("sessions/"))) <= 5
    mine.check()
    seen = held(repo)
    # what is another's is only looked at
    assert leases.renew(repo, session, host=B, ttl=1) == seen == held(repo)
    leases.renew(repo, session, host=A, ttl=9000)
    with pytest.raises(Conflict, match="has changed: host-a"):
        expired(repo, B, seen)
    with pytest.raises(Conflict, match="held by host host-a"):
        claim(repo, B)
    seen = held(repo)
    taken = expired(repo, B, seen)
    with pytest.raises(Conflict, match="taken over by host host-b"):
        mine.check()
    # It comes to nothing, though it was renewed meanwhile: the old home has it again, by the beat
    # that was seen.
    leases.renew(repo, session, host=B, ttl=9000)
    taken.release_unless_kept()
    assert held(repo).is_beat_of(seen) and held(repo).sequence > seen.sequence
    expired(repo, B, seen).keep()
    assert (held(repo).host, held(repo).epoch, held(repo).ttl) == (B, mine.head.epoch + 1, 9000)
    assert leases.release(repo, "web", host=B) and not leases.release(repo, "web", host=B)


def test_of_many_that_saw_a_lease_run_out_one_wins(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    claim(repo, A).keep()
    leases.renew(repo, SessionRef("web", SESSION), host=A, ttl=9000)
    seen, start = held(repo), threading.Barrier(8)
    won: list[str] = []

    def race(n: int) -> None:
        start.wait()
        try:
            if n:
                expired(repo, f"{n:032x}", seen).keep()
                won.append(f"{n:032x}")
            elif (
                not leases.renew(repo, SessionRef("web", SESSION), host=A, ttl=9000)
                or held(repo).host == A
            ):
                won.append(A)
        except Conflict:
            pass

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [held(repo).host] == won


def test_who_slept_since_it_looked_has_not_won(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number that it found free was used meanwhile, and cleared."""
    repo = kit.repository(tmp_path)
    claim(repo, A).keep()
    session, put = SessionRef("web", SESSION), leases.put_record
    stale: list[leases.Head] = []

    def slow(repository: Repository, head: leases.Head) -> bool:
        if not stale:
            stale.append(head)
            for _beat in range(9):
                leases.renew(repo, session, host=A, ttl=9000)
        return put(repository, head)

    seen = held(repo)
    monkeypatch.setattr(leases, "put_record", slow)
    with pytest.raises(Conflict, match="has changed: host-a"):
        expired(repo, B, seen)
    assert stale[0].host == B and (held(repo).host, held(repo).beat) == (A, 9)
    for _beat in range(4):  # after as many at most old records are removed
        leases.renew(repo, session, host=A, ttl=9000)
    assert all(int(info.name[-20:]) > stale[0].sequence for info in repo.store.list("sessions/"))


def test_what_was_seen_of_a_lease_that_is_renewed_is_too_old_to_release_it(tmp_path: Path) -> None:
    """The number that would follow was used meanwhile, and cleared."""
    repo = kit.repository(tmp_path)
    claim(repo, A).keep()
    session = SessionRef("web", SESSION)
    leases.renew(repo, session, host=A, ttl=9000)
    seen = held(repo)
    for _beat in range(9):
        leases.renew(repo, session, host=A, ttl=9000)
    assert leases.release(repo, "web", host=A, seen=seen)
    newest = leases.read_head(repo, "web")
    assert newest is not None and newest.state == "released"


def test_the_end_of_a_session_outlives_a_restore_that_comes_to_nothing(tmp_path: Path) -> None:
    """Else its newest checkpoint would be kept for ever, as one that it might come back from."""
    repo = kit.repository(tmp_path)
    claim(repo, A).keep()
    assert leases.end(repo, SessionRef("web", SESSION), 2, host=A)
    claim(repo, B, 3).release_unless_kept()
    head = leases.read_head(repo, "web")
    assert head is not None and (head.state, head.ended) == ("released", True)


def test_the_end_is_said_after_a_restore_elsewhere_that_came_to_nothing(tmp_path: Path) -> None:
    """It lay checkpointed here, and a restore there came to nothing: it is still who lived here
    last that may say it.
    """
    repo = kit.repository(tmp_path)
    claim(repo, A).release_unless_kept()
    claim(repo, B, 3).release_unless_kept()
    assert leases.end(repo, SessionRef("web", SESSION), 2, host=A)
    claim(repo, B, 3).keep()
    assert not leases.end(repo, SessionRef("web", SESSION), 2, host=A)  # it lives there
