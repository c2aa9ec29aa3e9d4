"""Logging in at a PostgreSQL server: trust, password, md5 and SCRAM-SHA-256; and the source of the
password.

The sources of a password, in this order: the rule's secret reference; PGPASSWORD in the program's
environment; the matching line of its ``~/.pgpass`` (or PGPASSFILE), under libpq's rules, including
the file's mode. A password is looked up only when the server asks for one.

The program chooses the file, and perhaps the server. So only a file that belongs to the program's
own user is read: otherwise criuctl, as root, would give away what the program cannot read itself.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import stat
import stringprep
import struct
import unicodedata
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct, field

from ...errors import UntrustedPath
from ...proc.trustedpath import opened
from .base import CannotRebuild, PeerAway
from .postgresql_wire import Conversation, ServerError, frame, startup

_MOST_ITERATIONS = 1_000_000  # a server that asks for more wants to keep us busy
_LARGEST = 1 << 20  # characters of a password file
_METHODS = {2: "Kerberos V5", 6: "SCM credentials", 7: "GSSAPI", 8: "GSSAPI", 9: "SSPI"}


class PasswordFile(Struct, frozen=True):
    """The program's .pgpass, and the names under which it knows the server."""

    path: str
    hosts: tuple[str, ...] = ()
    port: int = 0
    uid: int | None = None  # the program's effective user; None: it was not recorded


class Login(Struct):
    """The user and database of a login, and a function that returns the password."""

    user: bytes
    database: bytes
    password: Callable[[], str | None]  # None: there is none
    parameters: Sequence[tuple[bytes, bytes]] = ()
    cleartext: bool = True  # whether the password may be sent as it is
    warnings: list[str] = field(default_factory=list)  # what `password` had to say


def log_in(talk: Conversation, login: Login) -> None:
    """Log in, from StartupMessage to ReadyForQuery.

    Raise `CannotRebuild` if the server refuses, `PeerAway` if it refuses for now.
    """
    doing = f"login at {talk.wire.peer} as {login.user.decode(errors='replace')}"
    talk.wire.send(
        startup([(b"user", login.user), (b"database", login.database), *login.parameters])
    )
    if talk.wire.peek(1) == b"E" and talk.wire.peek(5)[1:2] not in (b"\0", b""):
        # A postmaster that cannot fork answers in the protocol's version 2: E, then plain text.
        raise PeerAway(f"{doing}: the server cannot start another process")
    try:
        _authenticate(talk, login, doing)
        while True:
            kind, body = talk.read()
            if kind == b"K" and len(body) >= 4:
                talk.backend = int.from_bytes(body[:4], "big")
            elif kind == b"Z":
                return
            else:
                raise CannotRebuild(f"{doing}: the server sent an unexpected message ({kind!r})")
    except ServerError as error:
        raise error.mapped(doing) from None


def _authenticate(talk: Conversation, login: Login, doing: str) -> None:
    scram: _Scram | None = None
    proved = True
    while True:
        kind, body = talk.read()
        if kind == b"v":
            continue  # NegotiateProtocolVersion: it knows no newer minor version, and we want none
        if kind != b"R" or len(body) < 4:
            raise CannotRebuild(f"{doing}: the server sent an unexpected message ({kind!r})")
        (method,) = struct.unpack_from("!I", body)
        data = body[4:]
        if method == 0:
            if not proved:
                raise CannotRebuild(f"{doing}: the server did not prove that it knows the password")
            return
        if method == 3:
            if not login.cleartext:
                raise CannotRebuild(f"{doing}: the server wants the password in clear")
            answer = _password(login, doing).encode() + b"\0"
        elif method == 5 and len(data) >= 4:
            answer = _md5(_password(login, doing).encode(), login.user, data[:4]) + b"\0"
        elif method == 10:
            offered = [name for name in data.split(b"\0") if name]
            if b"SCRAM-SHA-256" not in offered:
                raise CannotRebuild(
                    f"{doing}: the server offers no SASL mechanism that criuctl knows"
                )
            scram, proved = _Scram(_password(login, doing)), False
            first = scram.first()
            answer = b"SCRAM-SHA-256\0" + struct.pack("!I", len(first)) + first
        elif method == 11 and scram is not None:
            answer = scram.final(data, doing)
        elif method == 12 and scram is not None:
            scram.verify(data, doing)
            proved = True
            continue
        else:
            raise CannotRebuild(
                f"{doing}: authentication by {_METHODS.get(method, f'method {method}')} is not "
                "supported"
            )
        talk.wire.send(frame(b"p", answer))


def _password(login: Login, doing: str) -> str:
    found = login.password()
    if found is None:
        why = f" ({'; '.join(login.warnings)})" if login.warnings else ""
        raise CannotRebuild(
            f"{doing}: the server wants a password and none is known{why}",
            hint="Give the rule a `secret:` reference, or the program's user a line in ~/.pgpass.",
        )
    return found


def _md5(password: bytes, user: bytes, salt: bytes) -> bytes:
    inner = hashlib.md5(password + user, usedforsecurity=False).hexdigest().encode()
    return b"md5" + hashlib.md5(inner + salt, usedforsecurity=False).hexdigest().encode()


