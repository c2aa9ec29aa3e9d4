"""Typing into a session for a client that is not attached: text, keys, pasted files."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..config import Config
from ..errors import LeaseHeld, UsageError
from ..session import protocol
from ..session.client import caller, keys
from . import acting
from .sessions import check_seconds, connect

if TYPE_CHECKING:
    from ..session.client.session import Session

T = TypeVar("T")

# seconds to wait for a pause of the typing client; between two looks
_PATIENCE, _LOOK = 3.0, 0.1
_TAKEN = 30.0  # seconds that a person keeps a lease that a command has taken
_BEGIN, _END = b"\x1b[200~", b"\x1b[201~"


def writer(config: Config, name: str, *, take: bool) -> Session:
    """Return a connection that holds the lease and may type: see `hold_lease`.

    A lease that a person takes outlasts the command for a while: else the next input of the client
    that had it would take it back at once.
    """
    actor = acting.current()
    kind = actor.kind if actor else caller.kind()
    # no agent takes it from a human, unless the server that it is a client of lets it
    role = "admin" if take and (actor or kind != "agent") else "write"
    session = connect(config, name, kind=kind, role=role)
    try:
        hold_lease(session, take=take, hold=_TAKEN if kind == "human" else None)
    except BaseException:
        session.close()
        raise
    return session


def hold_lease(
    session: Session, *, take: bool, ttl: float = protocol.DEFAULT_TTL, hold: float | None = None
) -> None:
    """Get the write lease for the connection, for `ttl` seconds; wait a little for a client that is
    typing, or not with `take`.

    It is soft, unless it is taken, or the connection holds it already and has asked for it. One
    that is taken outlasts the connection for `hold` seconds.
    """
    if take:
        session.lease_take(ttl, hold=hold)
    else:
        patiently(lambda: session.lease_request(ttl, soft=True))


def patiently(ask: Callable[[], T]) -> T:
    """Return the answer of `ask`; wait a little for a pause of the client that holds the lease, if
    that one gives it up by pausing.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        last = time.monotonic() >= deadline
        try:
            return ask()
        except LeaseHeld as held:
            if last or held.details.get("soft") is False:
                raise
        time.sleep(_LOOK)


def type_into(
    config: Config,
    name: str,
    parts: Sequence[tuple[str, str]],
    *,
    take: bool = False,
    timeout: float = 30.0,
) -> dict[str, Any]:
    """Type `parts`: (``text``, TEXT), (``enter``, ""), (``keys``, KEYS), (``paste``, FILE); return
    what was typed, and where, when it is done.

    Files are read and keys parsed before anything is typed.
    """
    read = [(way, _file(value) if way == "paste" else value) for way, value in parts]
    check(read)
    with writer(config, name, take=take) as session:
        return {"session": name, **type_parts(session, read, timeout=timeout)}


Part = tuple[str, str | bytes]
"""What to type, after its kind: ``text``, ``enter`` (nothing), ``keys`` or ``paste`` (bytes)."""


def check(parts: Sequence[Part]) -> None:
    """Raise `UsageError` for a name that is no key's."""
    for way, value in parts:
        if way == "keys":
            _keys(str(value), {})


def type_parts(session: Session, parts: Sequence[Part], *, timeout: float) -> dict[str, Any]:
    """Type `parts` on a connection that holds the lease; return what was typed, and where."""
    status = session.status()
    data = b"".join(_bytes(way, value, status["modes"]) for way, value in parts)
    if not data:
        raise UsageError("nothing to send: the text is empty")
    check_seconds(timeout)
    answer = session.send(data, timeout=timeout)
    return {
        "offset": answer.get("offset", status["offset"]),
        "sequence": answer.get("sequence"),
        "bytes": len(data),
        "held": answer.get("held", False),
    }


def _bytes(way: str, value: str | bytes, modes: dict[str, Any]) -> bytes:
    """Return what a terminal would send for one part."""
    if way == "enter":
        return b"\r"
    if way == "keys":
        return _keys(str(value), modes)
    data = value.encode(errors="surrogateescape") if isinstance(value, str) else value
    return _pasted(data, modes) if way == "paste" else data


def _keys(text: str, modes: dict[str, Any]) -> bytes:
    return b"".join(
        keys.encode(word, cursor_keys=bool(modes.get("cursor_keys"))) for word in text.split()
    )


def _file(path: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _pasted(data: bytes, modes: dict[str, Any]) -> bytes:
    """Return data as a terminal sends a paste: lines end with a carriage return, and the text
    cannot end its own bracket.
    """
    data = data.replace(b"\r\n", b"\r").replace(b"\n", b"\r")
    if modes.get("bracketed_paste"):
        while _END in data:
            data = data.replace(_END, b"")
        return _BEGIN + data + _END
    return data
