"""Where a program keeps its pointers to functions of libraries, and where those are (ELF, x86-64).

The files are trusted: they are CRIU and its libraries, which are about to be run.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_LOAD, _DYNAMIC = 1, 2
_STRINGS, _SYMBOLS, _RELA, _RELA_SIZE, _PLT_SIZE, _PLT = 5, 6, 7, 8, 2, 23
_FUNCTION = 2  # STT_FUNC
_FUNCTION_POINTERS = (6, 7)  # R_X86_64_GLOB_DAT, R_X86_64_JUMP_SLOT
_HEADER = struct.Struct("<IIQQQQQQ")
_ENTRY = struct.Struct("<qQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")


def slot(program: bytes, name: str) -> int:
    """Return the address of the program's pointer to this function, from where it is loaded.

    `ValueError` if it has none.
    """
    try:
        elf = _Elf(program)
        for place, symbol, kind in elf.relocations():
            if kind in _FUNCTION_POINTERS and elf.name(symbol) == name.encode():
                return place
    except (struct.error, IndexError, KeyError, StopIteration) as error:
        raise ValueError(f"not a program that was understood: {error!r}") from None
    raise ValueError(f"it does not call {name}()")


def function(library: bytes, name: str) -> int:
    """Return the address of the library's function, from where it is loaded.

    `ValueError` if it has none.
    """
    try:
        elf = _Elf(library)
        for number in range(elf.symbol_count):
            _name, kind, _other, section, value, _size = elf.symbol(number)
            if kind & 0xF == _FUNCTION and section and elf.name(number) == name.encode():
                return value
    except (struct.error, IndexError, KeyError, StopIteration) as error:
        raise ValueError(f"not a library that was understood: {error!r}") from None
    raise ValueError(f"it has no {name}()")


class _Elf:
    """The dynamic tables of one file."""

    def __init__(self, content: bytes) -> None:
        if content[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not an ELF file of 64 bits")
        self._content = content
        (at,), (count,) = (
            struct.unpack_from("<Q", content, 32),
            struct.unpack_from("<H", content, 56),
        )
        headers = [_HEADER.unpack_from(content, at + n * _HEADER.size) for n in range(count)]
        # address, offset, size
        self._loads = [(h[3], h[2], h[5]) for h in headers if h[0] == _LOAD]
        start, size = next((h[2], h[5]) for h in headers if h[0] == _DYNAMIC)
        self._table: dict[int, int] = dict(_ENTRY.iter_unpack(content[start : start + size]))
        self._strings = self._offset(self._table[_STRINGS])
        self._symbols = self._offset(self._table[_SYMBOLS])
        # the names follow the symbols
        self.symbol_count = max(0, self._strings - self._symbols) // _SYMBOL.size

    def symbol(self, number: int) -> tuple[int, int, int, int, int, int]:
        """Return the fields of one symbol."""
        found: tuple[int, int, int, int, int, int] = _SYMBOL.unpack_from(
            self._content, self._symbols + number * _SYMBOL.size
        )
        return found

    def name(self, number: int) -> bytes:
        """Return the name of one symbol."""
        start = self._strings + self.symbol(number)[0]
        return self._content[start : self._content.index(b"\0", start)]

    def relocations(self) -> Iterator[tuple[int, int, int]]:
        """Yield address, symbol and kind."""
        for start, size in ((_PLT, _PLT_SIZE), (_RELA, _RELA_SIZE)):
            if start in self._table:
                first = self._offset(self._table[start])
                entries = self._content[first : first + self._table[size]]
                for place, info, _ in _RELOCATION.iter_unpack(entries):
                    yield place, info >> 32, info & 0xFFFFFFFF

    def _offset(self, address: int) -> int:
        found: int = next(o + address - a for a, o, size in self._loads if a <= address < a + size)
        return found