class _Scram:
    """The client's side of RFC 5802 with SHA-256, without channel binding (there is no TLS
    here).
    """

    def __init__(self, password: str) -> None:
        self._secret = _saslprep(password).encode()
        self._nonce = base64.b64encode(secrets.token_bytes(18))
        self._bare = b"n=,r=" + self._nonce  # the server takes the name from the StartupMessage
        self._signature = b""

    def first(self) -> bytes:
        return b"n,," + self._bare

    def final(self, challenge: bytes, doing: str) -> bytes:
        """Return the proof for the server's challenge."""
        try:
            parts = dict(item.split(b"=", 1) for item in challenge.split(b","))
            nonce, salt, rounds = (
                parts[b"r"],
                base64.b64decode(parts[b"s"], validate=True),
                int(parts[b"i"]),
            )
        except (KeyError, ValueError):
            raise CannotRebuild(f"{doing}: the server's SCRAM challenge makes no sense") from None
        if (
            not nonce.startswith(self._nonce)
            or len(nonce) == len(self._nonce)
            or not 1 <= rounds <= _MOST_ITERATIONS
        ):
            raise CannotRebuild(f"{doing}: the server's SCRAM challenge makes no sense")
        salted = hashlib.pbkdf2_hmac("sha256", self._secret, salt, rounds)
        client = _hmac(salted, b"Client Key")
        stored = hashlib.sha256(client).digest()
        without_proof = b"c=biws,r=" + nonce
        signed = self._bare + b"," + challenge + b"," + without_proof
        proof = bytes(a ^ b for a, b in zip(client, _hmac(stored, signed), strict=True))
        self._signature = _hmac(_hmac(salted, b"Server Key"), signed)
        return without_proof + b",p=" + base64.b64encode(proof)

    def verify(self, data: bytes, doing: str) -> None:
        """Check that the server knows the password too; raise `CannotRebuild`."""
        expected = b"v=" + base64.b64encode(self._signature)
        if not self._signature or not hmac.compare_digest(data.split(b",")[0], expected):
            raise CannotRebuild(f"{doing}: the server did not prove that it knows the password")


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def _saslprep(text: str) -> str:
    """Return `text` prepared by RFC 4013; text that it forbids is used unchanged, as PostgreSQL
    does.
    """
    mapped = "".join(
        " " if stringprep.in_table_c12(c) else c for c in text if not stringprep.in_table_b1(c)
    )
    prepared = unicodedata.normalize("NFKC", mapped)
    forbidden = (
        stringprep.in_table_a1, stringprep.in_table_c12, stringprep.in_table_c21_c22,
        stringprep.in_table_c3, stringprep.in_table_c4, stringprep.in_table_c5,
        stringprep.in_table_c6, stringprep.in_table_c7, stringprep.in_table_c8,
        stringprep.in_table_c9,
    )  # fmt: skip
    if not prepared or any(test(c) for c in prepared for test in forbidden):
        return text
    if any(stringprep.in_table_d1(c) for c in prepared) and (
        any(stringprep.in_table_d2(c) for c in prepared)
        or not (stringprep.in_table_d1(prepared[0]) and stringprep.in_table_d1(prepared[-1]))
    ):
        return text
    return prepared


def from_password_file(
    file: PasswordFile, database: str, user: str, warnings: list[str]
) -> str | None:
    """Return the password of the first line that matches; None if there is none. Like libpq, do not
    use a file that other users may read.
    """
    try:
        # The program named the path: no link that another user has made is followed, and no device
        # or FIFO is opened.
        with opened(os.path.abspath(file.path), trusted={0, file.uid or 0}) as place:
            if not stat.S_ISREG(place.status.st_mode):
                warnings.append(f"{file.path} is not a regular file and was not used")
                return None
            if place.status.st_mode & 0o077:
                warnings.append(f"{file.path} may be read by others and was not used (chmod 0600)")
                return None
            if file.uid not in (None, 0, place.status.st_uid):
                warnings.append(
                    f"{file.path} belongs to another user than the program and was not used"
                )
                return None
            with (
                place.reopened() as fd,
                open(fd, encoding="utf-8", errors="surrogateescape", closefd=False) as stream,
            ):
                return _match(
                    stream.read(_LARGEST).split("\n"), [*file.hosts], str(file.port), database, user
                )
    except UntrustedPath as error:
        warnings.append(f"{error.message}; it was not used")
        return None
    except OSError:
        return None  # no such file is the usual case


def _match(
    lines: Iterable[str], hosts: list[str], port: str, database: str, user: str
) -> str | None:
    for line in lines:
        text = line.rstrip("\r\n")
        if not text or text.startswith("#"):
            continue
        parts = _split(text)
        if len(parts) < 5:
            continue
        wanted = ([*hosts, "*"], [port, "*"], [database, "*"], [user, "*"])
        if all(part in choices for part, choices in zip(parts, wanted, strict=False)):
            return parts[4]
    return None


def _split(line: str) -> list[str]:
    """Return the fields of a line; ``\\`` quotes the next character."""
    parts, escaped = [""], False
    for c in line:
        if escaped or c not in "\\:":
            parts[-1] += c
            escaped = False
        elif c == "\\":
            escaped = True
        else:
            parts.append("")
    return parts
