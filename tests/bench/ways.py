"""The ways to dump a tree and to bring it back: criuctl and its peers.

Every way gets the same chances.  CRIU is the one that criuctl uses, with no option that the program
does not need.  By hand, images and the archive go to disk and the archive is copied into the store,
and back, without an fsync (criuctl makes its packs durable); S3 is reached by a command of its own
with boto3's transfer manager.  Next to it, for a folder, is the way without the copies: the
archive is written straight into the store, and read from there.  And the least that any program in
Python could do there (`bench.least`): no peer, but a measure of whether a bound can be kept at all.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from criuctl.config import Config
from criuctl.criu import binary

from .commands import Commands
from .errors import BenchFailed
from .places import Folder, Place, drop_cache
from .program import Tree

PROJECT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Dumped:
    """One dump."""

    seconds: float  # until the checkpoint is where it should be and the command has ended
    frozen: float  # seconds that the tree stood still, as CRIU or criuctl tells
    stored: int  # bytes that came to lie in the place
    new: int = 0  # bytes of memory that criuctl had not seen before, before compression
    peaks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Restored:
    """One restore."""

    seconds: float  # until the first instruction of the program
    ended: float  # until the command had ended
    peaks: Mapping[str, int] = field(default_factory=dict)


class Root(Protocol):
    """The root of a tree, as far as plain CRIU needs to know it."""

    pid: int


class Way(ABC):
    """One way to dump and restore."""

    name: str

    @abstractmethod
    def dump(self, tree: Tree, *, leave_running: bool = False, memory: bool = False) -> Dumped:
        """Dump the tree."""

    @abstractmethod
    def restore(self, tree: Tree, *, memory: bool = False) -> Restored:
        """Restore what `dump` has dumped."""

    @abstractmethod
    def cool(self) -> None:
        """Let no cache hold what it stored, once that is durable: the next restore reads it from
        the disk.
        """

    @abstractmethod
    def clean(self) -> None:
        """Remove everything that it stored: the next dump is the first one."""


# -- criu by itself
# -----------------------------------------------------------------------------------------


class Criu:
    """The CRIU that criuctl uses, from its command line."""

    def __init__(self, commands: Commands) -> None:
        self.argv = list(binary.find(Config()).argv)
        self._commands = commands

    def dump(self, tree: Root, images: Path, *, leave_running: bool) -> tuple[float, float]:
        """Seconds in all, and frozen."""
        done = self._commands.run(
            [*self.to_dump(tree, images), *(["--leave-running"] if leave_running else [])]
        )
        return done.seconds, frozen_seconds(images)

    def restore(self, images: Path) -> float:
        """Seconds until the command has ended."""
        return self._commands.run(self.to_restore(images)).seconds

    def to_dump(self, tree: Root, images: Path) -> list[str]:
        """The command that dumps."""
        return [
            *self.argv,
            "dump",
            "--no-default-config",
            "-t",
            str(tree.pid),
            "-D",
            str(images),
            "-o",
            "dump.log",
        ]

    def to_restore(self, images: Path) -> list[str]:
        """The command that restores."""
        return [
            *self.argv,
            "restore",
            "--no-default-config",
            "-d",
            "-D",
            str(images),
            "-o",
            "restore.log",
        ]


def frozen_seconds(images: Path) -> float:
    """How long the tree stood still, by CRIU's own account of a dump."""
    from pycriu import images as formats

    with (images / "stats-dump").open("rb") as file:
        return int(formats.load(file)["entries"][0]["dump"]["frozen_time"]) / 1e6


class PlainCriu(Way):
    """``criu dump`` to a folder, and nothing else: not compressed, not verified, not elsewhere."""

    def __init__(self, name: str, criu: Criu, folder: Path) -> None:
        self.name = name
        self._criu = criu
        self._images = folder / "images"

    def dump(self, tree: Root, *, leave_running: bool = False, memory: bool = False) -> Dumped:
        self.clean()
        self._images.mkdir()
        os.sync()
        seconds, frozen = self._criu.dump(tree, self._images, leave_running=leave_running)
        return Dumped(seconds, frozen, _size(self._images))

    def restore(self, tree: Tree, *, memory: bool = False) -> Restored:
        os.sync()
        tree.arm()
        began = time.time()
        ended = self._criu.restore(self._images)
        return Restored(tree.resumed_at() - began, ended)

    def cool(self) -> None:
        drop_cache(self._images)

    def clean(self) -> None:
        shutil.rmtree(self._images, ignore_errors=True)


