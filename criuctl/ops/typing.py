"""Typing into a session for a client that is not attached: text, keys, pasted files."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..config import Config
from ..errors import LeaseHeld, UsageError
from ..session.client import caller, keys
from .sessions import connect

if TYPE_CHECKING:
    from ..session.client.session import Session

T = TypeVar("T")

# seconds to wait for a pause of the typing client; between two looks
_PATIENCE, _LOOK = 3.0, 0.1
_TAKEN = 30.0  # seconds that a person keeps a lease that a command has taken
_BEGIN, _END = b"\x1b[200~", b"\x1b[201~"


def writer(config: Config, name: str, *, take: bool) -> Session:
    """Return a connection that holds the lease and may type; wait a little for a client that is
    typing, or not with `take`.

    A lease that a person takes outlasts the command for a while: else the next input of the client
    that had it would take it back at once.
    """
    kind = caller.kind()
    role = "admin" if take and kind != "agent" else "write"  # no agent takes it from a human
    session = connect(config, name, kind=kind, role=role)
    try:
        if take:
            session.lease_take(hold=_TAKEN if kind == "human" else None)
        else:
            patiently(lambda: session.lease_request(soft=True))
    except BaseException:
        session.close()
        raise
    return session


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
    pasted = [_file(value) if way == "paste" else b"" for way, value in parts]
    for way, value in parts:
        if way == "keys":
            _keys(value, {})
    with writer(config, name, take=take) as session:
        modes = session.hello["status"]["modes"]
        data = b"".join(
            value.encode(errors="surrogateescape")
            if way == "text"
            else b"\r"
            if way == "enter"
            else _keys(value, modes)
            if way == "keys"
            else _pasted(file, modes)
            for (way, value), file in zip(parts, pasted, strict=True)
        )
        if not data:
            raise UsageError("nothing to send: the text is empty")
        answer = session.send(data, timeout=timeout)
        return {
            "session": name,
            "offset": answer.get("offset", session.hello["status"]["offset"]),
            "sequence": answer.get("sequence"),
            "bytes": len(data),
            "held": answer.get("held", False),
        }


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
