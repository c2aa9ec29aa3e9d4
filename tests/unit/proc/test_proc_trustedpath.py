"""Paths from outside, on real folders: links followed, and users who could have put or opened
files.
"""

from __future__ import annotations

import itertools
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import fuse

from criuctl.errors import UntrustedPath
from criuctl.proc.credentials import (
    CAP_DAC_OVERRIDE,
    CAP_DAC_READ_SEARCH,
    Credentials,
    credentials_of,
)
from criuctl.proc.file_access import access_of, may_open
from criuctl.proc.trustedpath import Place, opened, opened_parent

USER, GROUP = 1001, 1002


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A folder of root's below folders of root's."""
    tmp_path.chmod(0o755)
    return tmp_path


def made(path: Path, uid: int = 0, mode: int = 0o755, *, content: str | None = None) -> Path:
    """A folder, or a file with `content`."""
    if content is None:
        path.mkdir()
    else:
        path.write_text(content)
    os.chown(path, uid, uid)
    path.chmod(mode)
    return path


def link(path: Path, target: str | Path, uid: int = 0) -> Path:
    path.symlink_to(target)
    os.chown(path, uid, uid, follow_symlinks=False)
    return path


def test_root_s_own_way_is_root_s(top: Path) -> None:
    file = made(made(top / "etc") / "file", content="root's")
    with opened(str(file)) as place:
        assert place.controlled_by_root and place.fixed_by_root and place.fault is None
        assert os.path.samestat(place.status, file.stat()) and place.path == str(file)
        with place.reopened() as fd:
            assert os.read(fd, 100) == b"root's" and not os.get_inheritable(fd)


def test_what_a_user_owns_on_the_way_is_named(top: Path) -> None:
    """A user's folder decides what lies in it, even if that is root's."""
    home = made(top / "home", USER)
    file = made(made(home / "d") / "file", content="")
    with opened(str(file)) as place:
        assert not place.fixed_by_root and place.fault is not None
        assert place.fault.component == str(home)
        assert "belongs to user 1001, not to root" in place.fault.reason
        assert place.fault.remedy == f"chown 0 {home}"
    with opened(str(file), trusted={0, USER}) as place:
        assert place.fault is None


def test_a_user_s_file_in_a_folder_of_root_s_cannot_be_swapped(top: Path) -> None:
    file = made(top / "log", USER, 0o644, content="")
    with opened(str(file)) as place:
        assert place.fixed_by_root and not place.controlled_by_root


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_a_folder_that_others_write_to_decides(top: Path, mode: int) -> None:
    file = made(made(top / "shared", mode=mode) / "file", content="")
    with opened(str(file)) as place:
        assert place.fault is not None and place.fault.remedy == f"chmod go-w {top}/shared"
        assert not place.fixed_by_root


def test_sticky_folders_keep_folders_and_nothing_else(top: Path) -> None:
    """A folder of root's in /tmp is root's; any user may have linked or moved a file of root's
    there.
    """
    sticky = made(top / "tmp", mode=0o1777)
    made(made(sticky / "folder") / "file", content="")
    made(sticky / "file", content="")
    made(made(sticky / "theirs", USER) / "file", content="")
    with opened(f"{sticky}/folder/file") as place:
        assert place.controlled_by_root
    with opened(f"{sticky}/file") as place:
        assert not place.fixed_by_root
        assert place.fault is not None and place.fault.component == f"{sticky}/file"
    with opened(f"{sticky}/theirs/file") as place:
        assert not place.fixed_by_root


def test_links_of_root_s_are_followed(top: Path) -> None:
    made(made(top / "usr") / "file", content="here")
    link(top / "relative", "usr/../usr")
    link(top / "absolute", f"{top}/relative/")
    with opened(f"{top}/absolute/file") as place:
        assert place.path == f"{top}/usr/file" and place.controlled_by_root
        assert {f"{top}/absolute", f"{top}/relative"} <= {one.path for one in place.walked}
        assert all(not stat.S_ISLNK(one.mode) for one in place.chain)
    with opened(f"{top}/absolute", follow_last=False) as place:
        assert stat.S_ISLNK(place.status.st_mode)


def refused(path: Path | str, *, root: int | None = None) -> UntrustedPath:
    with pytest.raises(UntrustedPath) as caught, opened(str(path), root=root):
        pass
    return caught.value


def test_links_that_a_user_could_have_made_are_not(top: Path) -> None:
    """His own, one of root's in his folder, one of root's that he has moved into a sticky one."""
    home, sticky, free = (
        made(top / "home", USER),
        made(top / "tmp", mode=0o1777),
        made(top / "free", mode=0o777),
    )
    for folder in (home, sticky, free, made(home / "root-s")):
        error = refused(link(folder / "link", "/etc") / "passwd")
        assert error.details["component"] in error.message and str(folder / "link") in error.message
    error = refused(link(top / "his", "/etc", USER) / "passwd")
    assert error.details["component"] == f"{top}/his" and "belongs to user 1001" in error.message
    with opened(str(home / "link"), follow_last=False) as place:
        assert stat.S_ISLNK(place.status.st_mode) and not place.fixed_by_root


def test_an_acl_s_mask_counts_as_the_group_s_bits(top: Path) -> None:
    """A named user of an ACL that may write shows in the bits of the group."""
    folder = made(top / "shared")
    set_acl(folder, {(1, 7, ALL), (2, 7, USER), (4, 5, ALL), (0x10, 7, ALL), (0x20, 5, ALL)})
    file = made(folder / "file", content="")
    with opened(str(file)) as place:
        assert place.fault is not None and place.fault.component == str(folder)


def test_loops_and_what_is_missing(top: Path) -> None:
    link(top / "a", "b")
    link(top / "b", "a")
    for path, error in (
        ("a", OSError),
        ("none", FileNotFoundError),
        ("file/x", NotADirectoryError),
        ("file/", NotADirectoryError),
    ):
        made(top / "file", content="") if not (top / "file").exists() else None
        with pytest.raises(error), opened(f"{top}/{path}"):
            pass
    for path in ("", "relative", "/a\0b"):
        with pytest.raises(OSError), opened(path):
            pass


def test_links_of_processes_are_not_followed() -> None:
    """A process that changed its user is root's to look at, and goes where its program likes."""
    assert "a link of a process" in refused(f"/proc/{os.getpid()}/cwd/etc").message
    assert "a link of a process" in refused("/proc/self/root").message
    with opened("/proc/self/status") as place:
        assert place.path == f"/proc/{os.getpid()}/status"


