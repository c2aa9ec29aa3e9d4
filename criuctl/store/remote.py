"""A store on another host, over a link to the criuctl there, where `criuctl.store.serving` answers.

The verbs, their arguments and their answers:

- ``store.put``: name, if_absent, and the object as the body -> nothing.  A large object is sent
  before by ``store.part`` and named by its upload in place of a body.
- ``store.part``: upload, offset, and a part of a large object as the body -> nothing.
- ``store.get``: name -> size, and the object as the body; no body if it is large.
- ``store.range``: name, offset, length -> exactly those bytes as the body.
- ``store.stat``: name -> size, modified.
- ``store.list``: prefix, after -> objects: [[name, size, modified]...], more: bool.
- ``store.delete``: name -> nothing.
- ``store.create`` -> nothing.
- ``store.probe`` -> conditional_create, kind.
- ``store.writable`` -> nothing.
- ``store.sweep``: older_than -> removed.

Errors of the other side's store are raised here as the same classes, with the host's name.  When
the link is lost, so is the answer: `LinkLost` is a `StoreUnreachable`.  The same holds for a
request that is not answered in time, as by a store there that hangs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import Damaged, LinkLost, StoreError, StoreUnreachable, TimedOut, UnsupportedFormat
from .base import (
    Capabilities,
    Data,
    ObjectInfo,
    Store,
    as_views,
    check_limit,
    check_name,
    check_prefix,
    short_object,
    valid_name,
)

if TYPE_CHECKING:
    from ..transport.link import Answer, Link

PIECE = 32 << 20  # bytes of a larger object per message
WHOLE = 64 << 20  # the largest object sent in one message
_PATIENCE = 120.0  # seconds for one request
_SLOWEST = 32 << 10  # bytes a second: time added for contents


class RemoteStore(Store):
    """The store that the other side of `link` serves; the caller closes the link."""

    def __init__(self, link: Link, url: str) -> None:
        self.url = url
        self._link = link

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        check_name(name)
        views = as_views(data)
        arguments: dict[str, Any] = {"name": name, "if_absent": if_absent}
        if sum(view.nbytes for view in views) > WHOLE:
            arguments["upload"] = upload = os.urandom(16).hex()
            offset = 0
            for piece in _pieces(views):
                self._ask("store.part", {"upload": upload, "offset": offset}, piece)
                offset += piece.nbytes
            arguments["size"] = offset
            views = []
        self._ask("store.put", arguments, views)

    def get(self, name: str, limit: int | None = None) -> bytes:
        answer = self._ask("store.get", {"name": check_name(name)})
        size = _number(answer.arguments, "size")
        check_limit(name, self.url, int(size), limit)
        if answer.view.nbytes == size:
            return bytes(answer.view)
        return self.get_range(name, 0, int(size))

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        if length <= PIECE:
            answer = self._ask(
                "store.range", {"name": check_name(name), "offset": offset, "length": length}
            )
            self._complete(name, offset, length, answer)
            return bytes(answer.view)
        whole = bytearray(length)
        self.read_into(name, offset, memoryview(whole))
        return bytes(whole)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        check_name(name)
        target, done = buffer.cast("B"), 0
        while True:  # also for no bytes at all: a missing object is an error
            piece = target[done : done + PIECE]
            arguments = {"name": name, "offset": offset + done, "length": piece.nbytes}
            self._complete(
                name, offset + done, piece.nbytes, self._ask("store.range", arguments, into=piece)
            )
            done += piece.nbytes
            if done >= target.nbytes:
                return

    def stat(self, name: str) -> ObjectInfo:
        answer = self._ask("store.stat", {"name": check_name(name)}).arguments
        return ObjectInfo(name, int(_number(answer, "size")), _number(answer, "modified"))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        after, more = "", True
        while more:
            answer = self._ask("store.list", {"prefix": prefix, "after": after}).arguments
            objects, more = answer.get("objects"), answer.get("more") is True
            if not isinstance(objects, list) or (more and not objects):
                raise self._nonsense()
            for entry in objects:
                info = self._info(entry)
                if info.name <= after or not info.name.startswith(prefix):
                    raise self._nonsense()
                after = info.name
                yield info

    def delete(self, name: str) -> None:
        self._ask("store.delete", {"name": check_name(name)})

    def create(self) -> None:
        """Ask the other side to create it."""
        self._ask("store.create")

    def probe(self) -> Capabilities:
        answer = self._ask("store.probe").arguments
        conditional, kind = answer.get("conditional_create"), answer.get("kind")
        if not isinstance(conditional, bool) or not isinstance(kind, str):
            raise self._nonsense()
        return Capabilities(conditional_create=conditional, kind=kind)

    def check_writable(self) -> None:
        self._ask("store.writable")

    def sweep(self, older_than: float) -> int:
        return int(
            _number(self._ask("store.sweep", {"older_than": older_than}).arguments, "removed")
        )

    # -- inside ------------------------------------------------------------------------------------

    def _ask(
        self,
        verb: str,
        arguments: dict[str, Any] | None = None,
        body: Data = b"",
        *,
        into: memoryview | None = None,
    ) -> Answer:
        size = sum(view.nbytes for view in as_views(body)) + int((arguments or {}).get("length", 0))
        try:
            return self._link.ask(
                verb, arguments, body, into=into, timeout=_PATIENCE + size / _SLOWEST
            )
        except LinkLost:
            raise
        except TimedOut as late:
            raise StoreUnreachable(
                late.message, hint="The store there, or the network between, is too slow."
            ) from late
        except (StoreError, Damaged) as error:
            error.message = f"{self._link.name}: {error.message}"
            error.args = (error.message,)
            raise

    def _complete(self, name: str, offset: int, length: int, answer: Answer) -> None:
        if answer.view.nbytes != length:
            raise short_object(name, self.url, offset, length, answer.view.nbytes)

    def _info(self, entry: object) -> ObjectInfo:
        match entry:
            case [str(name), int(size), int() | float() as modified] if valid_name(name):
                return ObjectInfo(name, size, modified)
        raise self._nonsense()

    def _nonsense(self) -> UnsupportedFormat:
        return UnsupportedFormat(
            f"criuctl on {self._link.name} sent an invalid answer for its store"
        )


def _pieces(views: list[memoryview]) -> Iterator[memoryview]:
    for view in views:
        for begin in range(0, view.nbytes, PIECE):
            yield view[begin : begin + PIECE]


def _number(answer: Mapping[str, Any], key: str) -> float:
    value = answer.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise UnsupportedFormat(f"an answer of the other side's store has no {key}")
    return value
