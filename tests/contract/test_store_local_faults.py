"""Local stores on disks that fill up, are read-only, vanish, or hold what does not belong there."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from criuctl.config import Config
from criuctl.errors import (
    Damaged,
    NoSuchBucket,
    ObjectExists,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreFull,
)
from criuctl.store import Store, open_store

pytestmark = pytest.mark.contract

WRITES: list[Callable[[Store], object]] = [
    lambda store: store.put("p/new", b"x"),
    lambda store: store.put("p/new", b"x", if_absent=True),
    lambda store: store.put("p/o", b"x"),
    lambda store: store.delete("p/o"),
    lambda store: store.check_writable(),
    lambda store: store.probe(),
]
READS: list[Callable[[Store], object]] = [
    lambda store: store.get("p/o"),
    lambda store: store.get_range("p/o", 0, 1),
    lambda store: store.stat("p/o"),
    lambda store: list(store.list()),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "outer" / "store"


@pytest.fixture
def store(folder: Path) -> Store:
    store = open_store(str(folder), Config())
    store.create()
    return store


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


@contextmanager
def _tmpfs(place: Path, options: str) -> Iterator[None]:
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "criuctl-test", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_only_the_owner_may_look(folder: Path) -> None:
    before = os.umask(0)
    try:
        store = open_store(str(folder), Config())
        store.create()
        store.put("a/b/c", b"secret")
    finally:
        os.umask(before)
    for path in [folder, folder.parent, *folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_what_put_returned_from_is_durable(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Content before name, name before return; each new folder in the one above it."""
    calls: list[str] = []

    def spy(name: str, tell: Callable[..., str]) -> None:
        real = getattr(os, name)

        def call(*args: object, **kwargs: object) -> object:
            calls.append(tell(*args))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    spy("fdatasync", lambda fd: "content")
    spy("fsync", lambda fd: "sync " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
    spy("mkdir", lambda name, *_: f"make {name}")
    spy("link", lambda *_: "name")
    spy("rename", lambda *_: "name")
    spy("unlink", lambda name, *_: "gone" if name == "o" else "temp gone")
    for if_absent in (True, False):
        calls.clear()
        store.put(f"n{if_absent:d}/m/o", b"x", if_absent=if_absent)
        assert calls[:7] == [
            *(
                "content",
                f"make n{if_absent:d}",
                "sync store",
                "make m",
                f"sync n{if_absent:d}",
                "name",
                "sync m",
            )
        ]
    calls.clear()
    store.delete("n0/m/o")
    assert calls == ["gone", "sync m"]


@pytest.mark.parametrize("if_absent", [False, True])
def test_what_could_not_be_made_durable_is_not_there(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch, if_absent: bool
) -> None:
    """A caller that got the error that a segment could not be put deletes its packs: others must
    not find it.
    """
    store.put("p/o", b"old")

    def broken(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        for name in ("p/new", "p/o"):
            with pytest.raises(StoreError):
                store.put(name, b"new", if_absent=if_absent)
    assert _files(folder) == ["p/o"]  # one that was replaced stays, in one state or the other
    store.put("p/new", b"x", if_absent=if_absent)


@pytest.mark.parametrize("if_absent", [False, True])
def test_a_full_disk(tmp_path: Path, if_absent: bool) -> None:
    place = tmp_path / "small"
    with _tmpfs(place, "size=2m"):
        store = open_store(str(place), Config())
        store.create()
        store.put("a", bytes(1 << 20))
        with pytest.raises(StoreFull) as caught:
            store.put("b", [bytes(700_000), bytes(700_000)], if_absent=if_absent)
        assert "prune" in caught.value.hint
        assert _files(place) == ["a"]
        store.put("c", bytes(500_000), if_absent=if_absent)  # what had been taken was given back
        assert store.get("a") == bytes(1 << 20)


def test_no_inodes_left(tmp_path: Path) -> None:
    place = tmp_path / "few"
    with _tmpfs(place, "nr_inodes=5"):
        store = open_store(str(place), Config())
        store.create()
        store.put("f/o", b"x")
        with pytest.raises(StoreFull):
            store.put("g/h/o", b"x")
        assert not [name for name in _files(place) if name.startswith(".tmp")]


def test_a_limit_on_file_size(store: Store, folder: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(StoreFull):
            store.put("large", bytes(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert _files(folder) == []


def test_a_read_only_disk_can_be_read(tmp_path: Path) -> None:
    place = tmp_path / "ro"
    with _tmpfs(place, "size=2m"):
        store = open_store(str(place), Config())
        store.create()
        store.put("p/o", b"x")
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        for read in READS:
            read(store)
        for write in WRITES:
            with pytest.raises(StoreDenied) as caught:
                write(store)
            assert caught.value.message == f"the store in {place} is mounted read-only"


def test_another_users_folder(store: Store) -> None:
    store.put("p/o", b"x")
    os.seteuid(65534)
    try:
        verbs: list[Callable[[Store], object]] = [*READS, *WRITES, lambda store: store.create()]
        for verb in verbs:
            with pytest.raises(StoreDenied):
                verb(store)
    finally:
        os.seteuid(0)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for path in (tmp_path / "missing", tmp_path / "file", tmp_path / "file" / "below"):
        store = open_store(str(path), Config())
        for verb in READS + WRITES:
            with pytest.raises(NoSuchBucket) as caught:
                verb(store)
            assert "store init" in caught.value.hint
    with pytest.raises(StoreError):
        open_store(str(tmp_path / "file" / "below"), Config()).create()


def test_a_disk_unmounted_under_a_store_is_missed(tmp_path: Path) -> None:
    place = tmp_path / "disk" / "store"
    with _tmpfs(place.parent, "size=2m"):
        store = open_store(str(place), Config())
        store.create()
        store.put("p/o", b"x")
    for verb in READS + WRITES:
        with pytest.raises(NoSuchBucket):
            verb(store)
    assert list(place.parent.iterdir()) == []


# -- what does not belong there
# ------------------------------------------------------------------------


def test_symbolic_links_lead_nowhere(store: Store, folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "o").write_text("not yours")
    (folder / "p").symlink_to(outside)
    (folder / "link").symlink_to(outside / "o")
    with pytest.raises(StoreError, match="another kind of file"):
        store.put("p/new", b"x")
    for verb in READS[:3]:
        with pytest.raises(StoreError, match="another kind of file"):
            verb(store)
    with pytest.raises(StoreError):
        store.delete("p/o")
    with pytest.raises(StoreError):
        store.get("link")
    with pytest.raises(ObjectExists):
        store.put("link", b"x", if_absent=True)
    assert list(store.list()) == []
    store.put("link", b"mine")  # takes the link's place, not its target's
    assert store.get("link") == b"mine"
    assert (outside / "o").read_text() == "not yours"
    assert os.listdir(outside) == ["o"]


def test_a_store_may_itself_be_reached_by_a_link(
    store: Store, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(folder)
    open_store(str(tmp_path / "link"), Config()).put("o", b"x")
    assert store.get("o") == b"x"


def test_foreign_files_are_passed_over(store: Store, folder: Path) -> None:
    store.put("o", b"x")
    for name in ("UPPER", ".hidden", "lost+found", "a b", "x..y"):
        (folder / name).mkdir()
        (folder / name / "o").write_text("foreign")
    os.mkfifo(folder / "fifo")
    assert [info.name for info in store.list()] == ["o"]
    with pytest.raises(StoreError):
        store.get("fifo")  # and it does not hang


def test_no_object_is_another_ones_folder(store: Store) -> None:
    store.put("a", b"x")
    store.put("b/c", b"x")
    for name in ("a/b", "b"):
        with pytest.raises(StoreError):
            store.put(name, b"y")
    with pytest.raises(ObjectExists):
        store.put("b", b"y", if_absent=True)
    with pytest.raises(StoreError):
        store.get("b")
    with pytest.raises(ObjectMissing):
        store.get("b/d")
    assert [info.name for info in store.list()] == ["a", "b/c"]


# -- writers that die
# ------------------------------------------------------------------------------------

_HALF_WAY = """
import os, sys, time
from criuctl.config import Config
from criuctl.store import open_store

def half_way(fd):
    print("half way", flush=True)
    time.sleep(600)

os.fdatasync = half_way
open_store(sys.argv[1], Config()).put("p/o", b"x" * 100000)
"""


@contextmanager
def _writer_half_way(folder: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    argv = [sys.executable, "-c", _HALF_WAY, str(folder)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "half way\n"
            yield writer
        finally:
            writer.kill()


def test_a_writer_killed_half_way_leaves_no_object_and_is_swept_up(
    store: Store, folder: Path
) -> None:
    with _writer_half_way(folder) as writer:
        (temp,) = _files(folder)
        assert temp.startswith(".tmp/")
        assert store.sweep(0) == 0  # it lives
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert list(store.list()) == []
    with pytest.raises(ObjectMissing):
        store.get("p/o")
    assert store.sweep(3600) == 0  # it might be another host's, seen late
    assert store.sweep(0) == 1
    assert _files(folder) == []


def test_old_leftovers_go_in_passing(store: Store, folder: Path) -> None:
    old, held, young = (folder / ".tmp" / name for name in ("1-old", "2-held", "3-young"))
    for path in (old, held, young):
        path.write_bytes(b"x")
    for path in (old, held):
        os.utime(path, (time.time() - 7200,) * 2)
    with held.open("r+b") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        store.check_writable()
        assert _files(folder) == [".tmp/2-held", ".tmp/3-young"]
    store.create()
    assert _files(folder) == [".tmp/3-young"]


def test_an_interrupted_put_leaves_nothing(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(fd: int) -> None:
        raise KeyboardInterrupt

    gc.collect()  # what others left to it is not closed meanwhile
    descriptors = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.put("o", b"x")
    assert _files(folder) == []
    assert os.listdir("/proc/self/fd") == descriptors


def test_no_verb_keeps_a_descriptor(store: Store) -> None:
    store.put("p/o", b"x")
    gc.collect()  # what others left to it is not closed meanwhile
    descriptors = os.listdir("/proc/self/fd")
    for verb in READS + WRITES:
        with suppress(ObjectExists):
            verb(store)
    with pytest.raises(ObjectMissing):
        store.get("p/nothing")
    assert next(store.list()).name == "p/new"  # a listing that is not read to its end
    assert os.listdir("/proc/self/fd") == descriptors


@pytest.mark.parametrize("size", [10, 5 << 20])
@pytest.mark.parametrize("if_absent", [False, True])
def test_with_verify_writes_a_disk_that_changes_a_byte_is_found_out(
    size: int, if_absent: bool, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read back is not what was written, so it never gets its name."""
    content = os.urandom(size)
    fdatasync = os.fdatasync

    def faulty(fd: int) -> None:
        fdatasync(fd)
        os.pwrite(fd, bytes([content[size // 2] ^ 1]), size // 2)
        fdatasync(fd)

    verifying = open_store(str(folder), Config(verify_writes=True))
    verifying.put("good", [content[:3], content[3:]], if_absent=if_absent)
    monkeypatch.setattr(os, "fdatasync", faulty)
    store.put("unseen", content)
    with pytest.raises(Damaged, match="not what was written") as caught:
        verifying.put("bad", [content[:3], content[3:]], if_absent=if_absent)
    assert caught.value.details["object"] == "bad"
    assert _files(folder) == ["good", "unseen"]
    assert verifying.get("good") == content
    assert verifying.get("unseen") != content
