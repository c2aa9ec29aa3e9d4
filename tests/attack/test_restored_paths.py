"""A user leads a restore to files of others: nothing but the file of the dump, or what the user may
open, is ever given back, and nothing is made where only root may write.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.identity import call_as
from support.laboratory import USER, Laboratory
from support.trip import RECORDED

pytestmark = pytest.mark.integration

STRANGER = 1002
CHROOTED = """
import ctypes, os, signal, sys
folder = os.open(sys.argv[1], os.O_RDONLY)
assert "4294967295" not in open("/proc/self/uid_map").read(), "this is the host"
ctypes.CDLL(None).mount(b"/proc", os.fsencode(sys.argv[2] + "/proc"), None, 4096, None)  # MS_BIND
os.chroot(sys.argv[2]); os.chdir("/")
os.setgroups([]); os.setresgid(1001, 1001, 1001); os.setresuid(1001, 1001, 1001)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE
fd = os.open("ready", os.O_CREAT | os.O_WRONLY, dir_fd=folder)
os.write(fd, str(os.getpid()).encode()); os.close(fd); os.close(folder)
while True:
    signal.pause()
"""


def refused(lab: Laboratory, report: Any, component: Path, *options: str) -> None:
    """The plan refuses the restore and names the component at fault; nothing is left of it."""
    planned = lab.restore(report["checkpoint"], "--dry-run", *options, check=False)
    answer = lab.restore(report["checkpoint"], *options, check=False)
    assert answer["exit_code"] == 4, answer
    assert planned["ok"] is False, planned
    findings = answer["error"]["findings"]
    untrusted = [f for f in findings if f["code"] == "untrusted-path" and str(component) in str(f)]
    assert untrusted, findings
    assert lab.processes() == []


@pytest.fixture
def secret(lab: Laboratory) -> Iterator[Path]:
    """A folder of root's with a file that the user may not read."""
    folder = lab.folder.parent / "roots"
    folder.mkdir(mode=0o755)
    (folder / "shadow").write_text("the hashes")
    (folder / "shadow").chmod(0o600)
    before = sorted(folder.iterdir())
    yield folder
    assert sorted(folder.iterdir()) == before
    assert (folder / "shadow").read_text() == "the hashes"
    status = (folder / "shadow").stat()
    assert (status.st_uid, status.st_nlink, stat.S_IMODE(status.st_mode)) == (0, 1, 0o600)


def link_to(lab: Laboratory, folder: Path) -> None:
    """The user's folder `d` becomes a link."""
    lab.as_user(f"mv d d.old; ln -s {folder} d")


@pytest.fixture
def shadow(lab: Laboratory) -> Path:
    """A file of the user's own, of the same name, size and mode as root's."""
    lab.as_user("mkdir d; printf 'the hashes' > d/shadow; chmod 600 d/shadow")
    return lab.folder / "d/shadow"


@pytest.fixture
def without_contents(lab: Laboratory) -> None:
    """Small files stay behind, too: what an interpreter reads would come back with its old
    contents.
    """
    lab.criuctl.extra |= RECORDED


@pytest.mark.usefixtures("without_contents")
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_APPEND, os.O_RDWR])
def test_a_folder_becomes_a_link(lab: Laboratory, secret: Path, shadow: Path, flags: int) -> None:
    report = lab.dump(lab.start((shadow, flags)))
    link_to(lab, secret)
    refused(lab, report, lab.folder / "d")
    refused(lab, report, lab.folder / "d", "--files", "keep")


@pytest.mark.usefixtures("without_contents")
def test_a_file_becomes_a_link(lab: Laboratory, secret: Path, shadow: Path) -> None:
    report = lab.dump(lab.start((shadow, os.O_RDONLY)))
    lab.as_user(f"rm d/shadow; ln -s {secret}/shadow d/shadow")
    refused(lab, report, shadow)


@pytest.mark.usefixtures("without_contents")
def test_a_mapped_file(lab: Laboratory, secret: Path, shadow: Path) -> None:
    pid = lab.start((shadow, os.O_RDONLY))
    lab.ask(
        pid,
        "opened.append(__import__('mmap').mmap(opened[0], 0, 2, 1)), os.close(opened[0])",
    )
    assert str(shadow) in Path(f"/proc/{pid}/maps").read_text()
    report = lab.dump(pid)
    link_to(lab, secret)
    refused(lab, report, lab.folder / "d")


def test_a_working_folder(lab: Laboratory, secret: Path, shadow: Path) -> None:
    secret.chmod(0o700)
    pid = lab.start()
    lab.ask(pid, f"os.chdir({str(shadow.parent)!r})")
    report = lab.dump(pid)
    link_to(lab, secret)
    refused(lab, report, lab.folder / "d")


