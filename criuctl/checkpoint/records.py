"""Records from outside: typed structs to and from JSON, with every value checked.

A `Record` is a frozen `msgspec.Struct` whose field types are its schema: text, integers, flags,
tuples, mappings, other records, and ``None`` where the type says so. `Record.from_dict` takes a
decoded JSON object that may be hostile and raises `Damaged` that names the field. It accepts no
value that the field's type forbids, and none larger than a manifest can need. Keys that this
version does not know are kept in `Record.extra` and written back by `to_dict`, so
``from_dict(to_dict(x)) == x`` and an old criuctl does not drop what a newer one recorded.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, Union, get_args, get_origin

from msgspec import Struct, field
from msgspec.structs import asdict, fields, replace

from ..errors import Damaged

MAX_TEXT = 1 << 20  # characters of one text; a command line may be long
MAX_ITEMS = 1 << 20  # entries of one list or mapping
MAX_INT = (1 << 64) - 1  # device numbers and addresses are unsigned 64 bit
MAX_DEPTH = 16  # nesting of free-form values
ID = re.compile(r"[0-9a-f]{32}")  # of a session, a checkpoint or a store
SESSION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
DIGEST = re.compile(r"(?:[0-9a-f]{64})?")  # BLAKE3, hex; empty if it was not taken
_MAX_OWNER = (1 << 32) - 1
_MAX_MODE = 0o177777

Check = Callable[[Any, str], Any]


def damaged(where: str, what: str) -> Damaged:
    """Return the error for a value that no criuctl has written."""
    return Damaged(
        f"the manifest is not valid: {where} {what}",
        hint="The checkpoint is damaged or was not made by criuctl.",
    )


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise damaged(where, "is not text")
    return value


def _integer(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -MAX_INT <= value <= MAX_INT:
        raise damaged(where, "is not a 64-bit integer")
    return value


def _number(value: Any, where: str) -> float:
    # An integer is accepted but stays an integer, so that equality survives.
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
        raise damaged(where, "is not a number")
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise damaged(where, "is not true or false")
    return value


def check_any(value: Any, where: str, depth: int = 0) -> Any:
    """Check a free-form JSON value: texts, numbers, lists and depth are bounded."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, int | float):
        return _number(value, where) if isinstance(value, float) else _integer(value, where)
    if depth >= MAX_DEPTH:
        raise damaged(where, "is nested too deeply")
    if isinstance(value, list | tuple) and len(value) <= MAX_ITEMS:
        return [check_any(item, where, depth + 1) for item in value]
    if isinstance(value, dict) and len(value) <= MAX_ITEMS:
        return {_text(key, where): check_any(item, where, depth + 1) for key, item in value.items()}
    raise damaged(where, "is not plain JSON")


