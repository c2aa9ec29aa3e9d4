"""Networks and servers that fail in the middle: what was said to be stored is stored, and nothing
is made up.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import os
import secrets
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError
from servers import FaultProxy, RadosGateway, RcloneServer
from support.places import Place

from criuctl.config import Config
from criuctl.errors import (
    Damaged,
    ObjectExists,
    ObjectMissing,
    StoreError,
    StoreFull,
    StoreUnreachable,
)
from criuctl.store import Store, open_store

pytestmark = pytest.mark.contract

Through = Callable[..., tuple[FaultProxy, Store]]


@pytest.fixture
def patient() -> bool:
    """Whether the store pauses between attempts for as long as it does for users."""
    return False


@pytest.fixture
def through(
    patient: bool, gateway: Place, radosgw_server: RadosGateway, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Through]:
    """The reference server behind a proxy with the given faults: the proxy and a store that goes
    through it.
    """
    proxies: list[FaultProxy] = []
    stores: list[Store] = []
    if not patient:
        monkeypatch.setattr("criuctl.store.s3_requests._PAUSE", 0.02)
        monkeypatch.setattr("criuctl.store.s3_requests._JITTER", 0.04)

    def make(
        retries: int = 5, pause: float = 1.0, deadline: float = 120.0, **faults: str
    ) -> tuple[FaultProxy, Store]:
        proxies.append(FaultProxy(radosgw_server.port, faults, pause=pause))
        patience = 3 if set("hd") & set("".join(faults.values())) else 20
        endpoint = proxies[-1].endpoint
        settings = Config(
            s3_endpoint=endpoint, s3_timeout=patience, s3_retries=retries, s3_deadline=deadline
        )
        stores.append(open_store(gateway.url, settings))
        return proxies[-1], stores[-1]

    yield make
    for store in stores:
        store.close()
    for proxy in proxies:
        proxy.__exit__(None, None, None)


@pytest.mark.parametrize("fault", list("5rcl"))
@pytest.mark.parametrize("size", [100, 3 << 20])
def test_a_passing_fault_of_a_put(through: Through, gateway: Place, fault: str, size: int) -> None:
    proxy, store = through(PUT=fault + "." + fault)
    content = os.urandom(size)
    store.put("o", [content[:50], content[50:]])
    store.put("only", content, if_absent=True)
    assert proxy.spoiled() == fault * 2
    assert gateway.open().get("o") == content
    assert gateway.open().get("only") == content


@pytest.mark.parametrize("fault", list("5rs"))
def test_a_passing_fault_of_a_read(through: Through, gateway: Place, fault: str) -> None:
    content = os.urandom(3 << 20)
    gateway.open().put("o", content)
    proxy, store = through(
        GET=f"{fault}.{fault}.{fault}{fault}.{fault}.", HEAD=fault if fault != "s" else "."
    )
    assert store.get("o") == content
    assert store.get_range("o", 1, 2 << 20) == content[1 : 1 + (2 << 20)]
    target = bytearray(1 << 20)
    store.read_into("o", 5, memoryview(target))
    assert target == content[5 : 5 + (1 << 20)]
    assert [info.name for info in store.list()] == ["o"]
    assert store.stat("o").size == len(content)
    store.delete("o")
    assert proxy.spoiled().count(fault) >= 5


def test_an_answer_that_never_comes_is_asked_for_again(through: Through, gateway: Place) -> None:
    proxy, store = through(PUT="h")
    store.put("o", b"content", if_absent=True)
    assert proxy.spoiled() == "h"
    assert gateway.open().get("o") == b"content"


@pytest.mark.parametrize(
    ("fault", "patient"), [("5", True), ("r", False), ("c", False)], ids=list("5rc")
)
def test_a_lasting_fault_is_reported_in_time(
    through: Through, gateway: Place, fault: str, patient: bool
) -> None:
    proxy, store = through(PUT=fault * 50)
    began = time.monotonic()
    with pytest.raises(StoreUnreachable):
        store.put("o", os.urandom(2 << 20))
    # it was tried again, after a while, and not for ever
    assert (1 if patient else 0) < time.monotonic() - began < 60
    assert proxy.spoiled() == fault * 5
    with pytest.raises(ObjectMissing):
        gateway.open().get("o")


@pytest.mark.parametrize("verb", ["put", "get", "list", "stat", "read_into", "delete"])
def test_an_answer_that_drips_is_bounded_in_all(
    through: Through, gateway: Place, verb: str
) -> None:
    """Each byte comes well within the time-out of a read, and all of them would take minutes."""
    gateway.open().put("o", b"content" * 100)
    proxy, store = through(
        pause=0.5, deadline=8.0, **dict.fromkeys(("PUT", "GET", "HEAD", "DELETE"), "d" * 50)
    )
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: store.put("p", b"x"),
        "get": lambda: store.get("o"),
        "list": lambda: list(store.list()),
        "stat": lambda: store.stat("o"),
        "read_into": lambda: store.read_into("o", 0, memoryview(bytearray(700))),
        "delete": lambda: store.delete("o"),
    }
    began = time.monotonic()
    with pytest.raises(StoreUnreachable, match=r"not done after 8(\.0\d)? s") as caught:
        calls[verb]()
    assert time.monotonic() - began < 8 + 3
    assert "s3_deadline" in caught.value.hint
    assert proxy.spoiled() == "dd"  # an attempt may take twice the time-out of a read


def test_an_answer_that_drips_is_asked_for_again(through: Through, gateway: Place) -> None:
    proxy, store = through(pause=0.5, PUT="d")
    began = time.monotonic()
    store.put("o", b"content")
    assert 5 < time.monotonic() - began < 12
    assert proxy.spoiled() == "d"
    assert gateway.open().get("o") == b"content"


def test_contents_are_given_more_time(through: Through, gateway: Place) -> None:
    """A body may come as slowly as 32 KiB a second, however small the deadline is."""
    content = os.urandom(300 << 10)
    gateway.open().put("o", content)
    proxy, store = through(deadline=0.5, GET="p")
    threading.Timer(4.0, proxy.proceed.set).start()
    assert store.get_range("o", 0, len(content)) == content


def test_over_tls_an_answer_that_drips_is_bounded_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    made += [
        "-addext",
        "subjectAltName=DNS:localhost",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    over = threading.Event()

    def drip(client: socket.socket) -> None:
        with suppress(OSError), context.wrap_socket(client, server_side=True) as secured:
            secured.recv(4096)
            for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + b"X-Padding: x\r\n" * 20:
                secured.sendall(bytes([byte]))
                if over.wait(0.2):
                    return

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(listener.accept()[0],), daemon=True).start()

    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        endpoint = f"https://localhost:{listener.getsockname()[1]}"
        began = time.monotonic()
        settings = Config(s3_endpoint=endpoint, s3_timeout=1.0, s3_deadline=3.0)
        with (
            open_store("s3://bucket/p", settings) as store,
            pytest.raises(StoreUnreachable, match="not done after 3 s"),
        ):
            store.put("o", b"x")
        assert time.monotonic() - began < 6
        over.set()
        listener.shutdown(socket.SHUT_RDWR)


def test_what_is_no_passing_fault_is_not_tried_again(through: Through) -> None:
    proxy, store = through(PUT="f" * 9)
    with pytest.raises(StoreFull):
        store.put("o", b"x")
    assert proxy.spoiled() == "f"


def test_an_object_that_always_ends_early_is_damaged(through: Through, gateway: Place) -> None:
    gateway.open().put("o", os.urandom(1 << 20))
    proxy, store = through(GET="s" * 50)
    reads: list[Callable[[], bytes]] = [
        lambda: store.get("o"),
        lambda: store.get_range("o", 0, 1 << 20),
    ]
    for read in reads:
        with pytest.raises(Damaged) as caught:
            read()
        assert caught.value.details["object"] == "o"
    assert proxy.spoiled() == "s" * 10


@pytest.mark.parametrize("size", [1 << 20, 3 << 20], ids=["with Content-MD5", "by its signature"])
def test_a_byte_changed_on_the_way_is_noticed_and_sent_again(
    size: int, through: Through, gateway: Place
) -> None:
    """The server itself refuses what is not what was sent."""
    proxy, store = through(PUT="x")
    content = os.urandom(size)
    store.put("o", content)
    assert proxy.spoiled() == "x"
    assert gateway.open().get("o") == content
    _, store = through(PUT="x" * 20)
    with pytest.raises(StoreUnreachable, match=r"BadDigest|SHA256Mismatch"):
        store.put("p", content)
    with pytest.raises(ObjectMissing):
        gateway.open().get("p")


def test_answers_are_acknowledged_at_once(gateway: Place) -> None:
    """A server that sends an answer in two pieces waits 40 ms for an acknowledgement, unless this
    end sends it at once.
    """
    from botocore.awsrequest import AWSHTTPConnectionPool, AWSHTTPSConnectionPool

    from criuctl.store.s3_client import PromptConnection, PromptTLSConnection

    calls: list[tuple[int, ...]] = []

    class Listener(socket.socket):
        def setsockopt(self, *arguments: Any) -> None:
            calls.append(arguments)

    store = gateway.open()
    store.put("o", b"x")
    assert AWSHTTPConnectionPool.ConnectionCls is PromptConnection
    assert AWSHTTPSConnectionPool.ConnectionCls is PromptTLSConnection
    for connection in (PromptConnection("localhost"), PromptTLSConnection("localhost")):
        connection.sock = Listener()
        with pytest.raises(http.client.HTTPException):
            connection.getresponse()  # nothing was asked
        connection.sock.close()
    assert calls == [(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)] * 2


@pytest.mark.parametrize(("scheme", "signed"), [("http", True), ("https", False)])
def test_a_body_is_signed_where_nothing_else_protects_it(
    scheme: str, signed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from criuctl.store.s3_client import make_client

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    client = make_client(Config(s3_endpoint=f"{scheme}://127.0.0.1:1"))
    seen: list[bytes] = []
    client.meta.events.register(
        "before-send.s3.PutObject",
        lambda request, **_: seen.append(request.headers["X-Amz-Content-SHA256"]),
    )
    with pytest.raises(EndpointConnectionError):
        client.put_object(Bucket="bucket", Key="key", Body=io.BytesIO(b"x"))
    assert [text != b"UNSIGNED-PAYLOAD" for text in seen] == [signed]


# -- what the server has stored
# ----------------------------------------------------------------------

Spoiler = Callable[..., tuple[FaultProxy, Store]]


@pytest.fixture
def spoiling(weak: Place, rclone_server: RcloneServer) -> Iterator[Spoiler]:
    """A server that changes a byte of what it was given, and then says (`honest`) what it has
    stored, or does not.
    """
    proxies: list[FaultProxy] = []

    def make(
        plan: str, *, honest: bool, flips: bool = True, **settings: Any
    ) -> tuple[FaultProxy, Store]:
        def harm(path: str) -> str | None:
            file = rclone_server.data / path.lstrip("/")
            content = bytearray(file.read_bytes())
            if flips:
                content[len(content) // 2] ^= 1
                file.write_bytes(content)
                return hashlib.md5(content).hexdigest() if honest else None
            return secrets.token_hex(16)

        proxies.append(FaultProxy(rclone_server.port, {"PUT": plan}, harm=harm))
        return proxies[-1], open_store(
            weak.url, Config(s3_endpoint=proxies[-1].endpoint, **settings)
        )

    yield make
    for proxy in proxies:
        proxy.__exit__(None, None, None)


@pytest.mark.parametrize("size", [700, 3 << 20])
@pytest.mark.parametrize("if_absent", [False, True])
def test_what_the_server_says_that_it_has_stored_is_compared(
    size: int, if_absent: bool, spoiling: Spoiler, weak: Place
) -> None:
    _, store = spoiling("X" * 9, honest=True)
    with store, pytest.raises(Damaged, match="not what was sent") as caught:
        store.put("o", os.urandom(size), if_absent=if_absent)
    assert caught.value.details["object"] == "o"
    assert weak.left() == []


def test_with_verify_writes_nothing_is_believed(spoiling: Spoiler, weak: Place) -> None:
    """Without it, a server that lies about what it has stored is found out by who reads it; with
    it, at once.
    """
    content = os.urandom(2 << 20)
    _, store = spoiling("X", honest=False)
    with store:
        store.put("o", content)
        assert store.get("o") != content
    _, store = spoiling(".X", honest=False, verify_writes=True)
    with store:
        store.put("good", content)
        with pytest.raises(Damaged, match="not what was sent"):
            store.put("bad", content)
        assert [info.name for info in store.list()] == ["good", "o"]


def test_etags_that_are_no_digests(spoiling: Spoiler) -> None:
    """As of a server that encrypts: what is stored is looked at once, and from then on they say
    nothing.
    """
    proxy, store = spoiling("X" * 9, honest=False, flips=False)
    with store:
        for name in ("one", "two", "three"):
            store.put(name, b"content")
        assert sum(method == "GET" for method, _, _ in proxy.seen) == 1
        assert store.get("two") == b"content"


# -- creating only if absent, with lost answers
# ------------------------------------------------------


def test_a_lost_answer_to_a_creation_is_our_own_success(through: Through, gateway: Place) -> None:
    """The second attempt meets 412 from the first one's object: that is ours."""
    for content in (b"", b"mine", os.urandom(3 << 20)):
        proxy, store = through(PUT="l")
        name = f"o{len(content)}"
        store.put(name, content, if_absent=True)
        assert proxy.spoiled() == "l"
        assert gateway.open().get(name) == content


