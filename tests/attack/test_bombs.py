"""Small files that would become very large: each must be refused as damaged, at once and in little
memory.

Each bomb is made here, sealed as soundly as any exported checkpoint or archive, so that nothing but
the bounds of
``images/FORMAT.md`` ("Bounds") stands against it.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import struct
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import zstandard
from support import checkpoints as kit
from support.command import Criuctl
from support.foreignimages import header, image, pstree

from criuctl.checkpoint import objects
from criuctl.checkpoint.chunks import CHUNK_ENTRY, MAX_CHUNK, StreamRef
from criuctl.checkpoint.codec import OVERHEAD
from criuctl.checkpoint.exported import ExportedCheckpoint
from criuctl.checkpoint.index import PACK
from criuctl.checkpoint.manifest import Manifest, MemoryImage
from criuctl.checkpoint.packs import PACK_ENTRY as RECORD
from criuctl.checkpoint.repository import Repository
from criuctl.checkpoint.summary import CheckpointSummary
from criuctl.checkpoint.writer import CheckpointWriter
from criuctl.criu import images, schema
from criuctl.report import Reporter
from criuctl.store.archive import ArchiveWriter

pytestmark = pytest.mark.slow

MEMORY = 300 << 20  # bytes that criuctl may have at once
SMALL = 2 << 20  # bytes of a bomb's file
SECONDS = 60.0  # for a machine that does much else; the real time is about one second
DAMAGED = 8

# A process between pytest and criuctl: what a fork inherits counts as the child's greatest size,
# and pytest is large.
RUNNER = f"""
import os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({6 << 30}, {6 << 30}))
null = os.open(os.devnull, os.O_WRONLY)
quiet = [(os.POSIX_SPAWN_DUP2, null, 1)]
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=quiet)
_, status, usage = os.wait4(pid, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)
"""


@dataclass(frozen=True)
class Ended:
    """How a criuctl ended."""

    code: int
    memory: int  # bytes at most
    seconds: float
    output: str


def run(criuctl: Criuctl, *arguments: str | Path) -> Ended:
    """Run criuctl with a limit of addresses that spares the machine, and measure it."""
    began = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            RUNNER,
            sys.executable,
            "-m",
            "criuctl",
            *map(str, arguments),
            "--json",
        ],
        env=criuctl.environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    code, memory = map(int, done.stdout.split())
    return Ended(code, memory, time.monotonic() - began, done.stderr[-2000:])


def refused(criuctl: Criuctl, *arguments: str | Path) -> None:
    """A bomb comes to nothing."""
    small(run(criuctl, *arguments), DAMAGED)


def small(ended: Ended, *codes: int) -> None:
    """It ended so, soon and in little memory."""
    assert ended.code in codes, f"{ended}"
    assert ended.memory < MEMORY, f"{ended.memory >> 20} MiB: {ended}"
    assert ended.seconds < SECONDS, f"{ended}"


# -- exported checkpoints
# -------------------------------------------------------------------------------


class Forged:
    """An exported checkpoint with a manifest or objects that no criuctl would write."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self.store = ArchiveWriter(self.fd, str(path))
        self.repository = ExportedCheckpoint.init(
            self.store, encryption=False, config=kit.config(folder, workers=1)
        )

    def writer(self) -> CheckpointWriter:
        return self.repository.writer(Reporter(), patient=True)

    def close(self) -> None:
        self.store.finish()
        os.close(self.fd)


def forged_object(
    kind: objects.Kind, name: str, head: bytes, body: bytes, repository: Repository
) -> bytes:
    """An object as `objects.encode` makes it, compressed as well as can be, whatever its sizes."""
    compress = zstandard.ZstdCompressor(level=9).compress
    parts = [compress(head), compress(body)]
    sizes = [len(part) + OVERHEAD for part in parts]
    prefix = objects.HEADER.pack(
        kind.magic, kind.version, 0, sizes[0], len(head), sizes[1], len(body)
    )
    sealed = [
        repository.sealer.seal(part, b"\0".join((which, name.encode(), prefix)))
        for part, which in zip(parts, (b"h", b"b"), strict=True)
    ]
    return b"".join((prefix, *sealed))


def publish(
    forged: Forged,
    manifest: Manifest,
    change: Callable[[bytes], bytes] = lambda body: body,
    head: bytes = b"",
) -> None:
    """Put the manifest, its JSON changed by `change`."""
    repository = forged.repository
    numbered = manifest.with_use(number=1)
    name = f"checkpoints/{repository.sealer.token(manifest.session.name)}/{1:020d}-{manifest.id}"
    head = head or json.dumps(CheckpointSummary.of(numbered, name).to_stored()).encode()
    body = change(json.dumps(numbered.to_dict()).encode())
    forged.store.put(name, forged_object(objects.MANIFEST, name, head, body, repository))


