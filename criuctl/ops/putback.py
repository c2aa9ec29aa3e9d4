"""Files at a restore: judged first, then put back, and undone if the restore fails.

`judge` compares each recorded file with what is at its path now and decides, as a pure function of both:

- ``same``: nothing to do;
- ``grown``: only ever appended to, and what was there at the freeze still is: left as it is, the program
  goes on appending;
- ``moved-on``: opened for reading only and different now, or only its mode is another one: left as it is;
- ``put-back``: what was recorded is made anew (from the carried contents, or from the unchanged beginning of
  the present file); a newer file is set aside beside it, never overwritten;
- ``overlaid``: a mapped file that came along (``--carry-binaries``) and is missing or another one here: the tree gets its own, in
  a mount namespace of its own (`criuctl.ops.overlays`), and what is here stays as it is;
- ``refuse``: it differs and there is nothing to put back, or the policy forbids touching it.

`Applied` does it.  Setting aside is a rename, so undoing is one too.  Folders are another user's now and then: nobody leads what
is put back elsewhere (`criuctl.proc.ways`).
"""

from __future__ import annotations

import base64
import errno
import os
import stat
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import PurePath
from typing import Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ..checkpoint.manifest import FileRecord
from ..checkpoint.reader import CheckpointReader
from ..errors import Damaged, RestoreFailed
from ..proc import ways
from ..report import Finding
from . import overlays
from .files import digest

T = TypeVar("T")
Verdict = Literal["same", "grown", "moved-on", "put-back", "overlaid", "refuse"]
Policy = Literal["refuse", "restore", "keep"]
_OTHER_VERSION = "Install the version that the program was started from; next time dump with --carry-binaries."


class Judgement(Struct, frozen=True):
    """One recorded file and what is to become of it."""

    record: FileRecord
    verdict: Verdict
    why: str = ""
    hint: str = ""
    from_prefix: bool = False  # the recorded contents are the beginning of the present file
    exists: bool = True

    def finding(self) -> Finding | None:
        """What a person is told, if anything."""
        if self.verdict in ("same", "grown", "moved-on", "overlaid"):
            return Finding("info", f"file-{self.verdict}", f"{self.record.path}: {self.why}") if self.why else None
        level: Literal["error", "warning"] = "error" if self.verdict == "refuse" else "warning"
        pid, fd = self.record.holders[0] if self.record.holders else (None, None)
        return Finding(level, f"file-{self.verdict}", f"{self.record.path}: {self.why}", self.hint, pid, fd)


def check_path(path: str) -> str:
    """A path from a manifest: absolute, plain, and without a way up."""
    if not path.startswith("/") or "\0" in path or os.path.normpath(path) != path:
        raise Damaged(f"{path!r} is not a plain absolute path", hint="The checkpoint is damaged or not from criuctl.")
    return path


def judge(record: FileRecord, policy: Policy) -> Judgement:
    """Compare one record with the present file."""
    check_path(record.path)
    try:
        return _compared(record, policy)
    except OSError as error:
        return Judgement(record, "refuse", f"cannot be looked at: {error.strerror}", "See what is there, and on the way there.")


def _compared(record: FileRecord, policy: Policy) -> Judgement:
    path = record.path
    if record.kind == "mapped" and record.data is not None:
        return _came_along(record)
    try:
        now = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return _missing(record)
    if stat.S_IFMT(now.st_mode) != stat.S_IFMT(record.mode):
        if record.data is None and record.kind != "carried":
            return Judgement(record, "refuse", "is another kind of file now", "Move it away.")
        return _changed(record, policy, "is another kind of file now")
    if not stat.S_ISREG(record.mode):
        if stat.S_ISLNK(record.mode) and os.readlink(path) != record.target:
            return _changed(record, policy, "points elsewhere now")
        return Judgement(record, "same")
    if record.kind == "mapped":
        if now.st_size != record.size:
            why = f"is mapped into memory and was {record.size} bytes at the dump; it is {now.st_size} now"
            return Judgement(record, "refuse", why, _OTHER_VERSION)
        return _unchanged(record, policy, now.st_mode)
    if record.kind == "read":
        if now.st_size == record.size:
            return _unchanged(record, policy, now.st_mode)
        return Judgement(record, "moved-on", f"was {record.size} bytes at the dump and is {now.st_size} now; it is only read")
    return _contents(record, policy, path, now)


