"""Programs that each give random numbers; this one asks all of them when it starts, and in each
later life, which it learns by waiting for its session's generation number.

Arguments: the folder for the answers, and what to start as JSON. Programs in ``piped`` answer each
line with a value; ``servers`` run on their own; ``sshd`` and ``nginx`` are ports, ``postgres`` is a
connection string of psycopg.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

from criuctl import inside

_IN_CLOSE_WRITE = 0x8


def patiently(attempt: Callable[[], Any]) -> Any:
    """What it returns as soon as it does not fail."""
    for _ in range(600):
        try:
            return attempt()
        except (OSError, psycopg.OperationalError):
            time.sleep(0.1)
    return attempt()


def connected(port: int) -> socket.socket:
    found: socket.socket = patiently(lambda: socket.create_connection(("127.0.0.1", port), 60))
    return found


def of_sshd(port: int) -> str:
    """After its version the first packet has 4 bytes of length, padding, kind, 16 random bytes."""
    with connected(port) as sock, sock.makefile("rb") as file:
        sock.sendall(b"SSH-2.0-test\r\n")
        file.readline()
        return file.read(22)[6:].hex()


def of_nginx(port: int) -> str:
    """The server's first record has 5 bytes, then kind, length, version, 32 random bytes."""
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        ssl._create_unverified_context().wrap_bio(received, sent).do_handshake()
    except ssl.SSLWantReadError:
        pass
    with connected(port) as sock, sock.makefile("rb") as file:
        sock.sendall(sent.read())
        return file.read(43)[11:].hex()


def of_pipe(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None and process.stdout is not None
    print(file=process.stdin, flush=True)
    return process.stdout.readline().strip()


def main(folder: str, given: dict[str, Any]) -> None:
    path = os.environ["CRIUCTL_SESSION_DIR"] + "/generation"
    libc = ctypes.CDLL(None)
    watch = libc.inotify_init()
    assert libc.inotify_add_watch(watch, path.encode(), _IN_CLOSE_WRITE) > 0
    piped = {
        name: subprocess.Popen(
            argv, text=True, bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for name, argv in given["piped"].items()
    }
    for argv in given["servers"]:
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    session = patiently(lambda: psycopg.connect(given["postgres"], autocommit=True))
    name = "first"
    while True:
        row = session.execute("SELECT gen_random_uuid()").fetchone()
        values = {name: of_pipe(process) for name, process in piped.items()}
        values |= {"sshd": of_sshd(given["sshd"]), "nginx": of_nginx(given["nginx"])}
        values |= {"postgres": str(row[0])}
        Path(folder, "." + name).write_text(json.dumps(values))
        os.rename(f"{folder}/.{name}", f"{folder}/{name}")
        os.read(watch, 4096)
        name = inside.generation()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
