"""Unix sockets that their programs have renamed, as haproxy does: clients find them again under the
names of now.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.keeper import wait_until
from support.trip import Trip
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration


# a restore binds sockets to what they are called
NAMES = ("*/descriptors/*/local", "*/descriptors/*/peer")


def _launch(zoo: Zoo, prefix: Sequence[str] = ()) -> Animal:
    return zoo.launch("renamed.py", prefix=prefix, ignore=NAMES)


def _send(folder: Path, name: str) -> None:
    """A client outside the tree: the kernel takes its connection, or its datagram, at that name."""
    with socket.socket(
        socket.AF_UNIX, socket.SOCK_DGRAM if name == "log" else socket.SOCK_STREAM
    ) as client:
        client.connect(str(folder / name))


def test_there_and_back_twice(zoo: Zoo, trip: Trip) -> None:
    """The second dump finds sockets that are bound to what they are called."""
    original = _launch(zoo)
    restored = trip.round(original)
    assert os.readlink(original.folder / "link") == "real"
    trip.round(restored)


def test_clients_from_outside(zoo: Zoo, trip: Trip) -> None:
    original = _launch(zoo)
    restored = trip.restore(trip.dump(original), original)
    restored.ask()
    for name in ("admin.sock", "link/s", "real/t", "after/s", "log", "linked"):
        _send(original.folder, name)


def test_left_running(zoo: Zoo, trip: Trip) -> None:
    """The original keeps its files; once it is gone they are replaced, and what was queued comes
    back.
    """
    original = _launch(zoo)
    report = trip.snapshot(original)
    before = os.stat(original.folder / "admin.sock").st_ino
    original.ask()
    original.end()
    assert os.stat(original.folder / "admin.sock").st_ino == before
    trip.restore(report, original, equal=False).ask()
    assert {
        str(path.relative_to(original.folder)) for path in original.folder.rglob("*")
    } == original.listing


def test_with_pids_of_its_own(zoo: Zoo, trip: Trip) -> None:
    """The images have other PIDs than criuctl sees when it dumps such a tree."""
    original = _launch(zoo)
    restored = trip.restore(trip.dump(original), original, "--pids", "private")
    assert restored.pid != original.pid
    restored.ask()
    trip.restore(trip.dump(restored), restored).ask()


def test_renamed_with_pids_of_its_own(zoo: Zoo, trip: Trip) -> None:
    """As before, and the file was renamed while the tree had those PIDs."""
    original = _launch(zoo)
    restored = trip.restore(trip.dump(original), original, "--pids", "private")
    os.rename(original.folder / "admin.sock", original.folder / "elsewhere")
    report = trip.dump(restored)
    trip.restore(report, restored)
    _send(original.folder, "elsewhere")
    assert not (original.folder / "admin.sock").exists()


def test_in_a_mount_namespace_of_its_own(zoo: Zoo, trip: Trip) -> None:
    original = _launch(zoo, prefix=["unshare", "--mount", "--"])
    trip.restore(trip.dump(original), original, ignore=("*/namespaces/mnt",)).ask()


JAILED = """
import os, signal, socket, sys
s = socket.socket(socket.AF_UNIX)
os.mkdir("jail")
home = os.getcwd() if sys.argv[1] == "before" else ""
if not home:
    os.chroot("jail")
    os.chdir("/")
s.bind(home + "/s.tmp")
s.listen()
os.rename(home + "/s.tmp", home + "/s")
if home:
    os.chroot("jail")
open("/ready", "w").close()
while True:
    signal.pause()
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_bound_before_and_after_a_chroot(when: str, zoo: Zoo, trip: Trip) -> None:
    """haproxy goes into its jail when its sockets are called what they should be; CRIU binds
    outside of any.
    """
    original = zoo.launch([sys.executable, "-S", "-c", JAILED, when], name="jailed", ignore=NAMES)
    wait_until((original.folder / "jail" / "ready").exists, 60, "jailed")
    trip.restore(trip.dump(original), original)
    _send(original.folder if when == "before" else original.folder / "jail", "s")