def _unchanged(record: FileRecord, policy: Policy, mode: int) -> Judgement:
    """Its contents are the same.  Another mode stops nobody who has it open; CRIU's check of it is taken off."""
    if mode == record.mode:
        return Judgement(record, "same")
    why = f"had mode {stat.S_IMODE(record.mode):04o} at the dump and has {stat.S_IMODE(mode):04o} now"
    if policy == "refuse":
        return Judgement(record, "refuse", why, f"`chmod {stat.S_IMODE(record.mode):o}` it, or restore with --files restore.")
    return Judgement(record, "moved-on", f"{why}; left as it is")


def _came_along(record: FileRecord) -> Judgement:
    """A program or library with its contents."""
    try:
        now: os.stat_result | None = os.lstat(record.path)
    except (FileNotFoundError, NotADirectoryError):
        now = None
    if now is not None and stat.S_ISREG(now.st_mode):
        if (now.st_size, now.st_mode) == (record.size, record.mode) and _has_contents(record):
            return Judgement(record, "same")
        return Judgement(record, "overlaid", "is another one here; the tree gets its own, in a mount namespace of its own")
    what = "is missing here" if now is None else "is another kind of file here"
    if (problem := overlays.obstacle(record.path)) is not None:
        return Judgement(record, "refuse", f"{what}, and {problem[0]}", problem[1], exists=now is not None)
    why = f"{what}; the tree gets its own, in a mount namespace of its own"
    return Judgement(record, "overlaid", why, exists=now is not None)


def _has_contents(record: FileRecord) -> bool:
    fd = ways.regular(record.path)
    try:
        return digest(fd, record.size) == record.digest
    finally:
        os.close(fd)


def _contents(record: FileRecord, policy: Policy, path: str, now: os.stat_result) -> Judgement:
    size = now.st_size
    fd = ways.regular(path)
    try:
        beginning = size >= record.size and digest(fd, record.size) == record.digest
    finally:
        os.close(fd)
    if beginning and size == record.size:
        return _unchanged(record, policy, now.st_mode)
    if beginning and record.append and record.kind == "written":
        return Judgement(record, "grown", f"has grown from {record.size} to {size} bytes and is only appended to")
    if beginning:
        return _changed(record, policy, f"has grown from {record.size} to {size} bytes", from_prefix=True)
    if size < record.size:
        return _changed(record, policy, f"has shrunk from {record.size} to {size} bytes")
    return _changed(record, policy, f"has other contents than at the dump ({record.size} bytes then, {size} now)")


def _changed(record: FileRecord, policy: Policy, why: str, from_prefix: bool = False) -> Judgement:
    if policy == "keep":
        return Judgement(record, "moved-on", f"{why}; left as it is, as asked")
    if policy == "refuse":
        return Judgement(record, "refuse", why, "Move it away, or restore with --files restore (keeps the newer copy aside).")
    if record.kind == "carried" or record.data is not None or from_prefix:
        return Judgement(record, "put-back", f"{why}; put back as it was, the newer copy kept aside", from_prefix=from_prefix)
    return Judgement(
        record,
        "refuse",
        f"{why}, and its contents were not taken along",
        "Put back the file as it was, or restore with --files keep; next time dump with --with-files.",
    )


def _missing(record: FileRecord) -> Judgement:
    if record.kind == "carried" or record.data is not None:
        return Judgement(record, "put-back", "is missing; put back from the checkpoint", exists=False)
    if record.kind == "written" and not record.size and os.path.isdir(os.path.dirname(record.path)):  # a lock file, say
        return Judgement(record, "put-back", "is missing; put back, empty as it was", exists=False)
    what = {"mapped": "is mapped into memory", "read": "is open", "written": "is open for writing"}[record.kind]
    return Judgement(
        record,
        "refuse",
        f"{what} and does not exist here",
        _OTHER_VERSION if record.kind == "mapped" else "Bring the file here; next time dump with --with-files.",
        exists=False,
    )


