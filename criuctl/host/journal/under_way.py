"""Operations that are under way, so that one that was killed still becomes an event.

While an operation runs, ``STATE_DIR/events.begun.BOOT.PID.START.N`` records what it is about; the
name shows its process.  It is removed when the operation ends.  The next operation that finds a
file whose process is gone removes it and reports it: at most once, because only one process can
remove it.  If the file cannot be written, or was not yet on the disk when the power was cut,
nothing is reported.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...proc.tree import ProcessIdentity
from ..registry import boot_id

_NAME = re.compile(r"events\.begun\.([0-9a-f-]+)\.(\d+)\.(\d+)\.\d+")
_numbers = itertools.count(1)


@contextmanager
def noted(state_dir: str, facts: Mapping[str, Any]) -> Iterator[None]:
    """Record what this process does while it does it; failures are ignored."""
    path, me = None, os.getpid()
    with suppress(Exception):
        start = ProcessIdentity.of(me).start_time
        path = Path(state_dir) / f"events.begun.{boot_id()}.{me}.{start}.{next(_numbers)}"
    try:
        if path is not None:
            with (
                suppress(OSError),
                open(
                    os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), "w"
                ) as file,
            ):
                json.dump(facts, file)
        yield
    finally:
        if path is not None and os.getpid() == me:
            with suppress(OSError):
                path.unlink()


def cut_off(state_dir: str) -> list[dict[str, Any]]:
    """Return what was noted by processes that are gone, and remove the notes.  `OSError`, except
    for a missing folder.
    """
    try:
        found = [
            (path, match)
            for path in Path(state_dir).iterdir()
            if (match := _NAME.fullmatch(path.name))
        ]
    except FileNotFoundError:
        return []
    cut: list[dict[str, Any]] = []
    for path, match in found:
        if match[1] == boot_id() and ProcessIdentity(int(match[2]), int(match[3])).alive():
            continue
        # another one was faster; it was killed while it wrote this
        with suppress(FileNotFoundError, ValueError):
            text = path.read_text()
            path.unlink()
            facts = json.loads(text)
            if isinstance(facts, dict):
                cut.append(facts)
    return cut
