"""Train from a DataLoader with workers: ``torch_loader.py FOLDER fork|spawn|forkserver``."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch_common as common
from steplog import DEVICE, Steps


class Batches:
    """Batches by number, made in a worker."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        return common.batch(number)


def main() -> None:
    """Train with two workers that are started the given way; with `fork`, after CUDA."""
    common.deterministic()
    net = common.network(DEVICE)
    optimizer = torch.optim.Adam(net.parameters())
    loader = torch.utils.data.DataLoader(
        Batches(),
        batch_size=None,
        shuffle=False,
        num_workers=2,
        multiprocessing_context=sys.argv[2],
        pin_memory=sys.argv[2] == "fork" and DEVICE == "cuda",
        persistent_workers=True,
    )
    steps = Steps()
    for _number, (rows, wanted) in zip(steps, loader, strict=False):
        optimizer.zero_grad()
        loss = ((net(rows.to(DEVICE)) - wanted.to(DEVICE)) ** 2).mean()
        loss.backward()
        optimizer.step()
        steps.log(float(loss), *common.state(net, optimizer))


if __name__ == "__main__":
    main()
