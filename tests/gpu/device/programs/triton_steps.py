"""A Triton kernel on a PyTorch tensor, step by step."""

from __future__ import annotations

import torch
import torch_common as common
import triton
import triton.language as tl
from steplog import Steps

COUNT = 1 << 18


def _mix(x_pointer, y_pointer, count, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    x = tl.load(x_pointer + offsets, mask=inside)
    y = tl.load(y_pointer + offsets, mask=inside)
    tl.store(x_pointer + offsets, x * factor + tl.sin(y + x), mask=inside)


mix = triton.jit(_mix)


def main() -> None:
    """Step until asked to stop."""
    common.deterministic()
    x = torch.linspace(0, 1, COUNT, device="cuda")
    y = torch.randn(COUNT, device="cuda")
    steps = Steps()
    for number in steps:
        mix[(triton.cdiv(COUNT, 1024),)](x, y, COUNT, 0.5 + (number % 7) / 20, BLOCK=1024)
        held = x.cpu().numpy()
        steps.log(float(held[0]), held.tobytes())


if __name__ == "__main__":
    main()
