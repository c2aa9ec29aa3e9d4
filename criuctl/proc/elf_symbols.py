"""The dynamic symbols of a program or library, read where a process has it mapped.

What the process runs counts, not what is at some path; and pages of a file that a process has
mapped can be read at any time. The process may have written anything there: every number is checked
before it is used as a size, loops are bounded, and what makes no sense is a `ValueError`. Only
64-bit files of this byte order are read. Sources: elf(5), the System V ABI, and for the hash table
of symbols glibc's ``elf/dl-lookup.c``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from .memory import PAGE

_HEADER = struct.Struct("<IIQQQQQQ")  # type, flags, offset, vaddr, paddr, filesz, memsz, align
_DYNAMIC, _RELOCATION, _WORD = struct.Struct("<qQ"), struct.Struct("<QQq"), struct.Struct("<I")
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
_LOAD, _OF_LINKER, _EXECUTABLE = 1, 2, 1
_PLTRELSZ, _STRTAB, _SYMTAB, _RELA, _RELASZ, _STRSZ, _JMPREL = 2, 5, 6, 7, 8, 10, 23
_GNU_HASH, _RELACOUNT = 0x6FFFFEF5, 0x6FFFFFF9
_FILLED_BY_NAME = (6, 7)  # R_X86_64_GLOB_DAT, R_X86_64_JUMP_SLOT
_MAX_HEADERS, _MAX_DYNAMIC, _MAX_TABLE, _MAX_CHAIN = 64, 1 << 14, 16 << 20, 1 << 10
_MAX_ADDRESS = 1 << 47

Read = Callable[[int, int], bytes]


class ElfSymbols:
    """The symbols of the file whose beginning is mapped at `start`."""

    def __init__(self, read: Read, start: int) -> None:
        """`read` returns the memory at an address, of a length."""
        self._read = read
        header = self._take(start, 64)
        (table,), (size, count) = (
            struct.unpack_from("<Q", header, 32),
            struct.unpack_from("<HH", header, 54),
        )
        if header[:6] != b"\x7fELF\2\1" or size != _HEADER.size or count > _MAX_HEADERS:
            raise ValueError("it is no 64-bit ELF file")
        headers = list(_HEADER.iter_unpack(self._take(start + table, size * count)))
        segments = [(h[3], h[6], h[1]) for h in headers if h[0] == _LOAD]
        sections = [(h[3], h[6]) for h in headers if h[0] == _OF_LINKER]
        if not segments or not sections:
            raise ValueError("it has no dynamic symbols")
        self._bias = start - (segments[0][0] & -PAGE)
        self._segments = [(self._bias + at, size, flags) for at, size, flags in segments]
        content = self._take(self._bias + sections[0][0], min(sections[0][1], _MAX_DYNAMIC))
        self._dynamic = dict(_DYNAMIC.iter_unpack(content[: len(content) // 16 * 16]))

    def function(self, name: bytes) -> tuple[int, int] | None:
        """Return address and size of an exported function; None if it has none of this name."""
        if _GNU_HASH not in self._dynamic:
            return None
        table = self._address(_GNU_HASH)
        buckets, first, words, _ = struct.unpack("<4I", self._take(table, 16))
        number = 5381
        for letter in name:
            number = (number * 33 + letter) & 0xFFFFFFFF
        place = table + 16 + 8 * words
        index = self._word(place + 4 * (number % max(1, buckets)))
        if index < max(1, first):
            return None
        chain = place + 4 * (buckets - first)
        for entry in range(index, index + _MAX_CHAIN):
            word = self._word(chain + 4 * entry)
            if word | 1 == number | 1 and self._is(entry, name):
                *_, section, value, size = self._symbol(entry)
                return (self._bias + value, size) if section else None
            if word & 1:
                break
        return None

    def slot(self, name: bytes) -> int | None:
        """Return where the address of an imported function is kept; None if it imports none of
        this name.
        """
        for table, size, others in ((_JMPREL, _PLTRELSZ, 0), (_RELA, _RELASZ, _RELACOUNT)):
            if table not in self._dynamic:
                continue
            offset = _RELOCATION.size * self._dynamic.get(others, 0)  # those have no name
            length = self._dynamic.get(size, 0) - offset
            length = max(0, length // _RELOCATION.size * _RELOCATION.size)
            entries = self._take(self._address(table) + offset, length) if length else b""
            slots: dict[int, int] = {
                info >> 32: self._bias + place
                for place, info, _ in _RELOCATION.iter_unpack(entries)
                if info & 0xFFFFFFFF in _FILLED_BY_NAME
            }
            # All at once: a library may have thousands.
            symbols = self._take(
                self._address(_SYMTAB), _SYMBOL.size * (max(slots, default=-1) + 1)
            )
            names = self._take(self._address(_STRTAB), self._dynamic.get(_STRSZ, 0))
            for index, slot in slots.items():
                (at,) = _WORD.unpack_from(symbols, _SYMBOL.size * index)
                if names.startswith(name + b"\0", at):
                    return slot
        return None

    def code(self) -> list[int]:
        """Return where its code begins."""
        return [at for at, _size, flags in self._segments if flags & _EXECUTABLE]

    def unused_code(self, length: int) -> int | None:
        """Return where the last page of its code has so many bytes that belong to nothing."""
        for at, size, flags in self._segments:
            place = at + size + 15 & -16
            end = at + size + PAGE - 1 & -PAGE
            others = (one for one in self._segments if one[0] != at)
            if flags & _EXECUTABLE and place + length <= end:
                if all(end <= other & -PAGE or other + long <= at for other, long, _ in others):
                    return int(place)
        return None

    def _is(self, index: int, name: bytes) -> bool:
        place = self._address(_STRTAB) + self._symbol(index)[0]
        return place < _MAX_ADDRESS and self._read(place, len(name) + 1) == name + b"\0"

    def _symbol(self, index: int) -> tuple[int, ...]:
        place = self._address(_SYMTAB) + _SYMBOL.size * index
        return _SYMBOL.unpack(self._take(place, _SYMBOL.size))

    def _address(self, tag: int) -> int:
        """Return an address of the dynamic section, to which the linker may have added where the
        file is.
        """
        try:
            value = int(self._dynamic[tag])
        except KeyError:
            raise ValueError("its dynamic section is not complete") from None
        return value if value >= self._bias else value + self._bias

    def _word(self, address: int) -> int:
        return int(_WORD.unpack(self._take(address, 4))[0])

    def _take(self, address: int, length: int) -> bytes:
        if not 0 <= address < _MAX_ADDRESS or not 0 <= length <= _MAX_TABLE:
            raise ValueError("its symbols are damaged")
        data = self._read(address, length)
        if len(data) != length:
            raise ValueError("its symbols cannot be read")
        return data