class Applied:
    """Files put back; `undo` takes all of it back, newest first."""

    def __init__(self, reader: CheckpointReader, mark: str) -> None:
        self._reader = reader
        self._mark = mark
        self._undo: list[Callable[[], None]] = []
        self._made: dict[tuple[int, int], str] = {}
        self.aside: list[tuple[str, str]] = []  # (path, where its newer copy is)

    def apply(self, judgements: Sequence[Judgement]) -> None:
        """Put back every file that is to be; `RestoreFailed` names the one that cannot."""
        wanted = [j for j in judgements if j.verdict == "put-back"]
        for judgement in wanted:
            try:
                self._put_back(judgement)
            except OSError as error:
                raise RestoreFailed(f"{judgement.record.path} cannot be put back: {error.strerror}") from error
        for judgement in reversed(wanted):  # folders last: their times change with what is put into them
            path, mtime = judgement.record.path, judgement.record.mtime_ns
            if stat.S_ISDIR(judgement.record.mode):
                with suppress(OSError), ways.folder(os.path.dirname(path)) as folder:
                    os.utime(os.path.basename(path), ns=(mtime, mtime), dir_fd=folder, follow_symlinks=False)

    def undo(self) -> None:
        """Take everything back; what cannot be is left, for there is nobody left to tell but the log."""
        while self._undo:
            with suppress(OSError):
                self._undo.pop()()

    def _put_back(self, judgement: Judgement) -> None:
        record = judgement.record
        path, name = record.path, os.path.basename(record.path)
        with self._parent(path) as folder:
            newer = self._set_aside(path, folder) if _is_there(name, folder) else ""
            if stat.S_ISDIR(record.mode):
                self._do(path, folder, lambda: os.mkdir(name, 0o700, dir_fd=folder), _rmdir)
                dress(name, record, folder)
            elif stat.S_ISLNK(record.mode):
                self._do(path, folder, lambda: os.symlink(record.target, name, dir_fd=folder), _unlink)
                os.chown(name, record.uid, record.gid, dir_fd=folder, follow_symlinks=False)
            elif stat.S_ISFIFO(record.mode):
                self._do(path, folder, lambda: os.mkfifo(name, 0o600, dir_fd=folder), _unlink)
                dress(name, record, folder)
            elif (record.device, record.inode) in self._made:
                self._link(self._made[record.device, record.inode], path, folder)
            else:
                self._write(record, newer if judgement.from_prefix else "", folder)
                self._made[record.device, record.inode] = path

    @contextmanager
    def _parent(self, path: str) -> Iterator[int]:
        """The folder that `path` is in, and what is missing of it is made."""
        above = os.path.dirname(path)
        with suppress(FileNotFoundError), ways.folder(above):
            above = ""
        if above:
            with self._parent(above) as folder:
                self._do(above, folder, lambda: os.mkdir(os.path.basename(above), 0o755, dir_fd=folder), _rmdir)
        with ways.folder(os.path.dirname(path)) as folder:
            yield folder

    def _do(self, path: str, folder: int, act: Callable[[], T], back: Callable[[str, int], None]) -> T:
        """Do one thing in the folder that `path` is in, and note first what takes it back there: a signal may follow at once."""
        there = os.fstat(folder)

        def undo() -> None:
            with ways.folder(os.path.dirname(path)) as folder:
                if os.path.samestat(os.fstat(folder), there):
                    back(os.path.basename(path), folder)

        self._undo.append(undo)
        try:
            return act()
        except OSError:
            self._undo.pop()
            raise

    def _link(self, made: str, path: str, folder: int) -> None:
        with ways.folder(os.path.dirname(made)) as beside:
            names = os.path.basename(made), os.path.basename(path)
            link = partial(os.link, *names, src_dir_fd=beside, dst_dir_fd=folder, follow_symlinks=False)
            self._do(path, folder, link, _unlink)

    def _write(self, record: FileRecord, prefix_of: str, folder: int) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        name = os.path.basename(record.path)
        fd = self._do(record.path, folder, lambda: os.open(name, flags, 0o600, dir_fd=folder), _unlink)
        try:
            if prefix_of:
                source = ways.regular(prefix_of, folder)
                try:
                    done = 0
                    while done < record.size:
                        copied = os.copy_file_range(source, fd, record.size - done)
                        if not copied:
                            raise RestoreFailed(f"{record.path} became shorter while it was read")
                        done += copied
                finally:
                    os.close(source)
            elif record.data is not None:
                os.ftruncate(fd, record.size)
                self._reader.write_to([(record.data, fd, 0)])
            os.fsync(fd)
            _dress(fd, record)
        finally:
            os.close(fd)

    def _set_aside(self, path: str, folder: int) -> str:
        """Rename what is there; its new name."""
        name = os.path.basename(path)
        newer = f"{name}.newer-{self._mark}-{time.strftime('%Y%m%dT%H%M%S')}"
        while _is_there(newer, folder):
            newer += "x"

        def rename(source: str, target: str, folder: int) -> None:
            os.rename(source, target, src_dir_fd=folder, dst_dir_fd=folder)

        self._do(path, folder, lambda: rename(name, newer, folder), lambda name, folder: rename(newer, name, folder))
        self.aside.append((path, os.path.join(os.path.dirname(path), newer)))
        return newer


