"""Control groups: a tree comes back into the groups that it was in, or says that they are gone."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import groups, oracle
from support.command import Criuctl
from support.hooking import HookFolder
from support.keeper import wait_until
from support.trip import Trip
from support.zoo import Animal, Zoo

from criuctl.cgroups.membership import mount_points, of_process

pytestmark = pytest.mark.integration


@pytest.fixture
def group() -> Iterator[tuple[str, Path]]:
    """A new group in some hierarchy of this host: (hierarchy, folder)."""
    hierarchy, mounted = next(
        (h, Path(m)) for h, m in sorted(mount_points().items(), reverse=True) if "cpuset" not in h
    )
    folder = mounted / f"made-by-a-test-{secrets.token_hex(4)}"
    folder.mkdir()
    yield hierarchy, folder
    if folder.exists():
        groups.remove(folder)


def test_back_into_its_group(group: tuple[str, Path], zoo: Zoo, trip: Trip) -> None:
    hierarchy, folder = group
    animal = zoo.launch("counter.py", "1")
    moved_into(folder, animal)
    restored = trip.round(animal)
    assert of_process(restored.pid)[hierarchy] == f"/{folder.name}"
    assert of_process(os.getpid())[hierarchy] != f"/{folder.name}"
    restored.end()


def moved_into(folder: Path, animal: Animal) -> None:
    for pid, _started in animal.identities():
        (folder / "cgroup.procs").write_text(str(pid))


def test_a_group_that_is_gone_is_made_again(group: tuple[str, Path], zoo: Zoo, trip: Trip) -> None:
    """With its settings, and the groups below it, though they had no processes."""
    hierarchy, folder = group
    setting = folder / "pids.max"
    if setting.exists():
        setting.write_text("99")
    (folder / "empty").mkdir()
    animal = zoo.launch("counter.py", "1")
    moved_into(folder, animal)
    report = trip.dump(animal)
    (folder / "empty").rmdir()
    groups.remove(folder)
    restored = trip.restore(report, animal)
    assert of_process(restored.pid)[hierarchy] == f"/{folder.name}"
    assert any(folder.name in warning for warning in restored.answer["warnings"])
    assert (folder / "empty").is_dir()
    assert not setting.exists() or setting.read_text().strip() == "99"
    restored.ask()
    again = trip.dump(restored)
    restored = trip.restore(again, restored)
    assert not restored.answer["warnings"]
    restored.end()
    (folder / "empty").rmdir()


def test_what_was_made_goes_with_a_restore_that_fails(
    group: tuple[str, Path], zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    _hierarchy, folder = group
    animal = zoo.launch("counter.py", "1")
    moved_into(folder, animal)
    report = trip.dump(animal)
    groups.remove(folder)
    HookFolder(criuctl.home.path / "hooks").sh(
        "post-restore", "veto", f"ls -d {folder} > {criuctl.home.path}/seen; exit 1"
    )
    failed = criuctl("restore", report["checkpoint"], check=False)
    assert failed["error"]["code"] == "vetoed", failed
    assert (criuctl.home.path / "seen").read_text().strip() == str(folder)  # CRIU had made it
    assert not folder.exists()


def test_a_group_that_is_gone_elsewhere(group: tuple[str, Path], zoo: Zoo, trip: Trip) -> None:
    """A tree with PIDs of its own has the groups of the process that restores it."""
    _hierarchy, folder = group
    animal = zoo.launch("counter.py", "1")
    moved_into(folder, animal)
    report = trip.dump(animal)
    groups.remove(folder)
    restored = trip.restore(
        report, animal, "--pids", "private", ignore=("*/cgroup*", *oracle.NEW_NAMESPACE)
    )
    assert any(folder.name in warning for warning in restored.answer["warnings"])
    assert not folder.exists()
    restored.ask()


def test_a_cgroup_namespace(group: tuple[str, Path], zoo: Zoo, trip: Trip) -> None:
    hierarchy, folder = group
    move = f'echo $$ > {folder}/cgroup.procs; exec unshare --cgroup -- "$@"'
    animal = zoo.launch(
        "counter.py", "1", prefix=["sh", "-c", move, "sh"], ignore=["*/namespaces/cgroup"]
    )
    restored = trip.round(animal)
    assert of_process(restored.pid)[hierarchy] == f"/{folder.name}"
    namespaces = {os.readlink(f"/proc/{pid}/ns/cgroup") for pid, _ in restored.identities()}
    assert len(namespaces) == 1 and os.readlink("/proc/self/ns/cgroup") not in namespaces
    restored.end()


_THREAD = """
import os, sys, threading, time
def work():
    with open(sys.argv[1], 'w') as file: file.write(str(threading.get_native_id()))
    while True:
        with open(f'/proc/thread-self/cgroup') as groups, open('said', 'w') as said:
            said.write(groups.read())
        os.rename('said', 'groups')
        time.sleep(0.05)
threading.Thread(target=work).start()
"""


@pytest.mark.parametrize("pids", ["same", "private"])
def test_a_thread_that_is_in_another_group_than_its_process(
    pids: str, zoo: Zoo, trip: Trip
) -> None:
    hierarchy, mounted = next(
        (h, Path(m)) for h, m in sorted(mount_points().items()) if h == "cpu" or "cpu," in h
    )
    group = mounted / f"made-by-a-test-{secrets.token_hex(4)}"
    group.mkdir()
    try:
        words = [sys.executable, "-c", _THREAD, str(group / "tasks")]
        animal = zoo.launch(words, name="threads", quiet=False)
        groups_of = animal.folder / "groups"
        inside = f":/{group.name}"
        wait_until(
            lambda: groups_of.exists() and inside in groups_of.read_text(),
            60,
            "the thread is in the group",
        )
        for _ in range(2):
            animal = trip.restore(trip.dump(animal), animal, "--pids", pids, equal=False)
            groups_of.unlink()
            wait_until(groups_of.exists, 60, "the thread goes on")
            warned = any(
                "in other control groups" in warning for warning in animal.answer["warnings"]
            )
            assert warned == (inside not in groups_of.read_text()), hierarchy
            assert not warned if pids == "same" else True
            if warned:
                break
        zoo.close()
    finally:
        groups.remove(group)
