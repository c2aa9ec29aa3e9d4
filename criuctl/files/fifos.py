"""Named pipes (FIFOs) that live on while the tree is away, or in its living original: unread data
must not come twice.

CRIU saves what a named pipe holds that the tree could read from, and writes it into what is open
under that path at the restore.  That is right for a pipe that was gone with the tree.  But if
another process has kept it open, the kernel has kept its bytes: the tree finds them there, less
what others have read meanwhile, and followed by what was written since.  So a dump records which
other processes have such a pipe open, up to its very end, and directly before CRIU opens them, each
pipe that another process has open then is examined:

- The pipe of the dump lives on: the same inode in the same boot, and it still begins with the bytes
  that were saved, or one of the processes that had it open then (the tree's original, too) still
  has it.  Nothing is written into it.  If it begins with something else, that is reported.
- It is another pipe, opened since: it gets the bytes that the tree had not read, after what is in
  it now, which is reported.  A restore that fails takes them back.
- Another process reads from it at the same time as a copy, most likely the original, which must not
  notice: the copy gets a named pipe of its own (`own_for_copy`) with the bytes that were saved.  If
  it cannot have one, nothing is written, and it is reported.

From that look until the tree runs criuctl has the pipe open, so that it does not end in between.
One that no process has open is left alone: a process that waits for its other end, in open(2), is
to meet the tree and not criuctl.  A pipe that is read by a process that criuctl cannot see (another
PID namespace, another user) is not known to live on.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import MappingProxyType

from msgspec import Struct, field

from ..checkpoint.file_records import FifoRecord, FileRecord
from ..checkpoint.manifest import Manifest
from ..criu.fifoimages import SavedQueue, drop_queues, saved_queues, taken_for_one
from ..criu.images import ImageSet
from ..errors import DumpFailed
from ..host.registry import boot_id
from ..proc import fifos
from ..proc.descriptors import Descriptor
from ..proc.fifos import Inode, Opener
from ..proc.tree import Process
from ..report import Finding, Reporter
from .judgement import Judgement

_NOWHERE: Mapping[str, str] = MappingProxyType({})
_OWN_HINT = (
    "A program that is to reach the copy must open that one. `criuctl verify --restore` tries a "
    "copy with files of its own."
)
_SHARED_HINT = "What one of them reads the other one does not get: end that process, or the copy."


def with_unread(
    images: ImageSet, tree: Sequence[Process], opened: Mapping[int, Sequence[Descriptor]]
) -> list[FifoRecord]:
    """Return, in post-dump, the named pipes with data that the frozen tree has not read, and their
    other users.

    `DumpFailed` for one that CRIU takes another one for: the images do not show whose data it is.
    """
    pipes = [
        d
        for held in opened.values()
        for d in held
        if d.kind == "pipe" and not d.target.startswith("pipe:")
    ]
    if not pipes:
        return []
    queues = [queue for queue in saved_queues(images) if queue.data and queue.paths]
    if not queues:
        return []
    for queue in queues:
        same = list({(d.device, d.inode): d.target for d in pipes if queue.of(d.inode)}.values())
        if len(same) > 1:
            text, hint = taken_for_one(same[0], same[1], queue.number)
            raise DumpFailed(f"{text}; the tree runs on", hint=hint)
    held = {
        (p.ns_pid, d.fd): (d.device, d.inode)
        for p in tree
        for d in opened.get(p.pid, ())
        if d.kind == "pipe"
    }
    inodes = [
        next((held[h] for h in q.holders if h in held and q.of(held[h][1])), None) for q in queues
    ]
    others = fifos.openers(
        {inode for inode in inodes if inode is not None}, but={p.pid for p in tree}
    )
    return [
        FifoRecord(
            path=queue.paths[0],
            inode=inode[1],
            device=inode[0],
            outside=tuple((other.pid, other.start_time) for other in others.get(inode, ())),
        )
        for queue, inode in zip(queues, inodes, strict=True)
        if inode is not None
    ]


def seen_again(records: Sequence[FifoRecord], tree: Sequence[Process]) -> tuple[FifoRecord, ...]:
    """Look again just before the manifest is written: a process that has opened one meanwhile keeps
    it alive, too.
    """
    if not records:
        return ()
    found = fifos.openers({(r.device, r.inode) for r in records}, but={p.pid for p in tree})

    def again(record: FifoRecord) -> FifoRecord:
        now = [
            (other.pid, other.start_time) for other in found.get((record.device, record.inode), ())
        ]
        return record.with_use(outside=tuple(dict.fromkeys((*record.outside, *now))))

    return tuple(again(record) for record in records)


def own_for_copy(images: ImageSet, manifest: Manifest) -> list[Judgement]:
    """Return the named pipes that another process reads from, too, each to be made for the copy
    under its own name.
    """
    queues = _there(
        (q for q in saved_queues(images) if q.own_name and len(q.paths) == 1), manifest, ""
    )
    found = fifos.openers(queues) if queues else {}
    made = []
    for inode, others in found.items():
        reader = _reader(others)
        if reader is not None and len(queues[inode]) == 1:
            with suppress(OSError):  # gone meanwhile
                made.append(_own(queues[inode][0], reader))
    return made


def untried(images: ImageSet, manifest: Manifest) -> Iterator[Finding]:
    """Report the named pipes that a trial does not have for itself (see `criuctl.proc.shadow`).

    It would read what is meant for a process outside.
    """
    for queues in _there(saved_queues(images), manifest, "").values():
        for queue in queues:
            if os.statvfs(queue.paths[0]).f_flag & os.ST_RDONLY:
                pid, fd = queue.holders[0] if queue.holders else (None, None)
                text = (
                    f"{queue.paths[0]}: a trial has no named pipe of its own on this file system, "
                    "and would read what is in this"
                )
                yield Finding(
                    "error",
                    "fifo-untried",
                    text,
                    "Restore a copy under another name, which gets its own.",
                    pid,
                    fd,
                )


def _own(queue: SavedQueue, reader: Opener) -> Judgement:
    now = os.stat(queue.paths[0])
    record = FileRecord(
        path=queue.paths[0],
        kind="read",
        mode=now.st_mode,
        uid=now.st_uid,
        gid=now.st_gid,
        mtime_ns=now.st_mtime_ns,
        holders=queue.holders,
    )
    unread = f", with the {_bytes(queue.data)} that were unread" if queue.data else ""
    why = f"{reader} reads from this named pipe; the copy gets its own next to it{unread}"
    return Judgement(record, "beside", why, _OWN_HINT)


@contextmanager
def settled(
    images: ImageSet,
    manifest: Manifest,
    reporter: Reporter,
    root: str,
    *,
    copy: bool,
    places: Mapping[str, str] = _NOWHERE,
) -> Iterator[None]:
    """Remove from the images what must not be written into named pipes, and keep these alive until
    the tree runs; see above.

    `root` is put before paths, for a tree with a mount namespace of its own; `places`: path -> what
    is to be opened instead.
    """
    queues = _there(saved_queues(images), manifest, root, places)
    with ExitStack() as stack:
        look = _Look(manifest, reporter, root, places, copy, stack)
        found = fifos.openers(queues) if queues else {}
        opened = {
            inode: fd for inode in found if (fd := look.open(queues[inode][0], inode)) is not None
        }
        # A process that has one open before and after criuctl has opened it has kept it alive until
        # then.
        after = fifos.openers(opened) if opened else {}
        kept = {
            inode: [other for other in after.get(inode, ()) if other in found[inode]]
            for inode in opened
        }
        left = {
            q.number
            for i, others in kept.items()
            if others
            for q in queues[i]
            if look.leave(q, i, opened[i], others)
        }
        if look.sizes:
            drop_queues(images, left, look.sizes)
        elif left:
            drop_queues(images, left)
        try:
            yield
        except BaseException:
            look.take_back()
            raise


class _Look(Struct, frozen=True):
    """The examination of named pipes directly before CRIU opens them."""

    manifest: Manifest
    reporter: Reporter
    root: str
    places: Mapping[str, str]
    copy: bool
    stack: ExitStack  # what is opened here stays open as long as the stack
    sizes: dict[int, int] = field(default_factory=dict)  # of those
    # that CRIU writes to: with what was in it before
    filled: list[tuple[SavedQueue, int, bytes]] = field(default_factory=list)

    def open(self, queue: SavedQueue, inode: Inode) -> int | None:
        """Return a descriptor of this pipe, until the tree runs; None if it is gone meanwhile, or
        not accessible: CRIU reports that.
        """
        with suppress(OSError):
            fd = fifos.open_both_ways(_way(queue.paths[0], self.root, self.places))
            self.stack.callback(os.close, fd)
            return fd if _is(fd, inode) else None
        return None

    def leave(self, queue: SavedQueue, inode: Inode, fd: int, others: list[Opener]) -> bool:
        """Return whether nothing is to be written into this pipe, which all these have open; report
        losses.
        """
        present, unread = fifos.queued(fd), _bytes(queue.data)
        if self.copy and (reader := _reader(others)) is not None:
            kept = (
                f"; the {unread} that were unread at the dump are not written into it"
                if queue.data
                else ""
            )
            self._report(
                queue,
                "fifo-shared",
                f"{reader} reads from this named pipe, and so will the copy{kept}",
                _SHARED_HINT,
            )
            return True
        if not queue.data and fifos.room(fd) < queue.size:
            return False  # enlarging it again does no harm
        begins = present.startswith(queue.data)
        if not self._lives_on(queue, inode, others, begins):
            if queue.data and present:
                behind = (
                    f"the {unread} of this named pipe that were unread at the dump come after the "
                    f"{_bytes(present)}"
                )
                self._report(
                    queue, "fifo-behind", f"{behind} that are in it now; {others[0]} has it open"
                )
            # CRIU would make it as large as it was, which may be too small for both, or for its
            # owner
            if queue.data:
                needed = (_pages(present) + _pages(queue.data)) * mmap.PAGESIZE
                if (
                    size := max(fifos.room(fd), queue.size, 1 << (needed - 1).bit_length())
                ) != queue.size:
                    self.sizes[queue.number] = size
            if queue.data:
                self.filled.append((queue, fd, present))
            return not queue.data
        if not begins:
            since = (
                f"{others[0]} has kept this named pipe open, and it was read from since the dump"
            )
            text = (
                f"{since}: the tree finds the {_bytes(present)} that are in it now, not the "
                f"{unread} that were unread then"
            )
            self._report(queue, "fifo-read-since", text)
        return True

    def take_back(self) -> None:
        """Take back, after a failed restore, what CRIU has written into a pipe that others have
        open: it would come twice later.
        """
        for queue, fd, before in self.filled:
            with suppress(OSError):
                now = fifos.queued(fd)
                written = now[len(before) :] if now.startswith(before) else b""
                # all, or as much as had room
                if written and queue.data.startswith(written) and os.read(fd, len(now)) == now:
                    fifos.put(fd, before)
                elif now != before:
                    self._report(
                        queue,
                        "fifo-left",
                        f"the {_bytes(queue.data)} that were unread at the dump may be left in it",
                    )

    def _lives_on(
        self, queue: SavedQueue, inode: Inode, others: list[Opener], begins: bool
    ) -> bool:
        """Return whether this is the very pipe of the dump, and not one that was opened since under
        the same name.
        """
        record = next((r for r in self.manifest.fifos if queue.of(r.inode)), None)
        if self.manifest.host.boot_id != boot_id() or not queue.of(inode[1]):
            return False
        if record is None:  # written by an older criuctl, which did not look
            return True
        if record.device != inode[0]:
            return False
        # The tree itself may not have ended: its original, or where it has been moved away from.
        known = {*record.outside, *((p.pid, p.start_time) for p in self.manifest.processes)}
        if any((other.pid, other.start_time) in known for other in others):
            return True
        return begins and bool(record.outside or self.manifest.criu.get("leave_running"))

    def _report(self, queue: SavedQueue, code: str, text: str, hint: str = "") -> None:
        pid, fd = queue.holders[0] if queue.holders else (None, None)
        self.reporter.finding(Finding("warning", code, f"{queue.paths[0]}: {text}", hint, pid, fd))


def _is(fd: int, inode: Inode) -> bool:
    status = os.fstat(fd)
    return (status.st_dev, status.st_ino) == inode


def _way(path: str, root: str, places: Mapping[str, str]) -> str:
    return places.get(path, root + path)


def _there(
    queues: Iterable[SavedQueue],
    manifest: Manifest,
    root: str,
    places: Mapping[str, str] = _NOWHERE,
) -> dict[Inode, list[SavedQueue]]:
    """Return the named pipe of this host that each would be written into."""
    # file systems may be the tree's own
    made = manifest.namespaces.get("mnt", {}).get("mode", "host") == "dumped"
    found: dict[Inode, list[SavedQueue]] = {}
    for queue in queues:
        with suppress(OSError):
            for path in queue.paths[:1]:
                status = os.stat(_way(path, root, places))
                if stat.S_ISFIFO(status.st_mode) and (queue.of(status.st_ino) or not made):
                    found.setdefault((status.st_dev, status.st_ino), []).append(queue)
    return found


def _reader(others: Iterable[Opener]) -> Opener | None:
    return next((other for other in others if other.reads), None)


def _pages(data: bytes) -> int:
    return -(-len(data) // mmap.PAGESIZE)


def _bytes(data: bytes) -> str:
    return "1 byte" if len(data) == 1 else f"{len(data)} bytes"
