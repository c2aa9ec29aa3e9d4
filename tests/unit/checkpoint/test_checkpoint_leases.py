"""A session lives on one host: of many that claim it one gets it, and the others are told who."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support import checkpoints as kit
from support.faulty_store import FaultyStore

from criuctl.checkpoint import leases
from criuctl.checkpoint.repository import Repository
from criuctl.errors import Conflict, Damaged, StoreUnreachable
from criuctl.store.base import Capabilities
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
    assert (second.head.epoch, second.head.incarnation, second.leased, second.warning) == (2, 3, True, "")
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
def test_an_unknown_outcome_is_resolved_by_the_store(tmp_path: Path, letter: str, held: bool) -> None:
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
    assert len(names) <= 5 and names[-1].endswith("0012")
    data = repo.store.get(names[-1])
    repo.store.put(names[-1][:-2] + "13", data)  # an older record passed off as the newest
    with pytest.raises(Damaged):
        claim(repo, B)
