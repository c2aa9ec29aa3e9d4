"""The parts of the S3 store that need no server: bodies, parts, and the mapping of errors."""

from __future__ import annotations

import base64
import hashlib
import inspect
import io
import json
import os
import socket
from contextlib import suppress

import botocore.exceptions
import pytest
from botocore.parsers import ResponseParserError
from hypothesis import given
from hypothesis import strategies as st

from criuctl.config import Config
from criuctl.errors import (
    CriuctlError,
    Damaged,
    NoSuchBucket,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnreachable,
)
from criuctl.store import open_store
from criuctl.store.base import as_views, probe_name
from criuctl.store.s3_body import ViewReader, cut, md5_of, slices
from criuctl.store.s3_errors import FOREIGN, is_transient, store_error

pieces = st.lists(
    st.binary(max_size=300) | st.integers(60_000, 70_000).map(os.urandom), max_size=12
)


def _rest(reader: ViewReader) -> bytes:
    return b"".join(bytes(piece) for piece in iter(lambda: reader.read(16384), b""))


@given(pieces, st.data())
def test_a_view_reader_is_a_file(parts: list[bytes], data: st.DataObject) -> None:
    content = b"".join(parts)
    reader, file = ViewReader(as_views(parts)), io.BytesIO(content)
    assert len(reader) == len(content)
    assert _rest(reader) == content
    assert reader.tell() == len(content)
    for _ in range(4):
        offset = data.draw(st.integers(0, len(content)))
        assert reader.seek(offset) == file.seek(offset) == reader.tell()
        assert _rest(reader) == file.read()
    assert reader.seek(0, io.SEEK_END) == len(content)
    assert reader.read() == b""


def test_a_view_reader_joins_crumbs_and_copies_no_slabs() -> None:
    slab = memoryview(os.urandom(3 << 20))
    reader = ViewReader([slab])
    first = reader.read(16384)
    assert isinstance(first, memoryview) and first.obj is slab.obj and len(first) == 1 << 20
    crumbs = ViewReader(as_views([b"x"] * 1000))
    assert crumbs.read(1) == b"x" * 1000


@given(pieces)
def test_md5_is_of_all_views(parts: list[bytes]) -> None:
    assert (
        md5_of(as_views(parts)) == base64.b64encode(hashlib.md5(b"".join(parts)).digest()).decode()
    )


@given(pieces, st.integers(1, 200_000))
def test_parts_are_of_one_size_but_the_last(buffers: list[bytes], size: int) -> None:
    content = b"".join(buffers)
    runs = [b"".join(run) for run in cut(as_views(buffers), max(size, len(content) // 50))]
    assert b"".join(runs) == content
    assert all(runs)
    assert len({len(run) for run in runs[:-1]}) <= 1
    assert not runs or len(runs[-1]) <= len(runs[0])
    assert b"".join(b"".join(slices(view, 1000)) for view in as_views(buffers)) == content


# -- errors
# ----------------------------------------------------------------------------------------------


def _answer(code: str, status: int, message: str = "") -> botocore.exceptions.ClientError:
    answer = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return botocore.exceptions.ClientError(answer, "GetObject")


def _mapped(error: Exception) -> CriuctlError:
    return store_error(error, "reading o", "s3://bucket", "http://host", "o")


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("NoSuchKey", 404, ObjectMissing),
        ("NoSuchBucket", 404, NoSuchBucket),
        ("404", 404, StoreError),
        ("AccessDenied", 403, StoreDenied),
        ("InvalidAccessKeyId", 403, StoreDenied),
        ("SignatureDoesNotMatch", 403, StoreDenied),
        ("RequestTimeTooSkewed", 403, StoreDenied),
        ("ExpiredToken", 400, StoreDenied),
        ("SomethingNew", 403, StoreDenied),
        ("QuotaExceeded", 403, StoreFull),
        ("XMinioStorageFull", 507, StoreFull),
        ("InsufficientStorage", 507, StoreFull),
        ("InvalidRange", 416, Damaged),
        ("SlowDown", 503, StoreUnreachable),
        ("InternalError", 500, StoreUnreachable),
        ("PermanentRedirect", 301, StoreError),
        ("Whatever", 400, StoreError),
        ("Whatever", 418, StoreError),
    ],
)
def test_answers(code: str, status: int, kind: type[CriuctlError]) -> None:
    error = _mapped(_answer(code, status))
    assert type(error) is kind
    assert "s3://bucket" in error.message


def test_the_name_of_a_test_object_is_not_told() -> None:
    """It means nothing to the reader, who looks for it in vain."""
    name = probe_name()
    error = _answer("AccessDenied", 403)
    found = store_error(error, f"writing {name}", "s3://bucket", "http://host", name)
    assert found.message.startswith("writing a test object in s3://bucket at http://host: Access")
    assert name not in json.dumps(found.to_dict())


def test_a_full_disk_behind_a_500_is_full_and_not_tried_again() -> None:
    error = _answer("InternalError", 500, "write /data/x: no space left on device")
    assert type(_mapped(error)) is StoreFull
    assert not is_transient(error)


def _foreign_classes() -> list[type[Exception]]:
    found = [
        member
        for _, member in inspect.getmembers(botocore.exceptions, inspect.isclass)
        if issubclass(member, FOREIGN)
    ]
    return [*found, ResponseParserError]


@pytest.mark.parametrize("kind", _foreign_classes(), ids=lambda kind: kind.__name__)
def test_every_error_of_botocore_is_mapped_and_none_means_absent(kind: type[Exception]) -> None:
    if issubclass(kind, botocore.exceptions.ClientError):
        error: Exception = kind({"Error": {}, "ResponseMetadata": {}}, "GetObject")
    else:
        error = kind.__new__(kind)
        Exception.__init__(error, "said something")
    mapped = _mapped(error)
    assert isinstance(mapped, CriuctlError)
    assert not isinstance(mapped, ObjectMissing)
    assert mapped.exit_code in (2, 7) or (
        isinstance(mapped, Damaged) and kind is botocore.exceptions.IncompleteReadError
    )


def test_a_certificate_that_is_not_trusted_is_not_tried_again() -> None:
    said = "SSL validation failed: [SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate"
    error = botocore.exceptions.SSLError(endpoint_url="https://host", error=said)
    assert not is_transient(error)
    assert "AWS_CA_BUNDLE" in _mapped(error).hint
    assert is_transient(
        botocore.exceptions.SSLError(endpoint_url="https://host", error="EOF occurred")
    )


def test_a_server_that_never_says_a_word_is_given_up_on_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes connections, as a stopped one does: asked as often as one that takes none, not as
    one that has answered before.
    """
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "x")
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        with (
            open_store("s3://bucket/p", Config(s3_endpoint=endpoint, s3_timeout=0.3)) as store,
            pytest.raises(StoreUnreachable),
        ):
            store.get("o")
        server.setblocking(False)
        asked = 0
        with suppress(BlockingIOError):
            while True:
                server.accept()[0].close()
                asked += 1
    assert asked == 3
