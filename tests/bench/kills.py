"""Fifty kills at random moments of a program that is supervised, and what each has cost: ``cd tests
&& python -m bench.kills``.

The program counts, and writes each number with the time to a file that stays where it is.  Whenever
it is back at an earlier number, what lies between that number's time and the last time before is
what it has lost.  That is a period at most, and what a snapshot takes: a kill in the middle of one
goes back to the one before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from support.supervising import COUNTER

PROJECT = Path(__file__).parent.parent.parent
PATIENCE = 120.0


def main() -> int:
    """Kill, wait until it is back, and again; then tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two snapshots")
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args()
    rng = random.Random(wanted.seed)
    with (
        tempfile.TemporaryDirectory(prefix="kills-") as text,
        tempfile.TemporaryDirectory(prefix="kills-", dir="/dev/shm") as run,
    ):
        folder = Path(text)
        env = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("CRIUCTL_", "AWS_"))
        }
        env |= {
            "PYTHONPATH": str(PROJECT),
            "CRIUCTL_RUN_DIR": run,
            "CRIUCTL_STORE": str(folder / "store"),
        }
        env |= {
            "CRIUCTL_STATE_DIR": str(folder / "state"),
            "CRIUCTL_CACHE_DIR": str(folder / "cache"),
        }
        if "CRIUCTL_CRIU" in os.environ:
            env["CRIUCTL_CRIU"] = os.environ["CRIUCTL_CRIU"]
        criuctl = [sys.executable, "-m", "criuctl"]
        (folder / "counter.py").write_text(COUNTER)
        program = [sys.executable, "-S", str(folder / "counter.py"), str(folder / "counted")]
        subprocess.run(
            [*criuctl, "run", "-d", "--name", "web", "--", *program],
            env=env,
            check=True,
            timeout=PATIENCE,
        )
        options = [
            f"--every={wanted.every}s",
            "--stable-after=0.01s",
            "--backoff=0.01s",
            "--keep-last=3",
        ]
        watch = subprocess.Popen(
            [*criuctl, "supervise", "web", *options, "--json"], env=env, stdout=subprocess.PIPE
        )
        try:
            events = _kill(watch, wanted.kills, wanted.every, rng)
        finally:
            watch.terminate()
            watch.wait(PATIENCE)
            subprocess.run(
                [*criuctl, "kill", "web", "--timeout", "0"], env=env, check=False, timeout=PATIENCE
            )
        return _tell(events, _losses(folder / "counted"), wanted.kills, wanted.every)


def _kill(
    watch: subprocess.Popen[bytes], kills: int, every: float, rng: random.Random
) -> list[dict[str, Any]]:
    """All events until it is back after the last kill."""
    assert watch.stdout is not None
    events: list[dict[str, Any]] = []
    _until(watch.stdout, events, "snapshot")
    pid = next(event["pid"] for event in reversed(events) if event["event"] == "home")
    for _ in range(kills):
        moment = time.monotonic() + rng.uniform(0, 2 * every)
        while (left := moment - time.monotonic()) > 0:
            if select.select([watch.stdout], [], [], left)[0]:
                _read(watch.stdout, events)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        pid = _until(watch.stdout, events, "recovered")["pid"]
    return events


def _read(stream: IO[bytes], events: list[dict[str, Any]]) -> dict[str, Any]:
    line = stream.readline()
    if not line:
        raise SystemExit(f"the supervisor has ended: {events[-3:]}")
    events.append(json.loads(line))
    return events[-1]


def _until(stream: IO[bytes], events: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    while _read(stream, events)["event"] != kind:
        pass
    return events[-1]


def _losses(path: Path) -> list[float]:
    """Seconds between where it was and where it went back to, for each time that it did."""
    found: list[float] = []
    when: dict[int, float] = {}
    last = (0, 0.0)
    for line in path.read_text().splitlines():
        number, at = int(line.split()[0]), float(line.split()[1])
        if number <= last[0]:
            found.append(last[1] - when[number])
        when[number], last = at, (number, at)
    return found


def _tell(events: list[dict[str, Any]], losses: list[float], kills: int, every: float) -> int:
    back = [event for event in events if event["event"] == "recovered"]
    taken = [event["total_ms"] / 1000 for event in events if event["event"] == "snapshot"]
    times = sorted(event["recovered_ms"] for event in back)
    most = every + max(taken)
    over = [loss for loss in losses if loss > every]
    print(
        f"{kills} kills, {len(back)} recoveries, {len(taken)} snapshots, each in "
        f"{min(taken):.2f} "
        f"to {max(taken):.2f} s"
    )
    print(
        f"lost: {min(losses):.2f} to {max(losses):.2f} s of a period of {every:g} s; "
        f"{len(over)} "
        "more than a period"
    )
    print(f"back after: median {times[len(times) // 2]:.0f} ms, at most {times[-1]:.0f} ms")
    return 0 if len(back) == kills and max(losses) <= most + 0.1 else 1


if __name__ == "__main__":
    sys.exit(main())