class ByHand(Way):
    """``criu dump``, ``tar | zstd -1 -T0``, a copy to the place; and all the way back.  A folder
    can do `without_copy`.
    """

    def __init__(
        self,
        criu: Criu,
        commands: Commands,
        folder: Path,
        place: Place,
        *,
        without_copy: bool = False,
    ) -> None:
        self.name = "without copy" if without_copy else "by hand"
        self._copied = not without_copy
        self._criu = criu
        self._commands = commands
        self._images = folder / "images"
        self._archive = folder / "images.tar.zst"
        self._place = place
        if without_copy:
            assert isinstance(place, Folder)
            self._archive = place.path("by-hand") / "images.tar.zst"
        for program in ("tar", "zstd"):
            if shutil.which(program) is None:
                raise BenchFailed(f"{program} is missing; install the package {program}")

    def dump(self, tree: Tree, *, leave_running: bool = False, memory: bool = False) -> Dumped:
        self.clean()
        self._images.mkdir()
        self._archive.parent.mkdir(parents=True, exist_ok=True)
        os.sync()
        began = time.monotonic()
        frozen = self._criu.dump(tree, self._images, leave_running=leave_running)[1]
        self._commands.run(
            ["tar", "-C", str(self._images), "-cf", "-", "."],
            then=["zstd", "-1", "-T0", "-q", "-c"],
            into=self._archive,
        )
        if self._copied:
            self._place.upload(self._archive, "by-hand")
        seconds = time.monotonic() - began
        stored = self._archive.stat().st_size
        self._drop_local()
        return Dumped(seconds, frozen, stored)

    def restore(self, tree: Tree, *, memory: bool = False) -> Restored:
        self._images.mkdir()
        os.sync()
        tree.arm()
        began = time.time()
        if self._copied:
            self._place.download("by-hand", self._archive)
        self._commands.run(
            ["zstd", "-dcq", str(self._archive)], then=["tar", "-C", str(self._images), "-xf", "-"]
        )
        self._criu.restore(self._images)
        ended = time.time() - began
        restored = Restored(tree.resumed_at() - began, ended)
        self._drop_local()
        return restored

    def cool(self) -> None:
        self._place.cool("by-hand")

    def clean(self) -> None:
        self._drop_local()
        self._place.empty("by-hand")

    def _drop_local(self) -> None:
        shutil.rmtree(self._images, ignore_errors=True)
        if self._copied:
            self._archive.unlink(missing_ok=True)


class Least(Way):
    """`bench.least` into a folder: neither its CRIU nor its images go to disk."""

    name = "least"

    def __init__(self, criu: Criu, commands: Commands, tmpfs: Path, place: Folder) -> None:
        self._criu = criu
        self._commands = commands
        self._images = tmpfs / "least"
        self._place = place
        self._file = place.path("least") / "images"

    def _run(self, verb: str, command: Sequence[str]) -> float:
        program = [sys.executable, "-I", str(Path(__file__).with_name("least.py"))]
        return self._commands.run(
            [*program, verb, str(self._images), str(self._file), *command]
        ).seconds

    def dump(self, tree: Tree, *, leave_running: bool = False, memory: bool = False) -> Dumped:
        self.clean()
        self._images.mkdir()
        self._file.parent.mkdir(parents=True)
        os.sync()
        seconds = self._run("dump", self._criu.to_dump(tree, self._images))
        frozen = frozen_seconds(self._images)
        shutil.rmtree(self._images)
        return Dumped(seconds, frozen, _size(self._file.parent))

    def restore(self, tree: Tree, *, memory: bool = False) -> Restored:
        self._images.mkdir()
        os.sync()
        tree.arm()
        began = time.time()
        ended = self._run("restore", self._criu.to_restore(self._images))
        restored = Restored(tree.resumed_at() - began, ended)
        shutil.rmtree(self._images)
        return restored

    def cool(self) -> None:
        self._place.cool("least")

    def clean(self) -> None:
        shutil.rmtree(self._images, ignore_errors=True)
        self._place.empty("least")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


