"""The metadata services of three clouds, as a machine sees them, on a port of this one.

Each speaks its cloud's protocol and refuses what the real one refuses: a request without the header
or with an expired token, an unknown path, a wrong method. `harm` makes it hostile: ``huge`` answers
without end, ``drip`` sends a byte now and then, ``hang`` nothing, ``redirect`` points elsewhere,
``garbage`` is no HTTP, ``error`` is 503.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

_HTTP_DATE = "%a, %d %b %Y %H:%M:%S GMT"


class CloudMetadata:
    """One service; what it announces is set by the test."""

    def __init__(self, cloud: str) -> None:
        self.cloud = cloud
        self.harm = ""
        self.lock = threading.Condition()
        self.token, self.tokens = "", 0  # the one that is valid, and how many were given
        self.documents: dict[str, str] = {}  # aws
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}  # gcp
        self.version = 1  # of the values: their ETag
        self.events: list[dict[str, Any]] = []  # azure
        self.started: list[str] = []  # azure: events that were acknowledged
        self.requests: list[str] = []
        self.over = threading.Event()
        self.url = ""

    # -- what the cloud does

    def interrupt(self, seconds: float, *, resources: tuple[str, ...] = ("machine-1",)) -> None:
        """Announce that the machine is taken away in so many seconds."""
        at = time.gmtime(time.time() + seconds)
        with self.lock:
            if self.cloud == "aws":
                self.documents["spot/instance-action"] = json.dumps(
                    {"action": "terminate", "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", at)}
                )
            elif self.cloud == "gcp":
                self._set("preempted", "TRUE")
            else:
                self.events.append(
                    {
                        "EventId": f"event-{len(self.events) + 1}",
                        "EventType": "Preempt",
                        "ResourceType": "VirtualMachine",
                        "Resources": list(resources),
                        "EventStatus": "Scheduled",
                        "NotBefore": time.strftime(_HTTP_DATE, at),
                        "Description": "",
                        "EventSource": "Platform",
                        "DurationInSeconds": -1,
                    }
                )

    def recommend(self) -> None:
        """Recommend to leave (aws)."""
        notice = {"noticeTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        with self.lock:
            self.documents["events/recommendations/rebalance"] = json.dumps(notice)

    def maintain(self, event: str) -> None:
        """Announce maintenance (gcp)."""
        with self.lock:
            self._set("maintenance-event", event)

    def withdraw(self) -> None:
        """Nothing is announced any more."""
        with self.lock:
            self.documents.clear()
            self.events.clear()
            self._set("preempted", "FALSE")

    def expire(self) -> None:
        """The token that was given is not valid any more (aws)."""
        self.token = ""

    def _set(self, key: str, value: str) -> None:
        self.values[key] = value
        self.version += 1
        self.lock.notify_all()

    # -- how it answers

    def answer(self, handler: _Handler, method: str) -> tuple[int, str, dict[str, str]]:
        """Status, body and headers."""
        parts = urlsplit(handler.path)
        self.requests.append(f"{method} {handler.path}")
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        return getattr(self, f"_{self.cloud}")(handler, method, parts.path, query)  # type: ignore[no-any-return]

    def _aws(
        self, handler: _Handler, method: str, path: str, _query: dict[str, str]
    ) -> tuple[int, str, dict[str, str]]:
        if path == "/latest/api/token":
            ttl = handler.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if method != "PUT" or not ttl.isdigit() or not 1 <= int(ttl) <= 21600:
                return 400, "Bad Request", {}
            self.tokens += 1
            self.token = f"AQAE{self.tokens:04}=="
            return 200, self.token, {}
        if not self.token or handler.headers.get("X-aws-ec2-metadata-token") != self.token:
            return 401, "Unauthorized", {}
        found = self.documents.get(path.removeprefix("/latest/meta-data/"))
        return (404, "Not Found", {}) if found is None else (200, found, {})

    def _gcp(
        self, handler: _Handler, _method: str, path: str, query: dict[str, str]
    ) -> tuple[int, str, dict[str, str]]:
        if handler.headers.get("Metadata-Flavor") != "Google":
            return 403, "Missing Metadata-Flavor:Google header.", {}
        key = path.removeprefix("/computeMetadata/v1/instance/")
        if key not in self.values:
            return 404, "", {"Metadata-Flavor": "Google"}
        if query.get("wait_for_change") == "true":
            until = time.monotonic() + int(query.get("timeout_sec", "3600"))
            with self.lock:
                while (
                    query.get("last_etag", str(self.version)) == str(self.version)
                    and (left := until - time.monotonic()) > 0
                    and not self.over.is_set()
                ):
                    self.lock.wait(min(left, 0.1))
        return 200, self.values[key], {"Metadata-Flavor": "Google", "ETag": str(self.version)}

    def _azure(
        self, handler: _Handler, method: str, path: str, query: dict[str, str]
    ) -> tuple[int, str, dict[str, str]]:
        if handler.headers.get("Metadata") != "true" or "api-version" not in query:
            return 400, "Bad request", {}
        if path == "/metadata/instance/compute/name" and query.get("format") == "text":
            return 200, "machine-1", {}
        if path != "/metadata/scheduledevents":
            return 404, "", {}
        if method == "POST":
            length = int(handler.headers.get("Content-Length", "0"))
            asked = json.loads(handler.rfile.read(length))["StartRequests"]
            self.started += [one["EventId"] for one in asked]
            return 200, "", {}
        body = {"DocumentIncarnation": len(self.events), "Events": self.events}
        return 200, json.dumps(body), {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: CloudMetadata

    def do_GET(self) -> None:
        self._serve("GET")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def do_POST(self) -> None:
        self._serve("POST")

    def _serve(self, method: str) -> None:
        with suppress(OSError):  # a client that had enough
            if self.service.harm:
                self._harm(self.service.harm)
                return
            status, body, headers = self.service.answer(self, method)
            self._send(status, body.encode(), headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _harm(self, how: str) -> None:
        self.close_connection = True
        if how == "error":
            self._send(503, b"busy", {})
        elif how == "redirect":
            self._send(302, b"", {"Location": f"{self.service.url}/elsewhere"})
        elif how == "garbage":
            self.wfile.write(b"220 mail.example.org ESMTP\r\n")
        elif how == "hang":
            self.service.over.wait()
        else:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\n\r\n")
            while not self.service.over.wait(0.05 if how == "drip" else 0):
                self.wfile.write(b"x" if how == "drip" else b"x" * 65536)

    def log_message(self, *_args: Any) -> None:
        """Say nothing."""


@contextmanager
def metadata_service(cloud: str) -> Iterator[CloudMetadata]:
    """A running service of ``aws``, ``gcp`` or ``azure``."""
    service = CloudMetadata(cloud)
    handler = type("Handler", (_Handler,), {"service": service})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    service.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield service
    finally:
        service.over.set()
        server.shutdown()
        thread.join(30)
        server.server_close()


def main(cloud: str, port: int) -> None:
    """Serve on a port until killed; a request of /interrupt announces an interruption."""
    service = CloudMetadata(cloud)

    class Handler(_Handler):
        def do_GET(self) -> None:
            if self.path == "/interrupt":
                service.interrupt(100)
            super().do_GET()

    handler = type("Handler", (Handler,), {"service": service})
    ThreadingHTTPServer(("127.0.0.1", port), handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
