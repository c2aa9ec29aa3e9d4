"""What every store promises, one verb at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.places import Place

from criuctl.errors import Damaged, InvalidName, ObjectExists, ObjectMissing
from criuctl.store import Store

KINDS = ["local", "linked", "memory", "radosgw", "apart", "rclone"]
pytestmark = [pytest.mark.contract, pytest.mark.parametrize("place", KINDS, indirect=True)]


def test_what_was_put_is_got(store: Store, place: Place) -> None:
    other = place.open()
    for size in (0, 1, 4095, 1 << 20, (1 << 20) + 1, 16 << 20):
        content = os.urandom(size)
        store.put("packs/3f/3f9a", content)
        assert store.get("packs/3f/3f9a") == content
        assert store.stat("packs/3f/3f9a").size == size
        assert other.get("packs/3f/3f9a") == content


def test_what_is_larger_than_it_can_be_is_not_read(store: Store) -> None:
    store.put("o", bytes(5000))
    for _turn in range(20):  # the connections go on being of use
        with pytest.raises(Damaged, match="5000 bytes") as caught:
            store.get("o", 4999)
    assert caught.value.details["object"] == "o"
    assert store.get("o", 5000) == store.get("o") == bytes(5000)


def test_several_buffers_are_one_object(store: Store) -> None:
    """More of them than one writev takes, some empty, of every kind, and too large in all to be
    joined.
    """
    pieces: list[bytes | bytearray | memoryview] = []
    for number in range(1500):
        piece = os.urandom(number % 2000)
        pieces += [piece, bytearray(piece), memoryview(piece)[1:], b""]
    store.put("many", pieces)
    assert store.get("many") == b"".join(pieces)


def test_views_of_other_kinds_are_bytes(store: Store) -> None:
    words = memoryview(os.urandom(64)).cast("Q")
    store.put("words", words)
    assert store.get("words") == words.tobytes()


def test_put_replaces(store: Store) -> None:
    store.put("a", b"long old content")
    store.put("a", b"new")
    assert store.get("a") == b"new"


def test_put_if_absent_never_overwrites(store: Store) -> None:
    store.put("a/b", b"first", if_absent=True)
    with pytest.raises(ObjectExists) as caught:
        store.put("a/b", b"second", if_absent=True)
    assert caught.value.details["object"] == "a/b"
    with pytest.raises(ObjectExists):
        store.put("a/b", b"first", if_absent=True)  # the same bytes are still another's
    assert store.get("a/b") == b"first"


def test_put_if_absent_of_a_large_object(store: Store) -> None:
    content = os.urandom(5 << 20)
    store.put("large", [content[: 3 << 20], content[3 << 20 :]], if_absent=True)
    with pytest.raises(ObjectExists):
        store.put("large", content[::-1], if_absent=True)
    assert store.get("large") == content


def test_absence_is_said(store: Store) -> None:
    buffer = memoryview(bytearray(3))
    verbs: list[Callable[[], object]] = [
        lambda: store.get("no/such"),
        lambda: store.get_range("no/such", 0, 3),
        lambda: store.get_range("no/such", 0, 0),
        lambda: store.read_into("no/such", 0, buffer),
        lambda: store.stat("no/such"),
    ]
    for verb in verbs:
        with pytest.raises(ObjectMissing) as caught:
            verb()
        assert "no/such" in caught.value.message
    assert list(store.list()) == []


def test_ranges(store: Store) -> None:
    content = os.urandom(3 << 20)
    store.put("o", content)
    for offset, length in [
        (0, 1),
        (0, len(content)),
        (5, 1 << 20),
        (1, len(content) - 1),
        (len(content) - 1, 1),
        (7, 0),
    ]:
        assert store.get_range("o", offset, length) == content[offset : offset + length]
        target = bytearray(b"\xa5" * (length + 2))
        store.read_into("o", offset, memoryview(target)[1:-1])
        assert target == b"\xa5" + content[offset : offset + length] + b"\xa5"


def test_a_range_beyond_the_end_is_damage(store: Store) -> None:
    store.put("o", b"0123456789")
    for offset, length in [(0, 11), (5, 6), (9, 2), (10, 1), (50, 5)]:
        with pytest.raises(Damaged) as caught:
            store.get_range("o", offset, length)
        assert caught.value.details["object"] == "o"
        with pytest.raises(Damaged):
            store.read_into("o", offset, memoryview(bytearray(length)))


def test_stat_tells_size_and_time(store: Store) -> None:
    store.put("o", b"12345")
    info = store.stat("o")
    assert (info.name, info.size) == ("o", 5)
    assert abs(info.modified - time.time()) < 60
    (listed,) = store.list()
    assert (listed.name, listed.size) == ("o", 5)
    assert abs(listed.modified - info.modified) < 1  # HEAD tells whole seconds


def test_delete(store: Store) -> None:
    store.put("x/y", b"1")
    store.put("x/z", b"2")
    store.delete("x/y")
    store.delete("x/y")
    store.delete("never/was")
    with pytest.raises(ObjectMissing):
        store.get("x/y")
    assert store.get("x/z") == b"2"
    store.put("x/y", b"3", if_absent=True)
    assert store.get("x/y") == b"3"


def test_list_is_sorted_by_name_and_filtered_by_prefix(store: Store) -> None:
    names = [
        "a-b/c",
        "a.b",
        "a/b",
        "a/b-c/d",
        "a/b.c",
        "a/bc",
        "a0",
        "b",
        "packs/00/01",
        "packs/0",
        "z_",
    ]
    for name in reversed(names):
        store.put(name, name.encode())
    assert [(info.name, info.size) for info in store.list()] == [
        (name, len(name)) for name in sorted(names)
    ]
    for prefix in ("a", "a/", "a/b", "a/b-c/", "packs/", "packs/00", "zz", "b", "b/", "a."):
        assert [info.name for info in store.list(prefix)] == sorted(
            n for n in names if n.startswith(prefix)
        ), prefix


def test_list_of_more_than_one_page(store: Store) -> None:
    names = [f"n/{number % 7}/{number:04}" for number in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.put(name, b"x"), names))
    assert [info.name for info in store.list("n/")] == sorted(names)


def test_list_streams(store: Store) -> None:
    """What is deleted while a listing is read may be missing from it, and disturbs nothing."""
    for number in range(20):
        store.put(f"s/{number:02}", b"x")
    listing = store.list()
    assert next(listing).name == "s/00"
    for number in range(10, 20):
        store.delete(f"s/{number:02}")
    rest = [info.name for info in listing]
    assert rest[:9] == [f"s/{number:02}" for number in range(1, 10)]


BAD_NAMES = [
    *("", "/a", "a/", "a//b", "../a", "a/../b", "a/..", ".", "..", "a..b", ".tmp/x", "a/.hidden"),
    *(
        "A",
        "ä",
        "a b",
        "a\0b",
        "a\n",
        "a\\b",
        "-a",
        "a/-b",
        "%2e%2e/a",
        "x" * 600,
        "/".join("x" * 60 for _ in range(10)),
    ),
]


def test_bad_names_are_refused_by_every_verb(store: Store, place: Place) -> None:
    verbs: list[Callable[[str], object]] = [
        lambda name: store.put(name, b""),
        lambda name: store.put(name, b"", if_absent=True),
        store.get,
        lambda name: store.get_range(name, 0, 1),
        lambda name: store.read_into(name, 0, memoryview(bytearray(1))),
        store.stat,
        store.delete,
    ]
    for name in BAD_NAMES:
        for verb in verbs:
            with pytest.raises(InvalidName):
                verb(name)
    for prefix in ("/", "../", "a//", "A", "a/../", ".tmp"):
        with pytest.raises(InvalidName):
            list(store.list(prefix))
    assert place.left() == []


def test_probing_leaves_nothing(store: Store, place: Place) -> None:
    store.put("o", b"x")
    before = place.left()
    found = store.probe()
    store.check_writable()
    assert store.sweep(0) == 0
    assert place.left() == before
    expected = {
        "local": (True, "local"),
        "linked": (True, "local"),
        "memory": (True, "memory"),
        "radosgw": (True, "radosgw"),
        "apart": (True, "radosgw"),
        "rclone": (False, "weak"),
    }
    assert (found.conditional_create, found.kind) == expected[place.kind]


def test_create_again_is_harmless(store: Store) -> None:
    store.put("o", b"x")
    store.create()
    assert store.get("o") == b"x"


def test_a_closed_store_gives_its_connections_back(store: Store) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    store.put("o", b"x")
    store.get("o")
    list(store.list())
    store.close()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
