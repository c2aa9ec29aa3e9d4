"""Files in memory (``/dev/shm``) that a restore made for a copy alone, and that go when it goes.

No program knows their names, so none removes them, and memory stays taken. `note` records them, one
file for each tree, before the tree runs. `sweep` removes those of trees that have ended, unless a
process still has one open: ``kill`` calls it, ``gc``, and each restore before it looks at files. A
copy that was dumped gets its file again at the restore, from its checkpoint; so one that is too
large to travel stays.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..config import Config
from ..proc import folder_walk
from ..proc.ownership import check_own
from ..proc.tree import ProcessIdentity
from .copies import writers_to
from .put_back import OWN_NAME
from .shared_mappings import is_in_memory, travels

_DEFAULT = "/run/criuctl"


def _folder(config: Config) -> Path:
    return Path(config.run_dir or _DEFAULT) / "memory-files"


def note(config: Config, root: int, created: Iterable[tuple[str, os.stat_result]]) -> None:
    """Record which of the files that were `created` are memory of the copy with this root alone."""
    files = [
        (path, status.st_dev, status.st_ino)
        for path, status in created
        if OWN_NAME.search(path) and is_in_memory(path) and travels(config, status.st_size)
    ]
    if not files:
        return
    folder = _folder(config)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_own(folder)
    start = ProcessIdentity.of(root).start_time
    (folder / f"{root}-{start}.json").write_text(json.dumps(files))


def sweep(config: Config) -> None:
    """Remove those of trees that have ended; `OSError` if the folder cannot be written."""
    folder = _folder(config)
    check_own(folder)
    for path in folder.glob("*.json"):
        pid, start = map(int, path.stem.split("-"))
        if ProcessIdentity(pid, start).alive():
            continue
        with suppress(FileNotFoundError):  # another criuctl does the same
            files = {(dev, inode): [name] for name, dev, inode in json.loads(path.read_text())}
            used = writers_to(files)
            for inode in files.keys() - used.keys():
                _remove(files[inode][0], inode)
            if not used:
                path.unlink()


def _remove(path: str, inode: tuple[int, int]) -> None:
    name = os.path.basename(path)
    with suppress(OSError), folder_walk.folder(os.path.dirname(path)) as folder:
        now = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if (now.st_dev, now.st_ino) == inode:
            os.unlink(name, dir_fd=folder)
