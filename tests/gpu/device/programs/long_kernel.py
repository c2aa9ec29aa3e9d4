"""Kernels that run for SECONDS each: ``long_kernel.py FOLDER SECONDS``; a second thread counts
meanwhile.
"""

from __future__ import annotations

import sys
import threading
import time

import torch
from steplog import FOLDER, Steps, note


def _count() -> None:
    steps = Steps()
    for number in steps:
        steps.log(number, b"%d" % number)


def main() -> None:
    """Run one long kernel after the other; how many have ended is noted."""
    counting = threading.Thread(target=_count, daemon=True)
    counting.start()
    x = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    reference = float(x.double().sum())
    begun = time.monotonic()
    torch.cuda._sleep(200_000_000)
    torch.cuda.synchronize()
    per_second = 200_000_000 / (time.monotonic() - begun)
    done = 0
    while not (FOLDER / "stop").exists():
        note(done=done, running=True)
        torch.cuda._sleep(int(per_second * float(sys.argv[2])))
        torch.cuda.synchronize()
        if float(x.double().sum()) != reference:
            raise SystemExit("the tensor has changed")
        done += 1
        note(done=done, running=False)
        time.sleep(0.5)


if __name__ == "__main__":
    main()
