"""Leave the tracking of a tree with its keeper, and take it back for the next snapshot.

What is left is a record for each process: what is registered, and where its memory is stored as it
was at the last snapshot. The keeper (`keeper`) is a small process of its own for each tree, so
that tracking depends neither on a holder nor on what takes the snapshots. It is found by a socket
in criuctl's run folder, named after the tree's root. The snapshot that takes the tracking has it
alone: if that snapshot fails, the tree is not tracked any more, and the next one starts again from
nothing.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from ..checkpoint.chunks import StreamRef
from ..config import Config
from ..errors import CriuctlError
from ..host.registry import run_folder
from ..proc import command
from ..proc.procfs import open_pidfd
from ..proc.tree import ProcessIdentity
from . import keeper

_FOLDER = "tracking"
BUSY_SECONDS = 3600  # until a tree is tried again that wrote too much
SECONDS = 26 * 3600  # without a snapshot; a daily one finds the tracking of the day before
_BUSY = ".busy"
_MOST = 1000  # processes
_LARGEST = 256 << 20  # bytes of a record
_PATIENCE = 10.0  # seconds for a keeper to answer


class KeptTask(Struct):
    """The tracking of one process, and where its memory is stored."""

    identity: ProcessIdentity
    entries: StreamRef
    data: StreamRef
    code: int  # see `userfault_code.code_of`
    uffd: int = -1

    def to_dict(self) -> dict[str, Any]:
        """Return what the keeper keeps, besides the descriptor."""
        return {
            "pid": self.identity.pid,
            "start_time": self.identity.start_time,
            "entries": self.entries.to_dict(),
            "data": self.data.to_dict(),
            "code": self.code,
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> KeptTask:
        """Return it, as `to_dict` has written it."""
        return cls(
            ProcessIdentity(int(value["pid"]), int(value["start_time"])),
            StreamRef.from_dict(value["entries"]),
            StreamRef.from_dict(value["data"]),
            int(value["code"]),
        )


class Kept(Struct):
    """The tracking of a tree."""

    repository: str  # id of the one that has its memory
    checkpoint: str  # id
    tasks: list[KeptTask]

    def close(self) -> None:
        """End the tracking that was not taken over."""
        for task in self.tasks:
            if task.uffd >= 0:
                os.close(task.uffd)
                task.uffd = -1


def leave(config: Config, root: ProcessIdentity, kept: Kept) -> bool:
    """Leave the tracking with a keeper, which has the only descriptors then; return whether that
    succeeded.
    """
    path = _path(config, root, make=True)
    with ExitStack() as stack:
        stack.callback(kept.close)
        try:
            pidfds, living = [], []
            for task in kept.tasks[:_MOST]:
                try:
                    pidfd = open_pidfd(task.identity.pid)
                except CriuctlError:  # it has ended
                    continue
                stack.callback(os.close, pidfd)
                if task.identity.alive():
                    pidfds.append(pidfd)
                    living.append(task)
            if not living:
                return False
            record = os.memfd_create("criuctl-tracking", os.MFD_CLOEXEC)
            stack.callback(os.close, record)
            value = {
                "repository": kept.repository,
                "checkpoint": kept.checkpoint,
                "tasks": [task.to_dict() for task in living],
            }
            os.pwrite(record, json.dumps(value).encode(), 0)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            with suppress(FileNotFoundError):
                path.unlink()
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(4)
            _start(path, listener.fileno(), record, living, pidfds)
        except (OSError, CriuctlError):
            with suppress(OSError):
                path.unlink()
            return False
    return True


def _start(
    path: Path, listener: int, record: int, tasks: Sequence[KeptTask], pidfds: Sequence[int]
) -> None:
    from ..session.launch.daemon import scope  # slow to import, and only needed here

    words = [str(listener), str(record), str(SECONDS), str(path)]
    words += [f"{task.uffd}:{pidfd}" for task, pidfd in zip(tasks, pidfds, strict=True)]
    argv = [*scope("tracking"), sys.executable, "-I", "-S", keeper.__file__, *words]
    passed = [listener, record, *(task.uffd for task in tasks), *pidfds]
    child = command.spawn(argv, pass_fds=passed, new_session=True)
    if child.wait(_PATIENCE) != 0:
        raise OSError("the keeper did not start")


def take(config: Config, root: ProcessIdentity) -> Kept | None:
    """Take the tracking of a tree back, with its descriptors; None if it is not tracked."""
    with _asked(config, root, b"t") as connection:
        if connection is None:
            return None
        kept = None
        fds: list[int] = []
        try:
            kept = _record(connection)
            while len(fds) < len(kept.tasks):
                word, some, _flags, _address = socket.recv_fds(connection, 1, _MOST)
                fds += some
                if not word:
                    break
        except (OSError, CriuctlError, ValueError, KeyError, TypeError):
            kept = None
        if kept is None or len(fds) != len(kept.tasks):
            for fd in fds:
                os.close(fd)
            return None
        for task, fd in zip(kept.tasks, fds, strict=True):
            os.set_inheritable(fd, False)
            task.uffd = fd
        return kept


def tracked(config: Config, root: ProcessIdentity) -> bool:
    """Return whether the writes of this tree are tracked between its snapshots."""
    try:
        with _asked(config, root, b"?") as connection:
            return connection is not None and bool(_record(connection).tasks)
    except (OSError, CriuctlError, ValueError, KeyError, TypeError):
        return False


def note_busy(config: Config, root: ProcessIdentity) -> None:
    """Note that this tree writes too much to be tracked."""
    with suppress(OSError):
        _path(config, root, make=True).with_suffix(_BUSY).touch(mode=0o600)


def busy(config: Config, root: ProcessIdentity) -> bool:
    """Return whether this tree wrote too much to be tracked, not long ago; sweep such notes."""
    noted = False
    with suppress(OSError):
        for note in run_folder(config, _FOLDER).glob(f"*{_BUSY}"):
            if time.time() - note.stat().st_mtime > BUSY_SECONDS:
                note.unlink(missing_ok=True)
            else:
                noted |= note == _path(config, root).with_suffix(_BUSY)
    return noted


@contextmanager
def _asked(config: Config, root: ProcessIdentity, request: bytes) -> Iterator[socket.socket | None]:
    """Yield a connection to the tree's keeper, which was asked for this; None if there is none."""
    path = _path(config, root)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_PATIENCE)
        try:
            connection.connect(str(path))
        except FileNotFoundError:
            yield None
            return
        except OSError:  # it was killed
            with suppress(OSError):
                path.unlink()
            yield None
            return
        connection.sendall(request)
        yield connection


def _record(connection: socket.socket) -> Kept:
    (size,) = struct.unpack("<Q", _received(connection, 8))
    if size > _LARGEST:
        raise ValueError("the keeper's record is too large")
    value = json.loads(_received(connection, size))
    tasks = [KeptTask.from_dict(task) for task in value["tasks"]]
    return Kept(str(value["repository"]), str(value["checkpoint"]), tasks)


def _received(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise OSError("the keeper has ended")
        data += piece
    return bytes(data)


def _path(config: Config, root: ProcessIdentity, *, make: bool = False) -> Path:
    folder = run_folder(config, _FOLDER)
    if make:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"{root.pid}-{root.start_time}"