def _checker(kind: Any) -> Check:
    """Return the check for one field type."""
    simple: dict[Any, Check] = {
        str: _text,
        int: _integer,
        float: _number,
        bool: _flag,
        Any: check_any,
    }
    if kind in simple:
        return simple[kind]
    if isinstance(kind, type) and hasattr(kind, "from_dict"):
        found: Check = kind.from_dict
        return found
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return lambda value, where: (
            value if value in arguments and isinstance(value, str) else _reject(where, arguments)
        )
    if origin in (Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        inner = _checker(next(a for a in arguments if a is not type(None)))
        return lambda value, where: None if value is None else inner(value, where)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _sequence(_checker(arguments[0]), None)
    if origin is tuple:
        checks = [_checker(a) for a in arguments]
        return _fixed(checks)
    if origin is dict and arguments[0] is str:
        return _mapping(_checker(arguments[1]))
    raise TypeError(f"no check for fields of type {kind!r}")


def _reject(where: str, allowed: tuple[Any, ...]) -> Any:
    raise damaged(where, f"is none of {', '.join(map(str, allowed))}")


def _sequence(check: Check, length: int | None) -> Check:
    def checked(value: Any, where: str) -> tuple[Any, ...]:
        if (
            not isinstance(value, list | tuple)
            or len(value) > MAX_ITEMS
            or length not in (None, len(value))
        ):
            raise damaged(where, "is not a list")
        return tuple([check(item, f"{where}[{n}]") for n, item in enumerate(value)])

    return checked


def _fixed(checks: list[Check]) -> Check:
    def checked(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or len(value) != len(checks):
            raise damaged(where, f"is not a list of {len(checks)}")
        return tuple([check(item, where) for check, item in zip(checks, value, strict=True)])

    return checked


def _mapping(check: Check) -> Check:
    def checked(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, Mapping) or len(value) > MAX_ITEMS:
            raise damaged(where, "is not a mapping")
        return {
            _text(key, where): check(item, f"{where}.{key[:40]}") for key, item in value.items()
        }

    return checked


def plain(value: Any) -> Any:
    """Convert `value` for JSON: records to mappings, tuples to lists."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value


# by field: its check, and whether the field is required
_CHECKS: dict[type, dict[str, tuple[Check, bool]]] = {}


class Confidential(Struct, frozen=True):
    """A record with values that must not appear in a message or a log."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


class Record(Struct, frozen=True, kw_only=True):
    """The base of everything in a manifest; see the module's docstring."""

    extra: dict[str, Any] = field(default_factory=dict)  # keys of a newer version, kept as they are

    def with_use(self, **changes: Any) -> Self:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON, unknown keys included."""
        known = {name: plain(value) for name, value in asdict(self).items() if name != "extra"}
        return {**{k: v for k, v in self.extra.items() if k not in known}, **known}

    @classmethod
    def from_dict(cls, value: Any, where: str = "") -> Self:
        """Return the record in decoded JSON; raise `Damaged`, which names the wrong field."""
        where = where or cls.__name__
        if not isinstance(value, dict):
            raise damaged(where, "is not a mapping")
        checks = _CHECKS.get(cls)
        if checks is None:
            checks = _CHECKS[cls] = {
                f.name: (_checker(f.type), f.required) for f in fields(cls) if f.name != "extra"
            }
        known: dict[str, Any] = {}
        for name, (check, required) in checks.items():
            if name in value:
                known[name] = check(value[name], f"{where}.{name}")
            elif required:
                raise damaged(f"{where}.{name}", "is missing")
        extra = {
            _text(k, where): check_any(v, f"{where}.{k[:40]}")
            for k, v in value.items()
            if k not in checks
        }
        made = cls(**known, extra=extra)
        made.check(where)
        return made

    def check(self, where: str) -> None:
        """Check rules beyond the types; raise `Damaged`."""


def check_pattern(pattern: re.Pattern[str], value: str, where: str) -> None:
    """Raise `Damaged` unless `value` matches all of `pattern`."""
    if pattern.fullmatch(value) is None:
        raise damaged(where, f"has the value {value[:80]!r}, which is not allowed")


def check_range(value: int, low: int, high: int, where: str) -> None:
    """Raise `Damaged` unless ``low <= value <= high``."""
    if not low <= value <= high:
        raise damaged(where, f"has the value {value}, which is not between {low} and {high}")


def check_path(path: str, where: str) -> None:
    """Raise `Damaged` unless `path` is absolute, plain and without ".."."""
    parts = path.split("/")
    if (
        not path.startswith("/")
        or not _of_the_kernel(path)
        or len(path) > 4096
        or ".." in parts
        or "." in parts
    ):
        raise damaged(where, f"is {path[:80]!r}, not a plain absolute path")


def check_text_of_kernel(text: str, where: str) -> None:
    """Raise `Damaged` unless `text` can be a path, a name or the target of a link."""
    if not _of_the_kernel(text):
        raise damaged(where, f"is {text[:80]!r}, which cannot be passed to the kernel")


def check_owner_and_mode(uid: int, gid: int, mode: int, where: str) -> None:
    """Raise `Damaged` unless a file can have these."""
    check_range(uid, 0, _MAX_OWNER, f"{where}.uid")
    check_range(gid, 0, _MAX_OWNER, f"{where}.gid")
    check_range(mode, 0, _MAX_MODE, f"{where}.mode")


def _of_the_kernel(text: str) -> bool:
    try:
        # independent of the locale of the process that reads it
        return b"\0" not in text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
