"""`--carry-binaries`: a user of the host tries to have files laid where root's programs look."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.command import Home
from support.laboratory import USER, Laboratory

from criuctl.errors import PlatformError
from criuctl.files.carried_binaries import SOURCE
from criuctl.proc.privatens import PrivateNamespaces
from criuctl.proc.scratch import Scratch

pytestmark = pytest.mark.integration

TOOL = """
#include <stdio.h>
#include <unistd.h>
int number(void);
int main(void) { printf("%d %d\\n", number(), (int)geteuid()); return 0; }
"""


class System:
    """A set-uid program of root's and the library that it loads, as /usr/bin and /usr/lib have
    them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.library, self.tool = folder / "lib" / "libnumber.so", folder / "tool"
        self.library.parent.mkdir(parents=True)
        for one in (folder, self.library.parent):
            one.chmod(0o755)
        build(self.library, 1)
        source = folder / "tool.c"
        source.write_text(TOOL)
        link = [f"-L{self.library.parent}", "-lnumber", f"-Wl,-rpath,{self.library.parent}"]
        subprocess.run(["gcc", "-o", str(self.tool), str(source), *link], check=True, timeout=60)
        self.tool.chmod(0o4755)


def build(library: Path, number: int) -> None:
    """A library whose `number` is this one."""
    made = library.with_name("new.so")
    source = library.with_name("number.c")
    source.write_text(f"int number(void) {{ return {number}; }}\n")
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnumber.so", "-o", str(made), str(source)]
    subprocess.run(command, check=True, timeout=60)
    source.unlink()
    made.rename(library)


@pytest.fixture
def system(home: Home) -> System:
    return System(home.path / "system")


def start(lab: Laboratory, library: Path, *, uid: int = USER) -> int:
    """A program that has the library mapped as code."""
    pid = lab.start(uid=uid)
    opened = f"os.open({str(library)!r}, os.O_RDONLY)"
    mapped = f"__import__('mmap').mmap({opened}, 0, prot=5, flags=2)"
    assert lab.ask(pid, f"globals().update(kept={mapped}) or 'mapped'") == "'mapped'"
    return pid


def run_tool(lab: Laboratory, pid: int, system: System) -> str:
    """What the set-uid program says when the restored program runs it."""
    return lab.ask(pid, f"os.popen({str(system.tool)!r}).read()")


def outside(system: System) -> str:
    """What it says when the user runs it outside of any restored tree."""
    return subprocess.check_output([system.tool], user=USER, text=True, timeout=60)


@pytest.fixture
def theirs(lab: Laboratory, tmp_path: Path) -> Path:
    """A library of the user's own, which has the name of one of root's."""
    lab.as_user("mkdir d")
    built = tmp_path / "libnumber.so"
    build(built, 666)
    library = lab.folder / "d" / "libnumber.so"
    library.write_bytes(built.read_bytes())
    os.chown(library, USER, USER)
    library.chmod(0o755)
    return library


def test_the_tool_is_root_s(lab: Laboratory, system: System) -> None:
    """Outside it does what root wants, for everybody."""
    assert outside(system) == "1 0\n"


@pytest.mark.parametrize("uid", [USER, 0])
def test_a_link_does_not_lead_it(lab: Laboratory, system: System, theirs: Path, uid: int) -> None:
    """Neither a user's tree nor one of root's gets the user's library in the place of root's."""
    report = lab.dump(start(lab, theirs, uid=uid), "--carry-binaries")
    lab.as_user(f"rm -r d; ln -s {system.library.parent} d")
    refused = lab.restore(report["checkpoint"], check=False)
    assert refused["exit_code"] == 4, refused
    assert f"{lab.folder}" in refused["error"]["message"]
    assert lab.processes() == []


def test_a_user_s_file_lies_in_no_folder_of_root_s(
    lab: Laboratory,
    system: System,
    theirs: Path,
) -> None:
    """Where the user's folder is gone, the nearest one that exists is root's, and stays as it
    is.
    """
    theirs.parent.rename(lab.folder.parent / "theirs")  # only root can
    moved = lab.folder.parent / "theirs" / theirs.name
    report = lab.dump(start(lab, moved), "--carry-binaries")
    moved.unlink()
    moved.parent.rmdir()
    refused = lab.restore(report["checkpoint"], check=False)
    assert refused["exit_code"] == 4, refused
    assert f"belongs to user {USER}" in refused["error"]["message"]
    assert "install -d" in refused["error"]["hint"]


def test_over_the_user_s_own_folder_it_is_not_set_uid(
    lab: Laboratory,
    system: System,
    theirs: Path,
) -> None:
    """The user's own library comes back in the user's own folder; no program there or elsewhere
    gains root's rights.
    """
    report = lab.dump(start(lab, theirs), "--carry-binaries")
    lab.as_user("echo other > d/libnumber.so")
    pid = lab.restore(report["checkpoint"])["pid"]
    assert lab.ask(pid, f"open({str(theirs)!r}, 'rb').read(4)") == "b'\\x7fELF'"
    assert run_tool(lab, pid, system) == repr(f"1 {USER}\n")
    points = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    assert all("nosuid" in point[5] for point in points)
    assert theirs.read_text() == "other\n"


def test_an_older_library_of_root_s_helps_nobody(lab: Laboratory, system: System) -> None:
    """A user keeps a library with a hole mapped, root replaces it: no set-uid program loads the old
    one with root's rights.
    """
    report = lab.dump(start(lab, system.library), "--carry-binaries")
    build(system.library, 2)
    pid = lab.restore(report["checkpoint"])["pid"]
    assert run_tool(lab, pid, system) == repr(f"1 {USER}\n")
    assert outside(system) == "2 0\n"


def test_a_tree_of_root_s_keeps_its_rights(lab: Laboratory, system: System) -> None:
    """It gets its library, and set-uid programs are what they are."""
    report = lab.dump(start(lab, system.library, uid=0), "--carry-binaries")
    build(system.library, 2)
    pid = lab.restore(report["checkpoint"])["pid"]
    try:
        script = f"setpriv --reuid {USER} --clear-groups {system.tool}"
        assert lab.ask(pid, f"os.popen({script!r}).read()") == repr("1 0\n")
    finally:
        lab.end(pid)


@pytest.mark.parametrize("by", ["a link", "another one"])
@pytest.mark.parametrize("what", ["covers", "binds"])
def test_nothing_is_laid_over_another_inode(home: Home, what: str, by: str) -> None:
    """Between the judgement and the mount the user puts something else in the place of what was
    judged.
    """
    place = home.path / "place"
    make = Path.mkdir if what == "covers" else Path.touch
    make(place)
    there = [place.stat().st_dev, place.stat().st_ino]
    place.rename(home.path / "away")
    if by == "a link":
        place.symlink_to("away")
    else:
        make(place)
    with Scratch(source=SOURCE, executable=True) as scratch:
        make(Path(scratch.path) / "layer")
        order = {"source": SOURCE, "set_uid": False, "covers": [], "binds": []}
        order |= {what: [["layer", str(place), there]]}
        Path(scratch.path, "list").write_text(json.dumps(order))
        with pytest.raises(PlatformError, match="something else is in its place"):
            PrivateNamespaces(layers=scratch.fd)
