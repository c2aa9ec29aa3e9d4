"""Train in PyTorch: ``torch_train.py FOLDER eager|graph|compile|amp|pinned [SEED]``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch_common as common
from steplog import DEVICE, FOLDER, Steps

Step = Callable[[Any, Any], float]


def _eager(net: Any, optimizer: Any) -> Step:
    def step(rows: Any, wanted: Any) -> float:
        optimizer.zero_grad()
        loss = ((net(rows.to(DEVICE)) - wanted.to(DEVICE)) ** 2).mean()
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def _amp(net: Any, optimizer: Any) -> Step:
    scaler = torch.amp.GradScaler(DEVICE, enabled=DEVICE == "cuda")
    kind = torch.float16 if DEVICE == "cuda" else torch.bfloat16

    def step(rows: Any, wanted: Any) -> float:
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=kind):
            loss = ((net(rows.to(DEVICE)) - wanted.to(DEVICE)) ** 2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return float(loss)

    return step


def _pinned(net: Any, optimizer: Any) -> Step:
    """Batches go through one pinned buffer that lives as long as the program; a stream of its own
    copies them.
    """
    pin = DEVICE == "cuda"
    rows_pinned = torch.empty(64, common.WIDTH, pin_memory=pin)
    kept = torch.arange(1 << 20, dtype=torch.int64, pin_memory=pin)  # 8 MiB
    total = int(kept.sum())
    eager = _eager(net, optimizer)

    def step(rows: Any, wanted: Any) -> float:
        rows_pinned.copy_(rows)
        on_device = rows_pinned.to(DEVICE, non_blocking=True)
        if int(kept.to(DEVICE, non_blocking=True).sum()) != total:
            raise SystemExit("the pinned buffer has changed")
        return eager(on_device, wanted)

    return step


def _graph(net: Any, optimizer: Any) -> Step:
    """The whole step, optimizer included, as one CUDA graph that is replayed."""
    if DEVICE != "cuda":
        return _eager(net, optimizer)
    rows_in = torch.zeros(64, common.WIDTH, device=DEVICE)
    wanted_in = torch.zeros(64, 1, device=DEVICE)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())

    def once() -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = ((net(rows_in) - wanted_in) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss

    with torch.cuda.stream(aside):
        for _ in range(3):
            once()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss_out = once()

    def step(rows: Any, wanted: Any) -> float:
        rows_in.copy_(rows)
        wanted_in.copy_(wanted)
        graph.replay()
        torch.cuda.synchronize()
        return float(loss_out)

    return step


def _compiled(net: Any, optimizer: Any) -> Step:
    return _eager(torch.compile(net), optimizer)


WAYS: dict[str, Callable[[Any, Any], Step]] = {
    "eager": _eager,
    "amp": _amp,
    "pinned": _pinned,
    "graph": _graph,
    "compile": _compiled,
}


def train(way: str, seed: int, folder: Path = FOLDER) -> None:
    """Train until asked to stop; each step's loss and the hash of all parameters are logged."""
    common.deterministic(seed)
    net = common.network(DEVICE)
    graph = way == "graph" and DEVICE == "cuda"
    optimizer = torch.optim.Adam(net.parameters(), capturable=graph)
    step = WAYS[way](net, optimizer)
    steps = Steps(folder)
    for number in steps:
        loss = step(*common.batch(number, seed))
        steps.log(loss, *common.state(net, optimizer))


if __name__ == "__main__":
    train(sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 7)
