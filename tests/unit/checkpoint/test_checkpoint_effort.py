"""How hard to compress for which link."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from support import checkpoints as kit

from criuctl.checkpoint.compression_level import LEVELS, fitting
from criuctl.checkpoint.streams import WriterStats
from criuctl.report import Reporter
from criuctl.store.memory import MemoryStore

MB = 1e6


@pytest.mark.parametrize(
    ("level", "compressing", "ratio", "sending", "wanted"),
    [
        (1, 600 * MB, 0.45, 2000 * MB, -5),  # a local disk: the compressors are the slow ones
        (-5, 840 * MB, 0.6, 100 * MB, 3),  # 1 Gbit/s that turned out after a fast start
        (1, 600 * MB, 0.45, 100 * MB, 3),
        (1, 600 * MB, 0.45, 10 * MB, 6),  # the slower the link, the harder
        (1, 600 * MB, 1.0, 10 * MB, 1),  # trying harder would not make it smaller
        (1, 600 * MB, 0.45, 270 * MB, 1),  # both take the same time
        (9, 30 * MB, 0.4, 2000 * MB, 9),  # no level that we know: a wish
        (1, 0.0, 0.45, 10 * MB, 1),
    ],
)
def test_the_slower_of_both_decides(
    level: int, compressing: float, ratio: float, sending: float, wanted: int
) -> None:
    assert fitting(level, compressing, ratio, sending) == wanted


def test_a_fitted_level_stays() -> None:
    """What was chosen is chosen again when it measures as foretold."""
    for sending in (5, 20, 80, 150, 300, 600, 2400):
        level = fitting(1, 500 * MB, 0.4, sending * MB)
        speed, size = LEVELS[level]
        assert fitting(level, 500 * MB * speed, 0.4 * size, sending * MB) == level


class Slow(MemoryStore):
    """A store behind a link of 2 MB/s."""

    def put(self, name: str, data: Any, **options: Any) -> Any:
        time.sleep(len(data) / (2 * MB))
        return super().put(name, data, **options)


@pytest.mark.parametrize("configured", [1, 2])
def test_a_slow_store_makes_the_writer_try_harder(tmp_path: Path, configured: int) -> None:
    """Unless the configuration wishes for a level of its own."""
    repo = kit.repository(tmp_path, store=Slow(), compression=configured)
    half = random.Random(1)
    with repo.writer(Reporter()) as writer:
        content = b"".join(half.randbytes(512) + bytes(3584) for _ in range(10_000))
        kit.put_windows(writer, "m", content)
        writer.flush()
        assert writer.stats.sending > 1
        assert writer.stats.packing > 0
        assert (writer.adapt(WriterStats()) > configured) is (configured == 1)
