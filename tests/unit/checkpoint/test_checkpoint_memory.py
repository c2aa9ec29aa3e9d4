"""A dump and a restore of much more than memory allows stay within the ceiling."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

_PROGRAM = """
import json, os, random, sys
from pathlib import Path
from support import checkpoints as kit
from criuctl.checkpoint.repository import Repository
from criuctl.report import Reporter
from criuctl.store.local import LocalStore

folder, mib = Path(sys.argv[1]), int(sys.argv[2])
config = kit.config(folder)
store = LocalStore(str(folder / "store"))
repo = Repository.init(store, encryption=True, config=config)
base = random.Random(1).randbytes(kit.WINDOW)

def dump(mark):
    with repo.writer(Reporter()) as writer:
        buffer, fill = writer.acquire(), 0
        for n in range(mib * 4):
            if fill + kit.WINDOW > len(buffer.view):
                writer.release(buffer)
                buffer, fill = writer.acquire(), 0
            view = buffer.view[fill : fill + kit.WINDOW]
            # half of each window compresses; one window in twenty is new the second time
            view[: kit.WINDOW // 2] = base[: kit.WINDOW // 2]
            view[kit.WINDOW // 2 :] = bytes(kit.WINDOW // 2)
            view[:8] = (n * 2 + (mark if n % 20 == 0 else 0)).to_bytes(8, "little")
            writer.window("m", buffer, fill, fill + kit.WINDOW)
            fill += kit.WINDOW
        writer.release(buffer)
        ref = writer.stream("m")
        writer.commit(kit.fill(writer, kit.SMALL))
        return ref, writer.stats.bytes_new

ref, _new = dump(0)
again, new = dump(1)
assert new <= mib * (1 << 20) // 20 + (1 << 20), new
with open(folder / "out", "w+b") as out:
    repo.reader(Reporter()).write_to([(again, out.fileno(), 0)])
    assert os.fstat(out.fileno()).st_size == mib << 20
    for n in (0, 1, 20, mib * 4 - 1):
        start = os.pread(out.fileno(), 9, n * kit.WINDOW)
        assert start == (n * 2 + (n % 20 == 0)).to_bytes(8, "little") + base[8:9], n
high = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"rss_kib": int(high.split()[1])}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mib", [640])  # twice dumped, once restored: far more than the ceiling
def test_memory_is_bounded(mib: int) -> None:
    root = Path(__file__).parents[3]
    folder = Path(tempfile.mkdtemp(prefix="criuctl-rss-", dir="/dev/shm"))
    try:
        environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"}
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(folder), str(mib)],
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["rss_kib"] < 400 * 1024
    finally:
        shutil.rmtree(folder)
