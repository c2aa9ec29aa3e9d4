"""One checkpoint into a file, and back into a store: export and import.

**Export** reads and verifies every chunk that the checkpoint needs and writes a file that holds
only the checkpoint, compressed, and by default encrypted if the store is. The file is written under
a temporary name next to FILE, made durable, and renamed last. So after any failure FILE is whole,
or absent, or what it was.

**Import** reads and checks the whole file first, opens it with its key, and then copies; the
manifest is put last, as by a dump. So after any failure the store lists what it listed before. The
checkpoint keeps its id: a second import finds it and does nothing. It gets the next number of its
session, so it becomes the newest.

A pipe cannot be read again from its start: its content is kept in memory until it is imported, and
never on a disk.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from ..checkpoint import key_files, keys
from ..checkpoint.exported import ORIGIN, ExportedCheckpoint, Key, copy
from ..checkpoint.manifest import Manifest, SessionRef
from ..checkpoint.repository import Repository
from ..checkpoint.summary import CheckpointSummary
from ..config import Config
from ..errors import (
    Conflict,
    Damaged,
    DataError,
    ObjectMissing,
    StoreError,
    StoreFull,
    UnsupportedFormat,
    UsageError,
    WrongKey,
)
from ..host import latest_checkpoints, rights
from ..host.journal import events, operation_facts
from ..host.latest_checkpoints import Latest
from ..host.registry import check_name
from ..host.rights import roles_of
from ..proc import trustedpath
from ..proc.procfs import available_memory
from ..quoting import quoted
from ..report import Reporter
from ..store import open_store
from ..store.archive import MAGIC, ArchiveStore, ArchiveWriter

_PIECE = 1 << 20
_NAME_A_FILE = "Name a file that `criuctl export` wrote, or pipe it in: `criuctl import -`."

Protection = Literal["store", "none", "file", "passphrase"]


class Seal(Struct, frozen=True):
    """The protection of an exported file; ``store``: like the store, opened by the store's key."""

    by: Protection = "store"
    key_file: Path | None = None  # for ``file``: made if it does not exist
    passphrase: bytes | None = None  # for ``passphrase``


class Exported(Struct, frozen=True):
    """The result of an export."""

    manifest: Manifest
    store: str
    file: str
    size: int
    key: dict[str, Any]  # as `Repository.key_info` of the file
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as JSON."""
        m = self.manifest
        return {
            "checkpoint": m.id,
            "session": m.session.name,
            "number": m.number,
            "incarnation": m.incarnation,
            "store": self.store,
            "file": self.file,
            "bytes": {
                "memory": m.bytes.get("memory", 0),
                "files": m.bytes.get("files", 0),
                "file": self.size,
            },
            "encrypted": self.key["kind"] != "none",
            "key": {name: self.key[name] for name in ("kind", "file", "fingerprint")},
            "warnings": self.warnings,
        }


class Imported(Struct, frozen=True):
    """The result of an import; not `done` if the checkpoint was there already."""

    summary: CheckpointSummary
    store: str
    file: str
    done: bool
    origin: dict[str, Any]  # the store that it was exported from, its session and number there
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as JSON."""
        s = self.summary
        return {
            "checkpoint": s.id,
            "session": s.session,
            "number": s.number,
            "incarnation": s.incarnation,
            "store": self.store,
            "file": self.file,
            "imported": self.done,
            "bytes": dict(s.bytes),
            "labels": dict(s.labels),
            "origin": self.origin,
            "warnings": self.warnings,
        }


# -- export


def export(
    config: Config,
    ref: str,
    target: Path | int,
    *,
    reporter: Reporter,
    seal: Seal | None = None,
    force: bool = False,
) -> Exported:
    """Write the checkpoint `ref` to the file `target`, or to an open descriptor; with `force` a
    file may be replaced.
    """
    if isinstance(target, Path):
        _see_place(target, force)
    with _opened(config) as repository:
        reporter.step("resolve", ref=ref)
        summary = repository.resolve(ref)
        manifest = repository.manifest_at(summary.object)
        rights.check(config, "export", manifest.session.name, lambda: roles_of(manifest))
        origin = {
            "store": repository.id,
            "session": manifest.session.name,
            "number": manifest.number,
        }
        packed = replace(manifest, extra={ORIGIN: origin, **manifest.extra})
        protection = _protection(repository, seal or Seal(), config)
        with _written(target, force) as (fd, name):
            reporter.step("export", checkpoint=manifest.id, file=name)
            archive = ArchiveWriter(fd, name)
            made = ExportedCheckpoint.init(archive, config=config, **protection)
            with made.writer(reporter, patient=True) as writer:
                writer.commit(copy(repository, packed, writer, reporter))
            archive.finish()
        reporter.step("done")
        return Exported(
            manifest,
            repository.store.url,
            name,
            archive.size,
            made.key_info(),
            list(reporter.warnings),
        )


