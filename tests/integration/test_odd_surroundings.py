"""criuctl started in surroundings unlike those of a login: ignored signals, narrow
limits.

Only what bounds criuctl itself is narrow: a hard limit below that of the tree cannot be given back
to it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.command import Criuctl
from support.hooking import HookFolder
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration

FEW_DESCRIPTORS = ["sh", "-c", 'ulimit -Sn 128; exec "$@"', "sh"]
USUAL_DESCRIPTORS = ["sh", "-c", 'ulimit -Sn 1024; exec "$@"', "sh"]
HARDLY_ANY = ["sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh"]


@pytest.mark.parametrize("signals", ["CHLD", "CHLD,PIPE,HUP,USR1,ALRM"])
@pytest.mark.parametrize("pids", ["same", "private"])
def test_ignored_signals(signals: str, pids: str, zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """A process that is started with SIGCHLD ignored cannot learn how its children end."""
    criuctl.prefix = ["env", f"--ignore-signal={signals}"]
    animal = zoo.launch("files.py")
    animal = trip.restore(trip.dump(animal), animal, "--pids", pids)
    animal.ask()


def test_more_processes_than_descriptors(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    criuctl.prefix = FEW_DESCRIPTORS
    animal = zoo.launch("crowd.py")
    animal = trip.restore(trip.dump(animal), animal)
    animal.ask()


@pytest.mark.parametrize("prefix", [USUAL_DESCRIPTORS, HARDLY_ANY], ids=["1024", "64"])
@pytest.mark.parametrize("pids", ["same", "private"])
def test_a_process_with_more_descriptors_than_criuctl_may_have(
    prefix: list[str], pids: str, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """CRIU needs as many, and some more; by itself it takes them only with CAP_SYS_RESOURCE."""
    criuctl.prefix = prefix
    animal = zoo.launch("descriptors.py")
    animal = trip.restore(trip.dump(animal), animal, "--pids", pids)
    animal.ask()


@pytest.mark.parametrize("pids", ["same", "private"])
def test_a_root_that_wants_to_end_with_its_parent(pids: str, zoo: Zoo, trip: Trip) -> None:
    """Its parent at the restore is CRIU, which ends; within the tree the wish stays."""
    animal = zoo.launch("bereaved.py")
    report = trip.dump(animal)
    answer = trip.criuctl("restore", report["checkpoint"], "--pids", pids)
    animal = zoo.adopt(answer["pid"], animal)
    cleared = [
        warning.partition("PR_SET_PDEATHSIG (")[2].partition(")")[0]
        for warning in answer["warnings"]
        if "PR_SET_PDEATHSIG" in warning
    ]
    assert cleared == ["SIGKILL", "signal 40"]
    animal.ask()
    animal = trip.restore(trip.dump(animal), animal, "--pids", pids)
    animal.ask()


def test_limits_that_cannot_be_raised_are_reported(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """A process without CAP_SYS_RESOURCE, as in many a container, cannot give a tree more than it
    has itself.
    """
    animal = zoo.launch("files.py")
    report = trip.dump(animal)
    criuctl.prefix = [
        "setpriv",
        "--bounding-set=-sys_resource",
        "prlimit",
        "--msgqueue=1000:2000",
        "--",
    ]
    answer = criuctl("restore", report["checkpoint"])
    zoo.adopt(answer["pid"], animal)
    warnings = [w for w in answer["warnings"] if "not restored" in w]
    assert len(warnings) == 1 and "RLIMIT_MSGQUEUE is 1000/2000, it was " in warnings[0], warnings
    criuctl.prefix = []
    report = criuctl("dump", answer["pid"])
    answer = criuctl("restore", report["checkpoint"])
    zoo.adopt(answer["pid"], animal).ask()
    assert answer["warnings"] == []  # it had them like this already


def test_a_limit_that_is_too_narrow_is_named(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """And the checkpoint can still be restored."""
    animal = zoo.launch("files.py")
    report = trip.dump(animal)
    criuctl.prefix = ["sh", "-c", 'ulimit -f 100; exec "$@"', "sh"]
    refused = criuctl("restore", report["checkpoint"], check=False)
    assert refused["exit_code"] == 13 and "ulimit -f" in refused["error"]["hint"]
    criuctl.prefix = []
    trip.restore(report, animal).ask()


def test_a_mapping_larger_than_memory(zoo: Zoo, trip: Trip) -> None:
    """The kernel lets it grow so large, but not be made so at once."""
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "0":
        pytest.skip("the kernel judges no single mapping")
    animal = zoo.launch("spacious.py")
    animal = trip.restore(trip.dump(animal), animal, equal=False)  # it reserves nothing any more
    animal.ask()


def test_more_shared_memory_than_a_restore_has_descriptors_that_came_after_the_look(
    zoo: Zoo, criuctl: Criuctl
) -> None:
    """The tree runs on; such a checkpoint could only be restored with a higher limit, and not
    here.
    """
    animal = zoo.launch("growing.py")
    wait = f"until [ -e {animal.folder}/report-1.json ]; do sleep 0.05; done"
    HookFolder(criuctl.home.path / "hooks").sh(
        "pre-dump", "grow", f"kill -USR1 {animal.pid}; {wait}"
    )
    criuctl.prefix = [
        "setpriv",
        "--bounding-set=-sys_resource",
        "prlimit",
        "--nofile=1000:1000",
        "--",
    ]
    refused = criuctl("dump", animal.pid, check=False)
    assert refused["exit_code"] == 5, refused
    assert (
        "1000 mappings of shared memory" in refused["error"]["message"]
        and refused["error"]["pid"] == animal.pid
    )
    criuctl.prefix = []
    animal.ask()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_store_that_is_not_mounted_is_not_made_again(
    encrypted: bool, zoo: Zoo, criuctl: Criuctl
) -> None:
    """Files below a mount point are hidden once it is mounted."""
    criuctl("store", "init", *([] if encrypted else ["--no-encrypt"]))
    first, second = zoo.launch("counter.py", "1"), zoo.launch("counter.py", "1")
    criuctl("dump", first.pid, "--name", "first", "--leave-running")
    mounted = criuctl.store.rename(criuctl.store.with_name("mounted"))
    for there in (True, False):
        if there:
            criuctl.store.mkdir()
        refused = criuctl("dump", first.pid, check=False)
        assert refused["exit_code"] == 7 and "is gone" in refused["error"]["message"]
        if encrypted:
            assert criuctl("dump", second.pid, "--leave-running", check=False)["exit_code"] == 7
        if there:
            criuctl.store.rmdir()  # it is empty
    first.ask()
    if not encrypted:  # a host without anything there starts afresh, as ever
        criuctl("dump", second.pid, "--leave-running")
        shutil.rmtree(criuctl.store)
    mounted.rename(criuctl.store)
    criuctl("dump", first.pid, "--leave-running")
