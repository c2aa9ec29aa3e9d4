"""Refusals of S3 servers: each has its own error, found within a time that a person waits."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from servers import RadosGateway
from support.places import BUCKET, Place

from criuctl.config import Config
from criuctl.errors import (
    ConfigError,
    CriuctlError,
    NoSuchBucket,
    ObjectExists,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnreachable,
)
from criuctl.store import Store, open_store

pytestmark = pytest.mark.contract

VERBS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("o", b"x"),
    "create only": lambda store: store.put("o", b"x", if_absent=True),
    "put in parts": lambda store: store.put("o", bytes(65 << 20)),
    "get": lambda store: store.get("o"),
    "get_range": lambda store: store.get_range("o", 0, 1),
    "stat": lambda store: store.stat("o"),
    "list": lambda store: list(store.list()),
    "delete": lambda store: store.delete("o"),
    "create": lambda store: store.create(),
    "probe": lambda store: store.probe(),
    "check_writable": lambda store: store.check_writable(),
}
every_verb = pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS.keys())


def _refused(
    verb: Callable[[Store], object], store: Store, kind: type[CriuctlError]
) -> CriuctlError:
    with store, pytest.raises(kind) as caught:
        verb(store)
    assert type(caught.value) is kind
    assert caught.value.hint
    assert os.environ.get("AWS_SECRET_ACCESS_KEY", "?") not in caught.value.message
    return caught.value


@every_verb
def test_no_bucket(gateway: Place, verb: Callable[[Store], object]) -> None:
    error = _refused(verb, open_store("s3://no-such-bucket/x", Config()), NoSuchBucket)
    assert "no-such-bucket" in error.message


def test_no_bucket_at_the_weak_server(weak: Place) -> None:
    for verb in VERBS.values():
        _refused(verb, open_store("s3://no-such-bucket/x", Config()), NoSuchBucket)


@every_verb
def test_unknown_access_key(
    gateway: Place, verb: Callable[[Store], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    assert "AWS_ACCESS_KEY_ID" in _refused(verb, gateway.open(), StoreDenied).hint


@every_verb
def test_wrong_secret(
    gateway: Place, verb: Callable[[Store], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong secret")
    assert "AWS_SECRET_ACCESS_KEY" in _refused(verb, gateway.open(), StoreDenied).hint


@every_verb
def test_no_credentials(
    gateway: Place, verb: Callable[[Store], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "no credentials" in _refused(verb, gateway.open(), StoreDenied).message


def test_no_such_profile(gateway: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    assert "no-such-profile" in _refused(VERBS["create"], gateway.open(), StoreDenied).message


@every_verb
def test_another_users_bucket(
    gateway: Place,
    radosgw_server: RadosGateway,
    verb: Callable[[Store], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    access, secret = _stranger(radosgw_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    assert "policy" in _refused(verb, gateway.open(), StoreDenied).hint


def test_a_reader_can_read_and_its_writes_are_denied(
    gateway: Place, radosgw_server: RadosGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    access, secret = _stranger(radosgw_server)
    with gateway.open() as owner:
        owner.put("o", b"readable")
    statement = {
        "Effect": "Allow",
        "Principal": {"AWS": ["arn:aws:iam:::user/stranger"]},
        "Action": ["s3:GetObject", "s3:ListBucket"],
        "Resource": [f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{BUCKET}/*"],
    }
    client = radosgw_server.client()
    client.put_bucket_policy(
        Bucket=BUCKET, Policy=json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    )
    try:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", access)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        with gateway.open() as reader:
            reader.create()
            assert reader.get("o") == b"readable"
            assert [info.name for info in reader.list()] == ["o"]
            with pytest.raises(ObjectMissing):
                reader.stat("no/such")
            for verb in ("put", "put in parts", "delete", "check_writable"):
                with pytest.raises(StoreDenied):
                    VERBS[verb](reader)
            with pytest.raises(StoreDenied):
                reader.put("p", b"x", if_absent=True)
            with pytest.raises(ObjectExists):
                reader.put("o", b"x", if_absent=True)
    finally:
        client.delete_bucket_policy(Bucket=BUCKET)


def _stranger(server: RadosGateway) -> tuple[str, str]:
    return server.users.get("stranger") or server.add_user("stranger")


def test_a_full_quota(gateway: Place, radosgw_server: RadosGateway) -> None:
    radosgw_server.set_quota("test", 4096)
    try:
        with gateway.open() as store:
            for data, if_absent in (
                (bytes(1 << 20), False),
                (bytes(1 << 20), True),
                (bytes(65 << 20), False),
            ):
                with pytest.raises(StoreFull) as caught:
                    store.put("o", data, if_absent=if_absent)
                assert "prune" in caught.value.hint
            with pytest.raises(ObjectMissing):
                store.get("o")
    finally:
        radosgw_server.set_quota("test", -1)
    assert gateway.left() == []


# -- no server


@contextmanager
def _silent_port() -> Iterator[int]:
    """A port whose queue of connections is full: what is sent there is dropped, as by a
    firewall.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        crowd = [socket.socket() for _ in range(4)]
        try:
            for sock in crowd:
                sock.setblocking(False)
                sock.connect_ex(("127.0.0.1", port))
            yield port
        finally:
            for sock in crowd:
                sock.close()


