"""A unix socket on which a criuctl that holds an arrived session takes the word of a later one; one
line each way.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ...config import Config
from ...errors import CriuctlError, NotFound, RestoreFailed

_PATIENCE = 120.0  # seconds for a decision to be carried out
_LINE = 1 << 20


def _address(config: Config, identity: str) -> str:
    return f"\0criuctl/move/{os.stat(config.state_dir).st_ino:x}/{identity}"


@contextmanager
def listening(
    config: Config, identity: str, decide: Callable[[str], dict[str, Any]]
) -> Iterator[None]:
    """Listen while inside: `decide` is called with the word that another criuctl sends for the move
    `identity`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as server:
        server.bind(_address(config, identity))
        server.listen(4)
        thread = threading.Thread(
            target=_serve, args=(server, decide), name="criuctl-rendezvous", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(server: socket.socket, decide: Callable[[str], dict[str, Any]]) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return  # it is over
        threading.Thread(
            target=_answer, args=(connection, decide), name="criuctl-word", daemon=True
        ).start()


def _answer(connection: socket.socket, decide: Callable[[str], dict[str, Any]]) -> None:
    with connection:
        connection.settimeout(_PATIENCE)
        if not _trusted(connection):
            return
        try:
            word = connection.makefile("rb").readline(64).decode().strip()
            answer = decide(word) if word in ("go", "abort") else {"error": f"bad word {word!r}"}
        except CriuctlError as error:
            answer = {"error": error.message}
        except (OSError, ValueError):
            return
        with suppress(OSError):
            connection.sendall(json.dumps(answer).encode() + b"\n")


def _trusted(connection: socket.socket) -> bool:
    """Return whether the other end belongs to root or to our own user: any user can bind an
    abstract address, or connect to it.
    """
    uid = int.from_bytes(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[4:8], "little"
    )
    return uid in (0, os.geteuid())


def tell(config: Config, identity: str, word: str) -> dict[str, Any]:
    """Send the word to the criuctl that holds the move `identity`, and wait until it is carried
    out.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(_PATIENCE)
        try:
            connection.connect(_address(config, identity))
            if not _trusted(connection):
                raise NotFound(
                    "a process of another user listens in place of the criuctl that holds that "
                    "session"
                )
            connection.sendall(f"{word}\n".encode())
            line = connection.makefile("rb").readline(_LINE)
            answer: dict[str, Any] = json.loads(line)
        except (OSError, ValueError) as error:
            raise NotFound("no criuctl there holds that session any more") from error
    if "error" in answer:
        raise RestoreFailed(str(answer["error"]))
    return answer
