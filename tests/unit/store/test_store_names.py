"""Object names and store URLs: what is accepted; no accepted name leads outside the store."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from criuctl.config import Config
from criuctl.errors import InvalidName, UsageError
from criuctl.store import open_store, parse_s3_url
from criuctl.store.base import MAX_NAME, check_name, check_prefix, probe_name, valid_name

names = st.from_regex(
    r"[a-z0-9][a-z0-9._-]{0,12}(/[a-z0-9][a-z0-9._-]{0,12}){0,4}", fullmatch=True
).filter(lambda name: ".." not in name)


@given(names)
def test_names_of_the_right_shape_are_accepted(name: str) -> None:
    assert check_name(name) == name
    for end in range(len(name)):
        if not name[:end].endswith(("..", "//")):
            assert check_prefix(name[:end]) == name[:end]


@given(st.text(st.sampled_from("ab0._-/\\ A\0\n~%é"), max_size=20) | st.text(max_size=600))
@example("a" * 201)
@example("/".join("a" * 100 for _ in range(6)))
def test_whatever_is_accepted_stays_inside_its_folder(name: str) -> None:
    if not valid_name(name):
        with pytest.raises(InvalidName):
            check_name(name)
        return
    assert os.path.normpath(os.path.join("/store", name)) == f"/store/{name}"
    assert name.isascii() and name == name.lower() and len(name) <= MAX_NAME
    assert all(part and part[0] not in ".-" and len(part) <= 255 for part in name.split("/"))


def test_probe_names_are_names() -> None:
    assert valid_name(probe_name())
    assert probe_name() != probe_name()


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/", "bucket", ""),
        ("s3://bucket/a", "bucket", "a"),
        ("s3://bucket/a/B.c_d/", "bucket", "a/B.c_d"),
        ("S3://my.bucket-1/x", "my.bucket-1", "x"),
    ],
)
def test_s3_urls(url: str, bucket: str, prefix: str) -> None:
    assert parse_s3_url(url) == (bucket, prefix)
    store = open_store(url, Config())
    assert store.url == f"s3://{bucket}/{prefix}".rstrip("/")


@pytest.mark.parametrize(
    "url",
    [
        *(
            "s3:",
            "s3:/b",
            "s3:bucket",
            "s3://",
            "s3:///x",
            "s3://b",
            "s3://-bucket/x",
            "s3://bu cket/x",
        ),
        *(
            "s3://bucket//",
            "s3://bucket//x",
            "s3://bucket/../x",
            "s3://bucket/./x",
            "s3://bucket/a b",
            "s3://bucket/x?y=1",
        ),
        *(
            "s3://bucket/x#y",
            "s3://bucket/" + "x" * 500,
            "http://host/bucket",
            "https://host",
            "gs://bucket/x",
            "ftp://host/x",
        ),
        *(
            "",
            "a\0b",
            "c:store",
            "file://host/x",
            "file:x",
            "file:///x?y",
            "file:///x#y",
            "file://",
            "file:/x",
        ),
    ],
)
def test_other_urls_are_refused_with_a_hint(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url, Config())
    assert caught.value.hint
    assert caught.value.exit_code == 2


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        open_store("s3://key:topsecret@bucket/x", Config())
    assert "topsecret" not in str(caught.value.to_dict())


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/var/lib/store", "/var/lib/store"),
        ("/var//lib/../store/", "/var/store"),
        ("file:///var/lib/store", "/var/lib/store"),
        ("FILE://localhost/var/lib/a%20b", "/var/lib/a b"),
        ("file:///var/lib/a%FFb", "/var/lib/a\udcffb"),  # a name is any bytes
        ("./c:store", None),
        ("relative", None),
        ("~/store", None),
    ],
)
def test_local_urls(url: str, path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    expected = path or os.path.abspath(url.replace("~", "/home/somebody"))
    assert open_store(url, Config()).url == expected


@given(st.text(max_size=40))
def test_any_text_is_a_store_or_a_usage_error(url: str) -> None:
    """And it is decided by the text alone: no such place need exist."""
    try:
        open_store(url, Config()).close()
    except UsageError as error:
        assert error.hint  # noqa: PT017 - either outcome is right


def test_memory_stores_are_known_by_name() -> None:
    open_store("memory:shared", Config()).put("o", b"x")
    assert open_store("memory:shared", Config()).get("o") == b"x"
    assert list(open_store("memory:other", Config()).list()) == []
    open_store("memory:", Config()).put("o", b"x")
    assert list(open_store("memory:", Config()).list()) == []


def test_boto3_is_imported_only_for_s3() -> None:
    """It takes a quarter of a second, which no command on a local store shall pay."""
    script = (
        "import sys; from criuctl.config import Config; from criuctl.store import open_store;"
        "open_store('/tmp/a-store', Config()); open_store('memory:', Config());"
        "print([m for m in ('boto3', 'botocore', 'tenacity', 'urllib3', 'ssl') if m in "
        "sys.modules]);"
        "open_store('s3://bucket', Config()); print('botocore' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\nTrue\n"
