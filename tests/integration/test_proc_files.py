"""Open files of /proc, and of other file systems that the kernel fills, between dump and restore.

What a descriptor stands for, and what may have changed:

===================  ===========================  =============================================
of /proc              changes                      restored as
===================  ===========================  =============================================
this process          number (copy)                its own again
a thread              made last by CRIU            opened when it is there
a child               also its descriptors         the same
an ended one          number is taken              one that has ended
one outside, alive    -                            that one
one outside           has ended, is not visible    one that has ended
one outside: net      has ended                    the network, the mounts of the holder
a control group's     is gone                      refused in the plan, which says what to make
sysfs: a device's     is gone                      the same
===================  ===========================  =============================================
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.command import Criuctl
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration

OWN = [
    "thread",
    "thread-as-process",
    "thread-name",
    "thread-folder",
    "shared",
    "itself",
    "child",
    "ended",
    "ended-thread",
]
# A file of a thread or process that has ended: which number it had cannot be kept where that is
# taken.
ENDED = ("*/target",)


@pytest.mark.parametrize("which", OWN)
def test_there_and_back(which: str, zoo: Zoo, trip: Trip) -> None:
    animal = zoo.launch("proc_files.py", which)
    ignore = ENDED if "ended" in which else ()
    trip.round(trip.round(animal, ignore=ignore), ignore=ignore)


@pytest.mark.parametrize("which", OWN)
def test_as_a_copy(which: str, zoo: Zoo, trip: Trip) -> None:
    """In a PID namespace of its own the numbers are the tree's own."""
    animal = zoo.launch("proc_files.py", which)
    report = trip.snapshot(animal, "--name", "first")
    trip.restore(report, animal, "--as", "second", ignore=ENDED if "ended" in which else ()).ask()
    animal.ask()


@pytest.fixture
def outside(zoo: Zoo) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is not of the tree."""
    process = subprocess.Popen(["sleep", "1000"], env=zoo.environment(), start_new_session=True)
    yield process
    if process.poll() is None:
        process.kill()
    process.wait()


def test_of_a_process_outside_that_lives(
    zoo: Zoo, trip: Trip, criuctl: Criuctl, outside: subprocess.Popen[bytes]
) -> None:
    animal = zoo.launch("proc_files.py", "outside", str(outside.pid))
    (found,) = [f for f in criuctl("check", animal.pid)["findings"] if f["code"] == "proc-outside"]
    assert (
        found["level"] == "warning"
        and str(outside.pid) in found["text"]
        and found["pid"] == animal.pid
    )
    trip.round(animal)


def test_a_working_folder_of_a_thread(zoo: Zoo, criuctl: Criuctl) -> None:
    """Not even criuctl's way to open files afterwards helps: refused before anything is touched."""
    animal = zoo.launch("proc_files.py", "thread-working-folder")
    refused = criuctl("dump", animal.pid, check=False)
    assert refused["exit_code"] and "proc-folder" in {
        f["code"] for f in refused["error"]["findings"]
    }
    assert animal.alive()


@pytest.mark.parametrize("how", ["ended", "taken", "copy"])
def test_of_a_process_outside_that_is_gone(
    how: str, zoo: Zoo, trip: Trip, outside: subprocess.Popen[bytes], request: pytest.FixtureRequest
) -> None:
    """To the program it has ended, as read(2) says, whichever process has its number now."""
    animal = zoo.launch("proc_files.py", "outside", str(outside.pid))
    report = trip.snapshot(animal, "--name", "first") if how == "copy" else trip.dump(animal)
    if how != "copy":
        outside.kill()
        outside.wait()
    if how == "taken":
        with open("/proc/sys/kernel/ns_last_pid", "w") as file:
            file.write(str(outside.pid - 1))
        another = subprocess.Popen(["sleep", "1000"], env=zoo.environment())
        request.addfinalizer(another.wait)
        request.addfinalizer(another.kill)
        assert another.pid == outside.pid, "another process was faster"
    options = ("--as", "second") if how == "copy" else ()
    restored = trip.restore(report, animal, *options, ignore=ENDED)
    assert [w for w in restored.answer["warnings"] if f"/proc/{outside.pid}/stat" in w]
    assert restored.ask()["reads"] == ["ESRCH"]


def test_the_network_of_a_process_outside_that_is_gone(
    zoo: Zoo, trip: Trip, outside: subprocess.Popen[bytes]
) -> None:
    animal = zoo.launch("proc_files.py", "outside-net", str(outside.pid))
    report = trip.dump(animal)
    outside.kill()
    outside.wait()
    trip.restore(report, animal, ignore=ENDED).ask()


def _group(name: str) -> Path:
    """A control group of that name, of a hierarchy in which one can be made."""
    for place in (Path("/sys/fs/cgroup"), *sorted(Path("/sys/fs/cgroup").iterdir())):
        with contextlib.suppress(OSError):
            group = place / name
            group.mkdir()
            if (group / "cgroup.procs").exists():
                return group
            group.rmdir()
    raise AssertionError("no control group can be made here")


@pytest.fixture(params=["control group", "interface"])
def thing(
    request: pytest.FixtureRequest, zoo: Zoo
) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    """A file of the kernel's, what makes it and what takes it away."""
    if request.param == "control group":
        group = _group(zoo.token)
        yield str(group / "cgroup.procs"), group.mkdir, group.rmdir
        group.rmdir()
        return
    name = zoo.token[4:]
    link = ["ip", "link"]
    end = [name, "type", "veth", "peer", "name", f"{name}p"]
    add = functools.partial(subprocess.run, [*link, "add", *end], check=True)
    remove = functools.partial(subprocess.run, [*link, "del", name], check=True)
    add()
    yield f"/sys/class/net/{name}/mtu", add, remove
    remove()


def test_what_is_gone_from_the_kernel(
    thing: tuple[str, Callable[[], object], Callable[[], object]],
    zoo: Zoo,
    trip: Trip,
    criuctl: Criuctl,
) -> None:
    """The plan says it, before anything is touched, and with that made again the restore works."""
    path, make, remove = thing
    animal = zoo.launch("proc_files.py", "kernel", path)
    report = trip.dump(animal)
    remove()
    for more in ([], ["--dry-run"]):
        refused = criuctl("restore", report["checkpoint"], *more, check=False)
        findings = refused["findings"] if more else refused["error"]["findings"]
        (found,) = [f for f in findings if f["code"] == "kernel-file-missing"]
        assert os.path.basename(path) in found["text"] and found["hint"] and found["fd"] is not None
    make()
    trip.restore(report, animal).ask()
