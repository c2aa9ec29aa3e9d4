"""Both ends of a link, and untrusted ends."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.linking import TIMEOUT, Ends, Raw, RawEnd

from criuctl.transport.link import Handler, Link


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Descriptors and threads of a link end with it."""
    descriptors = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    for thread in threading.enumerate():
        if thread.name.startswith("criuctl-link"):
            thread.join(TIMEOUT)
            assert not thread.is_alive(), thread


@pytest.fixture(autouse=True)
def no_thread_fails(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException | None]]:
    """What leaves a thread as an exception is a bug."""
    failed: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: failed.append(args.exc_value))
    yield failed
    assert failed == []


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Make links with both ends ours: over pipes, or over a pair of sockets."""
    made: list[Link] = []

    def make(
        left: Handler | None = None,
        right: Handler | None = None,
        *,
        sockets: bool = False,
        **options: Any,
    ) -> tuple[Link, Link]:
        if sockets:
            one, other = socket.socketpair()
            first, second = one.detach(), other.detach()
            pairs = [(first, first), (second, second)]
        else:
            (left_in, right_out), (right_in, left_out) = os.pipe(), os.pipe()
            pairs = [(left_in, left_out), (right_in, right_out)]
        handlers = [("right", left), ("left", right)]
        links = [
            Link(*pair, serve, name=name, **options)
            for pair, (name, serve) in zip(pairs, handlers, strict=True)
        ]
        made.extend(links)
        for link in links:
            link.start()
        return links[0], links[1]

    yield make
    for link in made:
        link.close()


@pytest.fixture
def raw() -> Iterator[RawEnd]:
    """Make links whose other end is untrusted."""
    made: list[tuple[Link, Raw]] = []

    def make(serve: Handler | None = None, **options: Any) -> tuple[Link, Raw]:
        one, other = socket.socketpair()
        fd = one.detach()
        link = Link(fd, fd, serve, name="far", **options)
        made.append((link, Raw(other)))
        link.start()
        return made[-1]

    yield make
    for link, end in made:
        end.sock.close()
        link.close()
