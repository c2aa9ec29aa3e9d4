"""Memory that follows, gathered instead of put into a process."""

from __future__ import annotations

from criuctl.checkpoint.chunks import StreamRef
from criuctl.checkpoint.opened_chunks import Gathered
from criuctl.checkpoint.reader import CheckpointReader
from criuctl.proc.syscalls import Readable
from criuctl.restore.lazy_memory import StoredMemory


class Memory:
    """The memory of one process, whose pages are those of a stream, from address 0 on."""

    def __init__(
        self, reader: CheckpointReader, ref: StreamRef, gathered: Gathered | None = None
    ) -> None:
        self.source = StoredMemory(reader, gathered)
        self.source.add(1, 0, reader.extents(ref))
        self.content = bytearray(b"?" * ref.size)
        self.order: list[int] = []  # addresses, as they were put

    def put(self, pid: int, address: int, content: Readable) -> None:
        """Take content."""
        assert pid == 1
        self.order.append(address)
        self.content[address : address + len(content)] = content

    def skip(self, pid: int, address: int, length: int) -> None:
        """Take zeros."""
        self.put(pid, address, bytes(length))

    def fill(self) -> bytes:
        """Return all of it."""
        self.source.fill(self.put, self.skip)
        return bytes(self.content)

    def bring(self, address: int) -> list[int]:
        """Have the page at this address brought; return the addresses at which something came."""
        before = len(self.order)
        self.source.bring(1, address, self.put)
        return self.order[before:]