def test_a_lost_race_after_a_fault_is_still_lost(through: Through, gateway: Place) -> None:
    """Our first attempt breaks; meanwhile another creates the name; our second must not take it for
    ours.
    """
    for fault, theirs in (("p", b"theirs"), ("p", b"mine!"), ("p", b"")):
        proxy, store = through(PUT=fault)
        name = f"race/{len(theirs)}"
        with ThreadPoolExecutor(1) as pool:
            ours = pool.submit(store.put, name, b"mine?", if_absent=True)
            assert proxy.arrived.wait(60)
            gateway.open().put(name, theirs, if_absent=True)
            proxy.proceed.set()
            with pytest.raises(ObjectExists):
                ours.result(120)
        assert gateway.open().get(name) == theirs


def test_one_winner_though_every_answer_is_uncertain(through: Through, gateway: Place) -> None:
    _, store = through(retries=50, PUT="l5.rl.5c.l" * 8, GET="..5..r" * 8)
    for number in range(4):
        start = threading.Barrier(4)

        def write(
            writer: int, number: int = number, start: threading.Barrier = start
        ) -> bytes | None:
            content = b"%d/%d" % (number, writer)
            start.wait()
            try:
                store.put(f"race/{number}", content, if_absent=True)
            except ObjectExists:
                return None
            return content

        with ThreadPoolExecutor(4) as pool:
            winners = [content for content in pool.map(write, range(4)) if content is not None]
        assert winners == [gateway.open().get(f"race/{number}")]