# -- criuctl
# ------------------------------------------------------------------------------------------------


class Criuctl(Way):
    """criuctl as it comes: a store as ``store init`` makes it, encrypted."""

    def __init__(
        self,
        commands: Commands,
        folder: Path,
        place: Place,
        program: Sequence[str] = (),
        options: Sequence[str] = (),
        configuration: Mapping[str, str] | None = None,
        restore_options: Sequence[str] = (),
        name: str = "",
    ) -> None:
        self.name = name or " ".join(option.lstrip("-") for option in options) or "criuctl"
        self._configuration = configuration or {}
        self._options = list(options)  # of dump
        self._restore_options = list(restore_options)
        self._commands = commands
        self._folder = folder / "criuctl"
        self._place = place
        self._program = list(program) or [sys.executable, "-m", "criuctl"]
        self._session = "bench"
        self._ready = False

    def environment(self) -> dict[str, str]:
        """The caller's, without what configures criuctl, and with folders of its own."""
        env = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("CRIUCTL_", "AWS_")) or k == "CRIUCTL_CRIU"
        }
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # as it is where pip has installed it
        return env | {
            "PYTHONPATH": str(PROJECT),
            "XDG_CONFIG_HOME": str(self._folder / "config"),
            "CRIUCTL_STORE": self._place.url("criuctl"),
            "CRIUCTL_FILES_SMALL_MIB": "0",  # no peer takes files along
            "CRIUCTL_SHARED_MEMORY_MAX_MIB": "0",
            "CRIUCTL_STATE_DIR": str(self._folder / "state"),
            "CRIUCTL_CACHE_DIR": str(self._folder / "cache"),
            "CRIUCTL_KEY_DIR": str(self._folder / "keys"),
            **self._place.env,
            **self._configuration,
        }

    def prepare(self) -> None:
        """Make the store, unless it is there."""
        if not self._ready:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.command("store", "init")
            self._ready = True

    def command(
        self, *arguments: str, memory: bool = False, parse: bool = True
    ) -> tuple[Any, float, float, Mapping[str, int]]:
        """Run one command: its JSON, when it began, its seconds, and the peaks of its memory."""
        argv = [*self._program, *arguments, *(["--json"] if parse else [])]
        done = self._commands.run(argv, env=self.environment(), memory=memory)
        return json.loads(done.out) if parse else None, done.began, done.seconds, done.peaks

    def dump(self, tree: Tree, *, leave_running: bool = False, memory: bool = False) -> Dumped:
        self.prepare()
        before = self._place.size("criuctl")
        os.sync()
        options = [*self._options, *(["--leave-running"] if leave_running else [])]
        answer, _, seconds, peaks = self.command(
            "dump", str(tree.pid), "--name", self._session, *options, memory=memory
        )
        stored = self._place.size("criuctl") - before
        return Dumped(seconds, answer["frozen_ms"] / 1000, stored, answer["bytes"]["new"], peaks)

    def restore(self, tree: Tree, *, memory: bool = False) -> Restored:
        os.sync()
        tree.arm()
        # The tree shares a file with the bench, which goes on: it must stay the same one.
        answer, began, seconds, peaks = self.command(
            "restore",
            self._session,
            "--files",
            "keep",
            *self._restore_options,
            memory=memory,
        )
        if answer["pid"] != tree.pid:
            raise BenchFailed(
                f"criuctl restored the tree as PID {answer['pid']}, not as {tree.pid}"
            )
        return Restored(tree.resumed_at() - began, seconds, peaks)

    def forget(self) -> None:
        """Remove what criuctl remembers of the store on this host."""
        shutil.rmtree(self._folder / "cache", ignore_errors=True)
        if isinstance(self._place, Folder):
            shutil.rmtree(self._place.path("criuctl") / ".cache", ignore_errors=True)

    def cool(self) -> None:
        self._place.cool("criuctl")

    def clean(self) -> None:
        self._place.empty("criuctl")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._ready = False