def _protection(repository: Repository, seal: Seal, config: Config) -> dict[str, Any]:
    """Return the arguments of `Repository.init` that protect the file."""
    if seal.by == "none" or (seal.by == "store" and not repository.encrypted):
        return {"encryption": False}
    if seal.by == "file":
        return {"encryption": True, "key_file": seal.key_file}
    if seal.by == "passphrase":
        return {"encryption": True, "passphrase": seal.passphrase}
    key = repository.key_info()
    if key["kind"] == "file":
        return {"encryption": True, "key_file": Path(key["file"])}
    if key["kind"] == "passphrase":
        return {"encryption": True, "passphrase": keys.find_passphrase(config)[0]}
    kind = {"recovery": "recovery key", "writer": "key of a write-only host"}.get(
        key["kind"], "exported master key"
    )
    raise UsageError(
        f"the store was opened by its {kind}, which cannot protect a file",
        hint="Choose what opens the file: --key-file FILE or --passphrase.",
    )


def _see_place(target: Path, force: bool) -> None:
    """Refuse early what could not be written, or must not be replaced."""
    try:
        found = target.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(
            f"{target} is no regular file", hint="Name a file, or - for standard output."
        )
    if not force:
        raise Conflict(f"{target} exists", hint="Name a new file, or replace it with --force.")


@contextmanager
def _written(target: Path | int, force: bool) -> Iterator[tuple[int, str]]:
    """Yield a descriptor to write to, and its name for messages; a file gets its name only after
    success.
    """
    if isinstance(target, int):
        yield target, "standard output"
        return
    some = os.fsdecode(os.fsencode(target.name)[:200])  # a name has at most 255 bytes
    temporary = target.with_name(f".{some}.{secrets.token_hex(4)}.part")
    try:
        fd = os.open(
            temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
    except OSError as error:
        raise UsageError(
            f"{target} cannot be written: {error.strerror}",
            hint="Name a file in a folder that exists.",
        ) from error
    try:
        try:
            yield fd, str(target)
            with _errors(target):
                os.fsync(fd)
        finally:
            os.close(fd)
        with _errors(target):
            _publish(temporary, target, force)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


@contextmanager
def _errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror}") from error


