"""Read and edit CRIU's metadata images in a folder, with pycriu's message classes.

An image file is two 32-bit magics, then entries of a 32-bit size and a protobuf message (CRIU's
``images/*.proto``). Only images without extra payload after their messages are read or edited here;
everything else is carried as it is. All access is by folder descriptor, because the folder has no
path.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

from ..errors import Damaged
from . import schema

_IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_REMAP_LINKED, REMAP_GHOST = 0, 1  # RemapType
_OWN_GHOSTS = 1 << 31  # CRIU's own numbers stay below
_DEAD, _STOPPED = 2, 3  # a task's state
REGULAR = 1  # of CRIU's FD_TYPES
# tty_info_id of /dev/pts/N is N << 1, beyond are consoles (criu/tty.c, MAX_PTY_INDEX)
_SLAVES = range(0, 2001, 2)


def valid_name(name: str) -> bool:
    """Return whether `name` may be a file of an images folder (no path, no hidden file)."""
    return _IMAGE_NAME.fullmatch(name) is not None and ".." not in name


def magics(kind: str) -> bytes:
    """Return the magics at the beginning of an image of this kind."""
    own = struct.pack("<I", schema.magic(kind))
    if kind == "INVENTORY":  # the only image in the format before 1.1
        return own
    family = "IMG_SERVICE" if kind in ("STATS", "IRMAP_CACHE") else "IMG_COMMON"
    return struct.pack("<I", schema.magic(family)) + own


def text(value: str | bytes) -> str:
    """Return a name of the kernel's that an image has as text.

    The kernel allows any bytes; names that are not UTF-8 are in the image as bytes.
    """
    return value if isinstance(value, str) else os.fsdecode(value)


def path_of(reg: Any) -> str:
    """Return the path of a file of the images."""
    return "/" + text(reg.name).lstrip("/")


def read(folder: int, name: str, kind: str) -> list[Any]:
    """Return the messages of image `name`, whose magic must be `kind` ("FILES", "PSTREE", ...)."""
    with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), "rb") as file:
        return parse(file.read(), name, kind)


def parse(data: bytes, name: str, kind: str, first: str = "") -> list[Any]:
    """Return the messages in the content of image `name`.

    `first`: the kind of the first message, if it differs.
    """
    head = magics(kind)
    if not data.startswith(head):
        raise Damaged(f"image {name} is not a CRIU image of kind {kind}")
    cls = schema.message(kind)
    messages: list[Any] = []
    position = len(head)
    while position < len(data):
        if position + 4 > len(data):
            raise Damaged(f"image {name} is cut off")
        (size,) = struct.unpack_from("<I", data, position)
        position += 4
        if position + size > len(data):
            raise Damaged(f"image {name} is cut off")
        message = schema.message(first)() if first and not messages else cls()
        try:
            message.ParseFromString(data[position : position + size])
        # protobuf's DecodeError, whose module differs between its versions
        except Exception as error:
            raise Damaged(f"image {name} cannot be parsed: {error}") from error
        messages.append(message)
        position += size
    return messages


def write(folder: int, name: str, kind: str, messages: Iterable[Any]) -> None:
    """Write (or replace) image `name`."""
    parts = [magics(kind)]
    for message in messages:
        body = message.SerializeToString()
        parts += [struct.pack("<I", len(body)), body]
    fd = os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=folder)
    with os.fdopen(fd, "wb") as file:
        file.write(b"".join(parts))


def _other_mode(reg: Any) -> bool:
    """Return whether the file or folder at the path is of the same kind, with another mode."""
    try:
        now = os.lstat(path_of(reg)).st_mode
    except OSError:
        return False
    return now != reg.mode and stat.S_IFMT(now) == stat.S_IFMT(reg.mode)


def _ghost_place(path: str) -> str:
    """Return where CRIU makes a deleted file: in the nearest folder that exists."""
    folder, name = os.path.split(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return os.path.join(folder, name)


class ImageSet:
    """One checkpoint's metadata images in a folder."""

    def __init__(self, folder: int) -> None:
        self.folder = folder

    def size(self, name: str) -> int:
        """Return the bytes of image `name`; 0 if it does not exist."""
        try:
            return os.stat(name, dir_fd=self.folder).st_size
        except FileNotFoundError:
            return 0

    def names(self) -> list[str]:
        """Return the image files, sorted."""
        return sorted(name for name in os.listdir(self.folder) if name.endswith(".img"))

    def run_id(self) -> str | None:
        """Return CRIU's id of the dump, which is in its firewall table's name."""
        entry = read(self.folder, "inventory.img", "INVENTORY")[0]
        return entry.dump_criu_run_id if entry.HasField("dump_criu_run_id") else None

    def pids(self) -> list[int]:
        """Return the PIDs of all processes, root first, in the tree's PID namespace."""
        return [entry.pid for entry in read(self.folder, "pstree.img", "PSTREE")]

    def memories(self) -> Iterator[tuple[int, Any]]:
        """Yield PID and memory description of each process that has one."""
        for name in self.names():
            if match := re.fullmatch(r"mm-(\d+)\.img", name):
                yield int(match[1]), read(self.folder, name, "MM")[0]

    def stopped(self) -> set[int]:
        """Return the PIDs of the processes stopped by a signal, in the tree's PID namespace."""
        cores = {pid: read(self.folder, f"core-{pid}.img", "CORE")[0] for pid in self.pids()}
        return {
            pid
            for pid, core in cores.items()
            if core.HasField("tc") and core.tc.task_state == _STOPPED
        }

    def exit_codes(self) -> dict[int, int]:
        """Return PID -> exit code of the processes that have ended and were not waited for."""
        codes, names = {}, set(os.listdir(self.folder))
        for pid in self.pids():
            if f"ids-{pid}.img" in names:
                continue  # it is alive
            core = read(self.folder, f"core-{pid}.img", "CORE")[0]
            if core.HasField("tc") and core.tc.task_state == _DEAD and not core.tc.exit_code & 0x7F:
                codes[pid] = core.tc.exit_code >> 8
        return codes

    def reserved_ids(self) -> set[int]:
        """Return every number that must be free for a restore with the same PIDs.

        Those of processes, threads, groups and sessions.
        """
        numbers: set[int] = set()
        for entry in read(self.folder, "pstree.img", "PSTREE"):
            numbers.update((entry.pid, entry.pgid, entry.sid, *entry.threads))
        numbers.discard(0)
        return numbers

    def files(self) -> list[Any]:
        """Return the entries of files.img."""
        return (
            read(self.folder, "files.img", "FILES")
            if "files.img" in os.listdir(self.folder)
            else []
        )

    def edit_files(self, edit: Callable[[Any], None]) -> None:
        """Rewrite files.img with `edit` applied to each entry."""
        entries = self.files()
        for entry in entries:
            edit(entry)
        self.write_files(entries)

    def write_files(self, entries: Iterable[Any]) -> None:
        """Replace the entries of files.img."""
        write(self.folder, "files.img", "FILES", entries)

    def make_regular(self, numbers: Container[int]) -> None:
        """Mark every descriptor of these files of files.img as one of a regular file."""
        for name in self.names():
            if name.startswith("fdinfo-"):
                held = read(self.folder, name, "FDINFO")
                changed = [entry for entry in held if entry.id in numbers]
                for entry in changed:
                    entry.type = REGULAR
                if changed:
                    write(self.folder, name, "FDINFO", held)

    def holders(self) -> dict[int, list[tuple[int, int]]]:
        """Return file id -> every (PID, descriptor) that refers to it."""
        found: dict[int, list[tuple[int, int]]] = {}
        names = set(os.listdir(self.folder))
        for pid in self.pids():
            if f"ids-{pid}.img" not in names:
                continue  # a zombie
            files_id = read(self.folder, f"ids-{pid}.img", "IDS")[0].files_id
            if f"fdinfo-{files_id}.img" not in names:
                continue
            for entry in read(self.folder, f"fdinfo-{files_id}.img", "FDINFO"):
                found.setdefault(entry.id, []).append((pid, entry.fd))
        return found

    def forget_sizes(self, paths: set[str]) -> None:
        """Remove CRIU's size check of these regular files; criuctl has judged them itself."""

        def edit(entry: Any) -> None:
            if entry.HasField("reg") and path_of(entry.reg) in paths:
                entry.reg.ClearField("size")

        self.edit_files(edit)

    def move_files(self, own: Mapping[str, str]) -> None:
        """Make CRIU open these regular files elsewhere: path -> the other path."""
        remapped = self.remapped()

        def edit(entry: Any) -> None:
            if (
                entry.HasField("reg")
                and entry.id not in remapped
                and (path := own.get(path_of(entry.reg))) is not None
            ):
                entry.reg.name = path

        if own:
            self.edit_files(edit)

    def forget_modes(self) -> None:
        """Remove CRIU's check of the mode of files that are still of the same kind.

        A change of the mode does not affect a process that has the file open.
        """

        files = self.files()
        # Those of /dev/pts are made again; the file that has the name now is another one.
        slaves = {
            e.tty.regf_id for e in files if e.HasField("tty") and e.tty.tty_info_id in _SLAVES
        }
        modes = [
            e.reg
            for e in files
            if e.HasField("reg") and e.reg.HasField("mode") and e.id not in slaves
        ]
        changed = {reg.name for reg in modes if _other_mode(reg)}

        def edit(entry: Any) -> None:
            if entry.HasField("reg") and entry.reg.name in changed:
                entry.reg.ClearField("mode")

        if changed:
            self.edit_files(edit)

    def remapped(self) -> set[int]:
        """Return the ids of files that were deleted under the name that they were opened by."""
        if "remap-fpath.img" not in os.listdir(self.folder):
            return set()
        return {e.orig_id for e in read(self.folder, "remap-fpath.img", "REMAP_FPATH")}

    def link_remaps(self) -> dict[str, int]:
        """Return path -> mount id of each helper link.

        CRIU makes one for a deleted name of a file with other names.
        """
        return {path: found[0][1].reg.mnt_id for path, found in sorted(self.linked().items())}

    def linked(self) -> dict[str, list[tuple[int, Any]]]:
        """Return path -> the file ids that use that helper link, each with its entry in files.img.

        The entry is the file opened by the deleted name.
        """
        if "remap-fpath.img" not in os.listdir(self.folder):
            return {}
        remaps = [
            e
            for e in read(self.folder, "remap-fpath.img", "REMAP_FPATH")
            if e.remap_type == _REMAP_LINKED
        ]
        files = {e.id: e for e in self.files() if e.HasField("reg")} if remaps else {}
        found: dict[str, list[tuple[int, Any]]] = {}
        for remap in remaps:
            if remap.remap_id in files and remap.orig_id in files:
                path = path_of(files[remap.remap_id].reg)
                found.setdefault(path, []).append((remap.remap_id, files[remap.orig_id]))
        return found

    def number_ghosts(self, name: str) -> list[str]:
        """Number deleted files by this name, so that parallel restores use other numbers.

        CRIU numbers them from 1. Returns the paths at which CRIU keeps them during the restore,
        until all processes have opened them.
        """
        if "remap-fpath.img" not in os.listdir(self.folder):
            return []
        remaps = list(read(self.folder, "remap-fpath.img", "REMAP_FPATH"))
        ghosts = {e.orig_id: e for e in remaps if e.remap_type == REMAP_GHOST}
        first = _OWN_GHOSTS | zlib.crc32(os.fsencode(name)) & (_OWN_GHOSTS >> 1) - 1
        own = {
            old: first + n for n, old in enumerate(sorted({e.remap_id for e in ghosts.values()}))
        }
        for old, new in own.items():
            os.rename(
                f"ghost-file-{old:x}.img",
                f"ghost-file-{new:x}.img",
                src_dir_fd=self.folder,
                dst_dir_fd=self.folder,
            )
        for entry in ghosts.values():
            entry.remap_id = own[entry.remap_id]
        if ghosts:
            write(self.folder, "remap-fpath.img", "REMAP_FPATH", remaps)
        regular = (
            [e for e in self.files() if e.id in ghosts and e.HasField("reg")] if ghosts else []
        )
        return [
            _ghost_place(f"{path_of(e.reg)}.cr.{ghosts[e.id].remap_id:x}.ghost") for e in regular
        ]

    def frozen_us(self) -> int | None:
        """Return how long the tree was frozen, in microseconds, by CRIU's own statistics."""
        if "stats-dump" not in os.listdir(self.folder):
            return None
        entry = read(self.folder, "stats-dump", "STATS")[0]
        return int(entry.dump.frozen_time)
