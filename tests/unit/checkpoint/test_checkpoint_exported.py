"""A checkpoint as a file: into another store whole, or not at all."""

from __future__ import annotations

import os
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3
from support import checkpoints as kit
from support import golden

from criuctl.checkpoint.exported import Key
from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.errors import (
    Conflict,
    DataError,
    KeyMissing,
    StoreFull,
    UnsupportedFormat,
    UsageError,
    WrongKey,
)
from criuctl.ops import transfer
from criuctl.ops.transfer import Exported, Imported, Seal
from criuctl.report import Reporter
from criuctl.store import archive
from criuctl.store.local import LocalStore

# More chunks than a manifest names itself, the same content in two streams, and secrets.
CONTENT = kit.Content(kit.SMALL.memory, kit.SMALL.images, kit.SMALL.file, window=4096)
OTHER = kit.Content(os.urandom(1 << 20), {"inventory.img": b"other"}, b"other file")
NAME = "far-travelled"  # a shorter one may be met by chance in what is encrypted
CUTS = (0, 1, 7, 8, 15, 16, 25, 27, 100, -33, -32, -1)


class Host:
    """A store in a folder, with the keys and caches of a host of its own."""

    def __init__(
        self, path: Path, *, encrypted: bool = False, passphrase: bytes | None = None
    ) -> None:
        path.mkdir()
        self.path = path
        self.config = kit.config(path, store=str(path / "store"), workers=1)  # one pack at a time
        if passphrase is not None:
            phrase = secret(path / "phrase", passphrase)
            self.config = self.config.with_options(passphrase_file=str(phrase))
        store = LocalStore(self.config.store)
        self.repository = Repository.init(
            store, encryption=encrypted, passphrase=passphrase, config=self.config
        )

    @property
    def key(self) -> Path:
        return next((self.path / "keys").glob("*.key"))

    def export(
        self, ref: str, target: Path | int, seal: Seal | None = None, **more: bool
    ) -> Exported:
        return transfer.export(self.config, ref, target, reporter=Reporter(), seal=seal, **more)

    def import_(
        self, source: Path | int, key: Key | None = None, name: str | None = None
    ) -> Imported:
        return transfer.import_(self.config, source, reporter=Reporter(), key=key, name=name)

    def objects(self) -> dict[str, int]:
        return {info.name: info.size for info in self.repository.store.list()}


