"""The records of a workspace's files as content of a checkpoint.

A manifest is read as a whole by each restore, so the records of a hundred thousand files are not in
it. They are a stream of JSON lines, one record a line without the fields that have their defaults.
The contents of all regular files are one more stream, in the order of the records: each file begins
with a chunk of its own, so a file is found by adding up the sizes of those before it. The further
names of a file with several names have no contents there.

Both streams come from a store and are not trusted: every record is checked, and every path lies at
or below the workspace.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Iterator

from ..checkpoint import bounds
from ..checkpoint.chunks import CHUNK_ENTRY, StreamRef
from ..checkpoint.file_records import FileRecord, WorkspaceRecord
from ..checkpoint.reader import CheckpointReader
from ..errors import Damaged

FEATURE = "workspace"
_DEFAULTS = FileRecord(path="/", kind="carried").to_dict()


def has_contents(record: FileRecord) -> bool:
    """Return whether a file of this kind and size has a part of the stream of contents."""
    return stat.S_ISREG(record.mode) and record.size > 0


def pack(records: Iterable[FileRecord]) -> Iterator[bytes]:
    """Yield the lines of the index."""
    for record in records:
        body = record.to_dict()
        short = {name: value for name, value in body.items() if value != _DEFAULTS.get(name)}
        yield json.dumps({"path": record.path, **short}, separators=(",", ":")).encode() + b"\n"


def unpack(workspace: WorkspaceRecord, reader: CheckpointReader) -> list[FileRecord]:
    """Return the records, with the place of their contents; raise `Damaged`."""
    lines = reader.read(workspace.index, bounds.FREE_LIST).splitlines()
    chunks = iter(reader.entries(workspace.data))
    found: list[FileRecord] = []
    contents: dict[tuple[int, int], StreamRef] = {}
    for number, line in enumerate(lines):
        where = f"workspace.index[{number}]"
        record = _record(line, workspace.path, where)
        if has_contents(record):
            file = (record.device, record.inode)
            if file not in contents:
                contents[file] = _next(chunks, record.size, where)
            record = record.with_use(data=contents[file])
            record.check(where)
        found.append(record)
    if next(chunks, None) is not None:
        raise _damaged("workspace.data", "has contents of no file")
    return found


def _record(line: bytes, top: str, where: str) -> FileRecord:
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _damaged(where, "is not JSON") from error
    if not isinstance(body, dict) or body.get("kind", "carried") != "carried" or "data" in body:
        raise _damaged(where, "is no record of a file")
    record = FileRecord.from_dict({**body, "kind": "carried"}, where)
    if record.path != top and not record.path.startswith(f"{top.rstrip('/')}/"):
        raise _damaged(where, "lies outside the workspace")
    return record


def _next(chunks: Iterator[tuple[bytes, int]], size: int, where: str) -> StreamRef:
    """Return the next `size` bytes of the contents."""
    packed, rest = bytearray(), size
    while rest > 0:
        chunk = next(chunks, None)
        if chunk is None:
            break
        packed += CHUNK_ENTRY.pack(*chunk)
        rest -= chunk[1]
    if rest:
        raise _damaged(where, "does not fit the contents")
    return StreamRef(size, bytes(packed))


def _damaged(where: str, what: str) -> Damaged:
    return Damaged(
        f"the checkpoint's workspace is not valid: {where} {what}",
        hint="The checkpoint is damaged or was not made by criuctl. Restore it without --rewind.",
    )
