"""Report what stands against giving a tree what its paths lead to now, before anything is touched.

Left out is what will be put back, and what a tree with mounts of its own will see: that is judged
when it exists.  So are files of /proc about processes: of what a process may not have now it gets
the file of a process that has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..checkpoint.manifest import Manifest
from ..config import Config
from ..criu.heldfiles import HeldFile, credentials, held_files
from ..criu.images import ImageSet
from ..criu.procfiles import about
from ..proc.path_control import PathLookup
from ..report import Finding
from . import deleted_files, socket_binds
from .judgement import Judgement
from .permission import Judge, Objection, check_external, check_flags


def objections(
    config: Config,
    manifest: Manifest,
    images: ImageSet,
    files: Iterable[Judgement],
    *,
    authentic: bool,
    hang_up: bool = False,
) -> list[Finding]:
    """Return one finding for each file or folder that the tree may not get; raise `Damaged` for
    hostile images.

    `authentic`: no other program than criuctl can have written the checkpoint.  `hang_up`:
    connections are not made again.
    """
    held = held_files(images)
    check_flags(held)
    check_external(held, manifest)
    if manifest.namespaces.get("mnt", {}).get("mode", "host") != "host":
        return []
    restored = {j.record.path for j in files if j.verdict in ("put-back", "beside", "overlaid")}
    judge = Judge.of(config, manifest, credentials(images), authentic=authentic)
    there = [
        one
        for one in held
        if not (one.deleted or one.external or one.path in restored or about(one.path))
    ]
    with PathLookup() as lookup:
        found = [
            *_files(there, judge, lookup),
            *deleted_files.folder_objections(images, held, judge, lookup),
            *socket_binds.folder_objections(images, judge, lookup),
            *([] if hang_up else socket_binds.peer_objections(images, judge, lookup)),
        ]
    return [objection.finding() for objection in dict.fromkeys(found)]


def _files(files: Iterable[HeldFile], judge: Judge, lookup: PathLookup) -> Iterator[Objection]:
    for one in files:
        try:
            with lookup.at(one.path, one.flags) as there:
                objection = judge.objection(one, there, None)
        except OSError:  # what is missing is reported elsewhere
            continue
        if objection is not None:
            yield objection
