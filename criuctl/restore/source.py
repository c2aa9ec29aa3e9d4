"""The checkpoint that is restored: found in its store, and checked against what this host
expects.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from msgspec import Struct

from ..checkpoint.manifest import Manifest
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.repository import Repository
from ..config import Config
from ..criu.images import ImageSet
from ..host import moves
from ..host.maintenance import check_open
from ..host.registry import Registry, exclusive_session
from ..proc.scratch import Scratch
from ..report import Reporter
from ..store import open_store
from . import materialise, newest, outcome
from .request import RestoreRequest


class Source(Struct, frozen=True):
    """A checkpoint in an open repository."""

    repository: Repository
    manifest: Manifest
    name: str  # of the session that is made of it
    found: newest.Found


class Unpacked(Struct, frozen=True):
    """CRIU's images of the checkpoint, in a folder that is never written to a disk."""

    images: ImageSet
    reader: CheckpointReader
    folder: int  # descriptor
    scratch: Scratch


def find(
    config: Config,
    ref: str,
    request: RestoreRequest,
    reporter: Reporter,
    registry: Registry,
    repository: Repository | None,
    stack: ExitStack,
    *,
    received: bool,
) -> Source:
    """Find the checkpoint and lock its session until `stack` ends; `received`: it came from another
    host.

    Raises `Conflict` if the session runs, `NoSuchCheckpoint`, `OlderCheckpoint`, `AnotherSession`.
    """
    if repository is None:
        repository = _open(config, reporter, stack)
    with (
        outcome.offering_another(repository, ref),
        newest.offering_elsewhere(config, repository, ref),
    ):
        manifest = repository.manifest(ref)
    stack.enter_context(outcome.offering_another(repository, ref, manifest))
    name = request.new_name or manifest.session.name
    stack.enter_context(exclusive_session(config, name))
    outcome.check_not_running(config, registry, name, copy=request.copy)
    found = newest.look(config, repository, ref, manifest, older=request.older)
    if not (request.dry_run or request.alone or request.returning or received):
        check_open(config)
    if not request.copy and not received:
        moves.check_at_home(config, name, take_over=request.take_over)
        outcome.check_not_moved(registry, repository, manifest, take_over=request.take_over)
    return Source(repository, manifest, name, found)


def _open(config: Config, reporter: Reporter, stack: ExitStack) -> Repository:
    store = open_store(config.store, config)
    stack.callback(store.close)
    repository = Repository.open(store, config)
    stack.callback(repository.close)
    repository.warn_unpinned(reporter)
    return repository


def unpack(source: Source, reporter: Reporter, stack: ExitStack) -> Unpacked:
    """Write CRIU's metadata images to a private tmpfs; every chunk is verified on the way."""
    reader = source.repository.reader(reporter)
    scratch = stack.enter_context(Scratch())
    for finding in scratch.findings():
        reporter.finding(finding)
    folder = scratch.folder("images")
    stack.callback(os.close, folder)
    materialise.write_images(source.manifest, reader, folder)
    return Unpacked(ImageSet(folder), reader, folder, scratch)
