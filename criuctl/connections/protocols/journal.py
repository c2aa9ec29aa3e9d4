"""systemd's journal: a service's output goes over a unix stream, with a header that names the
service to journald.

The header has seven lines: identifier, unit, priority, whether lines begin with a level, and
whether to pass them on to syslog, the kernel's log and the console (systemd's ``connect_logger_as``
and ``journald-stream.c``). journald never answers, and the reading side is shut. So no state is
lost with the connection: it is connected again with the same header, and the program's output is
found under the same unit. journald learns the process of each line from the kernel.

The original identifier and priority cannot be read back. They are assumed to be systemd's defaults:
the command of the process that holds the connection, and 30 (daemon.info). The options `identifier`
and `priority` of a rule override them.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from ...checkpoint.connection_record import ConnectionRecord
from ...errors import NoSuchProcess
from ...proc.procfs import read_text, unit_of
from .base import CannotRebuild, PeerAway, Settings

_PRIORITY = 30  # facility daemon, level info
_MOST = 191
_KNOWN = ("identifier", "priority")


class Journal:
    """The protocol `journal`; stateless."""

    name = "journal"
    any_time = True  # journald reads unread output when the program is gone

    def inspect(
        self, sock: socket.socket, record: ConnectionRecord, settings: Settings, deadline: float
    ) -> dict[str, Any]:
        """See `base.ApplicationProtocol`; reads only /proc."""
        _options(settings.options)
        try:
            return {"identifier": _text(record.pid, "comm"), "unit": unit_of(record.pid)}
        except NoSuchProcess as error:
            raise CannotRebuild(error.message) from error

    def reconnect(
        self, sock: socket.socket, record: ConnectionRecord, settings: Settings, deadline: float
    ) -> dict[str, Any]:
        """See `base.ApplicationProtocol`."""
        identifier, priority = _options(settings.options)
        session = record.session
        sender = {
            "identifier": identifier
            or str(session.get("identifier", ""))
            or _text(settings.process, "comm"),
            "unit": str(session.get("unit", "")),
        }
        lines = [sender["identifier"], sender["unit"], str(priority), "1", "0", "0", "0"]
        if any("\n" in line for line in lines):
            raise CannotRebuild("the identifier or the unit for the journal has more than one line")
        header = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
        try:
            sent = sock.send(header, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as error:
            raise PeerAway(f"{record.peer} accepts no data: {error.strerror}") from error
        if sent != len(header):
            raise CannotRebuild(f"{record.peer} has accepted only a part of its header")
        sock.shutdown(socket.SHUT_RD)
        return sender


PROTOCOL = Journal()


def _text(pid: int, name: str) -> str:
    return read_text(pid, name).rstrip("\n")


def _options(options: Mapping[str, Any]) -> tuple[str, int]:
    for key in options:
        if key not in _KNOWN:
            raise CannotRebuild(
                f"journal knows no option {key}, which the rule has",
                hint="It knows identifier and priority.",
            )
    identifier, priority = options.get("identifier", ""), options.get("priority", _PRIORITY)
    if not isinstance(identifier, str):
        raise CannotRebuild("the rule's option identifier must be text")
    if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= _MOST:
        raise CannotRebuild(
            f"the rule's option priority must be a number from 0 to {_MOST}: facility * 8 + level"
        )
    return identifier, priority
