"""The faulty store fails exactly as its letters say: tests of other parts rely on it."""

from __future__ import annotations

import pytest
from support.faulty_store import FaultyStore

from criuctl.errors import ObjectMissing, StoreDenied, StoreFull, StoreUnreachable
from criuctl.store.memory import MemoryStore


def test_without_faults_it_is_the_store_behind_it() -> None:
    store = FaultyStore(MemoryStore())
    store.create()
    store.check_writable()
    store.put("o", [b"con", b"tent"])
    target = bytearray(3)
    store.read_into("o", 1, memoryview(target))
    assert (store.get("o"), store.get_range("o", 2, 2), bytes(target)) == (
        b"content",
        b"nt",
        b"ont",
    )
    assert [info.name for info in store.list()] == ["o"]
    assert store.stat("o").size == 7
    assert store.probe().conditional_create
    store.delete("o")
    assert [verb for verb, _, letter in store.calls if letter != "."] == []


def test_each_letter() -> None:
    met: list[tuple[str, str]] = []
    store = FaultyStore(
        MemoryStore(), put=".EAFDWLH", get=".TWM", hook=lambda verb, name: met.append((verb, name))
    )
    store.put("a", b"ab")
    for kind, left in (
        (StoreUnreachable, False),
        (StoreUnreachable, True),
        (StoreFull, False),
        (StoreDenied, False),
    ):
        with pytest.raises(kind):
            store.put("b", b"ab")
        assert ([info.name for info in store.inner.list("b")] == ["b"]) is left
        store.inner.delete("b")
    for _ in range(3):
        store.put("c", b"ab")
    assert met == [("put", "c")]
    assert [store.get("a"), store.get("a"), store.get("a")] == [b"ab", b"a", b"`b"]
    with pytest.raises(ObjectMissing):
        store.get("a")
    assert store.get("a") == b"ab"


def test_a_star_keeps_the_last_letter_in_force() -> None:
    store = FaultyStore(MemoryStore(), put=".E*", list="E")
    store.put("a", b"x")
    for _ in range(5):
        with pytest.raises(StoreUnreachable):
            store.put("a", b"x")
    with pytest.raises(StoreUnreachable):
        list(store.list())
    assert len(list(store.list())) == 1
