"""The build-id of a program or library: the note that distinguishes two builds of the same size.

CRIU compares it when it opens a mapped file again (criu/files-reg.c, get_build_id) and looks for it
in the first mebibyte only; so does this module. Any user may have made the file: every number in it
is checked before it is used, and no more than a few kilobytes are read.
"""

from __future__ import annotations

import os
import struct

_SEEN = 1 << 20  # bytes from the beginning that CRIU searches
_MAX_HEADERS = 256
_MAX_NOTES = 1 << 16
_MAX_ID = 64
_PT_NOTE = 4
_NT_GNU_BUILD_ID = 3
_NOTE = struct.Struct("<III")  # name size, description size, type

# class -> (offset of e_phoff in the header, its format, offset of e_phentsize, program header up to
# p_filesz)
_HEADERS = {1: (28, "I", 42, "IIIII"), 2: (32, "Q", 54, "IIQQQQ")}


def build_id(fd: int) -> str:
    """Return the build-id (hex) in the open file `fd`.

    "" for a file that is no ELF file or has none where CRIU looks.
    """
    start = os.pread(fd, 64, 0)
    if (
        len(start) < 64
        or start[:4] != b"\x7fELF"
        or start[4] not in _HEADERS
        or start[5] not in (1, 2)
    ):
        return ""
    order = "<" if start[5] == 1 else ">"
    at, size, count_at, shape = _HEADERS[start[4]]
    (table,) = struct.unpack_from(order + size, start, at)
    entry, count = struct.unpack_from(order + "HH", start, count_at)
    header = struct.Struct(order + shape)
    if entry < header.size or not 0 < count <= _MAX_HEADERS or table + entry * count > _SEEN:
        return ""
    headers = os.pread(fd, entry * count, table)
    for number in range(len(headers) // entry):
        fields = header.unpack_from(headers, number * entry)
        # 32 bit: type, offset, vaddr, paddr, filesz; 64 bit: type, flags, offset, vaddr, paddr,
        # filesz
        kind, offset, length = fields[0], fields[-4], fields[-1]
        if kind == _PT_NOTE and 0 < length <= _MAX_NOTES and offset + length <= _SEEN:
            found = _in_notes(os.pread(fd, length, offset), order)
            if found:
                return found
    return ""


def _in_notes(notes: bytes, order: str) -> str:
    note = _NOTE if order == "<" else struct.Struct(">III")
    at = 0
    while at + note.size <= len(notes):
        name_size, size, kind = note.unpack_from(notes, at)
        name_at = at + note.size
        data_at = name_at + (name_size + 3) // 4 * 4
        if (
            kind == _NT_GNU_BUILD_ID
            and notes[name_at : name_at + name_size] == b"GNU\0"
            and 0 < size <= _MAX_ID
        ):
            data = notes[data_at : data_at + size]
            return data.hex() if len(data) == size else ""
        at = data_at + (size + 3) // 4 * 4
    return ""
