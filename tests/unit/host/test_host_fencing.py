"""Who is fenced, by what the lease says; and what a lease says after a take-over that failed, or a
session that moved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict, replace
from support import checkpoints as kit

from criuctl.checkpoint import leases
from criuctl.checkpoint.manifest import SessionRef
from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.errors import Conflict, HomeLost
from criuctl.host import fencing
from criuctl.host.registry import Registry, SessionRecord, boot_id
from criuctl.proc.tree import ProcessIdentity
from criuctl.report import Reporter
from criuctl.store.base import Capabilities
from criuctl.store.memory import MemoryStore

SESSION = SessionRef("web", "ab" * 16)
A, B = "home-a", "home-b"


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    return kit.repository(tmp_path, host_id=A, state_dir=str(tmp_path / "state"))


def claim(
    repo: Repository, host: str, *, take_over: bool = False, session: SessionRef = SESSION
) -> leases.Claim:
    return leases.claim(
        repo, session.name, session.id, 1, host=host, host_name=host, take_over=take_over
    )


def home(repo: Repository, epoch: int) -> SessionRecord:
    return fencing.with_lease(SessionRecord(SESSION.name, SESSION.id), repo, epoch)


def test_a_higher_epoch_fences_and_nothing_else_does(repo: Repository) -> None:
    def check(record: SessionRecord) -> fencing.Fenced | None:
        return fencing.check(repo.config, repo, record)

    record = home(repo, 1)
    assert check(record) is None  # no lease to see
    claim(repo, A).keep()
    assert check(record) is None and check(home(repo, 0)) is None
    claim(repo, B, take_over=True).keep()
    found = check(record)
    assert (
        found is not None
        and (found.epoch, found.head.epoch, found.head.host) == (1, 2, B)
        and "home-b" in found.text
    )
    assert check(home(repo, 2)) is None
    assert check(home(repo, 0)) is not None  # asked for, and another has it
    assert check(replace(record, leases={})) is None  # never claimed
    assert check(replace(record, id="cd" * 16)) is None  # the lease is another session's
    assert leases.release(repo, "web", host=B)
    assert check(record) is not None  # it has lived elsewhere since
    claim(repo, A).keep()  # of this host's, by a later life
    assert check(record) is not None and check(home(repo, 0)) is None


def test_a_take_over_that_fails_is_undone(repo: Repository) -> None:
    claim(repo, A).keep()
    claim(repo, B, take_over=True).release_unless_kept()
    head = leases.read_head(repo, "web")
    assert head is not None and (head.host, head.state, head.epoch) == (A, "held", 1)
    assert fencing.check(repo.config, repo, home(repo, 1)) is None
    with pytest.raises(Conflict, match="home-a"):
        claim(repo, B)


def test_passing_on(repo: Repository) -> None:
    def give(to: str, incarnation: int = 2, giver: str = A) -> leases.Head | None:
        return leases.pass_on(
            repo, SESSION, from_host=giver, to_host=to, to_name=to, incarnation=incarnation
        )

    first = give(B)  # no host has it
    assert first is not None and (first.host, first.epoch, first.state, first.incarnation) == (
        B,
        1,
        "held",
        2,
    )
    assert give(B) == first  # asked again after a lost answer
    with pytest.raises(Conflict, match="home-b"):
        give("home-c")
    back = give(A, 3, B)
    assert back is not None and (back.host, back.epoch) == (A, 2)
    assert fencing.check(repo.config, repo, home(repo, 1)) is not None


def test_a_weak_store_fences_no_host(tmp_path: Path) -> None:
    class Weak(MemoryStore):
        def probe(self) -> Capabilities:
            return Capabilities(conditional_create=False, kind="weak")

    repo = kit.repository(tmp_path, store=Weak(), host_id=A)
    assert fencing.check(repo.config, repo, home(repo, 1)) is None
    assert leases.pass_on(repo, SESSION, from_host=A, to_host=B, to_name=B, incarnation=2) is None
    assert not list(repo.store.list("sessions/"))


def test_old_records_are_read(tmp_path: Path) -> None:
    config = Config(state_dir=str(tmp_path), run_dir=str(tmp_path))
    registry = Registry(config)
    body = asdict(SessionRecord("web", SESSION.id, state="checkpointed"))
    for key in ("leases", "reason"):
        del body[key]
    registry.folder.mkdir(parents=True)
    (registry.folder / "web.json").write_text(json.dumps(body))
    record = registry.get("web")
    assert record is not None and (record.leases, record.reason) == ({}, "")


class TestHome:
    """The lease as a dump of this process needs it."""

    def home(self, repo: Repository, *, lives_on: bool = True, known: bool = True) -> fencing.Home:
        self.registry = Registry(replace(repo.config, run_dir=repo.config.state_dir))
        root = ProcessIdentity.of(1)
        record = self.registry.get("web") or SessionRecord(SESSION.name, SESSION.id)
        if known:
            self.registry.put(
                replace(record, pid=root.pid, start_time=root.start_time, boot_id=boot_id())
            )
            record = self.registry.get("web") or record
        home = fencing.Home(
            repo.config, repo, self.registry, record, root, Reporter(), lives_on=lives_on
        )
        home.look()
        return home

    def head(self, repo: Repository) -> tuple[str, str, int] | None:
        head = leases.read_head(repo, "web")
        return None if head is None else (head.state, head.host, head.epoch)

    def remembered(self, repo: Repository) -> int | None:
        record = self.registry.get("web")
        return None if record is None else fencing.epoch_of(record, repo)

    def test_a_known_session_is_claimed_once(self, repo: Repository) -> None:
        for _turn in range(2):
            with self.home(repo) as home:
                assert self.head(repo) == ("held", A, 1) and self.remembered(repo) == 1
                home.look()
        with self.home(repo, lives_on=False):
            pass
        assert self.head(repo) == ("held", A, 1)

    def test_what_failed_of_an_unknown_tree_is_given_back(self, repo: Repository) -> None:
        with self.home(repo, known=False) as home:
            assert fencing.epoch_of(home.session, repo) == 1
        assert self.head(repo) == ("released", A, 1)
        with self.home(repo, known=False) as home:
            home.keep()
        assert self.head(repo) == ("held", A, 2)

    def test_a_dump_that_ends_the_tree_claims_nothing(self, repo: Repository) -> None:
        with self.home(repo, lives_on=False):
            assert self.head(repo) is None

    @pytest.mark.parametrize("known", [True, False])
    def test_taken_over_meanwhile(self, repo: Repository, known: bool) -> None:
        with self.home(repo, known=known) as home:
            home.keep()
            claim(repo, B, take_over=True).keep()
            with pytest.raises(HomeLost, match="home-b"):
                home.look()
        with (
            pytest.raises(HomeLost if known else Conflict) as refused,
            self.home(repo, known=known),
        ):
            pass
        assert refused.value.exit_code == 9
        assert self.head(repo) == ("held", B, 2)

    def test_killed_between_asking_and_knowing(
        self, repo: Repository, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The claim is in the store and its epoch is not in the record: the next dump claims
        again.
        """

        real = leases.claim

        def killed(*arguments: Any, **options: Any) -> leases.Claim:
            real(*arguments, **options)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(leases, "claim", killed)
            with pytest.raises(KeyboardInterrupt), self.home(repo):
                pass
        assert (self.head(repo), self.remembered(repo)) == (("held", A, 1), 0)
        with self.home(repo):
            assert (self.head(repo), self.remembered(repo)) == (("held", A, 2), 2)
