"""A store with write-only hosts: enrolled, and opened as each of them would."""

from __future__ import annotations

from pathlib import Path

from criuctl.checkpoint import key_files, writer_keys
from criuctl.checkpoint.key_generations import described
from criuctl.checkpoint.repository import Repository
from criuctl.store import Store

from . import checkpoints as kit


def enrol(repo: Repository, path: Path, label: str = "") -> Path:
    """Make a write-only host whose folders are in `path`; its key file."""
    opened = repo.opened
    assert opened is not None
    key = writer_keys.enrol(opened.master, repo.id)
    repo.key_changer().change(lambda slots: [*slots, described(key.slot(), label)])
    file = path / "keys" / f"{repo.id}.key"
    key_files.write_secret(file, key.text())
    return file


def host(store: Store, path: Path) -> Repository:
    """The store as the host in `path` opens it, write-only or not."""
    return Repository.open(store, kit.config(path, workers=1))
