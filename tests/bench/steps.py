"""What a durable step costs its program: one of the kind ``once`` with a small result, which is two
records on the disk of the session's holder, or of a file next to the program; compared with two
plain appends with fsync(2) on the same disk.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from criuctl.session.client.session import Session

from .report import Bound, Section
from .session_ways import Sessions
from .ways import PROJECT

if TYPE_CHECKING:
    from .cases import Bench

BARE, FILE, HELD = "two appends", "a file", "criuctl"
STEP_MS = Bound(2.0, BARE, "above")
_STEPS = 300

_PROGRAM = f"""
import os, sys, time
sys.path.insert(0, {str(PROJECT)!r})
from criuctl import inside
count, way, place = int(sys.argv[1]), sys.argv[2], sys.argv[3]
fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
def bare(number):
    for _ in range(2):
        os.write(fd, b"x" * 400)
        os.fsync(fd)
def step(number):
    with inside.step(f"step-{{os.getpid()}}-{{number}}") as s:
        s.result = number
do = bare if way == "two appends" else step
times = []
for number in range(count):
    began = time.perf_counter()
    do(number)
    times.append(time.perf_counter() - began)
times.sort()
print("took", times[count // 2] * 1000, times[count * 95 // 100] * 1000, "ms", flush=True)
sys.stdin.read()
"""


def steps(bench: Bench) -> Iterator[Section]:
    """Measure all three in turns."""
    section = Section("a durable step", {"case": "steps"})
    with (
        TemporaryDirectory(dir=bench.tmpfs) as run,
        TemporaryDirectory(dir=bench.disk) as state,
    ):
        own = Sessions(bench.keeper, Path(run), Path(state), bench.program)
        try:
            for number in range(bench.runs):
                bench.say(f"steps: round {number + 1} of {bench.runs}")
                for way in (BARE, FILE, HELD):
                    middle, most = _took(own, f"s{number}-{way.split()[-1]}", way, Path(state))
                    section.row("median", "ms", STEP_MS).add(way, middle)
                    section.row("95 of 100 in", "ms").add(way, most)
        finally:
            own.close()
    yield section


def _took(own: Sessions, name: str, way: str, folder: Path) -> tuple[float, float]:
    """Start a session that measures one way; return its median and its slow ones, in ms."""
    program, place = folder / f"{name}.py", folder / f"{name}.data"
    program.write_text(_PROGRAM)
    kept = folder / f"{name}.steps"
    outside = ["env", "-u", "CRIUCTL_SESSION_DIR", f"CRIUCTL_STEPS_FILE={kept}"]
    argv = [sys.executable, "-u", str(program), str(_STEPS), way, str(place)]
    own.start(name, [*outside, *argv] if way == FILE else argv)
    with Session.connect(name, config=own.config, kind="human", operator="bench") as session:
        session.wait_match(r"took .* ms", since="start", timeout=600)
        data = session.read("start", None).data.decode()
    words = data[data.index("took") :].split()
    return float(words[1]), float(words[2])
