"""Mounts of a tree whose root is PID 1, also in several mount namespaces: each process comes back
in its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.command import Criuctl
from support.trip import Trip
from support.zoo import Animal, Zoo

from criuctl.dump.checks.open_paths import mount_of
from criuctl.proc.mounts import read_mounts
from criuctl.proc.tree import read_tree

pytestmark = pytest.mark.integration

# Runs the program next to a child in a mount namespace of its own, which has run commands there and
# is now `sleep`.
_NESTED = """import ctypes, os, subprocess, sys
before, inside, then, chroot = sys.argv[1:5]
if before: subprocess.run(["sh", "-ec", before], check=True)
held = os.open(".", os.O_RDONLY)
done, done_write = os.pipe()
if os.fork() == 0:
    assert ctypes.CDLL(None).unshare(0x20000) == 0
    subprocess.run(["sh", "-ec", inside], check=True)
    if chroot: os.chroot(chroot); os.chdir("/")
    os.set_inheritable(held, True); os.set_inheritable(done_write, True)
    say = f"echo x >&{done_write}; exec {done_write}>&-"
    os.execvp("sh", ["sh", "-ec", f"{then}; {say}; exec sleep 600"])
os.close(done_write)
assert os.read(done, 2) == b"x\\n"
os.close(done); os.close(held)
os.execvp(sys.argv[5], sys.argv[5:])
"""


def _launch(
    zoo: Zoo, inside: str, then: str = "true", *, before: str = "", chroot: str = ""
) -> Animal:
    """A counter as PID 1, with a child that runs `inside` in a namespace of its own, and there
    `then` itself.
    """
    nested = [sys.executable, "-c", _NESTED, before, inside, then, chroot]
    prefix = ["unshare", "--pid", "--fork", "--mount-proc", "setsid", *nested]
    return zoo.launch("counter.py", prefix=prefix)


def _nested(animal: Animal) -> int:
    """The process in the other namespace."""
    (pid,) = (p.pid for p in read_tree(animal.pid) if p.command == "sleep")
    return pid


def _own(pid: int, names: Iterable[str]) -> None:
    """These links of a process lead to mounts of its own mount namespace."""
    mounts = {mount.id for mount in read_mounts(pid)}
    outside = [name for name in names if mount_of(f"/proc/{pid}/{name}") not in mounts]
    assert outside == []


def test_each_process_is_on_the_mounts_of_its_own_namespace(zoo: Zoo, trip: Trip) -> None:
    """Also where one has a folder open of the other's, which must not drag the others along out of
    it.
    """
    animal = _launch(
        zoo, "mkdir own; mount -t tmpfs own own; echo inner >own/f", "exec 7<>own/f; cd own"
    )
    for _ in range(2):
        animal = trip.restore(trip.dump(animal), animal, equal=False)
        inner = _nested(animal)
        _own(animal.pid, ("cwd", "root", "exe"))
        _own(inner, ("cwd", "root", "exe", "fd/7"))
        held = next(
            f for f in os.listdir(f"/proc/{inner}/fd") if os.path.isdir(f"/proc/{inner}/fd/{f}")
        )
        assert mount_of(f"/proc/{inner}/fd/{held}") == mount_of(f"/proc/{animal.pid}/cwd")
        own = f"{animal.folder}/own/f"
        assert Path(f"/proc/{inner}/root{own}").read_text() == "inner\n"
        assert os.path.samefile(f"/proc/{inner}/fd/7", f"/proc/{inner}/root{own}")
        assert not Path(f"/proc/{animal.pid}/root{own}").exists()
        animal.ask()


def test_a_root_of_its_own_in_the_other_namespace(zoo: Zoo, trip: Trip) -> None:
    """As bwrap makes it: a tmpfs with this host's folders bound into it."""
    root = "mkdir own; mount -t tmpfs own own; cd own; mkdir old; echo inner >f; "
    root += (
        "for d in usr lib lib64 bin proc dev; do [ ! -e /$d ] || { mkdir -p $d; mount --rbind /$d "
        "$d; }; done; "
    )
    animal = _launch(zoo, f"{root} pivot_root . old; umount -l old", "cd /; exec 7</f")
    for _ in range(2):
        animal = trip.restore(trip.dump(animal), animal, equal=False)
        inner = _nested(animal)
        assert Path(f"/proc/{inner}/root/f").read_text() == "inner\n"
        _own(inner, ("cwd", "root", "exe", "fd/7"))
        animal.ask()


def test_a_deleted_name_in_the_other_namespace(zoo: Zoo, trip: Trip) -> None:
    """CRIU's helper link is looked for there; the tmpfs is not in the root's own, where the folder
    has another file.
    """
    mount = "mkdir own; mount -t tmpfs own own; echo inner >own/f; ln own/f own/g"
    animal = _launch(zoo, mount, "exec 7<>own/g; rm own/g")
    animal = trip.restore(trip.dump(animal), animal, equal=False)
    inner = _nested(animal)
    assert os.path.samefile(f"/proc/{inner}/fd/7", f"/proc/{inner}/root{animal.folder}/own/f")
    assert os.listdir(f"/proc/{inner}/root{animal.folder}/own") == ["f"]
    animal.ask()


