"""Workspaces in checkpoints: taken, put back, and single files taken out."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hooking import HookFolder
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators

pytestmark = pytest.mark.integration
BOB = 65534

# Counts in memory and in two files, one of them kept open; says what it finds.
COUNTER = """
import os, sys, time
count, log = 0, open("log", "w")
while True:
    count += 1
    with open("count.new", "w") as file:
        file.write(str(count))
    os.rename("count.new", "count")
    log.write(f"{count}\\n")
    log.flush()
    time.sleep(0.01)
"""


@pytest.fixture
def workspace(operators: Operators) -> Path:
    folder = operators.home.path / "workspace"
    (folder / "sub").mkdir(parents=True)
    (folder / "plan").write_text("first plan")
    (folder / "sub" / "data").write_bytes(bytes(range(256)) * 9000)
    os.link(folder / "plan", folder / "sub" / "plan")
    (folder / "link").symlink_to("sub/data")
    os.chown(folder / "sub" / "data", BOB, BOB)
    return folder


def counting(operators: Operators, workspace: Path) -> None:
    operators(
        *("run", "-d", "--name", "work", "--workspace", str(workspace), "--"),
        *(sys.executable, "-c", COUNTER),
    )
    wait_until(lambda: count(workspace) > 3, TIMEOUT, "it counts")


def count(workspace: Path) -> int:
    try:
        return int((workspace / "count").read_text())
    except FileNotFoundError:
        return 0


def files(workspace: Path) -> dict[Path, tuple[int, int]]:
    """Inode and time of change of each file, inode of each folder."""
    found = {path: path.lstat() for path in workspace.rglob("*")}
    return {
        path: (one.st_ino, 0 if stat.S_ISDIR(one.st_mode) else one.st_mtime_ns)
        for path, one in found.items()
    }


def test_memory_and_files_are_of_one_moment(operators: Operators, workspace: Path) -> None:
    """Changed files come back, newer ones are kept, and the log has no gap and no repetition."""
    counting(operators, workspace)
    operators("snapshot", "work", "--with-workspace")
    then = operators("show", "work@1", "--files")["workspace"]
    assert then["path"] == str(workspace)
    operators.text("cp", "work@1:count", str(operators.home.path / "then"))
    taken = int((operators.home.path / "then").read_text())
    wait_until(lambda: count(workspace) > taken + 5, TIMEOUT, "it goes on")
    operators("kill", "work", "--timeout", 0)

    last = count(workspace)
    (workspace / "plan").write_text("another plan")
    (workspace / "sub" / "data").unlink()
    (workspace / "new").mkdir()
    (workspace / "new" / "file").write_text("new")
    (workspace / "link").unlink()
    (workspace / "link").write_text("a file now")

    restored = operators("restore", "work@1", "--rewind")
    moved = {Path(f["path"]).relative_to(workspace): f for f in restored["files"]}
    assert set(map(str, moved)) >= {"plan", "sub/plan", "link", "new", "count", "log"}
    new = {str(name) for name, f in moved.items() if f.get("new")}
    assert new - {"count.new"} == {"new"}  # the program may have been killed while it wrote that
    aside = Path(moved[Path("new")]["newer_copy"]).parent
    assert aside.parent == workspace.parent and aside.name.startswith("workspace.newer-")
    assert (aside / "new" / "file").read_text() == "new"
    assert (aside / "plan").read_text() == (aside / "sub" / "plan").read_text() == "another plan"
    assert int((aside / "count").read_text()) == last
    assert stat.S_IMODE(aside.stat().st_mode) == 0o700

    assert (workspace / "plan").read_text() == "first plan"
    assert (workspace / "plan").samefile(workspace / "sub" / "plan")
    data = workspace / "sub" / "data"
    assert data.read_bytes() == bytes(range(256)) * 9000
    assert data.stat().st_uid == BOB
    assert os.readlink(workspace / "link") == "sub/data"
    assert not (workspace / "new").exists()
    wait_until(lambda: count(workspace) > taken + 5, TIMEOUT, "it goes on from there")
    lines = (workspace / "log").read_text().split()
    assert list(map(int, lines)) == list(range(1, len(lines) + 1))


def test_a_workspace_in_use_is_not_rewound(operators: Operators, workspace: Path) -> None:
    counting(operators, workspace)
    operators("snapshot", "work", "--with-workspace")
    operators("kill", "work", "--timeout", 0)
    (workspace / "plan").write_text("another plan")
    with open(workspace / "plan", "a"):
        refused = operators("restore", "work@1", "--rewind", check=False)
    assert refused["exit_code"] == 4
    assert "open for writing" in str(refused["error"])
    operators.shell("other", "--workspace", str(workspace / "sub"))
    refused = operators("restore", "work@1", "--rewind", check=False)
    assert refused["exit_code"] == 4
    assert "criuctl kill other" in str(refused["error"])
    operators("kill", "other", "--timeout", 0)
    os.chown(workspace / "plan", 4711, 4711)
    refused = operators("restore", "work@1", "--rewind", check=False)
    assert refused["exit_code"] == 4
    assert "belongs to user 4711" in str(refused["error"])
    assert (workspace / "plan").read_text() == "another plan"
    assert [p.name for p in workspace.parent.iterdir() if ".newer-" in p.name] == []
    operators("restore", "work@1")  # without --rewind nothing of it matters


def test_a_restore_that_fails_leaves_the_workspace(operators: Operators, workspace: Path) -> None:
    operators.shell("work", "--workspace", str(workspace))
    operators("dump", "work", "--with-workspace")
    (workspace / "plan").write_text("another plan")
    (workspace / "new" / "deep").mkdir(parents=True)
    before = files(workspace)
    hooks = HookFolder(operators.home.path / "hooks")
    veto = hooks.sh("post-restore", "veto", "exit 1")
    failed = operators("restore", "work", "--rewind", check=False)
    assert failed["exit_code"] == 10
    assert files(workspace) == before
    assert [p.name for p in workspace.parent.iterdir() if ".newer-" in p.name] == []
    veto.unlink()
    operators("restore", "work", "--rewind")
    assert (workspace / "plan").read_text() == "first plan"
    assert (workspace / "sub" / "plan").read_text() == "first plan"


def test_what_has_no_workspace_says_so(operators: Operators, workspace: Path) -> None:
    operators.shell("bare")
    refused = operators("dump", "bare", "--leave-running", "--with-workspace", check=False)
    assert refused["exit_code"] == 4 and "run --workspace" in refused["error"]["hint"]
    operators("dump", "bare")
    refused = operators("restore", "bare", "--rewind", check=False)
    assert refused["exit_code"] == 4 and "--with-workspace" in refused["error"]["hint"]
    operators.shell("large", "--workspace", str(workspace))
    with open(workspace / "large", "wb") as file:
        file.truncate(3 << 20)
    small = {"CRIUCTL_WORKSPACE_MAX_MIB": "2"}
    refused = operators("dump", "large", "--with-workspace", check=False, env=small)
    assert refused["exit_code"] == 4 and "workspace_max_mib" in refused["error"]["hint"]
    few = {"CRIUCTL_WORKSPACE_MAX_FILES": "3"}
    refused = operators("dump", "large", "--with-workspace", check=False, env=few)
    assert refused["exit_code"] == 4 and "workspace_max_files" in refused["error"]["hint"]


@pytest.fixture
def xfs(operators: Operators) -> Iterator[Path]:
    """A file system with reflinks."""
    image, place = operators.home.path / "disk", operators.home.path / "mounted"
    place.mkdir()
    image.touch()
    os.truncate(image, 320 << 20)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    yield place
    operators("kill", "work", "--timeout", 0, check=False)
    subprocess.run(["umount", "-l", place], check=True)


def test_changed_files_are_cloned_where_the_disk_can(operators: Operators, xfs: Path) -> None:
    """Also in a workspace that is a mount point: what is newer stays next to each file then."""
    counting(operators, xfs)
    operators("snapshot", "work", "--with-workspace")
    operators("kill", "work", "--timeout", 0)
    (xfs / "new").write_text("new")
    restored = operators("restore", "work@1", "--rewind")
    (new,) = [f["newer_copy"] for f in restored["files"] if f.get("new")]
    assert Path(new).read_text() == "new" and Path(new).parent == xfs
    lines = (xfs / "log").read_text().split()
    assert list(map(int, lines)) == list(range(1, len(lines) + 1))


def test_files_are_taken_out(operators: Operators, workspace: Path) -> None:
    operators.shell("work", "--workspace", str(workspace))
    (workspace / "sub" / "data").chmod(0o4751)
    operators("dump", "work", "--with-workspace")
    out = operators.home.path / "out"
    out.mkdir()
    told = operators("cp", "work:sub", str(out))
    assert (told["files"], told["target"]) == (2, str(out / "sub"))
    data = out / "sub" / "data"
    assert data.read_bytes() == bytes(range(256)) * 9000
    assert (stat.S_IMODE(data.stat().st_mode), data.stat().st_uid) == (0o751, 0)
    assert data.stat().st_mtime_ns == (workspace / "sub" / "data").stat().st_mtime_ns
    operators("cp", f"work@1:{workspace}/link", str(out / "link"))
    assert os.readlink(out / "link") == "sub/data"
    again = operators("cp", "work:sub", str(out), check=False)
    assert again["exit_code"] == 9 and "exists" in again["error"]["message"]
    missing = operators("cp", "work:data", str(out), check=False)
    assert missing["exit_code"] == 3 and "show work --files" in missing["error"]["hint"]
    (workspace / "trap").symlink_to(out)
    os.lchown(workspace / "trap", BOB, BOB)
    os.chown(workspace, BOB, BOB)
    through = operators("cp", "work:plan", str(workspace / "trap" / "plan"), check=False)
    assert (through["exit_code"], through["error"]["code"]) == (4, "untrusted-path")
    nowhere = operators("cp", "work:plan", str(out / "none" / "plan"), check=False)
    assert (nowhere["exit_code"], nowhere["error"]["code"]) == (3, "not-found")
    assert sorted(os.listdir(out)) == ["link", "sub"]