def _publish(temporary: Path, target: Path, force: bool) -> None:
    """Give the file its name, durably; without `force` a file of that name that appeared meanwhile
    stays.
    """
    if force:
        _see_place(target, force)
        os.rename(temporary, target)
    else:
        try:
            os.link(temporary, target)
        except FileExistsError:
            raise Conflict(
                f"{target} exists", hint="Name a new file, or replace it with --force."
            ) from None
        except OSError:  # a file system without hard links
            _see_place(target, force)
            os.rename(temporary, target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# -- import


@events.recorded("import", operation_facts.imported)
def import_(
    config: Config,
    source: Path | int,
    *,
    reporter: Reporter,
    key: Key | None = None,
    name: str | None = None,
) -> Imported:
    """Read the checkpoint in the file `source`, or from an open descriptor, into the store.

    With `name` it becomes a checkpoint of that session instead of its original one.

    `UnsupportedFormat`, `Damaged`, `KeyMissing`, `WrongKey` are about the file, store errors about
    the store.
    """
    if name is not None:
        check_name(name)
    with ExitStack() as stack:
        fd, url = _readable(source, stack)
        reporter.step("verify", file=url)
        archive = ArchiveStore.verified(
            fd, url, lambda done, total: reporter.progress("file", done, total)
        )
        packed = stack.enter_context(ExportedCheckpoint.unlock(archive, config, key or Key()))
        manifest = packed.manifest_at(packed.only().object)
        origin = manifest.extra.get(ORIGIN)
        origin = origin if isinstance(origin, dict) else {}
        repository = stack.enter_context(_opened(config, reporter))
        where = repository.store.url
        if (there := _present(repository, manifest.id)) is not None:
            if name not in (None, there.session):
                raise _already(there, where)
            reporter.step("done", already=f"{there.session}@{there.number}")
            return Imported(there, where, url, False, origin, list(reporter.warnings))
        wanted = (
            manifest
            if name is None
            else replace(manifest, session=SessionRef(name, secrets.token_hex(16)))
        )
        _warn_of_another(repository, wanted.session, reporter)
        repository.preflight_write()
        reporter.step("import", checkpoint=manifest.id, store=where)
        uid = wanted.processes[0].uid if wanted.processes else 0
        with repository.writer(reporter, patient=True, uid=uid) as writer:
            try:
                copied = copy(packed, wanted, writer, reporter)
            except ObjectMissing as error:
                raise Damaged(
                    f"{url} is damaged: {error.message}", object=error.details.get("object")
                ) from error
            # it was not needed, but no export has written it so
            for unreadable in packed.index.unreadable:
                raise unreadable
            writer.flush()
            sizes = {
                **manifest.bytes,
                "new": writer.stats.bytes_new,
                "stored": writer.stats.bytes_stored,
            }
            reporter.step("commit")
            # another process was faster
            if (there := _present(repository, manifest.id)) is not None:
                raise _already(there, where)
            summary = writer.commit(replace(copied, bytes=sizes))
        # the operator has made it the newest of that name
        latest_checkpoints.note(config, Latest.of(summary, where), reporter)
        reporter.step("done")
        return Imported(summary, where, url, True, origin, list(reporter.warnings))


def _already(there: CheckpointSummary, where: str) -> Conflict:
    ref = f"{there.session}@{there.number}"
    return Conflict(
        f"{where} has this checkpoint already, as {ref}",
        hint=f"Use it as it is, or remove it first: criuctl rm {quoted(ref)}",
    )


def _present(repository: Repository, checkpoint: str) -> CheckpointSummary | None:
    """Return the checkpoint of this id, if the store has it."""
    catalog = repository.catalog
    names = {
        name: size for name, size in catalog.names().items() if name.endswith(f"-{checkpoint}")
    }
    unreadable: list[DataError] = []
    found = catalog.summaries(names, unreadable)
    for error in unreadable:
        raise error
    return found[0] if found else None


def _warn_of_another(repository: Repository, session: SessionRef, reporter: Reporter) -> None:
    """Warn where the name is that of another session."""
    older = repository.list(session.name)
    if older and older[-1].session_id != session.id:
        reporter.warning(
            f"the store has checkpoints of another session named {session.name!r}; this one is "
            "now the newest of that name",
            f"The one before is {session.name}@{older[-1].number}; `import --as NAME` keeps "
            "sessions apart.",
        )


def _readable(source: Path | int, stack: ExitStack) -> tuple[int, str]:
    """Return a seekable descriptor, and its name for messages; `UntrustedPath` for a path through
    another user's link.
    """
    if isinstance(source, Path):
        return _opened_file(source, stack), str(source)
    url = "standard input"
    try:
        fd = os.dup(source)
    except OSError as error:
        raise UsageError(f"{url} cannot be read: {error.strerror}", hint=_NAME_A_FILE) from error
    stack.callback(os.close, fd)
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd, url
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
        raise UsageError(f"{url} is no regular file", hint=_NAME_A_FILE)
    file = stack.enter_context(os.fdopen(os.memfd_create("criuctl-import", os.MFD_CLOEXEC), "w+b"))
    _keep(fd, file, url)
    return file.fileno(), url


def _opened_file(path: Path, stack: ExitStack) -> int:
    users = {0, os.geteuid()}
    # not abspath(): ".." after a link is another folder than the text says
    walk = trustedpath.opened(os.path.join(os.getcwd(), path), trusted=users, follow_last=False)
    try:
        place = stack.enter_context(walk)
        kind = place.status.st_mode
        if not stat.S_ISREG(kind):
            what = "a link" if stat.S_ISLNK(kind) else "no regular file"
            what = "a folder" if stat.S_ISDIR(kind) else what
            raise UsageError(f"{path} is {what}", hint=_NAME_A_FILE)
        return stack.enter_context(place.reopened())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint=_NAME_A_FILE) from error


def _exactly(fd: int, size: int) -> bytes:
    """Read `size` bytes, or fewer at the end."""
    data = b""
    while len(data) < size and (piece := os.read(fd, size - len(data))):
        data += piece
    return data


def _keep(fd: int, file: BinaryIO, url: str) -> None:
    """Read a pipe to its end into memory, at most half of the free memory."""
    limit = available_memory() // 2
    beginning = _exactly(fd, len(MAGIC))
    if beginning != MAGIC:  # before it takes memory
        raise UnsupportedFormat(f"{url} is not an exported checkpoint", hint=_NAME_A_FILE)
    file.write(beginning)
    while piece := os.read(fd, _PIECE):
        limit -= len(piece)
        if limit < 0:
            raise StoreFull(
                f"what comes from {url} is too large to be held in memory",
                hint="Write it to a file and import that.",
            )
        file.write(piece)
    file.flush()


# -- both


@contextmanager
def _opened(config: Config, making: Reporter | None = None) -> Iterator[Repository]:
    """Yield the configured store; with `making` it may be made, which is reported there."""
    store = open_store(config.store, config)
    try:
        with (
            Repository.open(store, config)
            if making is None
            else Repository.open_or_make(store, config, making)
        ) as repository:
            yield repository
    finally:
        store.close()


def read_passphrase(path: Path) -> bytes:
    """Return the passphrase in a file that only this user can read; raise `KeyMissing`, or
    `WrongKey` for an empty one.
    """
    phrase = key_files.read_secret(path).rstrip(b"\r\n")
    if not phrase:
        raise WrongKey(f"{path} holds no passphrase")
    return phrase


__all__ = ["Exported", "Imported", "Key", "Seal", "export", "import_", "read_passphrase"]
