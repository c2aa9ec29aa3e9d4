"""Group checkpoints in a store: whole, or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support import checkpoints as kit

from criuctl.checkpoint.groups import GroupCheckpoint, GroupMemberRecord
from criuctl.checkpoint.repository import Repository
from criuctl.errors import Conflict, Damaged, DataError, NoSuchCheckpoint
from criuctl.host.retention import Rules
from criuctl.ops import groups, prune
from criuctl.report import Reporter
from criuctl.store.local import LocalStore


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    config = kit.config(
        tmp_path,
        store=str(tmp_path / "store"),
        state_dir=str(tmp_path / "state"),
        key_dir=str(tmp_path / "keys"),
        workers=1,
    )
    store = LocalStore(config.store)
    return Repository.init(store, encryption=True, config=config)


def put(repository: Repository, group: str = "work") -> GroupCheckpoint:
    """A group checkpoint of two sessions."""
    made = [kit.write(repository, session=name) for name in ("agent", "db")]
    members = tuple(
        GroupMemberRecord(session=s.session, checkpoint=s.id, number=s.number, object=s.object)
        for s in made
    )
    return repository.groups.put(
        GroupCheckpoint(
            id=os.urandom(16).hex(),
            group=group,
            created="2026-01-01T00:00:00.000Z",
            host="alpha",
            frozen_ms=1.5,
            members=members,
        )
    )


def test_references(repository: Repository) -> None:
    first, second = put(repository), put(repository)
    assert (first.number, second.number) == (1, 2)
    assert put(repository, "other").number == 1
    found = repository.groups
    assert found.list("work") == [first, second]
    assert [one.group for one in found.list()] == ["other", "work", "work"]
    for ref, one in (("work", second), ("work@1", first), ("work@-2", first), ("work@-1", second)):
        assert found.resolve(ref) == one
    for ref in ("nosuch", "work@3", "work@-3", "work@x"):
        with pytest.raises(NoSuchCheckpoint):
            found.resolve(ref)


def test_a_member_that_is_gone_takes_the_group_along(repository: Repository) -> None:
    one = put(repository)
    repository.store.delete(one.members[0].object)
    assert repository.groups.list() == []
    with pytest.raises(NoSuchCheckpoint):
        repository.groups.resolve("work")
    # and gc removes what is left of it, once it is old
    [left] = [info.name for info in repository.store.list("groups/")]
    assert repository.groups.broken(0) == [] and repository.groups.broken(2**62) == [left]


def test_none_is_put_for_a_member_that_is_gone(repository: Repository) -> None:
    one = put(repository)
    repository.store.delete(one.members[1].object)
    with pytest.raises(Conflict):
        repository.groups.put(one.with_use(id=os.urandom(16).hex()))
    assert len(list(repository.store.list("groups/"))) == 1


def test_a_member_s_checkpoint_stays(repository: Repository) -> None:
    one = put(repository)
    summary = repository.resolve("agent@1")
    with pytest.raises(Conflict, match="part of group checkpoint work@1"):
        repository.remove(summary)
    repository.groups.remove(one)
    repository.remove(summary)


def test_a_damaged_one_does_not_hide_the_others(repository: Repository) -> None:
    one, other = put(repository), put(repository)
    [name] = [i.name for i in repository.store.list("groups/") if one.id in i.name]
    data = repository.store.get(name)
    repository.store.delete(name)
    repository.store.put(name, data[:-1] + bytes([data[-1] ^ 1]))
    errors: list[DataError] = []
    assert repository.groups.list("work", errors) == [other] and len(errors) == 1
    with pytest.raises(DataError):
        repository.groups.resolve("work@1")
    # an object cannot pass for another group's
    elsewhere = name.replace("groups/", "groups/" + "0" * 32 + "/", 1).replace(
        name.split("/")[1] + "/", "", 1
    )
    repository.store.put(elsewhere, data)
    errors.clear()
    repository.groups.list(None, errors)
    assert len(errors) == 2


def test_who_may_be_in_it() -> None:
    record = {"id": "0" * 32, "group": "work", "created": "", "host": "", "frozen_ms": 0.0}
    member = {"session": "agent", "checkpoint": "1" * 32}
    for members in ([], [member, member], [{**member, "session": "../x"}]):
        with pytest.raises(Damaged):
            GroupCheckpoint.from_dict({**record, "members": members})
    GroupCheckpoint.from_dict({**record, "members": [member]})


def test_prune_and_rm(repository: Repository) -> None:
    """The rules decide on a group; its newest checkpoint stays, and members stay with it."""
    config = repository.config
    for _ in range(3):
        put(repository)
    dry = prune.prune(config, [], Rules(last=2), dry_run=True, reporter=Reporter())
    assert [d.keep for d in dry.groups] == [True, True, False]
    done = prune.prune(config, [], Rules(last=1), reporter=Reporter())
    assert [(d.checkpoint.number, d.keep) for d in done.groups] == [
        *((3, True), (2, False), (1, False))
    ]
    assert {(s.session, s.number) for s in repository.list()} == {("agent", 3), ("db", 3)}
    by_name = prune.prune(config, ["agent"], Rules(last=1), reporter=Reporter())
    assert all(d.keep for d in (*by_name.decisions, *by_name.groups))
    removed = groups.remove_group(config, "work", reporter=Reporter())
    assert removed.checkpoint.number == 3 and not removed.kept
    assert not repository.list()
