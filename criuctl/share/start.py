"""Making a share."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from ..errors import (
    CommandFailed,
    Conflict,
    CriuctlError,
    HostUnreachable,
    PlatformError,
    SessionGone,
    TimedOut,
    UntrustedPath,
    UsageError,
)
from ..host import rights
from ..ops.sessions import connect
from ..proc import command
from ..session.launch import daemon
from ..session.sessions import inside
from ..transport import ssh
from .keeper import Order
from .records import Share

if TYPE_CHECKING:
    from ..config import Config

LONGEST = 7 * 24 * 3600.0  # seconds
_ENTRY = Path(__file__).with_name("entry.py")
_PATIENCE = 60.0  # seconds for a keeper to answer
_PROBE = 5.0  # seconds for the relay to lead back here
_ERRORS: dict[str, type[CriuctlError]] = {
    kind.code: kind for kind in (HostUnreachable, PlatformError, SessionGone, UntrustedPath)
}
_BANNER = b"SSH-2.0-criuctl"


class Started(Struct, frozen=True):
    """A share that stands; `reachable`: a connection to its address has led back here."""

    share: Share
    line: str
    reachable: bool


def start(
    config: Config,
    session: str,
    via: str,
    *,
    role: str,
    seconds: float,
    address: str = "",
    config_file: str | None = None,
) -> Started:
    """Share `session` by way of the relay `via`. Return when the tunnel stands.

    `address` is the relay's name or address for guests, by default the one in `via`. `UsageError`,
    `Conflict` inside a session, `SessionGone`, `HostUnreachable`, `CommandFailed`.
    """
    if not 1 <= seconds <= LONGEST:
        raise UsageError("a share lasts from a second to seven days")
    if (around := inside(config)) is not None:
        raise Conflict(
            f"this runs inside session {around!r}, and the share's process would be a part of it",
            hint="Run it from outside of any session.",
        )
    rights.check(config, f"share open --role {role}", session)
    host = ssh.Host.parse(via, config)
    with connect(config, session, role="observe") as there:
        status = there.hello["status"]
    relay = address or host.address.destination.rpartition("@")[2]
    now = time.time()
    share = Share(
        id=secrets.token_hex(4),
        session=session,
        session_id=str(status["id"]),
        role=role,
        via=via,
        host=relay,
        made=now,
        expires=now + seconds,
    )
    if any(not (c.isascii() and (c.isalnum() or c in ".:-_")) for c in relay):
        raise UsageError(f"{relay!r} is no name or address for guests", hint="See --address.")
    order = Order(
        share,
        host,
        ssh.program(config),
        seconds,
        os.path.abspath(config_file) if config_file else None,
        daemon.helper_environment(config),
    )
    answer = _ask(order)
    if "error" in answer:
        error = answer["error"]
        kind = _ERRORS.get(str(error.get("code")), CommandFailed)
        raise kind(str(error.get("message")), hint=str(error.get("hint", "")))
    made = msgspec.convert(answer["share"], Share)
    return Started(made, str(answer["line"]), _leads_back(made))


def _ask(order: Order) -> dict[str, Any]:
    """Start the keeper and return its answer."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            child = command.spawn(
                [
                    *daemon.scope(f"share-{order.share.id}"),
                    sys.executable,
                    "-I",
                    str(_ENTRY),
                    str(theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                env=ssh.environment(),
                cwd="/",
                new_session=True,
            )
        ours.settimeout(_PATIENCE)
        try:
            ours.sendall(msgspec.json.encode(order))
            ours.shutdown(socket.SHUT_WR)
            with ours.makefile("rb") as file:
                answer = file.read()
        except TimeoutError:
            child.end()
            raise TimedOut(f"the share did not stand in {_PATIENCE:g} s") from None
        except OSError:
            answer = b""
        except BaseException:
            child.end()
            raise
    if not answer:
        said = child.stderr_tail().strip().splitlines()
        raise CommandFailed(f"the share did not start: {said[-1] if said else 'it said nothing'}")
    return dict(msgspec.json.decode(answer))


def _leads_back(share: Share) -> bool:
    """Return whether this host comes to its own share by the relay's address."""
    try:
        with socket.create_connection((share.host, share.port), _PROBE) as sock:
            return sock.recv(len(_BANNER), socket.MSG_WAITALL) == _BANNER
    except OSError:
        return False
