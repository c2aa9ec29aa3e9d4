"""A checkpoint's memory as CRIU's images."""

from __future__ import annotations

import os
import resource
import struct
from contextlib import nullcontext
from pathlib import Path

import pytest

from criuctl.checkpoint.manifest import Manifest, MemoryImage, SessionRef
from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.criu import images
from criuctl.criu.pages import PAGE, PE_PRESENT
from criuctl.report import Reporter
from criuctl.restore import materialise
from criuctl.store import open_store

COUNT = 700


def test_more_shared_memory_than_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs may have 65530 mappings, many users far fewer descriptors; and no more can be had
    here.
    """
    monkeypatch.setattr(materialise, "room_for_descriptors", nullcontext)
    config = Config(
        store=str(tmp_path / "store"),
        state_dir=str(tmp_path / "state"),
        cache_dir=str(tmp_path / "cache"),
        key_dir=str(tmp_path / "keys"),
    )
    repository = Repository.open(open_store(config.store, config), config, create_local=True)
    page = bytes(range(256)) * (PAGE // 256)
    with repository.writer(Reporter()) as writer:
        for name, content in (("entries", struct.pack("<QII", 0, 1, PE_PRESENT)), ("pages", page)):
            (tmp_path / name).write_bytes(content)
            with open(tmp_path / name, "rb") as file:
                writer.add_file(name, file.fileno(), len(content))
        entries, data = writer.stream("entries"), writer.stream("pages")
        memory = tuple(
            MemoryImage("shmem", number, 1, entries, data) for number in range(1, COUNT + 1)
        )
        manifest = Manifest(id="0" * 32, session=SessionRef("s", "1" * 32), memory=memory)
        writer.commit(manifest)
    (tmp_path / "images").mkdir()
    folder = os.open(tmp_path / "images", os.O_RDONLY)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        images.write(folder, "pstree.img", "PSTREE", [])
        opened = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened + COUNT // 2, hard))
        materialise.write_pages(manifest, repository.reader(Reporter()), folder)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(folder)
    repository.close()
    written = {path.name: path for path in (tmp_path / "images").iterdir()}
    assert all(
        written[f"pages-{number}.img"].read_bytes() == page for number in range(1, COUNT + 1)
    )
    assert all(f"pagemap-shmem-{number}.img" in written for number in range(1, COUNT + 1))
