"""A user leads a rewind of a workspace to files of root's: none is read, moved, made or changed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.operating import TIMEOUT, Operators

pytestmark = pytest.mark.integration
USER = 1001
AS_USER = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")

# Lets `sub` be the user's folder and a link to root's, in turn, as fast as it can.
SWAPS = """
import ctypes, sys
libc = ctypes.CDLL(None)
while True:
    libc.renameat2(-100, b"sub", -100, b"link", 2)  # RENAME_EXCHANGE
"""


@pytest.fixture
def roots(operators: Operators) -> Iterator[Path]:
    """A folder of root's with files of the names that the workspace has."""
    folder = operators.home.path / "roots"
    folder.mkdir(mode=0o755)
    for name in ("data", "more"):
        (folder / name).write_text(f"root's {name}")
        (folder / name).chmod(0o600)
    before = {path: path.stat() for path in folder.iterdir()}
    yield folder
    assert set(folder.iterdir()) == set(before)
    for path, was in before.items():
        now = path.stat()
        assert (now.st_uid, now.st_mode, now.st_ino) == (0, stat.S_IFREG | 0o600, was.st_ino)
        assert path.read_text() == f"root's {path.name}"


@pytest.fixture
def workspace(operators: Operators) -> Path:
    """A folder of the user's, the workspace of a session of root's that has ended."""
    operators.home.path.chmod(0o755)
    folder = operators.home.path / "workspace"
    (folder / "sub").mkdir(parents=True)
    for name in ("data", "more"):
        (folder / "sub" / name).write_text(f"the user's {name}")
    for path in (folder, folder / "sub", *(folder / "sub").iterdir()):
        os.chown(path, USER, USER)
    operators(
        *("run", "-d", "--name", "work", "--workspace", str(folder), "--"),
        *(sys.executable, "-c", "import time; time.sleep(1000)"),
    )
    operators("snapshot", "work", "--with-workspace")
    operators("kill", "work", "--timeout", 0)
    for name in ("data", "more"):
        (folder / "sub" / name).write_text("changed")
    return folder


def rewound(operators: Operators) -> bool:
    """Whether a rewind has put the files back; otherwise it was refused or undone."""
    answer = operators("restore", "work@1", "--rewind", check=False)
    assert answer["exit_code"] in (0, 4, 6, 11), answer
    return answer["exit_code"] in (0, 11)


def test_a_folder_that_is_a_link_now(operators: Operators, workspace: Path, roots: Path) -> None:
    (workspace / "sub").rename(workspace / "away")
    (workspace / "sub").symlink_to(roots)
    os.chown(workspace / "sub", USER, USER, follow_symlinks=False)
    if rewound(operators):
        assert not (workspace / "sub").is_symlink()
        assert (workspace / "sub" / "data").read_text() == "the user's data"


def test_a_file_that_is_a_link_now(operators: Operators, workspace: Path, roots: Path) -> None:
    (workspace / "sub" / "data").unlink()
    (workspace / "sub" / "data").symlink_to(roots / "data")
    (workspace / "sub" / "more").unlink()
    os.link(roots / "more", workspace / "sub" / "more")  # as where hard links are not protected
    rewound(operators)
    (workspace / "sub" / "more").unlink(missing_ok=True)
    for aside in workspace.parent.glob("workspace.newer-*/sub/more"):
        aside.unlink()


def test_a_folder_that_becomes_a_link_meanwhile(
    operators: Operators, workspace: Path, roots: Path
) -> None:
    (workspace / "link").symlink_to(roots)
    os.chown(workspace / "link", USER, USER, follow_symlinks=False)
    argv = [*AS_USER, sys.executable, "-c", SWAPS]
    with subprocess.Popen(argv, cwd=workspace) as swapping:
        try:
            for _ in range(3):
                if rewound(operators):
                    operators("kill", "work", "--timeout", 0)
        finally:
            swapping.kill()
    assert swapping.wait(TIMEOUT)
