"""The store's replica of steps: what was confirmed is known to every later home."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from support import checkpoints as kit

from criuctl.checkpoint import leases, objects, step_replica
from criuctl.checkpoint.gc import Collection
from criuctl.checkpoint.manifest import SessionRef
from criuctl.checkpoint.repository import Repository
from criuctl.checkpoint.step_replica import Replica, read
from criuctl.errors import Conflict, Damaged
from criuctl.report import Reporter
from criuctl.steps.states import Step, done, key_of
from criuctl.store.local import LocalStore

REF = SessionRef("web", "a" * 32)


def step(name: str) -> Step:
    return Step(name, "once", "began", key_of(REF.id, name), "t1")


def ended(name: str) -> Step:
    return done(step(name), "t1", {"of": name}, verified=False, now=1.0)


def home(repository: Repository, host: str = "one", **options: bool) -> Replica:
    leases.claim(repository, REF.name, REF.id, 2, host=host, **options).keep()  # type: ignore[arg-type]
    return Replica(repository, REF, host)


def known(repository: Repository, session: str = REF.id) -> dict[str, str]:
    return {one["id"]: one["state"] for one in read(repository, session)}


@pytest.mark.parametrize("encrypted", [True, False])
def test_what_was_put_is_read(tmp_path: Path, encrypted: bool) -> None:
    repository = kit.repository(tmp_path, encrypted=encrypted)
    replica = home(repository)
    replica.put([step("x").to_dict(), step("y").to_dict()])
    replica.put([ended("x").to_dict()])
    assert known(repository) == {"x": "done", "y": "began"}
    assert known(repository, "b" * 32) == {}
    assert next(one for one in read(repository, REF.id) if one["id"] == "x")["result"] == {
        "of": "x"
    }
    # a supervisor that begins again, and repeats what it has
    again = Replica(repository, REF, "one")
    again.put([step("x").to_dict(), step("z").to_dict()])
    assert known(repository) == {"x": "done", "y": "began", "z": "began"}


def test_many_objects_become_one(tmp_path: Path) -> None:
    repository = kit.repository(tmp_path)
    replica = home(repository)
    for number in range(100):
        replica.put([ended(f"s{number}").to_dict()])
    objects_there = [info.name for info in repository.store.list("steps/")]
    assert len(objects_there) <= step_replica._MANY + 1
    assert len(known(repository)) == 100


def test_a_home_that_was_taken_over_confirms_nothing(tmp_path: Path) -> None:
    repository = kit.repository(tmp_path)
    old = home(repository)
    old.put([step("x").to_dict()])
    new = home(repository, "two", take_over=True)
    assert known(repository) == {"x": "began"}
    with pytest.raises(Conflict):
        old.put([ended("x").to_dict()])
    with pytest.raises(Conflict):
        Replica(repository, REF, "one")
    new.put([step("y").to_dict()])
    # taken back: by another epoch than that of the old replica
    home(repository, "one", take_over=True)
    with pytest.raises(Conflict):
        old.put([step("z").to_dict()])


def test_without_a_lease_nothing_is_stored(tmp_path: Path) -> None:
    with pytest.raises(Conflict):
        Replica(kit.repository(tmp_path), REF, "one")


def test_a_damaged_object_is_no_missing_one(tmp_path: Path) -> None:
    repository = kit.repository(tmp_path)
    home(repository).put([ended("x").to_dict()])
    (info,) = repository.store.list("steps/")
    data = bytearray(repository.store.get(info.name, objects.STEPS.limit))
    data[-20] ^= 1
    repository.store.put(info.name, bytes(data))
    with pytest.raises(Damaged):
        read(repository, REF.id)


def test_an_object_of_another_session_is_refused(tmp_path: Path) -> None:
    repository = kit.repository(tmp_path)
    replica = home(repository)
    other = SessionRef(REF.name, "b" * 32)
    replica.put([ended("x").to_dict()])
    (info,) = repository.store.list("steps/")
    data = repository.store.get(info.name, objects.STEPS.limit)
    token = repository.sealer.token(other.id)
    repository.store.put(f"steps/{token}/{1:020d}", data)
    with pytest.raises(Damaged):
        read(repository, other.id)


def test_steps_of_a_session_that_cannot_come_back_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    repository = kit.repository(tmp_path, store=LocalStore(str(folder)))
    home(repository).put([ended("x").to_dict()])

    def abandoned(before: float = time.time() + 60) -> list[str]:
        return step_replica.abandoned(repository, before)

    names = [info.name for info in repository.store.list("steps/")]
    assert abandoned() == []  # its home is here
    leases.end(repository, REF, 2, host="one", host_name="one")
    assert abandoned(before=time.time() - 60) == []  # too young
    assert abandoned() == names
    # the collection itself counts a day by the store's clock
    assert Collection(repository, Reporter(), grace=0).run().refused_others == 0
    assert known(repository) == {"x": "done"}
    for name in names:
        os.utime(folder / name, (1, 1))
    # another session of the same name, with a checkpoint, is not this one
    summary = kit.write(repository, session=REF.name)
    assert summary.session_id != REF.id and abandoned() == names
    Collection(repository, Reporter(), grace=0).run()
    assert known(repository) == {}


def test_steps_stay_as_long_as_there_is_a_checkpoint_or_one_is_unreadable(tmp_path: Path) -> None:
    repository = kit.repository(tmp_path)
    summary = kit.write(repository, session="web")
    ref = SessionRef("web", summary.session_id)
    leases.claim(repository, ref.name, ref.id, 1, host="one").keep()
    Replica(repository, ref, "one").put([ended("x").to_dict()])
    leases.end(repository, ref, 1, host="one", host_name="one")
    later = time.time() + 60
    assert step_replica.abandoned(repository, later) == []
    repository.remove(summary)
    (record,) = [info.name for info in repository.store.list("sessions/")][-1:]
    data = repository.store.get(record, objects.LEASE.limit)
    repository.store.put(record, data[:-1])
    assert step_replica.abandoned(repository, later) == []
    repository.store.put(record, data)
    assert len(step_replica.abandoned(repository, later)) == 1
