"""The example hook that has programs release cached device memory before a dump."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from support.command import Criuctl
from support.gpu_standin import Board
from support.keeper import wait_until
from support.zoo import Zoo

HOOK = Path(__file__).parents[2] / "hooks/examples/pre-dump/release-gpu-cache"
PROGRAM = """
import os, signal, sys, time
fd = os.open(sys.argv[1], os.O_RDWR) if sys.argv[1] else -1
open(sys.argv[2], "w").write("ready")
def release(*_): open(sys.argv[2], "w").write("released")
if sys.argv[3] == "catches": signal.signal(signal.SIGUSR2, release)
open(sys.argv[2] + ".ready", "w")
while True: time.sleep(0.05)
"""


def start(
    zoo: Zoo, folder: Path, name: str, node: str, how: str, signal: str = "USR2"
) -> tuple[int, Path]:
    said, ready = folder / name, folder / f"{name}.ready"
    argv = [sys.executable, "-c", PROGRAM, node, str(said), how]
    animal = zoo.launch(argv, name=name, quiet=False, env={"GPU_CACHE_SIGNAL": signal})
    wait_until(ready.exists, 30, f"{name} is ready")
    return animal.pid, said


def asked(pid: int) -> dict[str, object]:
    done = subprocess.run(
        [HOOK],
        input=json.dumps({"pid": pid}),
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_only_programs_that_catch_the_signal_and_use_a_device_get_it(
    zoo: Zoo, board: Board
) -> None:
    node = board.devices[0].node
    willing, said = start(zoo, board.folder, "willing", node, "catches")
    assert asked(willing) == {"data": {"asked": [willing]}}
    wait_until(lambda: said.read_text() == "released", 10, "the program has released its cache")
    for name, path, how, signal in (
        ("deaf", node, "ignores", "USR2"),
        ("without", "", "catches", "USR2"),
        ("unasked", node, "catches", ""),
        ("odd", node, "catches", "; rm"),
    ):
        pid, kept = start(zoo, board.folder, name, path, how, signal)
        assert asked(pid) == {"data": {"asked": []}}
        assert kept.read_text() == "ready"


def test_a_snapshot_runs_it(zoo: Zoo, board: Board, gpu_criuctl: Criuctl) -> None:
    pid, said = start(zoo, board.folder, "cached", board.devices[0].node, "catches")
    folder = gpu_criuctl.home.path / "hooks" / "pre-dump"
    folder.mkdir(parents=True)
    shutil.copy2(HOOK, folder / "50-release")
    report = gpu_criuctl("snapshot", pid)
    assert report[0]["hooks"][0]["data"] == {"asked": [pid]}
    assert said.read_text() == "released"