def secret(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def lend(owner: Host, other: Host) -> None:
    """Bring the store's key to the other host."""
    (other.path / "keys").mkdir(mode=0o700, exist_ok=True)
    secret(other.path / "keys" / owner.key.name, owner.key.read_bytes())


@pytest.fixture
def source(tmp_path: Path) -> Host:
    """A plain store with a checkpoint between two others."""
    host = Host(tmp_path / "source")
    kit.write(host.repository, OTHER)
    kit.write(host.repository, CONTENT, labels={"why": "upgrade"})
    kit.write(
        host.repository,
        kit.Content(CONTENT.memory[4096:] + bytes(4096), CONTENT.images, b"newer", window=4096),
    )
    return host


@pytest.fixture
def target(tmp_path: Path) -> Host:
    return Host(tmp_path / "target")


@pytest.mark.parametrize("encrypted", [(False, False), (True, True), (True, False), (False, True)])
def test_there_and_back(tmp_path: Path, encrypted: tuple[bool, bool]) -> None:
    source, target = (
        Host(tmp_path / "a", encrypted=encrypted[0]),
        Host(tmp_path / "b", encrypted=encrypted[1]),
    )
    kit.write(source.repository, OTHER, session=NAME)
    written = kit.write(source.repository, CONTENT, session=NAME, labels={"why": "upgrade"})
    before = source.objects()
    file = tmp_path / "web.criuctl"
    exported = source.export(f"{NAME}@2", file).to_dict()
    assert (exported["checkpoint"], exported["number"], exported["encrypted"]) == (
        written.id,
        2,
        encrypted[0],
    )
    assert exported["bytes"]["file"] == file.stat().st_size
    assert file.stat().st_mode & 0o777 == 0o600
    assert source.objects() == before
    data = file.read_bytes()
    assert len(data) < len(OTHER.memory)  # nothing of the other one is in it
    if encrypted[0]:
        assert exported["key"]["kind"] == "file"
        for word in (b"canary", NAME.encode(), b"upgrade"):
            assert word not in data
        lend(source, target)
    imported = target.import_(file).to_dict()
    assert (imported["checkpoint"], imported["session"], imported["number"]) == (
        written.id,
        NAME,
        1,
    )
    assert imported["imported"]
    assert imported["labels"] == {"why": "upgrade"}
    assert imported["origin"] == {"store": source.repository.id, "session": NAME, "number": 2}
    assert imported["warnings"] == []
    there, here = (
        kit.check(target.repository, NAME, CONTENT),
        source.repository.manifest(f"{NAME}@2"),
    )
    assert (there.created, there.session, there.host, there.processes) == (
        here.created,
        here.session,
        here.host,
        here.processes,
    )
    target.import_(_again(target, tmp_path))  # an import can be exported, and its origin stays


def _again(host: Host, tmp_path: Path) -> Path:
    file = tmp_path / "again.criuctl"
    assert host.export(NAME, file).manifest.extra["origin"]["number"] == 2
    return file


@pytest.mark.parametrize(("version", "newest"), [("1", 1), ("1-layers", 2)])
def test_the_golden_checkpoints_travel_and_golden_files_are_read(
    tmp_path: Path, target: Host, version: str, newest: int
) -> None:
    folder = golden.FOLDER / version
    key = Key(file=secret(tmp_path / golden.KEY, (folder / golden.KEY).read_bytes()))
    for name in ("plain", "encrypted"):
        shutil.copytree(folder / name, tmp_path / name)
        config = kit.config(tmp_path, store=str(tmp_path / name))
        config = (
            config.with_options(key_file=str(tmp_path / golden.KEY))
            if name == "encrypted"
            else config
        )
        transfer.export(config, "golden", tmp_path / f"{name}.criuctl", reporter=Reporter())
        for file in (tmp_path / f"{name}.criuctl", folder / f"{name}.exported"):
            done = target.import_(
                file, key=key if name == "encrypted" else None, name=file.stem + file.suffix[1:]
            )
            assert done.summary.labels == {"made": "by hand"}
            content = golden.contents()[newest]
            manifest = target.repository.manifest(done.summary)
            reader = target.repository.reader(Reporter())
            assert kit.placed(reader, manifest.memory[0].data) == content.memory
            assert reader.read(manifest.image_data) == b"".join(content.images.values())
            target.repository.remove(done.summary)


def test_imported_twice_it_is_there_once(tmp_path: Path, source: Host, target: Host) -> None:
    file = tmp_path / "file"
    source.export("web@2", file)
    first = target.import_(file)
    before = target.objects()
    second = target.import_(file)
    assert (first.done, second.done) == (True, False)
    assert second.summary == first.summary
    with pytest.raises(Conflict, match="as web@1"):
        target.import_(file, name="other")
    assert target.objects() == before
    assert not source.import_(file).done
    target.repository.remove(first.summary)
    assert target.import_(file).summary.number == 2  # a number is never used twice


def test_it_becomes_the_newest_of_its_session_or_of_the_one_named(
    tmp_path: Path, source: Host, target: Host
) -> None:
    file = tmp_path / "file"
    source.export("web@2", file)
    kit.write(target.repository, OTHER, session="web")
    stored = sum(target.objects().values())
    assert target.import_(file, name="copy").summary.object.endswith(
        source.repository.resolve("web@2").id
    )
    assert sum(target.objects().values()) > stored
    # a session of its own
    assert kit.check(target.repository, "copy", CONTENT).session.id != "ab" * 16
    target.repository.remove(target.repository.resolve("copy"))
    again = target.import_(file)
    assert (again.summary.session, again.summary.number) == ("web", 2)
    assert again.summary.bytes["stored"] == 0  # its content was there


def test_a_session_of_the_same_name_is_reported(tmp_path: Path, source: Host, target: Host) -> None:
    file = tmp_path / "file"
    source.export("web@2", file)
    with target.repository.writer(Reporter()) as writer:
        manifest = kit.fill(writer, OTHER)
        writer.commit(manifest.with_use(session=manifest.session.with_use(id="cd" * 16)))
    (warning,) = target.import_(file).warnings
    assert "another session named 'web'" in warning
    assert "web@1" in warning


# -- damage
# ---------------------------------------------------------------------------------------------


def refused(target: Host, file: Path) -> DataError:
    """The import ends with 8 and nothing else is in the store."""
    before = target.objects()
    with pytest.raises(DataError) as caught:
        target.import_(file)
    assert caught.value.exit_code == 8
    assert str(file) in caught.value.message
    assert target.objects() == before
    return caught.value


def test_every_cut_is_reported_and_leaves_nothing(
    tmp_path: Path, source: Host, target: Host
) -> None:
    source.export("web@2", tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    for cut in (*CUTS, *(len(data) * part // 7 for part in range(1, 7))):
        (tmp_path / "cut").write_bytes(data[:cut])
        assert "cut off" in refused(target, tmp_path / "cut").message, cut
    (tmp_path / "cut").write_bytes(data + b"\0")
    assert "1 bytes follow its end" in refused(target, tmp_path / "cut").message


def test_every_flipped_bit_is_reported_and_leaves_nothing(
    tmp_path: Path, source: Host, target: Host
) -> None:
    source.export("web@2", tmp_path / "whole")
    data = bytearray((tmp_path / "whole").read_bytes())
    places = [
        *(cut % len(data) for cut in CUTS),
        *(len(data) * part // 23 for part in range(1, 23)),
    ]
    for place in places:
        data[place] ^= 0x10
        (tmp_path / "flipped").write_bytes(data)
        refused(target, tmp_path / "flipped")
        data[place] ^= 0x10
    (tmp_path / "flipped").write_bytes(data)
    assert target.import_(tmp_path / "flipped").done


def sections(data: bytes) -> list[tuple[bytes, bytes]]:
    """(name, content) of each section."""
    found, at = [], archive.HEADER.size
    while at < len(data):
        size, words, _zero = archive.SECTION.unpack_from(data, at)
        at += archive.SECTION.size
        found.append((data[at : at + words], data[at + words : at + words + size]))
        at += words + size
    return found


def forge(path: Path, parts: list[tuple[bytes, bytes]]) -> Path:
    """A file of these sections, with the digest that fits."""
    data = archive.HEADER.pack(archive.MAGIC, archive.VERSION, 0, 0)
    for name, content in parts[:-1]:
        data += archive.SECTION.pack(len(content), len(name), 0) + name + content
    data += archive.SECTION.pack(archive.DIGEST_SIZE, len(archive.END), 0) + archive.END
    path.write_bytes(data + blake3(data).digest())
    return path


def test_a_forged_archive_is_refused_though_the_digest_fits(tmp_path: Path, target: Host) -> None:
    source = Host(tmp_path / "sealed", encrypted=True)
    kit.write(source.repository, CONTENT)
    kit.write(source.repository, OTHER)
    lend(source, target)
    for number in (1, 2):
        source.export(f"web@{number}", tmp_path / str(number))
    parts, others = (sections((tmp_path / str(number)).read_bytes()) for number in (1, 2))
    assert [name.partition(b"/")[0] for name, _ in parts] == [
        b"config",
        b"packs",
        b"index",
        b"checkpoints",
        b"end",
    ]

    def changed(index: int, edit: Callable[[bytes], bytes]) -> list[tuple[bytes, bytes]]:
        return [
            (name, edit(content)) if n == index else (name, content)
            for n, (name, content) in enumerate(parts)
        ]

    def flip(at: int) -> Callable[[bytes], bytes]:
        return lambda content: content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    before = target.objects()
    forged = {
        "config": changed(
            0, lambda c: c.replace(b'"file"\n', b'"none"\n').replace(b"aes-256-gcm", b"none")
        ),
        "config's date": changed(0, lambda c: c.replace(b'"created": "2', b'"created": "3')),
        "pack": changed(1, flip(500)),
        "index": changed(2, flip(-1 + len(parts[2][1]))),
        "manifest": changed(3, flip(200)),
        "another's manifest": [*parts[:3], others[3], parts[4]],
        "two manifests": [*parts[:4], others[3], parts[4]],
        "no manifest": [*parts[:3], parts[4]],
        "no config": parts[1:],
        "no packs": [parts[0], *parts[2:]],
        "another's packs": [parts[0], *others[1:3], *parts[3:]],
        "twice": [parts[0], *parts],
        "a path": [*parts[:4], (b"packs/../../x", b""), parts[4]],
        "another object": [*parts[:4], (b"sessions/00", b""), parts[4]],
    }
    for what, made in forged.items():
        with pytest.raises(DataError):
            target.import_(forge(tmp_path / "forged", made))
        assert target.objects() == before, what
    assert target.import_(forge(tmp_path / "forged", parts)).done  # the forger's tools work


def test_other_files_are_no_exported_checkpoints(tmp_path: Path, target: Host) -> None:
    (tmp_path / "text").write_text("hello, world: this is a text, and longer than a header\n")
    newer = archive.HEADER.pack(archive.MAGIC, archive.VERSION + 1, 0, 0) + bytes(99)
    (tmp_path / "newer").write_bytes(newer)
    for name, words in (
        ("text", "not a checkpoint that criuctl exported"),
        ("newer", "export format 2"),
    ):
        found = refused(target, tmp_path / name)
        assert isinstance(found, UnsupportedFormat)
        assert words in found.message
    for wrong in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UsageError):
            target.import_(wrong)


# -- keys
# -----------------------------------------------------------------------------------------------


def test_what_opens_a_file_is_what_was_chosen(tmp_path: Path) -> None:
    source, target = Host(tmp_path / "a", encrypted=True), Host(tmp_path / "b")
    kit.write(source.repository, CONTENT)
    file, phrase = tmp_path / "file", b"correct horse"
    asked: list[bytes] = []

    def ask() -> bytes:
        asked.append(phrase)
        return phrase

    source.export("web", file)
    with pytest.raises(KeyMissing) as missing:
        target.import_(file, Key(ask=ask))
    print_ = source.export("web", tmp_path / "other").key["fingerprint"]
    assert print_ in missing.value.hint
    with pytest.raises(KeyMissing):  # a key file that is not the one
        target.import_(file, Key(file=tmp_path / "absent.key"))
    assert not asked

    source.export("web", file, Seal("file", key_file=tmp_path / "own.key"), force=True)
    lend(source, target)  # the store's key is of no use
    with pytest.raises(KeyMissing):
        target.import_(file)
    with pytest.raises(WrongKey):
        target.import_(file, Key(file=source.key))
    assert target.import_(file, Key(file=tmp_path / "own.key")).done

    target.repository.remove(target.repository.resolve("web"))
    source.export("web", file, Seal("passphrase", passphrase=phrase), force=True)
    with pytest.raises(KeyMissing):
        target.import_(file)
    with pytest.raises(WrongKey):
        target.import_(file, Key(passphrase=b"wrong"))
    assert target.import_(file, Key(ask=ask)).done
    assert asked == [phrase]

    target.repository.remove(target.repository.resolve("web"))
    assert source.export("web", file, Seal("none"), force=True).key["kind"] == "none"
    assert target.import_(file).done


def test_a_store_with_a_passphrase_exports_with_it(tmp_path: Path) -> None:
    source = Host(tmp_path / "a", encrypted=True, passphrase=b"first words")
    target = Host(tmp_path / "b", encrypted=True, passphrase=b"second words")
    kit.write(source.repository, CONTENT)
    assert source.export("web", tmp_path / "file").key["kind"] == "passphrase"
    with pytest.raises(KeyMissing):
        target.import_(tmp_path / "file")
    phrase = transfer.read_passphrase(source.path / "phrase")
    assert target.import_(tmp_path / "file", Key(passphrase=phrase)).done
    kit.check(target.repository, "web", CONTENT)
    master = tmp_path / "master.key"
    source.repository.export_key(master)
    by_master = Config(
        store=source.config.store,
        key_file=str(master),
        cache_dir=str(tmp_path),
        state_dir=str(tmp_path),
    )
    with pytest.raises(UsageError):
        transfer.export(by_master, "web", tmp_path / "other", reporter=Reporter())
    assert not (tmp_path / "other").exists()


# -- files
# ----------------------------------------------------------------------------------------------


def test_a_file_is_replaced_only_on_request_and_a_failed_export_leaves_nothing(
    tmp_path: Path, source: Host
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    file = folder / "file"
    file.write_text("mine")
    with pytest.raises(Conflict):
        source.export("web@2", file)
    assert file.read_text() == "mine"
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to(file)
    for name in ("fifo", "link"):
        with pytest.raises(UsageError):
            source.export("web@2", folder / name, force=True)
    with pytest.raises(UsageError):
        source.export("web@2", folder / "no" / "file")
    for pack in (Path(source.config.store) / "packs").rglob("*"):
        if pack.is_file():
            data = bytearray(pack.read_bytes())
            data[300] ^= 1
            pack.chmod(0o600)
            pack.write_bytes(data)
    with pytest.raises(DataError):
        source.export("web@1", file, force=True)
    assert file.read_text() == "mine"
    assert sorted(path.name for path in folder.iterdir()) == ["fifo", "file", "link"]


def test_a_file_may_have_the_longest_of_names(tmp_path: Path, source: Host, target: Host) -> None:
    file = tmp_path / ("\u0436" * 127)  # 254 bytes
    source.export("web@2", file)
    assert target.import_(file).done and [
        path for path in tmp_path.iterdir() if path.is_file()
    ] == [file]


def test_force_replaces_it_at_once(tmp_path: Path, source: Host, target: Host) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    source.export("web@2", file, force=True)
    assert target.import_(file).done
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_pipes_at_both_ends(tmp_path: Path, source: Host, target: Host) -> None:
    source.export("web@2", tmp_path / "file")
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as pipe:
            source.export("web@2", pipe.fileno())

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert target.import_(reading).done
    finally:
        thread.join()
        os.close(reading)
    kit.check(target.repository, "web", CONTENT)


def test_a_pipe_that_is_too_large_for_the_memory_is_refused(
    tmp_path: Path, target: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "available_memory", lambda: 100)
    reading, writing = os.pipe()
    os.write(writing, archive.MAGIC + bytes(51))
    os.close(writing)
    try:
        with pytest.raises(StoreFull, match="too large"):
            target.import_(reading)
    finally:
        os.close(reading)


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path, source: Host) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(StoreFull):
            source.export("web@2", full)
    finally:
        os.close(full)
    assert kit.pipeline_threads() == []


def test_sections_are_what_the_format_says(tmp_path: Path, source: Host) -> None:
    source.export("web@2", tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    assert data[:16] == b"CRIUCTLX" + struct.pack("<HHI", 1, 0, 0)
    *_objects, (name, digest) = sections(data)
    assert name == b"end"
    assert digest == blake3(data[:-32]).digest()
