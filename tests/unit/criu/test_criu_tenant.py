"""What a checkpoint for a user may hold, by CRIU's images: on small images, without CRIU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from criuctl.criu import schema
from criuctl.criu.images import ImageSet, write
from criuctl.criu.tenant import Tenant, objections

ADA = Tenant(1001, frozenset({1001, 50}))
ROOT, CHILD, THREAD, ENDED = 10, 11, 12, 13


def _fill(message: Any) -> None:
    for one in message.DESCRIPTOR.fields:
        if one.is_required and one.message_type is not None:
            _fill(getattr(message, one.name))
        elif one.is_required and not message.HasField(one.name):
            setattr(message, one.name, getattr(message, one.name))


class Tree:
    """A root, a child with a second thread, and one that has ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        make = schema.message("PSTREE")
        threads = {ROOT: [ROOT], CHILD: [CHILD, THREAD], ENDED: [ENDED]}
        write(
            self.fd,
            "pstree.img",
            "PSTREE",
            [make(pid=pid, ppid=0, pgid=pid, sid=ROOT, threads=t) for pid, t in threads.items()],
        )
        for pid in (ROOT, CHILD):
            (folder / f"mm-{pid}.img").touch()
        for pid in (ROOT, CHILD, THREAD):
            self.core(pid)

    def core(self, pid: int, *, groups: Any = (50,), **changed: Any) -> None:
        """Write the image of a thread of the user's, with these values of its credentials."""
        core = schema.message("CORE")()
        _fill(core)
        _fill(core.thread_core)
        creds = core.thread_core.creds
        _fill(creds)
        for name in ("uid", "euid", "suid", "fsuid", "gid", "egid", "sgid", "fsgid"):
            setattr(creds, name, 1001)
        creds.groups.extend(groups)
        for name, value in changed.items():
            if isinstance(value, int):
                setattr(creds, name, value)
            else:
                getattr(creds, name).extend(value)
        write(self.fd, f"core-{pid}.img", "CORE", [core])

    def objections(self) -> list[str]:
        """What is found."""
        return list(objections(ImageSet(self.fd), ADA))


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    made = Tree(tmp_path)
    yield made
    os.close(made.fd)


def test_what_is_the_user_s_alone(tree: Tree) -> None:
    assert tree.objections() == []


@pytest.mark.parametrize("name", ["uid", "euid", "suid", "fsuid"])
def test_another_user_anywhere(tree: Tree, name: str) -> None:
    tree.core(CHILD, **{name: 0})
    assert tree.objections() == [f"PID {CHILD} is also user 0"]


@pytest.mark.parametrize("name", ["gid", "egid", "sgid", "fsgid"])
def test_a_group_of_others(tree: Tree, name: str) -> None:
    tree.core(ROOT, **{name: 42})
    assert tree.objections() == [f"PID {ROOT} is in group 42, in which its user is not"]


def test_a_supplementary_group_of_others(tree: Tree) -> None:
    tree.core(ROOT, groups=(50, 0))
    assert tree.objections() == [f"PID {ROOT} is in group 0, in which its user is not"]


@pytest.mark.parametrize("name", ["cap_inh", "cap_prm", "cap_eff", "cap_amb"])
def test_a_capability_of_a_thread(tree: Tree, name: str) -> None:
    tree.core(THREAD, **{name: [0, 1]})
    assert tree.objections() == [f"PID {CHILD} (thread {THREAD}) has capabilities"]


def test_a_user_namespace_of_its_own(tree: Tree) -> None:
    (tree.folder / "userns-8.img").touch()
    assert tree.objections() == ["the tree is in a user namespace of its own"]