def with_json(path: Path, folder: Path, change: Callable[[bytes], bytes]) -> None:
    """A sound checkpoint but for its manifest's text."""
    forged = Forged(path, folder)
    with forged.writer() as writer:
        made = kit.fill(writer, kit.SMALL)
        writer.flush()
        publish(forged, made, change)
        writer._publication.committed = True  # its packs stay
    forged.close()


def with_key(content: bytes) -> Callable[[bytes], bytes]:
    """One more key, which a newer version might have written."""
    return lambda body: body[:-1] + b',"newer":' + content + b"}"


def many_values(path: Path, folder: Path) -> None:
    with_json(path, folder, with_key(b"[" + b"[]," * (80 << 20) + b"0]"))


def many_mappings(path: Path, folder: Path) -> None:
    with_json(path, folder, with_key(b"[" + b'{"a":0},' * (4 << 20) + b"0]"))


def long_text(path: Path, folder: Path) -> None:
    with_json(path, folder, with_key(b'"' + b"a" * (250 << 20) + b'"'))


def many_processes(path: Path, folder: Path) -> None:
    one = b'{"pid":1,"ns_pid":1},'
    with_json(
        path,
        folder,
        lambda body: body.replace(b'"processes": [', b'"processes": [' + one * ((1 << 20) - 8)),
    )


