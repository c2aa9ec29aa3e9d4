"""Folders and FIFOs that the tree has open and that do not exist here: CRIU would fail at them
half-way.

Regular files are judged by their records in the manifest (`judgement`), working folders in the
plan.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator

from ..checkpoint.manifest import Manifest
from ..criu.images import ImageSet, path_of
from ..quoting import quoted
from ..report import Finding
from .judgement import Judgement

_KERNELS_OWN = ("/proc/", "/sys/")  # folders there come with processes and control groups


def absent(
    images: ImageSet, manifest: Manifest, files: Iterable[Judgement], reported: Iterable[str]
) -> Iterator[Finding]:
    """Report what is missing, or is something else here, and is not put back; `reported`: folders
    to leave out.
    """
    if manifest.namespaces.get("mnt", {}).get("mode", "host") != "host":
        return  # what the tree will see is not known beforehand
    made = {j.record.path for j in files if j.verdict == "put-back"}
    known = {*reported, *(parent for path in made for parent in _above(path)), *made}
    remapped = images.remapped()  # deleted: made again
    entries = list(images.files())
    holders = {file: held[0] for file, held in images.holders().items()}
    holders |= {
        e.fifo.regf_id: holders[e.id] for e in entries if e.HasField("fifo") and e.id in holders
    }
    for entry in entries:
        if not entry.HasField("reg") or not entry.reg.HasField("mode") or entry.id in remapped:
            continue
        mode, path = entry.reg.mode, path_of(entry.reg)
        kind = "folder" if stat.S_ISDIR(mode) else "FIFO" if stat.S_ISFIFO(mode) else ""
        if (
            not kind
            or path in known
            or path.startswith(_KERNELS_OWN)
            or _type(path) == stat.S_IFMT(mode)
        ):
            continue
        known.add(path)
        pid, fd = holders.get(entry.id, (None, None))
        code, make = (
            ("folder-missing", "mkdir -p") if kind == "folder" else ("file-missing", "mkfifo")
        )
        hint = f"Make it (`{make} {quoted(path)}`), or move away what is there."
        yield Finding("error", code, f"{path}: is open, and no {kind} is here", hint, pid, fd)


def _above(path: str) -> Iterator[str]:
    while (path := os.path.dirname(path)) != "/":
        yield path


def _type(path: str) -> int | None:
    try:
        return stat.S_IFMT(os.stat(path).st_mode)
    except OSError:
        return None
