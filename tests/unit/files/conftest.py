"""What several tests of operations write checkpoints with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from criuctl.checkpoint.repository import Repository
from criuctl.checkpoint.writer import CheckpointWriter
from criuctl.config import Config
from criuctl.report import Reporter
from criuctl.store import open_store


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[CheckpointWriter]:
    """Of a checkpoint in a new store of the test's own."""
    config = Config(
        store=str(tmp_path / "store"),
        state_dir=str(tmp_path / "state"),
        cache_dir=str(tmp_path / "cache"),
    )
    repository = Repository.open(open_store(config.store, config), config, create_local=True)
    with repository.writer(Reporter()) as writer:
        yield writer
    repository.close()