def test_a_root_folder_and_a_start_are_not_left(top: Path) -> None:
    made(made(top / "etc") / "file", content="inside")
    link(top / "up", "../../../../etc")
    link(top / "top", "/etc")
    root = os.open(top, os.O_PATH)
    try:
        for path in ("/etc/file", "/../../etc/file", "/up/file", "/top/file"):
            with opened(path, root=root) as place, place.reopened() as fd:
                assert os.read(fd, 100) == b"inside" and place.path == "/etc/file"
        with opened("etc/../top/file", start=root, root=root) as place, place.reopened() as fd:
            assert os.read(fd, 100) == b"inside"
        with opened("etc/file", start=root) as place:
            assert place.path == "etc/file"
        for path in ("../x", "etc/../../x", "up/file"):
            with pytest.raises(UntrustedPath, match="leads out of"), opened(path, start=root):
                pass
    finally:
        os.close(root)


def test_a_parent_for_what_is_to_be_made(top: Path) -> None:
    with opened_parent(f"{top}/new") as (parent, name):
        os.mkdir(name, dir_fd=parent.fd)
        assert name == "new" and parent.fixed_by_root
    assert (top / "new").is_dir()
    for path in (f"{top}/", f"{top}/..", "/"):
        with pytest.raises(OSError), opened_parent(path):
            pass
    made(top / "file", content="")
    with pytest.raises(NotADirectoryError), opened_parent(f"{top}/file/x"):
        pass


def test_nothing_blocks_and_no_other_kind_is_opened(top: Path) -> None:
    os.mkfifo(top / "fifo")
    for path in (f"{top}/fifo", "/dev/null"):
        with opened(path) as place, pytest.raises(OSError, match="expected kind"), place.reopened():
            pass
    with opened("/dev/null") as place, place.reopened(os.O_RDWR, kinds=[stat.S_IFCHR]) as fd:
        assert os.write(fd, b"x") == 1


def test_a_place_stays_what_it_was(top: Path) -> None:
    """What was judged is used, even after the name has changed."""
    file = made(top / "file", content="judged")
    with opened(str(file)) as place:
        file.rename(top / "other")
        link(file, "/etc/passwd", USER)
        with place.reopened() as fd:
            assert os.read(fd, 100) == b"judged"


def test_descriptors_are_closed(top: Path) -> None:
    made(made(top / "a") / "b", content="")
    link(top / "l", "a")
    before = os.listdir("/proc/self/fd")
    for path in ("a/b", "l/b", "none", "a/../a/b"):
        try:
            with opened(f"{top}/{path}"):
                pass
        except OSError:
            pass
    assert os.listdir("/proc/self/fd") == before


# -- who may open


ALL = 0xFFFFFFFF


def set_acl(path: Path, entries: set[tuple[int, int, int]]) -> None:
    packed = b"".join(struct.pack("<HHI", *entry) for entry in sorted(entries))
    os.setxattr(path, "system.posix_acl_access", struct.pack("<I", 2) + packed)


