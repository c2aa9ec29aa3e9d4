"""A store that fails on request: for tests of what is built on stores.

    store = FaultyStore(MemoryStore(), put="..E", get="T", seconds=0.1)

Each verb has a string with one letter per call of it, in order of arrival; calls beyond its end
pass, unless the string ends in ``*``: then its last letter stays in force.  `list` counts by
iteration begun.

    .  passes
    E  StoreUnreachable, nothing was done
    A  done, then StoreUnreachable
    D  StoreDenied
    F  StoreFull, nothing was done
    T  reads: the last byte is missing from what is returned
    W  reads: one bit is wrong;  put: one bit is stored wrongly
    M  ObjectMissing, although it may be there
    L  `seconds` late, then passes
    H  calls `hook(verb, name)` first, then passes
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from criuctl.errors import ObjectMissing, StoreDenied, StoreFull, StoreUnreachable
from criuctl.store.base import Capabilities, Data, ObjectInfo, Store, as_views


class FaultyStore(Store):
    """See the module's docstring."""

    def __init__(
        self,
        inner: Store,
        *,
        seconds: float = 0.05,
        hook: Callable[[str, str], None] | None = None,
        **faults: str,
    ) -> None:
        self.inner = inner
        self.url = inner.url
        self.faults = faults
        self.seconds = seconds
        self.hook = hook
        self.calls: list[tuple[str, str, str]] = []  # verb, name, letter
        self._lock = threading.Lock()
        self._count: dict[str, int] = {}

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        with self._spoilt("put", name) as letter:
            if letter == "W":
                data = _wrong(b"".join(as_views(data)))
            self.inner.put(name, data, if_absent=if_absent)

    def get(self, name: str, limit: int | None = None) -> bytes:
        with self._spoilt("get", name) as letter:
            return _spoil(self.inner.get(name, limit), letter)

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        with self._spoilt("get_range", name) as letter:
            return _spoil(self.inner.get_range(name, offset, length), letter)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        with self._spoilt("read_into", name) as letter:
            self.inner.read_into(name, offset, buffer)
            if letter == "W" and buffer.nbytes:
                buffer[-1] ^= 1  # a read may begin before what it is for, but it ends with it

    def stat(self, name: str) -> ObjectInfo:
        with self._spoilt("stat", name):
            return self.inner.stat(name)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._spoilt("list", prefix):
            yield from self.inner.list(prefix)

    def delete(self, name: str) -> None:
        with self._spoilt("delete", name):
            self.inner.delete(name)

    def create(self) -> None:
        with self._spoilt("create", ""):
            self.inner.create()

    def probe(self) -> Capabilities:
        with self._spoilt("probe", ""):
            return self.inner.probe()

    def check_writable(self) -> None:
        with self._spoilt("check_writable", ""):
            self.inner.check_writable()

    def sweep(self, older_than: float) -> int:
        return self.inner.sweep(older_than)

    def close(self) -> None:
        self.inner.close()

    def _letter(self, verb: str, name: str) -> str:
        with self._lock:
            number = self._count.get(verb, 0)
            self._count[verb] = number + 1
            plan = self.faults.get(verb, "")
            if plan.endswith("*"):
                plan = plan[:-1] + plan[-2] * (number + 1)
            letter = plan[number : number + 1] or "."
            self.calls.append((verb, name, letter))
        return letter

    @contextmanager
    def _spoilt(self, verb: str, name: str) -> Iterator[str]:
        letter = self._letter(verb, name)
        if letter == "E":
            raise StoreUnreachable(f"{verb} {name}: the faulty store does not answer")
        if letter == "D":
            raise StoreDenied(f"{verb} {name}: the faulty store refuses")
        if letter == "F":
            raise StoreFull(f"{verb} {name}: the faulty store is full")
        if letter == "M":
            raise ObjectMissing(f"{verb} {name}: the faulty store hides it", object=name)
        if letter == "L":
            time.sleep(self.seconds)
        if letter == "H" and self.hook is not None:
            self.hook(verb, name)
        yield letter
        if letter == "A":
            raise StoreUnreachable(f"{verb} {name}: the faulty store's answer was lost")


def _spoil(content: bytes, letter: str) -> bytes:
    if letter == "T":
        return content[:-1]
    return _wrong(content) if letter == "W" else content


def _wrong(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:] if content else content
