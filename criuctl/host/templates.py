"""The keepers of templates on this host: processes that hold the memory of a checkpoint once, for
the copies that `fork` has made of it.

A copy's pages that were not touched yet are in the template alone. Each keeper
(`criuctl.restore.template_keeper`) listens on a socket in ``run_dir/templates``. Over a connection
to it, a SOCK_SEQPACKET socket with JSON, a restore introduces a copy, and a dump has the memory of
a copy completed.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import CriuctlError, DumpFailed
from ..proc.mappings import vm_flags
from ..proc.tree import read_tree
from ..session.names import socket_address
from .registry import run_folder

MESSAGE = 1 << 16  # bytes
_FOLDER = "templates"
_SUFFIX = ".socket"  # of a keeper's address
_ANSWER = 30.0  # seconds for an answer
_FILLING = 600.0  # seconds for the memory of one tree


def folder(config: Config) -> Path:
    """Return the folder of the keepers' sockets."""
    return run_folder(config, _FOLDER)


class KeeperGone(CriuctlError):
    """The keeper of the template has ended, or does not answer."""


class KeeperLine:
    """A connection to a keeper; `close` it."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError` if no keeper listens at `path`."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(_ANSWER)
            with socket_address(path) as address:
                self._socket.connect(address)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def send(self, what: dict[str, Any], *fds: int) -> None:
        """Send a message; a keeper that has ended is noticed when its answer does not come."""
        with suppress(OSError):
            socket.send_fds(self._socket, [json.dumps(what).encode()], fds)

    def ask(self, what: dict[str, Any], *, timeout: float = _ANSWER) -> None:
        """Send a message and wait until it is done; `KeeperGone`, or what went wrong there."""
        self.send(what)
        self._socket.settimeout(timeout)
        try:
            said = json.loads(self._socket.recv(MESSAGE) or b"{}")
        except (OSError, ValueError):
            said = {}
        if not said.get("done"):
            raise KeeperGone(
                said.get("error") or "the process that keeps the template has ended or hangs"
            )


def complete(config: Config, root: int) -> None:
    """Have all memory of this tree in place, if it is a copy that a template serves; `DumpFailed`.

    CRIU takes a page that is not there yet for one that never was.
    """
    keepers = _keepers(config)
    pids = [p.pid for p in read_tree(root)] + list(_above(root)) if keepers else []
    for path in keepers:
        try:
            line = KeeperLine(path)
        except ConnectionRefusedError:  # it was killed, and its copies have ended
            with suppress(OSError):
                path.unlink()
            continue
        except FileNotFoundError:  # it has just ended
            continue
        try:
            line.ask({"fill": pids}, timeout=_FILLING)
        except KeeperGone as error:
            raise DumpFailed(
                f"the memory of PID {root} cannot be completed from its template: {error.message}",
                hint="It is a copy that `criuctl fork` has made; it runs on. Try again.",
            ) from error
        finally:
            line.close()
    if _others(config):
        _check_whole(root)


def _keepers(config: Config) -> list[Path]:
    place = folder(config)
    try:
        return [place / name for name in sorted(os.listdir(place))]
    except FileNotFoundError:
        return []


def _others(config: Config) -> bool:
    """Return whether there may be keepers of other run folders; sockets of any program are seen, so
    none of them is asked.
    """
    mine = str(folder(config))
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
        paths = [line.split(" ")[-1].rstrip() for line in file if line.rstrip().endswith(_SUFFIX)]
    return any(
        (place := os.path.dirname(path)) != mine and os.path.basename(place) == _FOLDER
        for path in paths
    )


def _check_whole(root: int) -> None:
    """Raise `DumpFailed` if pages of this tree are still to be brought (``um``: registered with a
    userfaultfd for missing pages).
    """
    for process in read_tree(root):
        flags = {} if process.zombie else vm_flags(process.pid)
        if any("um" in words for words in flags.values()):
            raise DumpFailed(
                f"PID {process.pid}: memory of it is still in a template that is kept for another "
                "run folder",
                hint="Set `run_dir` to that of the criuctl that has forked it.",
            )


def _above(pid: int) -> Iterable[int]:
    """Yield the ancestors of a process."""
    from ..proc.tree import read_process

    while pid > 1:
        try:
            pid = read_process(pid).ppid
        except CriuctlError:
            return
        yield pid