def kernel_says(folder: Path, path: str, flags: int, credentials: Credentials) -> bool:
    """Whether a process with these credentials can open it, by trying."""
    top = os.open(folder, os.O_PATH)
    pid = os.fork()
    if pid == 0:
        try:
            os.fchdir(top)
            os.setgroups(sorted(credentials.groups))
            os.setresgid(credentials.gid, credentials.gid, credentials.gid)
            os.setresuid(credentials.uid, credentials.uid, credentials.uid)
            os.open(path, flags)
            os._exit(0)
        except PermissionError:
            os._exit(1)
        finally:
            os._exit(2)
    os.close(top)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1)
    return code == 0


@pytest.fixture
def start(top: Path) -> Iterator[int]:
    fd = os.open(top, os.O_PATH)
    yield fd
    os.close(fd)


NOBODY = Credentials(USER, USER)
PEOPLE = [
    NOBODY,
    Credentials(USER, USER, frozenset({GROUP})),
    Credentials(USER, GROUP),
    Credentials(0, 0, frozenset(), -1),
]
FLAGS = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR)


def says(place: Place, credentials: Credentials, flags: int) -> bool:
    return may_open(credentials, place.walked, access_of(flags))


@pytest.mark.parametrize("owner", [(0, 0), (USER, GROUP), (0, GROUP)])
def test_the_kernel_agrees_by_modes(top: Path, start: int, owner: tuple[int, int]) -> None:
    folder = made(top / "folder")
    file = made(folder / "file", content="")
    for one in (folder, file):
        os.chown(one, *owner)
    folder_modes, file_modes = (0o700, 0o710, 0o701, 0o060), (0o600, 0o640, 0o604, 0o062, 0o000)
    for folder_mode, file_mode in itertools.product(folder_modes, file_modes):
        folder.chmod(folder_mode)
        file.chmod(file_mode)
        with opened("folder/file", start=start) as place:
            for who, flags in itertools.product(PEOPLE, FLAGS):
                assert says(place, who, flags) == kernel_says(top, "folder/file", flags, who), (
                    folder_mode,
                    file_mode,
                    who,
                    flags,
                )


def test_the_kernel_agrees_by_acls(top: Path, start: int) -> None:
    """Named users and groups, the mask, and two groups that allow half each."""
    file = made(top / "file", content="")
    base = {(1, 6, ALL), (0x20, 4, ALL)}
    for named in (
        {(2, 6, USER), (4, 0, ALL), (0x10, 6, ALL)},
        {(2, 6, USER), (4, 0, ALL), (0x10, 4, ALL)},
        {(2, 0, USER), (4, 6, ALL), (0x10, 6, ALL)},
        {(4, 4, ALL), (8, 2, GROUP), (0x10, 6, ALL)},
        {(4, 4, ALL), (8, 2, GROUP), (8, 4, USER), (0x10, 6, ALL)},
        {(4, 0, ALL), (8, 6, USER), (0x10, 7, ALL)},
    ):
        for group in (0, GROUP):
            os.chown(file, 0, group)
            set_acl(file, base | named)
            with opened("file", start=start) as place:
                for who, flags in itertools.product(PEOPLE, FLAGS):
                    assert says(place, who, flags) == kernel_says(top, "file", flags, who), (
                        named,
                        group,
                        who,
                        flags,
                    )


def test_a_capability_to_read_is_none_to_write(top: Path, start: int) -> None:
    made(made(top / "folder", mode=0o700) / "file", mode=0o600, content="")
    reader = Credentials(USER, USER, capabilities=1 << CAP_DAC_READ_SEARCH)
    with opened("folder/file", start=start) as place:
        assert says(place, reader, os.O_RDONLY) and not says(place, reader, os.O_RDWR)
        assert says(place, Credentials(USER, USER, capabilities=1 << CAP_DAC_OVERRIDE), os.O_RDWR)
        assert not says(place, NOBODY, os.O_RDONLY)


def test_credentials_of_a_process() -> None:
    own = credentials_of(os.getpid())
    assert (own.uid, own.gid, own.groups) == (os.geteuid(), os.getegid(), frozenset(os.getgroups()))
    assert own.has(CAP_DAC_OVERRIDE)


# -- a file system that may claim any owner


@pytest.mark.parametrize("user", [USER, 0])
def test_owners_are_not_believed_of_a_user_s_file_system(top: Path, user: int) -> None:
    """What root mounted is as good as any other."""
    folder = made(top / "mounted")
    with fuse.mounted(folder, user):
        assert (folder / "file").stat().st_uid == 0
        with opened(str(folder / "file")) as place:
            assert place.controlled_by_root == (user == 0)
            if user:
                assert place.fault is not None and place.fault.component == str(folder)
                assert "FUSE" in place.fault.reason
