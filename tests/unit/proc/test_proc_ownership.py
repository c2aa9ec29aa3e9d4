"""The folders and files that criuctl trusts: for root, for an ordinary user, in a user
namespace.
"""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from criuctl.errors import UntrustedPath
from criuctl.proc.ownership import check_own, check_place, opened_own, trusted_groups, trustees

PROJECT = Path(__file__).parents[3]
USER = pwd.getpwnam("daemon")  # with a group of the same name that has no other members
OTHERS = grp.getgrnam("users").gr_gid
ASK = """
import os, sys
sys.path[:0] = sys.argv[2:]
from criuctl.errors import UntrustedPath
from criuctl.proc.ownership import check_own
os.chdir("/")
try:
    check_own(sys.argv[1])
    print("own")
except UntrustedPath as error:
    print(error.message)
"""


def asked(folder: Path, prefix: tuple[str, ...] = (), user: int | None = None) -> str:
    """What another process of that user, or in namespaces of its own, takes a folder for."""
    paths = [str(PROJECT), *(path for path in sys.path if "site-packages" in path)]
    command = [
        *prefix,
        os.path.realpath(sys.executable),
        "-I",
        "-S",
        "-c",
        ASK,
        str(folder),
        *paths,
    ]
    ran_as: dict[str, Any] = {}
    if user is not None:
        ran_as = {"user": user, "group": user, "extra_groups": []}
    return str(subprocess.check_output(command, text=True, timeout=60, **ran_as)).strip()


@pytest.fixture
def top() -> Iterator[Path]:
    """A folder that all users may look into."""
    with TemporaryDirectory(prefix="own-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def made(path: Path, mode: int, *, user: int = 0, group: int = 0) -> Path:
    path.mkdir()
    os.chown(path, user, group)
    path.chmod(mode)
    return path


def test_root_trusts_root_alone(top: Path) -> None:
    assert trustees() == {0} and trusted_groups() == frozenset()
    check_own(made(top / "own", 0o755))
    for mode in (0o775, 0o757, 0o1777):
        with pytest.raises(UntrustedPath):
            check_own(made(top / f"{mode:o}", mode))
    with pytest.raises(UntrustedPath, match=f"belongs to user {USER.pw_uid}"):
        check_own(made(top / "theirs", 0o700, user=USER.pw_uid))
    check_own(top / "missing")


def test_where_a_folder_may_be_made(top: Path) -> None:
    sticky = made(top / "sticky", 0o1777)
    check_place(sticky / "new" / "below")
    check_place(top / "new")
    for path in (
        made(top / "open", 0o777) / "new",
        made(sticky / "theirs", 0o700, user=1001) / "new",
    ):
        with pytest.raises(UntrustedPath):
            check_place(path)
    (sticky / "dangling").symlink_to(top / "none")
    for path in (sticky / "dangling", sticky / "dangling" / "new"):
        with pytest.raises(UntrustedPath):
            check_place(path)


def test_a_user_has_a_private_group(top: Path) -> None:
    """With a umask of 002 the user's files are writable for a group without other members."""
    user = USER.pw_uid
    assert asked(made(top / "own", 0o775, user=user, group=USER.pw_gid), user=user) == "own"
    assert asked(made(top / "root", 0o755), user=user) == "own"
    shared = made(top / "shared", 0o775, user=user, group=OTHERS)
    assert "can be written by others" in asked(shared, user=user)
    other = made(top / "other", 0o755, user=1001)
    assert f"belongs to user 1001, not to root or user {user}" in asked(other, user=user)


def test_in_a_user_namespace_the_host_s_root_is_trusted(top: Path) -> None:
    """It is one of the users that the namespace does not know."""
    folder = made(top / "own", 0o755)
    assert asked(folder, ("unshare", "--user", "--map-root-user")) == "own"
    assert asked(folder, ("unshare", "--user", "--map-user=1000")) == "own"


def test_reading_does_not_wait_for_what_is_not_one_s_own(top: Path) -> None:
    """A FIFO that another user has put there is refused, not opened."""
    folder = made(top / "theirs", 0o777)
    os.mkfifo(folder / "fifo")
    with pytest.raises(UntrustedPath), opened_own(folder / "fifo"):
        pass
