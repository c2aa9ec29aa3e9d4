"""The bench runs, says what it should, and leaves nothing behind; what it measures is not judged
here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support.keeper import wait_until

PROJECT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def _bench(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    disk, tmpfs = tmp_path / "disk", Path("/dev/shm") / f"bench-test-{os.getpid()}"
    for folder in (disk, tmpfs):
        folder.mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "bench", "--disk", str(disk), "--tmpfs", str(tmpfs), *arguments],
        env=os.environ | {"PYTHONPATH": f"{PROJECT}:{PROJECT / 'tests'}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _left(tmp_path: Path) -> list[str]:
    """What lies in the folders that the bench was given, and processes whose program was there."""
    folders = [tmp_path / "disk", Path("/dev/shm") / f"bench-test-{os.getpid()}"]
    with suppress(TimeoutError):  # what is killed takes a moment to be gone
        wait_until(lambda: not _programs(tmp_path), 60, "nothing of it runs")
    found = [str(path) for folder in folders for path in folder.iterdir()]
    folders[1].rmdir()
    return found + _programs(tmp_path)


def _programs(tmp_path: Path) -> list[str]:
    """Processes whose program lies in this folder."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            program = os.readlink(f"/proc/{entry}/exe")
        except OSError:
            continue
        if program.startswith(f"{tmp_path}/"):
            found.append(f"PID {entry}: {program}")
    return found


def test_dump_restore_and_increment(tmp_path: Path) -> None:
    """Every way is measured, in every round, and bounds are reported with their peers."""
    options = ("--sizes", "4M", "--processes", "3", "--runs", "2", "--store", "local", "--json")
    bench = _bench(tmp_path, "dump", "restore", "increment", *options)
    out, err = bench.communicate(timeout=200)
    assert (bench.returncode, _left(tmp_path)) == (0, []), err
    answer = json.loads(out)
    assert answer["failures"] == []
    sections = {
        section["case"]: {row["what"]: row for row in section["rows"]}
        for section in answer["sections"]
    }
    assert list(sections) == ["dump", "restore", "increment"]
    total = sections["dump"]["total"]
    assert set(total["ways"]) == {
        "criuctl",
        "criu to disk",
        "criu to tmpfs",
        "by hand",
        "without copy",
        "least",
    }
    assert all(len(way["samples"]) == 2 and way["median"] > 0 for way in total["ways"].values())
    value = total["ways"]["criuctl"]["median"] / total["ways"]["by hand"]["median"]
    assert total["bound"] == {
        "limit": 0.6,
        "peer": "by hand",
        "value": pytest.approx(value),
        "met": value <= 0.6,
    }
    assert all(way["median"] > 0 for way in sections["restore"]["until it runs"]["ways"].values())
    own = sections["increment"]["frozen"]["ways"]["criuctl"]["samples"]
    seen = sections["increment"]["stood still, seen from inside"]["ways"]["criuctl"]["samples"]
    # The tree stands still for as long as it is frozen, and for as long as a busy machine does not
    # let it run.
    assert all(felt > stated - 0.02 for stated, felt in zip(own, seen, strict=True)), (own, seen)


def test_a_way_that_fails_is_reported(tmp_path: Path) -> None:
    """A criuctl that does not work makes the bench end with 1, names it, and does not stop the
    others.
    """
    options = (
        "--sizes",
        "4M",
        "--processes",
        "1",
        "--runs",
        "1",
        "--store",
        "local",
        "--json",
        "--criuctl",
        "false",
    )
    bench = _bench(tmp_path, "dump", *options)
    out, err = bench.communicate(timeout=200)
    assert (bench.returncode, _left(tmp_path)) == (1, []), err
    answer = json.loads(out)
    assert any("criuctl" in failure for failure in answer["failures"])
    assert set(answer["sections"][0]["rows"][0]["ways"]) == {
        "criu to disk",
        "criu to tmpfs",
        "by hand",
        "without copy",
        "least",
    }


def test_sessions(tmp_path: Path) -> None:
    """Every way holds sessions and shows what they print; nothing of them stays."""
    bench = _bench(
        tmp_path,
        "sessions",
        "--sessions",
        "2",
        "--flood",
        "2M",
        "--watch",
        "1",
        "--runs",
        "1",
        "--json",
    )
    out, err = bench.communicate(timeout=200)
    assert (bench.returncode, _left(tmp_path)) == (0, []), err
    sections = {
        section["what"]: {row["what"]: row for row in section["rows"]}
        for section in json.loads(out)["sections"]
    }
    assert list(sections) == ["echo", "output", "memory", "idle"]
    ways = {"bare PTY", "criuctl", "criuctl client", "dtach", "tmux"}
    came = sections["output"]["of it came"]["ways"]
    assert set(came) == set(sections["echo"]["median"]["ways"]) == ways
    # 2 MiB: no client has to skip
    assert all(came[way]["median"] >= 100 for way in ways - {"tmux"}), came
    bounds = [row["bound"] for rows in sections.values() for row in rows.values() if "bound" in row]
    assert len(bounds) == 5 and all(bound["value"] is not None for bound in bounds)


def test_a_simulated_store(tmp_path: Path) -> None:
    """It is made, listed, pruned and collected, and every step's time and memory is held to what it
    may be.
    """
    bench = _bench(tmp_path, "store", "--simulated", "60,600", "--store", "local", "--json")
    out, err = bench.communicate(timeout=500)
    assert (bench.returncode, _left(tmp_path)) == (0, []), err
    (section,) = json.loads(out)["sections"]
    rows = {row["what"]: row for row in section["rows"]}
    assert {
        "list of a session, the first time",
        "plan of a prune, again",
        "gc of it, and of what is small",
    } <= set(rows)
    assert all(row["bound"]["met"] for name, row in rows.items() if name.endswith(": peak"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """An interrupt in the middle of a round ends everything and removes everything."""
    bench = _bench(
        tmp_path, "dump", "--sizes", "4M", "--processes", "2", "--runs", "500", "--store", "local"
    )
    assert bench.stderr is not None
    try:
        for line in bench.stderr:
            if "round 1 of" in line:
                break
        bench.send_signal(number)
        bench.communicate(timeout=100)
    finally:
        if bench.poll() is None:
            bench.kill()
            bench.wait()
    assert (bench.returncode, _left(tmp_path)) == (code, [])
