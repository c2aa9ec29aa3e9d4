"""Names of unix sockets in the images of a restore: which are bound, which are given others, and
what is left of a failure.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from criuctl.checkpoint.manifest import Manifest, SessionRef
from criuctl.criu import schema
from criuctl.criu.images import ImageSet
from criuctl.criu.socketimages import TCP_CLOSE, TCP_ESTABLISHED, TCP_LISTEN
from criuctl.errors import RestoreFailed
from criuctl.files.socket_names import Bindings, bound, disown, taken
from criuctl.namespaces.network_choice import Place

MANIFEST = Manifest(id="ab" * 16, session=SessionRef("s", "1" * 32))
STREAM, DATAGRAM = socket.SOCK_STREAM, socket.SOCK_DGRAM


class _Images(ImageSet):
    """Images of one process with PID 7, whose sockets have their descriptors as file ids."""

    def __init__(self, *sockets: dict[str, Any]) -> None:
        super().__init__(-1)
        self.entries = []
        for number, values in enumerate(sockets, 3):
            entry = schema.message("FILES")()
            entry.id = number
            entry.usk.type, entry.usk.state = STREAM, TCP_LISTEN
            for key, value in values.items():
                setattr(entry.usk, key, value)
            self.entries.append(entry)

    def files(self) -> list[Any]:
        return self.entries

    def edit_files(self, edit: Callable[[Any], None]) -> None:
        for entry in self.entries:
            edit(entry)

    def holders(self) -> dict[int, list[tuple[int, int]]]:
        return {entry.id: [(7, entry.id)] for entry in self.entries}

    def names(self) -> list[str]:
        return []

    def bytes(self) -> list[bytes]:
        return [entry.usk.name for entry in self.entries]


def test_which_are_bound() -> None:
    """Not what only bears its listener's name, and not a peer outside; a datagram socket may be
    connected, too.
    """
    images = _Images(
        {"name": b"/listener\0"},
        {"name": b"/accepted\0", "state": TCP_ESTABLISHED},
        {"name": b"/only-bound\0", "state": TCP_CLOSE},
        {"name": b"/datagram\0", "state": TCP_ESTABLISHED, "type": DATAGRAM},
        {"name": b"/dev/log\0", "state": TCP_CLOSE, "type": DATAGRAM, "uflags": 1},
        {"name": b"relative\0", "name_dir": "/somewhere"},
        {"name": b"\0abstract\0x"},
        {"name": b""},
    )
    assert [b.path for b in bound(images)] == [
        *("/listener", "/only-bound", "/datagram", "/somewhere/relative", "@abstract@x"),
    ]
    disown(images)
    assert [name for name in images.bytes() if name] == [
        *(
            b"/listener\0",
            b"/only-bound\0",
            b"/datagram\0",
            b"/dev/log\0",
            b"relative\0",
            b"\0abstract\0x",
        ),
    ]


def test_an_accepted_connection_comes_without_all_that_goes_with_a_name() -> None:
    images = _Images(
        {"name": b"relative\0", "name_dir": "/somewhere", "state": TCP_ESTABLISHED, "deleted": True}
    )
    images.entries[0].usk.file_perms.mode = images.entries[0].usk.file_perms.uid = images.entries[
        0
    ].usk.file_perms.gid = 0
    disown(images)
    usk = images.entries[0].usk
    assert (usk.name, [usk.HasField(field) for field in ("name_dir", "file_perms", "deleted")]) == (
        b"",
        [False] * 3,
    )


@pytest.mark.parametrize("relative", [False, True])
def test_another_name_in_the_same_folder(relative: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    values = (
        {"name": b"s\0", "name_dir": str(tmp_path)}
        if relative
        else {"name": os.fsencode(path) + b"\0"}
    )
    images = _Images(values)
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(path)
        Path(f"{path}.copy-abababab").touch()
        (found,) = taken(images, MANIFEST, Place("host"), copy=True)
    assert (found.path, found.what, found.own, found.pid, found.fd) == (
        path,
        "socket",
        f"{path}.copy-ababababx",
        7,
        3,
    )
    assert f"PID {os.getpid()} (" in found.by
    bindings = Bindings(images, [found])
    bindings.put()
    assert bindings.own == {path: found.own}
    assert images.bytes() == [os.fsencode("s.copy-ababababx" if relative else found.own) + b"\0"]


def test_a_path_that_leaves_no_room_for_another_name(tmp_path: Path) -> None:
    path = str(tmp_path / "s").ljust(100, "s")
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(path)
        (found,) = taken(_Images({"name": os.fsencode(path)}), MANIFEST, Place("host"), copy=True)
    assert (found.what, found.own) == ("socket", "")


def test_the_file_of_a_dead_socket_is_free(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    images = _Images({"name": os.fsencode(path)})
    assert taken(images, MANIFEST, Place("host"), copy=False) == ()
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(path)
    assert taken(images, MANIFEST, Place("host"), copy=False) == ()


def test_abstract_names_are_of_the_network(tmp_path: Path) -> None:
    name = b"\0criuctl-test-%d" % os.getpid()
    images = _Images({"name": name})
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(name)
        (found,) = taken(images, MANIFEST, Place("existing", "/proc/self/ns/net"), copy=False)
        assert (found.path, found.what, found.own) == (
            f"@criuctl-test-{os.getpid()}",
            "abstract",
            "",
        )
        assert taken(images, MANIFEST, Place("private"), copy=False) == ()


def test_deleted_names(tmp_path: Path) -> None:
    """CRIU moves a file aside for them, but removes sockets."""
    path = str(tmp_path / "s")
    images = _Images({"name": os.fsencode(path), "deleted": True})
    Path(path).touch()
    assert taken(images, MANIFEST, Place("host"), copy=True) == ()
    os.unlink(path)
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(path)
        (found,) = taken(images, MANIFEST, Place("host"), copy=True)
    assert found.what == "deleted"


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", ["dead", "alive", "none", "other"])
def test_what_a_failed_restore_has_left_is_taken_back(
    before: bool, after: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    images = _Images({"name": os.fsencode(path)})
    if before:
        _dead(path)
        os.chmod(path, 0o604)
        os.utime(path, ns=(1, 10**18))
    bindings = Bindings(images, [])
    bindings.put()
    bindings.begin()
    if before:
        os.unlink(path)
    with socket.socket(socket.AF_UNIX) as living:
        if after == "dead":
            _dead(path)
        elif after == "alive":
            living.bind(path)
        elif after == "other":
            Path(path).touch()
        there = os.lstat(path).st_ino if after in ("alive", "other") else None
        bindings.undo()
        assert os.path.lexists(path) == (before or there is not None)
        if there is not None:
            assert os.lstat(path).st_ino == there
        elif before:
            status = os.lstat(path)
            assert (
                stat.S_ISSOCK(status.st_mode),
                stat.S_IMODE(status.st_mode),
                status.st_mtime_ns,
            ) == (True, 0o604, 10**18)


def test_another_socket_has_it_by_now(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    bindings = Bindings(_Images({"name": os.fsencode(path)}), [])
    bindings.put()
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(path)
        with pytest.raises(RestoreFailed, match="by now") as refused:
            bindings.begin()
        assert path in refused.value.message and f"PID {os.getpid()} (" in refused.value.message
        bindings.undo()
        assert os.path.lexists(path)


def _dead(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(path)
