"""One large tensor on the device that does not change: ``tensor.py FOLDER GIB [half]``.

Random numbers; with ``half``, every other half of a MiB is one repeated value.  A checksum of a
sample is logged.
"""

from __future__ import annotations

import sys

import torch
import torch_common as common
from steplog import DEVICE, Steps, note


def main() -> None:
    """Fill the tensor, and look at it again and again."""
    common.deterministic()
    count = int(float(sys.argv[2]) * (1 << 30))
    tensor = torch.empty(count, device=DEVICE, dtype=torch.uint8)
    block = 256 << 20
    for start in range(0, count, block):
        tensor[start : start + block].random_(0, 256)
    if len(sys.argv) > 3 and sys.argv[3] == "half":
        pieces = tensor[: count >> 20 << 20].view(-1, 1 << 20)
        pieces[:, : 1 << 19] = 7
    note(device_bytes=count)
    steps = Steps()
    for _number in steps:
        sample = tensor[:: 4096 + 1].cpu().numpy()
        steps.log(0, sample.tobytes())


if __name__ == "__main__":
    main()
