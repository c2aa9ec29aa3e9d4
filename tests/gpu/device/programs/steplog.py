"""The record that a test program keeps of itself: one line per step, with a hash of its state.

The first argument of every program is its folder.  There it writes ``steps`` (one JSON array per
line: number, value, hash), looks for ``stop``, which ends it, and writes ``end`` when it ends by
itself.  Two runs with the same seed write the same lines, so a run that was dumped and restored is
compared with one that was not, line by line.

`LIMIT` steps at most: an undisturbed twin does them without a pause between them
(CRIUCTL_GPU_PACE=0) and ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
DEVICE = os.environ.get("CRIUCTL_GPU_DEVICE", "cuda")
PACE = float(os.environ.get("CRIUCTL_GPU_PACE", "0.02"))
LIMIT = int(os.environ.get("CRIUCTL_GPU_LIMIT", "100000"))


class Steps:
    """The log of one program; `folder` is another than `FOLDER` in a child."""

    def __init__(self, folder: Path = FOLDER) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.number = 0
        self._log = (folder / "steps").open("a", buffering=1)

    def __iter__(self) -> Iterator[int]:
        """Numbers from 0, until the limit or until ``stop`` appears."""
        while self.number < LIMIT and not (self.folder / "stop").exists():
            yield self.number
            self.number += 1
            time.sleep(PACE)
        (self.folder / "end").write_text("end\n")

    def log(self, value: Any, *state: bytes) -> None:
        """The line of this step: a value as exact text, and a hash of the state."""
        digest = hashlib.blake2b(digest_size=8)
        for part in state:
            digest.update(part)
        text = value.hex() if isinstance(value, float) else value
        self._log.write(json.dumps([self.number, text, digest.hexdigest()]) + "\n")


def note(**facts: Any) -> None:
    """Facts for the harness, such as how many bytes lie on the device."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    temporary = FOLDER / ".facts"
    temporary.write_text(json.dumps(facts))
    temporary.replace(FOLDER / "facts")