def test_a_root_folder(lab: Laboratory, secret: Path, shadow: Path) -> None:
    secret.chmod(0o700)
    lab.as_user("mkdir d/proc")
    python = os.path.realpath(sys.executable)
    argv = [python, "-I", "-S", "-c", CHROOTED, str(lab.folder), str(shadow.parent)]
    report = lab.dump(lab.start(uid=0, argv=argv, inside=True))
    link_to(lab, secret)
    refused(lab, report, lab.folder / "d")


def test_a_fifo(lab: Laboratory, secret: Path) -> None:
    """What the user's program had not read would be written into another FIFO."""
    os.mkfifo(secret.parent / "control", 0o600)
    lab.as_user("mkdir d; mkfifo -m 600 d/control")
    pid = lab.start((lab.folder / "d/control", os.O_RDWR))
    lab.ask(pid, "os.write(opened[0], b'do evil')")
    report = lab.dump(pid)
    reader = os.open(secret.parent / "control", os.O_RDONLY | os.O_NONBLOCK)
    try:
        link_to(lab, secret.parent)
        refused(lab, report, lab.folder / "d")
        assert os.read(reader, 100) == b""
    finally:
        os.close(reader)


def test_a_deleted_file(lab: Laboratory, secret: Path, shadow: Path) -> None:
    """CRIU makes it again in the folder that it was in."""
    pid = lab.start((shadow, os.O_RDWR))
    lab.as_user("rm d/shadow")
    report = lab.dump(pid)
    link_to(lab, secret)
    refused(lab, report, lab.folder / "d")


def test_a_deleted_name_of_a_file(lab: Laboratory, secret: Path, shadow: Path) -> None:
    """CRIU links the file to its deleted name."""
    pid = lab.start((shadow, os.O_RDWR))
    lab.as_user("ln d/shadow other; rm d/shadow")
    report = lab.dump(pid)
    link_to(lab, secret)
    refused(lab, report, lab.folder / "d")


def test_a_socket_in_a_folder_of_roots(lab: Laboratory, secret: Path, shadow: Path) -> None:
    pid = lab.start()
    lab.ask(pid, listening(shadow.with_name("sock")))
    report = lab.dump(pid)
    link_to(lab, secret)
    refused(lab, report, lab.folder / "d")


def listening(path: Path) -> str:
    """Python that makes a unix socket listen."""
    made = "s.socket(s.AF_UNIX)"
    return (
        f"[(known.append(k), k.bind({str(path)!r}), k.listen()) for known in [opened]"
        f" for s in [__import__('socket')] for k in [{made}]]"
    )


@pytest.mark.usefixtures("without_contents")
def test_a_file_in_tmp_is_replaced_by_a_stranger(lab: Laboratory) -> None:
    """In a sticky folder the name was free when the tree was gone."""
    common = lab.folder.parent / "common"
    common.mkdir()
    common.chmod(0o1777)
    lab.as_user(f"echo mine > {common}/file; chmod 644 {common}/file")
    report = lab.dump(lab.start((common / "file", os.O_RDONLY)))
    lab.as_user(f"rm {common}/file")
    call_as(STRANGER, ["sh", "-c", f"umask 022; echo this > {common}/file"])
    refused(lab, report, common)


def test_a_hard_link_of_another_file(lab: Laboratory, secret: Path, shadow: Path) -> None:
    """Without ``fs.protected_hardlinks`` a user can have a second name of any file."""
    report = lab.dump(lab.start((shadow, os.O_RDWR)))
    lab.as_user("mv d/shadow mine")
    os.link(secret / "shadow", shadow)
    try:
        refused(lab, report, shadow)
    finally:
        shadow.unlink()


def test_a_process_of_roots_in_a_user_s_folder(lab: Laboratory, secret: Path, shadow: Path) -> None:
    """Root may open everything, but not because a user's link leads there."""
    report = lab.dump(lab.start((shadow, os.O_RDWR), uid=0))
    link_to(lab, secret)
    refused(lab, report, lab.folder / "d")
    lab.as_user("rm d; mv d.old d; mv d/shadow mine")
    os.link(secret / "shadow", shadow)
    try:
        refused(lab, report, shadow)
    finally:
        shadow.unlink()


# -- what still comes back ---------------------------------------------------------------------


def test_the_file_of_the_dump_comes_back_over_a_link(lab: Laboratory, shadow: Path) -> None:
    """The user moved the folder and left a link: it is still that file."""
    report = lab.dump(lab.start((shadow, os.O_RDWR)))
    lab.as_user("mv d e; ln -s e d")
    pid = lab.restore(report["checkpoint"])["pid"]
    assert lab.ask(pid, "os.read(opened[0], 9)") == "b'the hashe'"


