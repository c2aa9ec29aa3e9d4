"""Unix sockets under the names that their files have now: what is put into the images, and what
cannot be.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.obstacles import running

from criuctl.criu import schema
from criuctl.criu.images import ImageSet
from criuctl.criu.socketimages import TCP_ESTABLISHED, TCP_LISTEN
from criuctl.proc.descriptors import descriptors
from criuctl.proc.tree import read_tree
from criuctl.repairs.renamed_sockets import follow_renamed
from criuctl.report import Reporter

# the repair does not look there
ELSEWHERE = "os.mkdir(TMP + '/d'); os.link(TMP + '/a', TMP + '/d/a'); os.unlink(TMP + '/a')"


class _Images(ImageSet):
    """Images of one process, whose sockets have their descriptors as file ids."""

    def __init__(self, pid: int, names: dict[int, bytes], state: int = TCP_LISTEN) -> None:
        super().__init__(-1)
        self.pid = pid
        self.entries = []
        for fd, name in names.items():
            entry = schema.message("FILES")()
            entry.id = fd
            entry.usk.name = name
            entry.usk.type, entry.usk.state = socket.SOCK_STREAM, state
            self.entries.append(entry)

    def files(self) -> list[Any]:
        return self.entries

    def edit_files(self, edit: Callable[[Any], None]) -> None:
        for entry in self.entries:
            edit(entry)

    def holders(self) -> dict[int, list[tuple[int, int]]]:
        return {entry.id: [(self.pid, entry.id)] for entry in self.entries}

    def names(self) -> list[str]:
        return [os.fsdecode(entry.usk.name) for entry in self.entries]


def _followed(
    text: str, name: str, folder: Path, state: int = TCP_LISTEN
) -> tuple[list[str], list[str]]:
    """The name in the images of a socket that was bound to `name`, and what was warned of."""
    with running(
        f"s = socket.socket(socket.AF_UNIX); s.bind({name!r}); s.listen()\n{text}", folder
    ) as program:
        tree = read_tree(program.pid)
        (fd,) = [d.fd for d in descriptors(program.pid) if d.kind == "socket"]
        images, reporter = _Images(program.pid, {fd: os.fsencode(name) + b"\0"}, state), Reporter()
        follow_renamed(images, tree, reporter)
    return images.names(), reporter.warnings


@pytest.mark.parametrize("new", ["b", "é", "x\udcff"])
def test_the_new_name_is_followed(new: str, tmp_path: Path) -> None:
    name = f"{tmp_path}/a"
    text = f"os.rename({name!r}, TMP + os.fsdecode({os.fsencode('/' + new)!r}))"
    assert _followed(text, name, tmp_path) == ([f"{tmp_path}/{new}\0"], [])


def test_another_name_of_a_file_that_has_lost_the_first_one_is_followed(tmp_path: Path) -> None:
    name = f"{tmp_path}/a"
    second = "other = socket.socket(socket.AF_UNIX); other.bind(TMP + '/b')"
    text = f"{second}; os.close(other.detach()); os.link({name!r}, TMP + '/c'); os.unlink({name!r})"
    assert _followed(text, name, tmp_path) == ([f"{tmp_path}/c\0"], [])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "os.unlink(TMP + '/a')",
        "os.rename(TMP + '/a', TMP + '/b'); os.unlink(TMP + '/b')",
        ELSEWHERE,
    ],
)
def test_one_that_is_in_its_place_or_deleted_keeps_its_name(text: str, tmp_path: Path) -> None:
    name = f"{tmp_path}/a"
    assert _followed(text, name, tmp_path) == ([name + "\0"], [])


def test_an_accepted_connection_does_not_get_its_listeners_new_name(tmp_path: Path) -> None:
    """CRIU would remove the file at that name, which may be of a listener outside the tree."""
    name = f"{tmp_path}/a"
    text = "os.rename(TMP + '/a', TMP + '/b')"
    assert _followed(text, name, tmp_path, TCP_ESTABLISHED) == ([name + "\0"], [])


def test_the_longest_name_that_can_be_bound(tmp_path: Path) -> None:
    name = f"{tmp_path}/a"
    long = f"{tmp_path}/".ljust(107, "n")
    assert _followed(f"os.rename({name!r}, {long!r})", name, tmp_path) == ([long + "\0"], [])


def test_a_name_that_is_too_long_is_reported(tmp_path: Path) -> None:
    name = f"{tmp_path}/a"
    long = f"{tmp_path}/".ljust(108, "n")
    names, (warning,) = _followed(f"os.rename({name!r}, {long!r})", name, tmp_path)
    assert names == [name + "\0"]
    assert f"{name} is called {long} now" in warning
