"""Freed device memory that PyTorch keeps: ``torch_cached.py FOLDER MIB``; SIGUSR2 has it
released.
"""

from __future__ import annotations

import signal
import sys

import torch
from steplog import DEVICE, Steps


def main() -> None:
    """Take memory, free it, and count."""
    signal.signal(signal.SIGUSR2, lambda *_: torch.cuda.empty_cache())
    # first: else it lies in the block that is to be released
    kept = torch.arange(1 << 20, device=DEVICE)
    torch.ones(int(sys.argv[2]) << 20, dtype=torch.uint8, device=DEVICE)
    steps = Steps()
    for number in steps:
        steps.log(int(kept[number % len(kept)]), kept[:4096].cpu().numpy().tobytes())


if __name__ == "__main__":
    main()