def test_a_server_that_knows_no_conditions(through: Through, gateway: Place) -> None:
    """501 to If-None-Match: the look beforehand is all there is, and the probe says so."""
    _, store = through(PUT="n")
    store.put("o", b"content", if_absent=True)
    assert gateway.open().get("o") == b"content"
    with pytest.raises(ObjectExists):
        store.put("o", b"other", if_absent=True)
    _, other = through(PUT=".nnnnnnnnn")
    assert not other.probe().conditional_create


# -- the probe
# -----------------------------------------------------------------------------------------


def test_the_probe_finds_out_a_deceiver(weak: Place, rclone_server: RcloneServer) -> None:
    """A server that looks before it writes is right one by one, and lets both of two overlapping
    writers win.
    """

    def exists(path: str) -> bool:
        return (rclone_server.data / path.lstrip("/")).exists()

    with FaultProxy(rclone_server.port, {"PUT": "C" * 100}, exists) as proxy:
        with open_store(weak.url, Config(s3_endpoint=proxy.endpoint)) as store:
            store.put("one", b"first", if_absent=True)
            found = store.probe()
        one_by_one = [
            path for method, path, _ in proxy.seen if method == "PUT" and "probe-" in path
        ]
    assert not found.conditional_create
    assert len(one_by_one) >= 4  # it got as far as the overlapping writers
    assert weak.left() == [f"{weak.url.rpartition('/')[2]}/one"]