def _is_there(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _unlink(name: str, folder: int) -> None:
    os.unlink(name, dir_fd=folder)


def _rmdir(name: str, folder: int) -> None:
    os.rmdir(name, dir_fd=folder)


def dress(path: str, record: FileRecord, folder: int | None = None) -> None:
    """Give a file that was made anew the owner, mode, attributes and time that it had.

    Its folder may be another user's, who can put a link to a file of somebody else in its place: nothing is followed.
    """
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        if stat.S_IFMT(os.fstat(fd).st_mode) != stat.S_IFMT(record.mode):
            raise OSError(errno.ESTALE, "something else is in its place by now", path)
        _dress(fd, record)
    finally:
        os.close(fd)


def _dress(fd: int, record: FileRecord) -> None:
    """The same for an open file."""
    itself = f"/proc/self/fd/{fd}"
    os.chown(itself, record.uid, record.gid)
    os.chmod(itself, stat.S_IMODE(record.mode))
    for name, value in record.xattrs.items():
        with suppress(OSError):  # a file system without them, or security.* without the module
            os.setxattr(itself, name, base64.b64decode(value))
    os.utime(itself, ns=(record.mtime_ns, record.mtime_ns))


def judge_all(records: Iterable[FileRecord], policy: Policy) -> list[Judgement]:
    """Judge every record, parents before what is in them."""
    judged = [judge(record, policy) for record in sorted(records, key=lambda r: r.path)]
    anew = {j.record.path for j in judged if j.verdict == "put-back"}
    judged = [_if_reached(j, anew) if j.verdict == "put-back" else j for j in judged]
    if not any(j.verdict == "overlaid" for j in judged):
        return judged
    written = overlays.written_folders(j.record for j in judged)
    return [_beside_written(j, written) for j in judged]


def _if_reached(judgement: Judgement, anew: Container[str]) -> Judgement:
    """Refused if another user leads the way there elsewhere; not by what is to be set aside itself."""
    record = judgement.record
    if any(str(above) in anew for above in PurePath(record.path).parents):
        return judgement
    try:
        with suppress(FileNotFoundError, NotADirectoryError), ways.folder(os.path.dirname(record.path)):
            pass
    except ways.ForeignLink as error:
        hint = f"See what the link is for. Once it is gone, {record.path} can be put back."
        return replace(judgement, verdict="refuse", why=f"is not put back, for {error.strerror}", hint=hint)
    except OSError as error:
        return replace(
            judgement, verdict="refuse", why=f"cannot be put back: {error.strerror}", hint="See what is on the way there."
        )
    return judgement


def _beside_written(judgement: Judgement, written: Mapping[str, str]) -> Judgement:
    """A folder that the tree writes to is not covered."""
    record = judgement.record
    if judgement.verdict != "overlaid" or overlays.is_file(record.path):
        return judgement
    folder = os.path.realpath(overlays.folder_of(record.path))
    if folder not in written:
        return judgement
    return Judgement(
        record,
        "refuse",
        f"cannot be laid over {folder}, because {written[folder]} in that folder is written to",
        f"Take it along with --with-files {record.path}.",
        exists=judgement.exists,
    )
