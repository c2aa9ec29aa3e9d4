"""A small training run in PyTorch that is the same bit by bit every time."""

from __future__ import annotations

import os

# before CUDA starts: deterministic products
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from typing import Any

import torch

WIDTH = 256


def deterministic(seed: int = 7) -> None:
    """Let PyTorch use deterministic kernels only, and start its generators from `seed`."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    torch.set_num_threads(1)


def network(device: str) -> Any:
    """A network of two layers."""
    nn = torch.nn
    return nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, 1)).to(device)


def batch(number: int, seed: int = 7, rows: int = 64) -> tuple[Any, Any]:
    """The batch of this number, on the host; the same in every process."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    rows_of = torch.randn(rows, WIDTH, generator=generator)
    return rows_of, rows_of.sum(1, keepdim=True)


def state(*holders: Any) -> list[bytes]:
    """The bytes of the parameters and of the optimizer's state, in order."""
    found: list[bytes] = []
    for holder in holders:
        _collect(holder.state_dict(), found)
    return found


def _collect(value: Any, found: list[bytes]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value.detach().cpu().contiguous().numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            _collect(value[key], found)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)
