"""A store over a link, beyond the contract's suite: large objects, long lists, dishonest
clients.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.linking import TIMEOUT, RawEnd
from support.places import LinkedStore

from criuctl.errors import (
    CriuctlError,
    InvalidName,
    LinkLost,
    ObjectMissing,
    StoreCannot,
    StoreDenied,
    UnsupportedFormat,
    UsageError,
)
from criuctl.store import serving
from criuctl.store.local import LocalStore
from criuctl.store.memory import MemoryStore
from criuctl.store.remote import RemoteStore
from criuctl.store.serving import StoreServer
from criuctl.transport import frames
from criuctl.transport.link import Request


@pytest.fixture
def served() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def store(served: MemoryStore) -> Iterator[LinkedStore]:
    store = LinkedStore(served)
    with store:
        yield store


def test_an_object_larger_than_a_message(store: LinkedStore, served: MemoryStore) -> None:
    block = os.urandom(1 << 20)
    pieces = [bytes([number]) + block for number in range(70)]
    store.put("large", pieces, if_absent=True)
    whole = b"".join(pieces)
    assert served.get("large") == whole
    assert store.get("large") == whole
    assert store.get_range("large", 5, len(whole) - 7) == whole[5:-2]
    target = bytearray(40 << 20)
    store.read_into("large", 3, memoryview(target))
    assert target == whole[3 : 3 + (40 << 20)]


def test_a_list_of_many_answers(
    store: LinkedStore, served: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_LISTED", 7)
    names = [f"n/{number:03}" for number in range(50)]
    for name in [*names, "m", "o"]:
        served.put(name, b"x")
    assert [info.name for info in store.list("n/")] == names
    listing = store.list()
    assert next(listing).name == "m"
    served.delete("n/040")
    assert [info.name for info in listing] == [*names[:40], *names[41:], "o"]


def test_errors_name_the_host(store: LinkedStore, tmp_path: Path) -> None:
    with pytest.raises(ObjectMissing, match=r"^there: no/such is not in memory:"):
        store.get("no/such")
    store.link.close()
    with pytest.raises(LinkLost):
        store.get("no/such")


def test_a_refusal_of_the_served_store_is_one_here(tmp_path: Path) -> None:
    class Refusing(LocalStore):
        def check_writable(self) -> None:
            raise StoreDenied("no access", hint="Be root.")

    with (
        LinkedStore(Refusing(str(tmp_path))) as store,
        pytest.raises(StoreDenied, match="there: no access") as info,
    ):
        store.check_writable()
    assert info.value.hint == "Be root."


LIES: list[tuple[str, dict[str, object], type[CriuctlError]]] = [
    ("store.get", {"name": "../../etc/shadow"}, InvalidName),
    ("store.get", {"name": 7}, UsageError),
    ("store.get", {}, UsageError),
    ("store.put", {"name": "/etc/passwd", "if_absent": False}, InvalidName),
    ("store.put", {"name": "a"}, UsageError),
    ("store.put", {"name": "a", "if_absent": 1}, UsageError),
    ("store.put", {"name": "a", "if_absent": False, "upload": "0" * 32, "size": 5}, UsageError),
    ("store.put", {"name": "a", "if_absent": False, "upload": "x"}, UsageError),
    ("store.part", {"upload": "0" * 32, "offset": 1}, UsageError),
    ("store.range", {"name": "o", "offset": -1, "length": 1}, UsageError),
    ("store.range", {"name": "o", "offset": 0, "length": -1}, UsageError),
    ("store.range", {"name": "o", "offset": 0, "length": 1 << 60}, UsageError),
    ("store.range", {"name": "o", "offset": True, "length": 1}, UsageError),
    ("store.stat", {"name": "o\0"}, InvalidName),
    ("store.list", {"prefix": "../", "after": ""}, InvalidName),
    ("store.list", {"prefix": "", "after": None}, UsageError),
    ("store.delete", {"name": ".tmp/x"}, InvalidName),
    ("store.sweep", {"older_than": "x"}, UsageError),
    ("store.burn", {}, UnsupportedFormat),
]


@pytest.mark.parametrize(("verb", "arguments", "error"), LIES)
def test_a_client_that_lies(
    served: MemoryStore, verb: str, arguments: dict[str, object], error: type[CriuctlError]
) -> None:
    served.put("o", b"object")
    with pytest.raises(error) as info:
        StoreServer(served).handle(Request(verb, arguments, b"body"))
    assert type(info.value) is error
    assert [info.name for info in served.list()] == ["o"]


def test_what_waits_in_memory_is_bounded(
    served: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_LARGEST", 1000)
    server = StoreServer(served)
    server.handle(Request("store.part", {"upload": "a" * 32, "offset": 0}, bytes(900)))
    with pytest.raises(StoreCannot):
        server.handle(Request("store.part", {"upload": "b" * 32, "offset": 0}, bytes(101)))
    server.handle(
        Request("store.put", {"name": "o", "if_absent": True, "upload": "a" * 32, "size": 900})
    )
    assert served.get("o") == bytes(900)
    server.handle(Request("store.part", {"upload": "b" * 32, "offset": 0}, bytes(999)))


ODD: list[tuple[str, dict[str, object], bytes]] = [
    ("stat", {}, b""),
    ("stat", {"size": -1, "modified": 1}, b""),
    ("list", {"objects": 5}, b""),
    ("list", {"objects": [["../x", 1, 1]]}, b""),
    ("list", {"objects": [["b", 1, 1], ["a", 1, 1]]}, b""),
    ("list", {"objects": [], "more": True}, b""),
    ("probe", {"kind": 5}, b""),
    ("get", {}, b"xyz"),
]


@pytest.mark.parametrize(("verb", "arguments", "body"), ODD)
def test_a_server_that_makes_no_sense(
    raw: RawEnd, verb: str, arguments: dict[str, object], body: bytes
) -> None:
    link, far = raw()
    far.hello()
    store = RemoteStore(link, "far:store")
    asks = {
        "stat": lambda: store.stat("a"),
        "list": lambda: list(store.list()),
        "probe": store.probe,
        "get": lambda: store.get("a"),
    }
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(asks[verb])
        far.receive()
        far.send(frames.ANSWER, far.receive()[1], {"arguments": arguments}, body)
        with pytest.raises(UnsupportedFormat):
            asked.result(TIMEOUT)