def repeated(
    forged: Forged, writer: CheckpointWriter, content: bytes, times: int, *, depth: int
) -> StreamRef:
    """`content`, at most 4 MiB, `times` after each other: one chunk, and lists in which it stands
    again and again.
    """
    kit.put_windows(writer, ("repeated", content[:40], len(content)), content, len(content))
    ref = writer.stream(("repeated", content[:40], len(content)))
    for _ in range(depth):
        entries = CHUNK_ENTRY.size * times
        listed = ref.chunks * times
        size = ref.size * times
        if times <= 64:
            ref = StreamRef(size, listed)
            continue
        piece = ref.chunks * min(times, MAX_CHUNK // CHUNK_ENTRY.size)
        rest = entries // len(piece)
        kit.put_windows(writer, ("list", piece[:40], entries), piece, len(piece))
        inner = writer.stream(("list", piece[:40], entries))
        assert len(inner.chunks) == CHUNK_ENTRY.size
        ref = StreamRef(
            ref.size * len(piece) // CHUNK_ENTRY.size * rest,
            list=StreamRef(len(piece) * rest, inner.chunks * rest),
        )
    return ref


def with_memory(
    path: Path, folder: Path, make: Callable[[Forged, CheckpointWriter], MemoryImage]
) -> None:
    """A checkpoint with one memory image."""
    forged = Forged(path, folder)
    with forged.writer() as writer:
        made = kit.fill(writer, kit.SMALL)
        image = make(forged, writer)
        writer.flush()
        publish(forged, made.with_use(memory=(image,)))
        writer._publication.committed = True
    forged.close()


def repeated_page_list(path: Path, folder: Path) -> None:
    """The list of the pages of an address space is one chunk of 4 MiB, 64 times."""

    def make(forged: Forged, writer: CheckpointWriter) -> MemoryImage:
        entries = repeated(
            forged, writer, struct.pack("<QII", 4096, 1, 4) * (MAX_CHUNK // 16), 64, depth=1
        )
        return MemoryImage("task", 7, 1, entries, StreamRef())

    with_memory(path, folder, make)


def one_long_page_list(path: Path, folder: Path) -> None:
    """The same without repetition: 32 MiB of zeros, in chunks that differ in one byte."""

    def make(_forged: Forged, writer: CheckpointWriter) -> MemoryImage:
        one = struct.pack("<QII", 4096, 1, 4) * (MAX_CHUNK // 16)
        for n in range(16):
            kit.put_windows(
                writer, "entries-long", struct.pack("<QII", 4096 * n, 1, 4) + one[16:], MAX_CHUNK
            )
        return MemoryImage("task", 7, 1, writer.stream("entries-long"), StreamRef())

    with_memory(path, folder, make)


def repeated_chunk_list(path: Path, folder: Path) -> None:
    """The list of chunks of the list of pages is itself one chunk of 4 MiB, 240 times: thirty
    million entries.
    """

    def make(forged: Forged, writer: CheckpointWriter) -> MemoryImage:
        return MemoryImage(
            "task", 7, 1, repeated(forged, writer, bytes(16), 116508 * 60, depth=1), StreamRef()
        )

    with_memory(path, folder, make)


def repeated_runs(path: Path, folder: Path) -> None:
    """The runs of a layered stream are one chunk, repeated."""

    def make(forged: Forged, writer: CheckpointWriter) -> MemoryImage:
        runs = repeated(
            forged, writer, struct.pack("<IHH", 0, 0, 1) * (MAX_CHUNK // 8), 60, depth=1
        )
        kit.put_windows(writer, "page", bytes(range(256)) * 16)
        layered = StreamRef(runs.size // 8 * 4096, pages=writer.stream("page"), runs=runs)
        return MemoryImage("task", 7, 1, layered, StreamRef())

    with_memory(path, folder, make)


def repeated_index(path: Path, folder: Path) -> None:
    """An index segment of 64 MiB that tells the same again and again."""
    forged = Forged(path, folder)
    with forged.writer() as writer:
        made = kit.fill(writer, kit.SMALL)
        writer.flush()
        publish(forged, made)
        writer._publication.committed = True
    record = RECORD.pack(bytes(32), 32, 100, 100)
    for n in range(4):
        packs = [PACK.pack(bytes([n, m]) * 8, 200 << 20, 50000) + record * 50000 for m in range(28)]
        name = f"index/{n:032x}"
        forged.store.put(
            name, forged_object(objects.INDEX, name, b"", b"".join(packs), forged.repository)
        )
    forged.close()


EXPORTED: dict[str, tuple[Callable[[Path, Path], None], tuple[str, ...]]] = {
    "many-values": (many_values, ()),
    "many-mappings": (many_mappings, ()),
    "long-text": (long_text, ()),
    "many-processes": (many_processes, ()),
    "repeated-page-list": (repeated_page_list, ("--maps",)),
    "one-long-page-list": (one_long_page_list, ("--maps",)),
    "repeated-chunk-list": (repeated_chunk_list, ("--maps",)),
    "repeated-runs": (repeated_runs, ("--maps",)),
    "repeated-index": (repeated_index, ("--maps",)),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_checkpoint_stays_as_small_as_its_file(name: str, criuctl: Criuctl) -> None:
    make, options = EXPORTED[name]
    bomb = criuctl.home.path / "bomb.criuctl"
    make(bomb, criuctl.home.path)
    assert bomb.stat().st_size < SMALL
    # Without an index, the packs tell what is in them.
    small(run(criuctl, "show", bomb, *options), *([0] if name == "repeated-index" else []), DAMAGED)
    small(run(criuctl, "import", bomb), 0, DAMAGED)  # what is only long is sound, chunk by chunk


# -- archives and folders of plain images
# -----------------------------------------------------------------


def archive(path: Path, members: dict[str, bytes]) -> None:
    """An archive as podman makes them."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content in members.items():
            about = tarfile.TarInfo(f"checkpoint/{name}")
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    path.write_bytes(zstandard.ZstdCompressor(level=9).compress(made.getvalue()))


def long_header(kind: bytes) -> Callable[[Path], None]:
    """A header of a GiB and more, which tar readers keep whole."""

    def make(path: Path) -> None:
        size = 1500 << 20
        packer = zstandard.ZstdCompressor(level=1)
        with path.open("wb") as file, packer.stream_writer(file) as packed:
            packed.write(header(b"long", kind, size))
            piece = bytes(1 << 20) if kind == b"g" else b"x" * (1 << 20)
            for _ in range(size >> 20):
                packed.write(piece)
            packed.write(
                header(b"checkpoint/pstree.img", b"0", len(pstree(1)))
                + pstree(1).ljust(1024, b"\0")
                + bytes(1024)
            )

    return make


def many_records(path: Path) -> None:
    """An extended header of many records."""
    records, n = b"", 0
    while len(records) < (900 << 10):
        word = b"k%07d=v\n" % n
        records += b"%d %s" % (len(word) + 3, word)
        n += 1
    members = header(b"pax", b"x", len(records)) + records.ljust(
        -(-len(records) // 512) * 512, b"\0"
    )
    members += header(b"checkpoint/other.img", b"0", 0)
    packer = zstandard.ZstdCompressor(level=9)
    with path.open("wb") as file, packer.stream_writer(file) as packed:
        for _ in range(600):
            packed.write(members)
        packed.write(bytes(1024))


def many_members(path: Path) -> None:
    """Two million empty members."""
    packer = zstandard.ZstdCompressor(level=3)
    with path.open("wb") as file, packer.stream_writer(file) as packed:
        block = b"".join(header(b"checkpoint/core-%d.img" % n, b"0", 0) for n in range(1 << 10))
        for _ in range(1 << 11):
            packed.write(block)
        packed.write(bytes(1024))


def descriptors(count: int) -> bytes:
    cls = schema.message("FDINFO")
    return image("FDINFO", [cls(id=1, flags=0, type=1, fd=3)] * count)


def ids(files: int) -> bytes:
    cls = schema.message("IDS")
    return image("IDS", [cls(vm_id=1, files_id=files, fs_id=1, sighand_id=1)])


def many_descriptors(path: Path) -> None:
    """One process with two million descriptors."""
    archive(
        path, {"pstree.img": pstree(1), "ids-1.img": ids(1), "fdinfo-1.img": descriptors(2 << 20)}
    )


def shared_descriptors(path: Path) -> None:
    """Ten thousand processes that share ten thousand descriptors."""
    members = {"pstree.img": pstree(*range(1, 10001)), "fdinfo-1.img": descriptors(10000)}
    archive(path, members | {f"ids-{pid}.img": ids(1) for pid in range(1, 10001)})


def same_process(path: Path) -> None:
    """A hundred thousand times the same process, which has ten thousand mappings."""
    members = {"pstree.img": pstree(*[1] * 100000), "mm-1.img": mappings(10000)}
    archive(path, members)


def mappings(count: int) -> bytes:
    cls = schema.message("MM")
    made = cls()
    for name in (
        "mm_start_code",
        "mm_end_code",
        "mm_start_data",
        "mm_end_data",
        "mm_start_stack",
        "mm_start_brk",
        "mm_brk",
    ):
        setattr(made, name, 0)
    for name in ("mm_arg_start", "mm_arg_end", "mm_env_start", "mm_env_end", "exe_file_id"):
        setattr(made, name, 0)
    for _ in range(count):
        made.vmas.add(start=4096, end=8192, pgoff=0, shmid=0, prot=3, flags=2, status=1, fd=-1)
    return image("MM", [made])


def many_mapped(path: Path) -> None:
    """One process with half a million mappings, all alike."""
    archive(path, {"pstree.img": pstree(1), "mm-1.img": mappings(700000)})


def many_runs(path: Path) -> None:
    """An address space whose pages are listed one by one."""
    head = schema.message("PAGEMAP_HEAD")(pages_id=1).SerializeToString()
    one = schema.message("PAGEMAP")(
        vaddr=4096, compat_nr_pages=1, nr_pages=1, flags=4
    ).SerializeToString()
    content = (
        images.magics("PAGEMAP")
        + struct.pack("<I", len(head))
        + head
        + (struct.pack("<I", len(one)) + one) * (2 << 20)
    )
    archive(path, {"pstree.img": pstree(1), "pagemap-1.img": content})


def wide_dictionary(path: Path) -> None:
    """Compressed by xz, with a dictionary of a GiB."""
    packer = lzma.LZMACompressor(
        filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 20}]
    )
    parts = [
        packer.compress(
            header(b"checkpoint/pstree.img", b"0", len(pstree(1))) + pstree(1).ljust(512, b"\0")
        )
    ]
    parts.append(packer.compress(header(b"checkpoint/pages-1.img", b"0", 1200 << 20)))
    parts += [packer.compress(bytes(1 << 20)) for _ in range(1200)]
    packed = bytearray(b"".join([*parts, packer.compress(bytes(1024)), packer.flush()]))
    size = (packed[12] + 1) * 4  # of the block's header, which says how large the dictionary is
    assert packed[14:16] == b"\x21\x01"
    packed[16] = 36
    packed[12 + size - 4 : 12 + size] = zlib.crc32(packed[12 : 12 + size - 4]).to_bytes(4, "little")
    path.write_bytes(packed)


PLAIN: dict[str, Callable[[Path], None]] = {
    "long-pax-header": long_header(b"x"),
    "long-global-header": long_header(b"g"),
    "long-name": long_header(b"L"),
    "long-link": long_header(b"K"),
    "many-records": many_records,
    "many-members": many_members,
    "many-descriptors": many_descriptors,
    "shared-descriptors": shared_descriptors,
    "same-process": same_process,
    "many-mapped": many_mapped,
    "many-runs": many_runs,
    "wide-dictionary": wide_dictionary,
}


@pytest.mark.parametrize("name", PLAIN)
def test_an_archive_of_images_stays_as_small_as_its_file(name: str, criuctl: Criuctl) -> None:
    bomb = criuctl.home.path / "bomb.tar"
    PLAIN[name](bomb)
    assert bomb.stat().st_size < SMALL
    refused(criuctl, "show", bomb)
