"""The plain side of the relay: a unix socket for one user, or a port of loopback.

What arrives here leaves this host with the relay's trust, so other users may not reach it. A unix
socket is made with mode 0600, in a folder that only root or the relay's own user can change: its
name cannot be another file's when its owner is set. A port is one of loopback.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import pwd
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec import Struct

from ...errors import Conflict, PlatformError, UsageError
from ...proc.ownership import check_own, check_place
from ...quoting import quoted

_BACKLOG = 64
_PATIENCE = 1.0  # seconds in which a relay that is alive takes a connection


class Place(Struct, frozen=True):
    """Where the relay listens: a unix socket's `path`, or a `host` and `port` of loopback."""

    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Place:
        """Parse an absolute path or ``HOST:PORT``; `UsageError` for what others can reach."""
        if text.startswith("/"):
            return cls(path=os.path.normpath(text))
        host, port = host_and_port(text, "an absolute path, or 127.0.0.1:PORT")
        try:
            loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            loopback = False
        if not loopback:
            raise UsageError(
                f"{host} is reached from other machines, and the relay's own side has no TLS",
                hint="Listen on a unix socket (--listen /run/tls/NAME), or on 127.0.0.1.",
            )
        return cls(host="127.0.0.1" if host == "localhost" else host, port=port)

    def __str__(self) -> str:
        return self.path or f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def host_and_port(text: str, wanted: str) -> tuple[str, int]:
    """Return the parts of ``HOST:PORT`` or ``[IPV6]:PORT``; `UsageError`, which names what is
    `wanted`.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise UsageError(f"{text!r} is no address", hint=f"Give {wanted}.")
    return host, int(port)


@contextmanager
def listening(place: Place, owner: str = "") -> Iterator[socket.socket]:
    """Yield the listening socket; a unix socket belongs to the user `owner` and is removed
    afterwards.

    `Conflict` if the place is taken, `UntrustedPath` for a folder that others can change.
    """
    if place.path:
        sock = _unix(place.path, owner)
        status = os.lstat(place.path)
    else:
        if owner:
            raise UsageError(
                "--owner is for a unix socket; every user of this host reaches a port",
                hint="Use --listen /run/tls/NAME.",
            )
        sock = _port(place)
    try:
        yield sock
    finally:
        sock.close()
        if place.path:
            with suppress(OSError):
                if os.path.samestat(os.lstat(place.path), status):
                    os.unlink(place.path)


def _port(place: Place) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in place.host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((place.host, place.port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise Conflict(
            f"{place} cannot be listened on: {error.strerror}",
            hint="Choose another port, or a unix socket.",
        ) from error
    return sock


def _unix(path: str, owner: str) -> socket.socket:
    uid = _uid(owner) if owner else -1
    folder = Path(path).parent
    try:
        if not folder.exists():
            check_place(folder)
            folder.mkdir(mode=0o755)
        check_own(folder)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be used: {error.strerror}",
            hint=f"Make it: `mkdir -p {quoted(folder)}`.",
        ) from error
    sock = socket.socket(socket.AF_UNIX)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # two relays that are started at the same time
        _remove_stale(path)
        before = os.umask(0o177)
        try:
            sock.bind(path)
        finally:
            os.umask(before)
        if owner:
            os.chown(path, uid, -1, follow_symlinks=False)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        kind = Conflict if error.errno == errno.EADDRINUSE else PlatformError
        raise kind(
            f"{path} cannot be listened on: {error.strerror or error}",
            hint="Choose another path, of at most 107 bytes, whose owner you may set.",
        ) from error
    except BaseException:
        sock.close()
        raise
    finally:
        os.close(fd)
    return sock


def _uid(owner: str) -> int:
    try:
        return pwd.getpwnam(owner).pw_uid
    except KeyError:
        raise UsageError(f"there is no user {owner!r} on this host") from None


def _remove_stale(path: str) -> None:
    """Remove the socket of a relay that was killed; `Conflict` if it is alive, or no socket."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise Conflict(f"{path} is there already, and is no socket", hint="Choose another path.")
    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(_PATIENCE)
        try:
            asked.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError:
            pass
    raise Conflict(
        f"another program listens on {path}", hint="End it first, or choose another path."
    )
