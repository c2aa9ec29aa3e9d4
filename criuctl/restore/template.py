"""A template: the memory of one checkpoint, read once and kept in memory for many copies of it.

`make` reads all pages into one sealed memory file and starts a *keeper* for it
(`criuctl.restore.template_keeper`). Each restore of a copy gets from the file what CRIU has to have
before the tree runs; all other pages are copied in by the keeper when the copy touches them, for as
long as it lives. What no copy touches is in memory once.

The keeper ends when its last copy has ended, or has all of its memory. A copy is not dumped before
it has all of it (`criuctl.host.templates`).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType

from msgspec import Struct

from ..checkpoint.manifest import Manifest
from ..checkpoint.reader import CheckpointReader
from ..config import Config
from ..criu import lazy_socket
from ..criu.images import read
from ..errors import RestoreFailed
from ..host.templates import KeeperGone, KeeperLine
from ..proc.procfs import available_memory
from ..proc.syscalls import has_userfaultfd
from ..proc.tree import ProcessIdentity
from . import materialise, template_keeper
from .template_images import TemplateImage


class Template(Struct, frozen=True):
    """The memory of a checkpoint, and the keeper that serves it."""

    checkpoint: str
    memory: int  # descriptor of the file
    images: list[TemplateImage]
    keeper: Path  # its socket

    def write_images(self, folder: int) -> None:
        """Write CRIU's page maps, and the pages that cannot follow."""
        materialise.write_template(self.images, self.memory, folder)

    def pages(self, folder: int) -> KeptPages:
        """Return the pages that follow, for one restore from the images in `folder`."""
        return KeptPages(self, folder)


class KeptPages:
    """The pages of a template during one restore; has the interface of `LazyPages`."""

    def __init__(self, template: Template, folder: int) -> None:
        self._template, self._folder = template, folder
        self._line: KeeperLine | None = None
        self._root: ProcessIdentity | None = None

    def __enter__(self) -> KeptPages:
        """Have the keeper wait for CRIU."""
        try:
            self._line = KeeperLine(self._template.keeper)
        except OSError as error:
            raise _gone(error.strerror or str(error)) from error
        tasks = len(read(self._folder, "pstree.img", "PSTREE"))
        with lazy_socket.listen(self._folder) as listening:
            self._line.send({"restore": tasks}, listening.fileno())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._line is not None:  # the keeper drops a copy that was not about to run
            self._line.close()

    def watch(self, root: ProcessIdentity) -> None:
        """Note the tree's root; `watched` sends it."""
        self._root = root

    def watched(self) -> None:
        """Have the tree end with the keeper; to be called before it runs."""
        assert self._root is not None
        self._ask({"root": [self._root.pid, self._root.start_time]})

    def about_to_run(self) -> None:
        """Note that from here on both outlive criuctl."""
        self._ask({"run": True})

    def finish(self) -> None:
        """Return at once: the keeper goes on."""

    def _ask(self, what: dict[str, object]) -> None:
        assert self._line is not None
        try:
            self._line.ask(what)
        except KeeperGone as error:
            raise _gone(error.message) from error


def _gone(why: str) -> RestoreFailed:
    return RestoreFailed(f"the template cannot be used: {why}", hint="Fork again.")


def possible(manifest: Manifest) -> bool:
    """Return whether the memory of this checkpoint can be a template here."""
    return bool(manifest.memory) and manifest.gpu is None and has_userfaultfd()


@contextmanager
def made(config: Config, manifest: Manifest, reader: CheckpointReader) -> Iterator[Template]:
    """Read the memory and start a keeper; it ends by itself when this block and all copies have
    ended.

    Raises what reading a checkpoint raises. To be called where no other thread runs.
    """
    _check_room(sum(image.data.size for image in manifest.memory))
    memory = os.memfd_create("template", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        images = materialise.read_template(manifest, reader, memory)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
        spans = {image.key.id: image.spans() for image in images if image.key.kind == "task"}
        keeper = template_keeper.start(config, memory, spans)
        with closing(KeeperLine(keeper)) as owner:
            owner.ask({"owner": True})
            yield Template(manifest.id, memory, images, keeper)
    finally:
        os.close(memory)


def _check_room(size: int) -> None:
    """Raise `RestoreFailed` if the host has no room for the template."""
    if (free := available_memory()) < size:
        raise RestoreFailed(
            f"the memory of the copies takes {size >> 20} MiB once, and {free >> 20} MiB are free",
            hint="End what needs memory, or fork on another host.",
        )