@pytest.mark.parametrize(
    "way", ["a folder becomes a link", "a file becomes a link", "mapped", "a stranger's"]
)
def test_old_contents_come_back_and_nothing_else(
    way: str, lab: Laboratory, secret: Path, shadow: Path
) -> None:
    """What the process read before, from the checkpoint, wherever its path leads to now."""
    pid = lab.start((shadow, os.O_RDONLY))
    if way == "mapped":
        lab.ask(
            pid, "opened.append(__import__('mmap').mmap(opened[0], 0, 2, 1)), os.close(opened[0])"
        )
    report = lab.dump(pid)
    (secret / "shadow").write_text("OF OTHERS.")
    if way == "a file becomes a link":
        lab.as_user(f"rm d/shadow; ln -s {secret}/shadow d/shadow")
    elif way == "a stranger's":
        shadow.unlink()
        shadow.write_text("OF OTHERS.")
    else:
        link_to(lab, secret)
    before = sorted(shadow.parent.iterdir())
    pid = lab.restore(report["checkpoint"])["pid"]
    assert (
        lab.ask(pid, "opened[-1][:]" if way == "mapped" else "os.read(opened[0], 100)")
        == "b'the hashes'"
    )
    assert sorted(shadow.parent.iterdir()) == before
    (secret / "shadow").write_text("the hashes")


def test_old_contents_from_a_folder_of_roots(lab: Laboratory) -> None:
    """A user's program reads a file that root has put there and upgraded since; only root can make
    files there.
    """
    folder = lab.folder.parent / "package"
    folder.mkdir(mode=0o755)
    table = folder / "table"
    table.write_text("version 1")
    report = lab.dump(lab.start((table, os.O_RDONLY)))
    table.write_text("version 2")
    pid = lab.restore(report["checkpoint"])["pid"]
    assert lab.ask(pid, "os.read(opened[0], 100)") == "b'version 1'"
    assert list(folder.iterdir()) == [table]


@pytest.mark.usefixtures("without_contents")
def test_another_file_of_the_user_s_own_comes_back(lab: Laboratory, shadow: Path) -> None:
    """It may be opened by the user, so the process may have it, too."""
    report = lab.dump(lab.start((shadow, os.O_RDONLY)))
    lab.as_user("mv d e; mkdir d; printf 'my things!' > d/shadow; chmod 600 d/shadow")
    pid = lab.restore(report["checkpoint"], "--files", "keep")["pid"]
    assert lab.ask(pid, "os.read(opened[0], 100)") == "b'my things!'"


def test_all_that_a_user_had_comes_back(lab: Laboratory, shadow: Path) -> None:
    """A file, a mapping, folders that are gone, deleted files, a FIFO and a socket of a user's own,
    each at its place, in its mode, and under its name.
    """
    lab.as_user("mkdir w gone; mkfifo d/fifo; echo kept > d/kept")
    lab.as_user("echo ghost > d/ghost; echo two > d/two")
    names = ("shadow", "fifo", "kept", "ghost", "two")
    flags = (os.O_RDWR | os.O_APPEND, os.O_RDWR, os.O_RDONLY, os.O_RDWR, os.O_RDWR)
    pid = lab.start(*[(shadow.with_name(n), f) for n, f in zip(names, flags, strict=True)])
    lab.ask(pid, "os.write(opened[1], b'unread'), os.lseek(opened[2], 2, 0)")
    lab.ask(pid, "opened.append(__import__('mmap').mmap(opened[2], 0, 2, 1))")
    lab.ask(pid, listening(shadow.with_name("sock")))
    lab.ask(pid, f"os.chdir({str(lab.folder / 'gone')!r}), os.open('.', os.O_RDONLY)")
    lab.as_user("rm d/ghost; ln d/two third; rm d/two; rmdir gone")
    report = lab.dump(pid)
    before = sorted(shadow.parent.iterdir())
    pid = lab.restore(report["checkpoint"])["pid"]
    held = lab.descriptors(pid)
    for name in ("shadow", "fifo", "kept", "ghost (deleted)", "two (deleted)"):
        assert str(shadow.with_name(name)) in held.values(), held
    assert lab.ask(pid, "os.read(opened[1], 100)") == "b'unread'"
    assert lab.ask(pid, "os.read(opened[2], 100), opened[5][:]") == "(b'pt\\n', b'kept\\n')"
    assert lab.ask(pid, "os.pread(opened[3], 100, 0)") == "b'ghost\\n'"
    assert lab.ask(pid, "os.write(opened[0], b'+'), os.write(opened[4], b'TWO')") == "(1, 3)"
    assert (lab.folder / "third").read_text() == "TWO\n"
    assert shadow.read_text() == "the hashes+"
    assert os.readlink(f"/proc/{pid}/cwd") == f"{lab.folder}/gone (deleted)"
    assert sorted(shadow.parent.iterdir()) == before
    socket = shadow.with_name("sock").stat()
    assert stat.S_ISSOCK(socket.st_mode) and socket.st_uid == USER
    assert lab.ask(pid, "opened[6].getsockname()") == repr(str(shadow.with_name("sock")))
