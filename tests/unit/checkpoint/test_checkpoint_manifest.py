"""Manifests come back as they were, and nothing hostile gets in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import checkpoints as kit

from criuctl.checkpoint.chunks import CHUNK_ENTRY, StreamRef
from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.checkpoint.file_records import FileRecord
from criuctl.checkpoint.manifest import (
    HostInfo,
    ImageFile,
    Manifest,
    MemoryImage,
    ProcessRecord,
    SessionRef,
)
from criuctl.errors import CriuctlError, Damaged
from criuctl.report import Reporter

text = st.text(max_size=20)
number = st.integers(0, 1 << 40)
ids = st.binary(min_size=16, max_size=16).map(bytes.hex)
small = st.integers(1, 4 << 20)


@st.composite
def streams(draw: st.DrawFn) -> StreamRef:
    parts = draw(st.lists(st.tuples(st.binary(min_size=32, max_size=32), small), max_size=4))
    ref = StreamRef(
        sum(size for _name, size in parts), b"".join(CHUNK_ENTRY.pack(*part) for part in parts)
    )
    inner = StreamRef(72, CHUNK_ENTRY.pack(bytes(32), 72))
    size = draw(st.integers(9 << 12, 1 << 40))  # of nine runs, a page each at least
    return draw(
        st.sampled_from(
            [ref, StreamRef(draw(number), b"", inner), StreamRef(size, pages=ref, runs=inner)]
        )
    )


@st.composite
def areas(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    borders = sorted(draw(st.sets(st.integers(0, 1 << 35), max_size=6)))
    return tuple(
        (low << 12, high << 12) for low, high in zip(borders[::2], borders[1::2], strict=False)
    )


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    names = draw(
        st.lists(st.from_regex(r"[a-z]{1,8}\.img", fullmatch=True), unique=True, max_size=3)
    )
    images = tuple(ImageFile(name, draw(small)) for name in names)
    total = sum(image.size for image in images)
    pairs = st.lists(st.tuples(number, number), max_size=2).map(tuple)
    return Manifest(
        id=draw(ids),
        session=SessionRef(
            draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)), draw(ids)
        ),
        incarnation=draw(number),
        parent=draw(st.none() | ids),
        labels=draw(st.dictionaries(text, text, max_size=2)),
        pinned=draw(st.booleans()),
        host=HostInfo(name=draw(text), cpu_flags=tuple(draw(st.lists(text, max_size=2)))),
        criu=draw(
            st.dictionaries(
                text, st.none() | st.integers(-5, 5) | st.lists(text, max_size=2), max_size=2
            )
        ),
        processes=tuple(
            draw(
                st.lists(
                    st.builds(
                        ProcessRecord, pid=st.integers(0, 9), ns_pid=st.integers(0, 9), cwd=text
                    ),
                    max_size=2,
                )
            )
        ),
        namespaces=draw(
            st.dictionaries(text, st.dictionaries(text, st.none() | text, max_size=2), max_size=2)
        ),
        images=images,
        image_data=StreamRef(total, b"", StreamRef(36, CHUNK_ENTRY.pack(bytes(32), 36))),
        memory=tuple(
            MemoryImage("task", n, draw(number), draw(streams()), draw(streams()), draw(areas()))
            for n in range(draw(st.integers(0, 2)))
        ),
        connections=tuple(
            draw(
                st.lists(
                    st.builds(ConnectionRecord, pid=number, fd=number, holders=pairs, local=text),
                    max_size=2,
                )
            )
        ),
        files=tuple(
            FileRecord(
                f"/{n}", "read", size=1 << 45, data=draw(st.none() | streams()), holders=draw(pairs)
            )
            for n in range(2)
        ),
        timings=draw(st.dictionaries(text, st.floats(0, 1e9) | number, max_size=2)),
        warnings=tuple(draw(st.lists(text, max_size=2))),
    )


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


@settings(deadline=None)
@given(manifests())
def test_a_manifest_comes_back_equal(manifest: Manifest) -> None:
    assert Manifest.from_dict(through_json(manifest.to_dict())) == manifest


@settings(deadline=None)
@given(
    manifests(), st.dictionaries(text.map("new_{}".format), st.lists(text), min_size=1, max_size=3)
)
def test_what_a_newer_version_noted_is_kept(manifest: Manifest, more: dict[str, Any]) -> None:
    body = through_json({**manifest.to_dict(), **more})
    body["session"]["nickname"] = "x"
    loaded = Manifest.from_dict(body)
    assert through_json(loaded.to_dict()) == body
    assert Manifest.from_dict(through_json(loaded.with_use(pinned=True).to_dict())).extra == more


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=300)
@given(manifests(), st.data(), anything)
def test_any_value_anywhere_is_read_or_refused(
    manifest: Manifest, data: st.DataObject, value: Any
) -> None:
    """No other exception than `Damaged`, and what is accepted can be written again."""
    body = through_json(manifest.to_dict())
    at = body
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans()):
            at = at[key]
            continue
        at[key] = value
        break
    try:
        loaded = Manifest.from_dict(body)
    except Damaged:
        return
    assert Manifest.from_dict(through_json(loaded.to_dict())) == loaded


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("images", "files", 0, "name"), "../../etc/passwd"),
        (("images", "files", 0, "name"), "/etc/passwd"),
        (("images", "files", 0, "name"), "a/b"),
        (("images", "files", 0, "name"), ".."),
        (("images", "files", 0, "name"), "a..b"),
        (("images", "files", 0, "name"), "a\0b"),
        (("images", "files", 0, "name"), "core-7.img"),
        (("images", "files", 0, "size"), 1 << 62),
        (("images", "files", 0, "size"), True),
        (("images", "data", "size"), 5),
        (("session", "name"), "../../root"),
        (("session", "name"), "a\nb"),
        (("files", 0, "path"), "/a/../../etc"),
        (("files", 0, "path"), "etc"),
        (("files", 0, "path"), "/a\0"),
        (("files", 0, "path"), "/a\ud800"),  # no name that a file can have
        (("files", 0, "size"), -1),
        (("files", 0, "uid"), 1 << 32),
        (("files", 0, "gid"), -1),
        (("files", 0, "mode"), 1 << 40),
        (("files", 0, "target"), "a\0b"),
        (("files", 0, "target"), "\ud800"),
        (("files", 0, "xattrs"), {"user.a": "Y"}),
        (("files", 0, "xattrs"), {"user.\0": "YQ=="}),
        (("links", 0, "uid"), 1 << 40),
        (("links", 0, "mode"), -1),
        (("links", 0, "path"), "link_remap.1"),
        (("external", 0, "path"), "../x"),
        (("processes", 0, "pid"), 1 << 40),
        (("processes", 0, "cgroups"), {"": "/system.slice/a\0.service"}),
        (("memory", 0, "data"), {"size": 1 << 50, "chunks": [["00" * 32, 1 << 50]]}),
        (("memory", 0, "data"), {"size": 0, "chunks": [["00" * 32, 0]]}),
        (("memory", 0, "data"), {"size": 65, "chunks": [["00" * 32, 1]] * 65}),
        (
            ("memory", 0, "data"),
            {
                "size": 1,
                "list": {
                    "size": 36,
                    "list": {"size": 36, "list": {"size": 36, "list": {"size": 0, "chunks": []}}},
                },
            },
        ),
        (("memory", 0, "data"), {"size": 1, "list": {"size": 35, "chunks": [["00" * 32, 35]]}}),
        (("memory", 0, "data"), {"size": -1, "chunks": []}),
        (("memory", 0, "data"), []),
        (("memory", 0, "own"), [[8192, 4096]]),
        (("memory", 0, "own"), [[8192, 8192]]),
        (("memory", 0, "own"), [[0, 4095]]),
        (("memory", 0, "own"), [[0, 8192], [4096, 12288]]),
        (("memory", 0, "own"), [[-4096, 4096]]),
        (("memory", 0, "own"), [[0, 4096, 8192]]),
        (("timings",), {"x": float("inf")}),
        (("criu",), nested(60)),
        (("image_data",), {"size": 0, "chunks": []}),
    ],
)
def test_hostile_values_are_refused(tmp_path: Path, path: tuple[Any, ...], value: Any) -> None:
    repo = kit.repository(tmp_path)
    body = through_json(repo.manifest(kit.write(repo)).to_dict())
    at = body
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(Damaged):
        Manifest.from_dict(body)


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    repo = kit.repository(tmp_path)
    with repo.writer(Reporter()) as writer:
        manifest = kit.fill(writer, kit.SMALL).with_use(session=SessionRef("no/name", "ab" * 16))
        with pytest.raises(CriuctlError):
            writer.commit(manifest)
    assert repo.list() == []


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, criuctl.checkpoint.manifest, criuctl.checkpoint;"
        "heavy = {'zstandard', 'blake3', 'cryptography', 'sqlite3'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)