@pytest.mark.parametrize(
    "verb", [VERBS[name] for name in ("put in parts", "create only", "list", "probe")]
)
def test_a_closed_port(gateway: Place, verb: Callable[[Store], object]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        began = time.monotonic()
        error = _refused(
            verb, open_store(gateway.url, Config(s3_endpoint=endpoint)), StoreUnreachable
        )
        assert time.monotonic() - began < 30
    assert endpoint in error.message


def test_a_port_that_swallows_everything(gateway: Place) -> None:
    with _silent_port() as port:
        began = time.monotonic()
        store = open_store(gateway.url, Config(s3_endpoint=f"http://127.0.0.1:{port}"))
        _refused(VERBS["check_writable"], store, StoreUnreachable)
        assert time.monotonic() - began < 40


def test_a_name_that_does_not_resolve(gateway: Place) -> None:
    store = open_store(gateway.url, Config(s3_endpoint="http://no-such-host.invalid"))
    _refused(VERBS["create"], store, StoreUnreachable)


def test_endpoints_that_make_no_sense(gateway: Place) -> None:
    for endpoint in ("ftp:/x", "127.0.0.1:9000", "http://"):
        with pytest.raises(ConfigError):
            open_store(gateway.url, Config(s3_endpoint=endpoint)).create()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, "<html>hello</html>"),
        (200, ""),
        (302, ""),
        (403, ""),
        (404, "<html>nothing</html>"),
        (405, ""),
    ],
)
def test_a_web_server_that_is_no_s3(gateway: Place, status: int, body: str) -> None:
    """Whatever it says, it is never taken for the absence of an object, nor for an empty store.

    A 200 with some content is an object as far as HTTP can tell: there the caller's checksums
    decide.
    """
    verbs = ["list", "create", "probe"] + (
        ["get", "stat", "put", "create only"] if status != 200 else []
    )
    with (
        _web_server(status, body) as endpoint,
        open_store(gateway.url, Config(s3_endpoint=endpoint)) as store,
    ):
        for verb in verbs:
            with pytest.raises(StoreError) as caught:
                VERBS[verb](store)
            assert not isinstance(caught.value, ObjectMissing | ObjectExists)


_LISTED = (
    "<ListBucketResult><Name>b</Name><IsTruncated>%s</IsTruncated>"
    "<Contents><Key>%s/o</Key>%s</Contents></ListBucketResult>"
)
_SIZE, _TIME = "<Size>1</Size>", "<LastModified>2026-11-20T20:00:00Z</LastModified>"


@pytest.mark.parametrize(
    ("more", "entry", "what"),
    [
        ("false", _TIME, "Size"),
        ("false", _TIME + "<Size>one</Size>", "one"),
        ("false", _SIZE, "LastModified"),
        ("false", _SIZE + "<LastModified>once</LastModified>", "once"),
        ("true", _SIZE + _TIME, "NextContinuationToken"),
    ],
)
def test_a_listing_that_lacks_something(gateway: Place, more: str, entry: str, what: str) -> None:
    listed = _LISTED % (more, gateway.url.split("/", 3)[3], entry)
    with _web_server(200, listed) as endpoint:
        error = _refused(
            VERBS["list"], open_store(gateway.url, Config(s3_endpoint=endpoint)), StoreError
        )
    assert what in error.message and endpoint in error.message


@pytest.mark.parametrize(
    ("listing", "more", "verb"),
    [
        (
            "ListBucketResult",
            "<Name>b</Name><NextContinuationToken>x</NextContinuationToken>",
            VERBS["list"],
        ),
        (
            "ListMultipartUploadsResult",
            "<NextKeyMarker>x</NextKeyMarker><NextUploadIdMarker>x</NextUploadIdMarker>",
            lambda store: store.sweep(0),
        ),
    ],
    ids=["objects", "uploads"],
)
def test_a_listing_that_never_ends(
    gateway: Place, listing: str, more: str, verb: Callable[[Store], object]
) -> None:
    with _web_server(
        200, f"<{listing}><IsTruncated>true</IsTruncated>{more}</{listing}>"
    ) as endpoint:
        error = _refused(verb, open_store(gateway.url, Config(s3_endpoint=endpoint)), StoreError)
    assert "never ends" in error.message


def test_a_web_server_takes_no_parts(gateway: Place) -> None:
    with _web_server(200, "") as endpoint:
        error = _refused(
            VERBS["put in parts"], open_store(gateway.url, Config(s3_endpoint=endpoint)), StoreError
        )
    assert "UploadId" in error.message


def test_an_untrusted_certificate_is_refused_until_it_is_configured(
    gateway: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reported at once, with the remedy; with that applied, it is trusted."""
    certificate = _self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with _web_server(404, "", context) as endpoint:
        began = time.monotonic()
        error = _refused(
            VERBS["create"], open_store(gateway.url, Config(s3_endpoint=endpoint)), StoreUnreachable
        )
        assert "AWS_CA_BUNDLE" in error.hint
        assert time.monotonic() - began < 20
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        _refused(VERBS["create"], open_store(gateway.url, Config(s3_endpoint=endpoint)), StoreError)


def _self_signed(folder: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
        now + datetime.timedelta(days=1)
    )
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    path = folder / "self-signed.pem"
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(private + builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    return path


@contextmanager
def _web_server(status: int, body: str, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Last-Modified", "Fri, 20 Nov 2026 20:00:00 GMT")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body.encode())

        do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = handle_any  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            """Not on the terminal."""

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A client that turns away is what is tested."""

    server = Quiet(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
