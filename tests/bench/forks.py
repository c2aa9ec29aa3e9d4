"""How long it takes until all copies of a forked Python session answer, and what they have for
themselves by then.

The copies are made by the Python API, in a program that goes on (`fork_rounds`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from . import fork_rounds
from .errors import BenchFailed
from .interrupts import waiting
from .report import SUBJECT, Bound, Section

if TYPE_CHECKING:
    from .cases import Bench

# The bounds that criuctl is held to.
LIVE = Bound(1.2)
STORED = Bound(4.0)
PRIVATE_MIB = Bound(12)

SIZE = 256 << 20
LIVE_COPIES, STORED_COPIES = 8, 20
_PATIENCE = 600.0
_PROJECT = Path(__file__).parents[2]


def forks(bench: Bench, size: int = SIZE) -> Iterator[Section]:
    """A session of Python with `size` bytes: copies of the live one, and of its checkpoint."""
    bench.say("forks")
    with TemporaryDirectory(dir=bench.tmpfs) as run, TemporaryDirectory(dir=bench.disk) as state:
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("CRIUCTL_")},
            "PYTHONPATH": str(_PROJECT),
            "CRIUCTL_RUN_DIR": run,
            **{
                f"CRIUCTL_{name.upper()}": f"{state}/{name}"
                for name in ("store", "state_dir", "cache_dir", "key_dir")
            },
        }
        if "CRIUCTL_CRIU" in os.environ:
            environment["CRIUCTL_CRIU"] = os.environ["CRIUCTL_CRIU"]
        asked = [size, LIVE_COPIES, STORED_COPIES, bench.runs]
        out = Path(state) / "rounds"
        with out.open("wb") as file:
            program = bench.keeper.spawn(
                [sys.executable, "-P", fork_rounds.__file__, *map(str, asked)],
                env=environment,
                stdout=file,
            )
            with waiting():
                code = program.wait(_PATIENCE)
        if code:
            raise BenchFailed(f"forks: the program ended with {code}")
        rounds = [json.loads(line) for line in out.read_text().splitlines()]
    for kind, copies, bound in (("live", LIVE_COPIES, LIVE), ("stored", STORED_COPIES, STORED)):
        title = f"fork, {copies} copies of a {size >> 20} MiB session, {kind}"
        section = Section(title, {"case": "forks", "size": size, "copies": copies, "of": kind})
        for one in (one for one in rounds if one["kind"] == kind):
            section.row("until all answer", bound=bound).add(SUBJECT, one["answered"])
            section.row("made").add(SUBJECT, one["made"])
            private = max(one["private"]) / (1 << 20)
            section.row("private memory, the most", "MiB", PRIVATE_MIB).add(SUBJECT, private)
            if one["frozen_ms"]:
                section.row("frozen").add(SUBJECT, one["frozen_ms"] / 1000)
        yield section
