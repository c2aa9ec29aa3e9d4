"""Files open under a deleted name that have other names (see `link_remaps`), judged before a
restore touches anything.

At the dump the deleted name and the others were one file.  What is at the other name is that file
if it is the same inode; if another file has that name now, or none was known, the file's handle
leads to it, whatever its names are.  After a reboot, or on another host, these numbers mean
nothing, and the contents decide, as for files with records.  `judge` decides what the tree has open
under the deleted name now:

- ``same``: what is at the other name: it is that file, with the contents that were recorded;
- ``grown``: the same file with data appended: the tree only appends to it, or only reads it;
- ``moved-on``: the same file, which has changed: left as it is because of ``--files keep``, or
  because only its mode differs;
- ``follows``: a name of it has a record of its own: what is there when files have been put back
  (`put_back`);
- ``apart``: a file of its own with the contents that were recorded, because the other has changed
  or is not known;
- ``refuse``: it has changed, and the policy is to refuse then.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Literal

from blake3 import blake3
from msgspec import Struct
from msgspec.structs import replace

from ..checkpoint.file_records import LinkRecord
from ..checkpoint.manifest import Manifest
from ..checkpoint.reader import CheckpointReader
from ..criu.images import ImageSet, path_of
from ..host.registry import boot_id
from ..proc import folder_walk
from ..report import Finding
from .contents import digest
from .copies import shared, writers_to
from .judgement import Judgement, Policy
from .shared_mappings import shared_files

Verdict = Literal["same", "grown", "moved-on", "follows", "apart", "refuse"]
_REFUSED_HINT = (
    "Put it back as it was, or restore with --files restore (what has it open gets a file of its "
    "own) or keep."
)
_TWO_FILES = "the process that has it open gets a file of its own, as it was"


class DeletedName(Struct, frozen=True):
    """One such file and the decision about it."""

    links: tuple[LinkRecord, ...]  # CRIU's helper links to it, one for each time that it was opened
    verdict: Verdict
    name: str  # the deleted one
    # the name of the file that it is one with; "" if it is a file of its own, or `there` and no
    # name is known
    other: str = ""
    there: tuple[int, int] | None = None  # device and inode of that, if it must be this very one
    why: str = ""
    writes: bool = False  # the tree writes to it, elsewhere than at its end
    holder: tuple[int | None, int | None] = (None, None)  # PID, descriptor

    def finding(self) -> Finding | None:
        """Return the finding for the user, if any."""
        if not self.why:
            return None
        level: Literal["error", "warning", "info"] = "info"
        if self.verdict in ("apart", "refuse"):
            level = "error" if self.verdict == "refuse" else "warning"
        hint = _REFUSED_HINT if self.verdict == "refuse" else ""
        return Finding(
            level,
            f"deleted-{self.verdict}",
            f"{self.name} (deleted): {self.why}",
            hint,
            *self.holder,
        )


def judge(
    manifest: Manifest,
    images: ImageSet,
    files: Sequence[Judgement],
    policy: Policy,
    reader: CheckpointReader,
    *,
    own: bool = False,
) -> tuple[DeletedName, ...]:
    """Decide for each file that a helper link leads to; `files`: those with records, as they are
    judged. `own`: what a copy writes to must be its own.
    """
    groups: dict[tuple[int, int], list[LinkRecord]] = {}
    for link in manifest.links:
        groups.setdefault((link.device, link.inode), []).append(link)
    if not groups:
        return ()
    opened, holders, mapped = images.linked(), images.holders(), shared_files(images)
    recorded: dict[tuple[int, int], Judgement] = {}
    for j in files:  # with contents to compare; preferably one that is made again
        key = (j.record.device, j.record.inode)
        if (
            j.record.digest
            and j.record.kind not in ("mapped", "read")
            and (key not in recorded or j.verdict in ("put-back", "beside"))
        ):
            recorded[key] = j
    found = []
    for key, group in groups.items():
        entries = [entry for link in group for _, entry in opened.get(link.path, [])]
        pid, fd = next(
            (held[0] for entry in entries if (held := holders.get(entry.id))), (None, None)
        )
        writers = [
            entry.reg.flags for entry in entries if entry.reg.flags & os.O_ACCMODE != os.O_RDONLY
        ]
        writes = any(not flags & os.O_APPEND for flags in writers) or any(
            entry.id in mapped for entry in entries
        )
        name = path_of(entries[0].reg) if entries else group[0].path
        itself = DeletedName(tuple(group), "apart", name, writes=writes, holder=(pid, fd))
        if key in recorded:
            j = recorded[key]
            # else other findings report it
            there = (
                _place(j.record.path)
                if j.verdict == "same" and j.record.kind == "carried"
                else None
            )
            found.append(replace(itself, verdict="follows", other=j.record.path, there=there))
        elif own and (writers or writes) and not stat.S_ISFIFO(group[0].mode):
            found.append(replace(itself, why=f"is written to by the copy; {_TWO_FILES}"))
        else:
            found.append(
                _judged(itself, policy, reader, same_boot=manifest.host.boot_id == boot_id())
            )
    return tuple(found)


def both_write(names: Iterable[DeletedName]) -> list[Finding]:
    """Report, for a copy, which of these files another process writes to as well, each at its own
    offset.
    """
    sought: dict[tuple[int, int], DeletedName] = {}
    for name in names:
        if name.there is not None and name.writes:
            sought[name.there] = name
    writers = writers_to({key: [name.other] if name.other else [] for key, name in sought.items()})
    return [
        shared(f"{sought[key].name} (deleted)", writer, *sought[key].holder)
        for key, writer in writers.items()
    ]


def _place(path: str) -> tuple[int, int] | None:
    with suppress(OSError):
        now = os.lstat(path)
        return now.st_dev, now.st_ino
    return None


def _judged(
    itself: DeletedName, policy: Policy, reader: CheckpointReader, *, same_boot: bool
) -> DeletedName:
    link = itself.links[0]
    try:
        now = os.lstat(link.sibling)
        there = (now.st_dev, now.st_ino)
        if not (same_boot and there != (link.device, link.inode)) and stat.S_IFMT(
            now.st_mode
        ) == stat.S_IFMT(link.mode):
            return _compared(itself, link.sibling, now, policy, reader)
    except OSError:
        pass  # that name is deleted now, too, or another file's
    if same_boot:
        with folder_walk.by_handle(link.handle, os.path.dirname(link.path)) as fd:
            if fd is not None and os.fstat(fd).st_ino == link.inode:
                name, now = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd)
                return _compared(
                    itself,
                    name if _place(name) == (now.st_dev, now.st_ino) else "",
                    now,
                    policy,
                    reader,
                )
    if link.sibling or (same_boot and link.handle) or stat.S_ISFIFO(link.mode):
        return itself  # as if the tree had been running all the time
    return replace(itself, why=f"none of its other names is known; {_TWO_FILES}")


def _compared(
    itself: DeletedName, name: str, now: os.stat_result, policy: Policy, reader: CheckpointReader
) -> DeletedName:
    """Decide about a file that was found, as it is `now`, by that name, or under an unknown one."""
    link = itself.links[0]
    one = replace(itself, verdict="same", other=name, there=(now.st_dev, now.st_ino))
    what, only_more = ("", False) if stat.S_ISFIFO(link.mode) else _change(link, name, now, reader)
    why = (
        f"{name}, another name of that file, {what}"
        if name
        else f"that file, which has another name, {what}"
    )
    if only_more and not itself.writes:
        return replace(one, verdict="grown", why=f"{why}; it goes on with that")
    if what and policy == "restore":
        return replace(itself, why=f"{why}; {_TWO_FILES}")
    if not what and now.st_mode != link.mode:
        why += (
            f"had mode {stat.S_IMODE(link.mode):04o} at the dump and has "
            f"{stat.S_IMODE(now.st_mode):04o} now"
        )
    elif not what:
        return one
    if policy == "refuse":
        return replace(one, verdict="refuse", why=why)
    return replace(
        one, verdict="moved-on", why=f"{why}; left as it is{', as asked' if what else ''}"
    )


def _change(
    link: LinkRecord, name: str, now: os.stat_result, reader: CheckpointReader
) -> tuple[str, bool]:
    """Return how the contents differ from those recorded, "" if not at all, and whether data was
    only appended.
    """
    was = link.data.size
    beginning = False
    if now.st_size >= was:
        with suppress(OSError), ExitStack() as stack:
            if name:
                fd = folder_walk.regular(name)
            else:
                folder = os.path.dirname(link.path)
                held = stack.enter_context(folder_walk.by_handle(link.handle, folder))
                fd = os.open(f"/proc/self/fd/{held}", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            beginning = digest(fd, was) == (link.digest or _digest(link, reader))
    if beginning:
        return (
            (f"has grown from {was} to {now.st_size} bytes", True)
            if now.st_size > was
            else ("", False)
        )
    if now.st_size < was:
        return f"has shrunk from {was} to {now.st_size} bytes", False
    return f"has other contents than at the dump ({was} bytes then, {now.st_size} now)", False


def _digest(link: LinkRecord, reader: CheckpointReader) -> str:
    """Return the digest of the recorded contents, if the dump took none."""
    hasher = blake3()
    for piece in reader.chunks(link.data):
        hasher.update(piece)
    return str(hasher.hexdigest())


__all__ = ["DeletedName", "both_write", "judge"]
