"""Serve a store to the other side of a link: the requests of `criuctl.store.remote`.

Nothing that comes over the link is trusted: names, sizes and offsets are checked before the store
sees them, and the memory used for the other side is bounded.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..errors import StoreCannot, UsageError
from ..transport.messages import Answer, unknown_verb
from .base import Store, check_name, check_prefix
from .remote import WHOLE

if TYPE_CHECKING:
    from ..transport.link import Request

_LISTED = 5000  # objects in one answer
_LARGEST = 320 << 20  # bytes of objects that arrive in parts, all together
_UPLOAD = re.compile(r"[0-9a-f]{32}")


class StoreServer:
    """Answers the verbs ``store.*`` from `store`."""

    def __init__(self, store: Store, stored: Callable[[str, int], None] | None = None) -> None:
        """`stored` is called with the name and the size of every object that was put."""
        self._store, self._stored = store, stored
        self._lock = threading.Lock()
        self._parts: dict[str, bytearray] = {}
        self._verbs: dict[str, Callable[[Request], Answer | Mapping[str, Any] | None]] = {
            "store.put": self._put,
            "store.part": self._part,
            "store.get": self._get,
            "store.range": self._range,
            "store.stat": self._stat,
            "store.list": self._list,
            "store.delete": lambda request: self._store.delete(_name(request)),
            "store.create": lambda request: self._store.create(),
            "store.probe": self._probe,
            "store.writable": lambda request: self._store.check_writable(),
            "store.sweep": lambda request: {
                "removed": self._store.sweep(request.argument("older_than", (int, float)))
            },
        }

    def handle(self, request: Request) -> Answer | Mapping[str, Any] | None:
        """Handle these verbs of a link."""
        verb = self._verbs.get(request.verb)
        if verb is None:
            raise unknown_verb(request)
        return verb(request)

    def _put(self, request: Request) -> None:
        body: bytes | memoryview | bytearray = request.body
        if "upload" in request.arguments:
            size = request.argument("size", int)
            with self._lock:
                body = self._parts.pop(_upload(request), bytearray())
            if len(body) != size:
                raise UsageError(f"{size} bytes were announced, {len(body)} came")
        size = len(body)
        self._store.put(_name(request), body, if_absent=request.argument("if_absent", bool))
        if self._stored is not None:
            self._stored(_name(request), size)

    def _part(self, request: Request) -> None:
        upload = _upload(request)
        with self._lock:
            waiting = sum(map(len, self._parts.values()))
            if waiting + len(request.body) > _LARGEST:
                self._parts.pop(upload, None)
                raise StoreCannot(
                    f"more than {_LARGEST >> 20} MiB of large objects at once are not "
                    "accepted over a link"
                )
            parts = self._parts.setdefault(upload, bytearray())
            if request.argument("offset", int) != len(parts):
                del self._parts[upload]
                raise UsageError("the parts of an object are not in their order")
            parts += request.body

    def _get(self, request: Request) -> Answer:
        name = _name(request)
        size = self._store.stat(name).size
        content = self._store.get(name) if size <= WHOLE else b""
        if len(content) > WHOLE:  # it was replaced meanwhile
            size, content = len(content), b""
        return Answer({"size": len(content) if content else size}, content)

    def _range(self, request: Request) -> Answer:
        offset, length = request.argument("offset", int), request.argument("length", int)
        if offset < 0 or not 0 <= length <= WHOLE:
            raise UsageError(f"{length} bytes from {offset} cannot be read")
        return Answer({}, self._store.get_range(_name(request), offset, length))

    def _stat(self, request: Request) -> dict[str, Any]:
        info = self._store.stat(_name(request))
        return {"size": info.size, "modified": info.modified}

    def _list(self, request: Request) -> dict[str, Any]:
        prefix, after = (
            check_prefix(request.argument("prefix", str)),
            request.argument("after", str),
        )
        found = (info for info in self._store.list(prefix) if info.name > after)
        objects = [[info.name, info.size, info.modified] for info in islice(found, _LISTED + 1)]
        return {"objects": objects[:_LISTED], "more": len(objects) > _LISTED}

    def _probe(self, _request: Request) -> dict[str, Any]:
        found = self._store.probe()
        return {"conditional_create": found.conditional_create, "kind": found.kind}


def _name(request: Request) -> str:
    return check_name(request.argument("name", str))


def _upload(request: Request) -> str:
    upload: str = request.argument("upload", str)
    if not _UPLOAD.fullmatch(upload):
        raise UsageError("an upload has no such name")
    return upload
