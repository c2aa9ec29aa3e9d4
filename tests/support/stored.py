"""Everything that the checkpoints of a store hold, as plain bytes: what a reader with the key can
find in it.
"""

from __future__ import annotations

from pathlib import Path

from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.report import Reporter
from criuctl.store import open_store


def plain(store: Path, folder: Path) -> bytes:
    """Memory and images of every checkpoint in `store`; keys are looked for in `folder`."""
    config = Config(store=str(store), key_dir=str(folder / "keys"), cache_dir=str(folder / "cache"))
    found = bytearray()
    with open_store(config.store, config) as opened, Repository.open(opened, config) as repository:
        reader = repository.reader(Reporter())
        for summary in repository.list():
            manifest = repository.manifest(summary)
            for stream in (manifest.image_data, *(image.data for image in manifest.memory)):
                found += reader.read(stream)
    return bytes(found)