def test_a_proc_of_the_trees_own_at_another_place(zoo: Zoo, trip: Trip) -> None:
    """The kernel fills it: its files are not compared with this host's."""
    animal = _launch(
        zoo,
        "mkdir own; mount -t proc own own",
        "exec 7<own/uptime",
        before="mkdir here; mount -t proc here here",
    )
    for _ in range(2):
        animal = trip.restore(trip.dump(animal), animal, equal=False)
        _own(_nested(animal), ("fd/7",))
        assert Path(f"/proc/{animal.pid}/root{animal.folder}/here/1/comm").exists()
        animal.ask()


def test_a_file_that_only_the_other_namespace_has_at_its_path(zoo: Zoo, criuctl: Criuctl) -> None:
    """A restore judges files outside of a tmpfs by what this host has: refused while the tree still
    runs.
    """
    mount = "echo one >one; echo two >two; mount --bind one two"
    animal = _launch(zoo, mount, "exec 7<two")
    answer = criuctl("dump", animal.pid, check=False)
    assert [(f["code"], f["pid"]) for f in answer["error"]["findings"]] == [
        ("own-mount", _nested(animal))
    ]
    animal.ask()


def test_a_chroot_hides_the_other_namespace(zoo: Zoo, criuctl: Criuctl) -> None:
    """What its processes get at a restore could not be checked."""
    inside = (
        "mkdir own; for d in usr lib lib64 bin; do [ ! -e /$d ] || { mkdir own/$d; mount --bind "
        "/$d own/$d; }; done"
    )
    animal = _launch(zoo, inside, chroot="own")
    found = [
        f
        for f in criuctl("check", animal.pid, check=False)["findings"]
        if f["code"] == "nested-namespace"
    ]
    assert [(f["level"], f["pid"]) for f in found] == [
        ("error", _nested(animal))
    ] and "chroot" in found[0]["text"]
    animal.ask()


_RAMFS = "mkdir own; mount -t ramfs own own"
_PART = "mkdir own part; mount -t tmpfs own own; mkdir own/s; mount --bind own/s part; umount own"


@pytest.mark.parametrize(("mount", "point"), [(_RAMFS, "own"), (_PART, "part")])
@pytest.mark.parametrize("nested", [False, True])
def test_mounts_that_criu_cannot_make_again(
    nested: bool, mount: str, point: str, zoo: Zoo, criuctl: Criuctl
) -> None:
    """Refused while nothing is frozen, wherever in the tree they are; raw CRIU refuses the dump as
    well.
    """
    animal = _launch(zoo, mount if nested else "true", before="" if nested else mount)
    answer = criuctl("dump", animal.pid, check=False)
    found = [
        f
        for f in answer["error"]["findings"]
        if f["pid"] == (_nested(animal) if nested else animal.pid)
        and str(animal.folder) in f["text"]  # a mount of another test may be there as well
    ]
    assert [f["code"] for f in found] == ["mount-unsaved"] and f"{animal.folder}/{point}" in found[
        0
    ]["text"]
    animal.ask()


_AUTOMOUNTER = """import ctypes, os, sys
os.mkdir("own")
asked, asks = os.pipe()
options = f"fd={asks},pgrp={os.getpgrp()},minproto=5,maxproto=5,indirect".encode()
assert ctypes.CDLL(None).mount(b"zoo", b"own", b"autofs", 0, options) == 0
os.dup2(asked, 9)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_an_automounter_is_asked_again(zoo: Zoo, trip: Trip) -> None:
    """The kernel's end of its pipe is in packet mode, and of no process."""
    prefix = [
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        "setsid",
        sys.executable,
        "-c",
        _AUTOMOUNTER,
    ]
    animal = zoo.launch("counter.py", prefix=prefix)
    for _ in range(2):
        animal = trip.restore(trip.dump(animal), animal, equal=False)
        (mount,) = (m for m in read_mounts(animal.pid) if m.kind == "autofs")
        assert mount.point == f"{animal.folder}/own"
        assert f"pipe_ino={os.stat(f'/proc/{animal.pid}/fd/9').st_ino}" in mount.settings
        animal.ask()


def test_formats_of_programs_that_would_be_lost(zoo: Zoo, criuctl: Criuctl) -> None:
    """The kernel forgets those of a binfmt_misc that nothing has mounted any more."""
    mount = "mkdir own; mount -t binfmt_misc own own; echo ':zoo:E::zoo::/bin/true:' >own/register"
    animal = _launch(zoo, "true", before=mount)
    found = [f for f in criuctl("check", animal.pid)["findings"] if f["code"] == "formats-lost"]
    assert {(f["level"], f["pid"]) for f in found} == {
        ("warning", animal.pid),
        ("warning", _nested(animal)),
    }
    assert "zoo, registered in" in found[0]["text"]