def test_the_probe_cleans_up_when_it_fails(through: Through, gateway: Place) -> None:
    _, store = through(PUT="...5555555")
    with pytest.raises(StoreUnreachable):
        store.probe()
    assert gateway.left() == []


# -- in parts
# --------------------------------------------------------------------------------------------

_LARGE = (65 << 20) + 12345


@pytest.fixture(scope="module")
def large() -> list[memoryview]:
    """More than goes in one request, in buffers that fit no part."""
    content = memoryview(os.urandom(_LARGE))
    return [
        content[: 10 << 20],
        content[10 << 20 : (10 << 20) + 7],
        content[(10 << 20) + 7 : 60 << 20],
        content[60 << 20 :],
    ]


@pytest.mark.parametrize(
    "faults", [{}, {"PUT": "5.c.l"}, {"POST": "5"}, {"POST": ".5"}, {"POST": ".l"}, {"HEAD": "5"}]
)
def test_a_large_object_goes_in_parts(
    through: Through, gateway: Place, large: list[memoryview], faults: dict[str, str]
) -> None:
    proxy, store = through(**faults)
    store.put("large", large)
    assert sum(letter != "." for plan in faults.values() for letter in plan) == len(proxy.spoiled())
    assert gateway.open().get("large") == b"".join(large)
    assert gateway.left() == [f"{gateway.url.rpartition('/')[2]}/large"]


