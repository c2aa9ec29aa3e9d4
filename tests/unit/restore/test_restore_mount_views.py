"""Which process shows the mount namespace that a file of a restored tree belongs to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from criuctl.criu.heldfiles import HeldFile, Use
from criuctl.criu.mountspaces import MountSpaces
from criuctl.errors import RestoreFailed
from criuctl.restore.mount_views import Views

SPACES = MountSpaces({10: 1, 20: 2, 30: 3}, {1: 1, 5: 2, 6: 2})


def _held(mount: int, pid: int) -> tuple[HeldFile, Use]:
    use = Use(pid, "descriptor", 3)
    return HeldFile(1, "/x", 0, os.O_RDONLY, (use,), mount=mount), use


@pytest.fixture
def chrooted() -> Iterator[int]:
    """A process in a chroot."""
    ready = "import os, sys, time; os.chroot('/usr'); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", ready], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_a_path_is_one_of_the_namespace_of_its_mount() -> None:
    """Whichever process has it; of a mount that is in none, one of its process's."""
    views = Views(SPACES, {1: 100, 5: 105}, 100)
    assert [
        views.space_of(*_held(mount, pid)) for mount, pid in ((10, 5), (20, 1), (-1, 5), (99, 1))
    ] == [1, 2, 2, 1]


def test_a_namespace_is_seen_by_a_process_in_no_chroot(chrooted: int) -> None:
    """By the root where that is in it, or where no process is; never by one that sees a part of
    it.
    """
    alone = Views(SPACES, {1: chrooted}, chrooted)
    assert alone.top(1) == alone.top(3) == chrooted
    assert Views(SPACES, {1: 1, 5: chrooted, 6: os.getpid()}, 1).top(2) == os.getpid()
    with pytest.raises(RestoreFailed, match="chroot"):
        Views(SPACES, {1: 1, 5: chrooted}, 1).top(2)
