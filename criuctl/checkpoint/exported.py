"""One checkpoint as one file: a separate store, with its own key, that holds nothing else.

An exported checkpoint is a whole store in an archive (`criuctl.store.archive`): config, packs,
index and the one manifest. It has its own master key, so chunk ids and seals differ from those of
the original store: a person who gets a file and its key learns nothing of that store. The secret
that opens it is chosen at the export; by default it is the one that opens the original store.

`copy` takes a checkpoint's content from one repository to a writer of another, chunk by chunk.
Every chunk is opened, verified by its id, named by the other store's key, compressed and sealed by
its writer, which leaves out chunks that the other store has. Memory is bounded: some MiB are read
ahead, plus the writer's buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from msgspec.structs import replace

from ..config import Config
from ..errors import CriuctlError, Damaged, KeyMissing, StoreNotInitialised, WrongKey
from ..report import Reporter
from ..store import Store
from . import key_files, key_slots, keys
from .chunks import StreamRef
from .codec import fingerprint
from .manifest import Manifest
from .repository import Repository
from .storeconfig import load
from .summary import CheckpointSummary

if TYPE_CHECKING:
    from .buffers import PageBuffer
    from .writer import CheckpointWriter

ORIGIN = "origin"  # the manifest key for the store and checkpoint that it was exported from


class ExportedCheckpoint(Repository):
    """The store in a file; `init` makes one, `unlock` opens one."""

    @classmethod
    def unlock(cls, store: Store, config: Config, key: Key) -> Self:
        """Open the archive; errors as `Repository.open`, naming the file."""
        # A key for the store that is imported into says nothing about the file.
        try:
            about, opened = load(
                store, replace(config, key_file=""), find=key.finder(store.url, config)
            )
        except StoreNotInitialised as error:
            raise Damaged(f"{store.url} is damaged: it has no config", object="config") from error
        return cls(store, config, about, opened)

    def only(self) -> CheckpointSummary:
        """Return its checkpoint; raise `Damaged` if it does not have exactly one readable
        checkpoint.
        """
        unreadable: list[Any] = []
        found = self.list(unreadable=unreadable)
        for error in unreadable:
            raise error
        if len(found) != 1:
            raise Damaged(
                f"{self.store.url} holds {len(found)} checkpoints where there must be one"
            )
        return found[0]

    def _cache_path(self) -> None:
        """Return None: a cache of this store would not be used again."""


class Key:
    """The secret for an exported checkpoint: a key file, a passphrase, or any that this
    host has.

    `ask` is called for a passphrase when one would open it and nothing else has.
    """

    def __init__(
        self,
        *,
        file: Path | None = None,
        passphrase: bytes | None = None,
        ask: Callable[[], bytes] | None = None,
    ) -> None:
        self._file, self._passphrase, self._ask = file, passphrase, ask

    def finder(self, url: str, config: Config) -> keys.Finder:
        """Return the key finder for `storeconfig.load`; its errors name the file `url` and the key
        it needs.
        """

        def find(slots: list[dict[str, Any]], file_id: str, _config: Config) -> keys.Opened:
            if self._file is not None:
                return _by_file(slots, file_id, self._file, url)
            if self._passphrase is not None:
                return _by_passphrase(slots, file_id, self._passphrase, "the passphrase", url)
            for path in _key_files(config):
                # a key of another store, or damaged: irrelevant here
                with suppress(CriuctlError):
                    return _by_file(slots, file_id, path, url)
            if any(slot.get("type") == "passphrase" for slot in slots):
                phrase, source = keys.find_passphrase(config)
                if phrase is not None:
                    with suppress(WrongKey):  # it may be the passphrase of the store
                        return _by_passphrase(
                            slots, file_id, phrase, f"the passphrase from {source}", url
                        )
                if self._ask is not None:
                    return _by_passphrase(slots, file_id, self._ask(), "the passphrase", url)
            raise KeyMissing(
                f"{url} is encrypted, and its key was not found", hint=_wanted(slots, config)
            )

        return find


def _key_files(config: Config) -> Iterator[Path]:
    if config.key_file:
        yield Path(config.key_file)
    with suppress(OSError):
        yield from sorted(Path(config.key_dir).glob("*.key"))


def _by_file(slots: list[dict[str, Any]], file_id: str, path: Path, url: str) -> keys.Opened:
    key = key_files.KeyText.parse(key_files.read_secret(path), str(path))
    master = None if key.master else key_slots.opened_by_key(slots, file_id, key.key)
    if master is None:
        what = (
            "the exported master key"
            if key.master
            else f"the key (fingerprint {fingerprint(key.key)})"
        )
        raise WrongKey(f"{what} in {path} does not open {url}", hint=_wanted(slots))
    return keys.Opened(master, str(path), key, "file", path)


def _by_passphrase(
    slots: list[dict[str, Any]], file_id: str, phrase: bytes, what: str, url: str
) -> keys.Opened:
    master = key_slots.opened_by_passphrase(slots, file_id, phrase)
    if master is None:
        raise WrongKey(f"{what} does not open {url}", hint=_wanted(slots))
    return keys.Opened(master, what, key_files.KeyText(master, master=True), "passphrase")


def _wanted(slots: list[dict[str, Any]], config: Config | None = None) -> str:
    """Describe the keys that would open it."""
    prints = key_slots.fingerprints(slots)
    if not prints:
        return (
            "It wants the passphrase that it was exported with: --passphrase asks for it, "
            "--passphrase-file reads it."
        )
    where = "" if config is None else f": name it by --key-file, or bring it to {config.key_dir}"
    return (
        f"It wants the key file with the fingerprint {', '.join(prints)}{where}. If none was "
        "named at the export, it is that of the store it is from (`criuctl store key --export` "
        "there). Or export it again, with --passphrase or --no-encrypt."
    )


def copy(
    source: Repository, manifest: Manifest, writer: CheckpointWriter, reporter: Reporter
) -> Manifest:
    """Copy all content of a checkpoint of `source` to `writer`; return the manifest for it
    there.

    `Damaged` and `ObjectMissing` name the unreadable object of the source.
    """
    reader = source.reader(reporter)
    wanted = dict.fromkeys(manifest.streams())
    streams = dict.fromkeys(part for ref in wanted for part in ref.parts)
    for ref in streams:
        _give(writer, ref, reader.chunks(ref))
    there = {ref: writer.stream(ref) for ref in streams}
    for ref in wanted:
        if ref.pages is not None and ref.runs is not None:
            there[ref] = StreamRef(ref.size, pages=there[ref.pages], runs=there[ref.runs])
    made = _renamed(manifest, there)
    if made.streams() != [there[ref] for ref in manifest.streams()]:
        raise AssertionError("a stream of the manifest was not copied")
    return made


def _give(writer: CheckpointWriter, stream: StreamRef, contents: Iterator[bytes]) -> None:
    """Copy the chunks of one stream, cut as they were."""
    buffer: PageBuffer | None = None
    fill = 0
    try:
        for content in contents:
            if buffer is not None and fill + len(content) > len(buffer.view):
                full, buffer = buffer, None
                writer.release(full)
            if buffer is None:
                buffer, fill = writer.acquire(), 0
            end = fill + len(content)
            buffer.view[fill:end] = content
            writer.window(stream, buffer, fill, end)
            fill = end
    finally:
        if buffer is not None:
            writer.release(buffer)


def _renamed(manifest: Manifest, there: dict[StreamRef, StreamRef]) -> Manifest:
    """Return the checkpoint's manifest with the new references of its streams."""
    holder = manifest.holder
    if holder is not None:
        scrollback, steps = holder.scrollback, holder.steps
        holder = replace(
            holder, scrollback=scrollback and there[scrollback], steps=steps and there[steps]
        )
    workspace = manifest.workspace
    if workspace is not None:
        workspace = replace(workspace, index=there[workspace.index], data=there[workspace.data])
    return replace(
        manifest,
        workspace=workspace,
        image_data=there[manifest.image_data],
        memory=tuple(
            replace(image, entries=there[image.entries], data=there[image.data])
            for image in manifest.memory
        ),
        files=tuple(
            file if file.data is None else replace(file, data=there[file.data])
            for file in manifest.files
        ),
        links=tuple(replace(link, data=there[link.data]) for link in manifest.links),
        terminals=tuple(
            replace(t, input=t.input and there[t.input], printed=t.printed and there[t.printed])
            for t in manifest.terminals
        ),
        holder=holder,
    )