def test_a_large_object_at_the_weak_server(weak: Place, large: list[memoryview]) -> None:
    with weak.open() as store:
        store.put("large", large)
        assert store.stat("large").size == _LARGE
        assert store.get_range("large", 59 << 20, 3 << 20) == b"".join(large)[59 << 20 : 62 << 20]
        store.delete("large")
    assert weak.left() == []


@pytest.mark.parametrize("faults", [{"PUT": "..f"}, {"PUT": "5" * 99}, {"POST": ".f"}])
def test_a_large_object_that_fails_leaves_no_parts(
    through: Through, gateway: Place, large: list[memoryview], faults: dict[str, str]
) -> None:
    _, store = through(**faults)
    with pytest.raises(StoreError):
        store.put("large", large)
    assert gateway.left() == []


def test_an_interrupted_upload_leaves_no_parts(
    through: Through, gateway: Place, large: list[memoryview]
) -> None:
    """^C while parts are on their way: they are waited for, then the upload is aborted."""
    proxy, store = through(PUT="..p")

    def interrupt() -> None:
        proxy.arrived.wait(60)
        os.kill(os.getpid(), signal.SIGINT)
        proxy.proceed.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        store.put("large", large)
    thread.join()
    assert gateway.left() == []


def test_sweep_aborts_old_uploads_of_this_store_alone(
    gateway: Place, radosgw_server: RadosGateway
) -> None:
    client = radosgw_server.client()
    prefix = gateway.url.rpartition("/")[2]
    ours = client.create_multipart_upload(Bucket="contract", Key=f"{prefix}/checkpoints/dead")
    others = [
        f"other-{prefix}/checkpoints/dead",
        f"{prefix}/Backup of somebody else.tar",
        f"{prefix}/backup/somebody.tar",
    ]
    theirs = [client.create_multipart_upload(Bucket="contract", Key=key) for key in others]
    with gateway.open() as store:
        assert store.sweep(3600) == 0
        assert store.sweep(0) == 1
    assert sorted(gateway.left()) == sorted(f"unfinished {key}" for key in others)
    for upload in theirs:
        client.abort_multipart_upload(
            Bucket="contract", Key=upload["Key"], UploadId=upload["UploadId"]
        )
        assert ours["UploadId"] != upload["UploadId"]


# -- a server that dies
# ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_gateway_killed_under_writers_and_started_again(
    gateway: Place, radosgw_server: RadosGateway
) -> None:
    """Every put comes through, though kill -9 met some of them half way, and all that was
    acknowledged is there.
    """
    half_way = threading.Semaphore(0)
    contents = {f"k/{number:02}": os.urandom(4 << 20) for number in range(24)}

    def write(item: tuple[str, bytes]) -> None:
        half_way.release()
        store.put(item[0], item[1], if_absent=int(item[0][2:]) % 3 == 0)

    with open_store(gateway.url, Config(s3_retries=30)) as store, ThreadPoolExecutor(4) as pool:
        store.create()
        writers = [pool.submit(write, item) for item in contents.items()]
        for _ in range(8):
            half_way.acquire()
        radosgw_server.kill_gateway()
        radosgw_server.start_gateway()
        for writer in writers:
            writer.result(120)
        assert [info.name for info in store.list("k/")] == list(contents)
        for name, content in contents.items():
            assert store.get(name) == content


@pytest.mark.slow
def test_a_gateway_that_stays_away(gateway: Place, radosgw_server: RadosGateway) -> None:
    with open_store(gateway.url, Config(s3_retries=3)) as store:
        store.put("before", b"x")
        radosgw_server.kill_gateway()
        try:
            for verb in (
                lambda: store.put("o", b"x"),
                lambda: store.get("before"),
                lambda: list(store.list()),
            ):
                with pytest.raises(StoreUnreachable):
                    verb()
        finally:
            radosgw_server.start_gateway()
        assert store.get("before") == b"x"
