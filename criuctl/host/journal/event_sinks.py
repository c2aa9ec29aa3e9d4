"""Forward events, after they are in the event log, to the journal or to syslog.

The journal's native protocol is used: one datagram of ``FIELD=value`` lines, so `journalctl
CRIUCTL_SESSION=web` finds what happened to a session.  The protocol is a few lines; the libraries
for it need libsystemd and a compiler.  Syslog's lines are those of RFC 3164, to the local socket.
Neither may delay an operation: what cannot be sent within a second is not sent.  So neither
`syslog` nor `logging` of the standard library is used: they wait, and report failures on standard
error.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

JOURNAL = Path("/run/systemd/journal/socket")
SYSLOG = Path("/dev/log")
_PATIENCE = 1.0  # seconds
_INFO, _WARNING, _ERROR = 6, 4, 3
_DAEMON = 3  # the facility
_PRIORITIES = {"done": _INFO, "degraded": _WARNING}


def forward(sink: str, events: Sequence[Mapping[str, Any]]) -> str:
    """Send the events to `sink`: ``journald``, or ``syslog`` if there is none; return what went
    wrong, "" if nothing did.
    """
    send, where = (
        (_to_journal, JOURNAL) if sink == "journald" and JOURNAL.exists() else (_to_syslog, SYSLOG)
    )
    try:
        send(where, events)
    except OSError as error:
        return f"{where}: {error.strerror or error}"
    return ""


def sentence(event: Mapping[str, Any]) -> str:
    """Return an event as a sentence."""
    about = str(event.get("session") or event.get("pid") or "")
    if about and event.get("number"):
        about += f"@{event['number']}"
    if event["outcome"] in ("failed", "interrupted"):
        result = f"{event['outcome']} with {event['exit_code']} ({event.get('error', '')})"
    else:
        result = f"{event['outcome']} in {event.get('seconds', 0.0):.1f} s"
    return f"{event['operation']}{' ' if about else ''}{about}: {result}"


def _to_journal(path: Path, events: Sequence[Mapping[str, Any]]) -> None:
    with _connected(path, socket.SOCK_DGRAM) as sock:
        for event in events:
            fields = {
                "MESSAGE": sentence(event),
                "PRIORITY": str(_priority(event)),
                "SYSLOG_IDENTIFIER": "criuctl",
            }
            fields |= {f"CRIUCTL_{key.upper()}": _text(value) for key, value in event.items()}
            sock.send(b"".join(_field(key, value) for key, value in fields.items()))


def _field(name: str, value: str) -> bytes:
    data = value.encode()
    if b"\n" in data:
        return name.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n"
    return name.encode() + b"=" + data + b"\n"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _to_syslog(path: Path, events: Sequence[Mapping[str, Any]]) -> None:
    lines = [
        f"<{_DAEMON << 3 | _priority(e)}>criuctl[{os.getpid()}]: {sentence(e)} {_text(e)}".encode()
        for e in events
    ]
    try:
        with _connected(path, socket.SOCK_DGRAM) as sock:
            for line in lines:
                sock.send(line)
    except OSError as error:
        if error.errno != errno.EPROTOTYPE:
            raise
        with _connected(path, socket.SOCK_STREAM) as sock:  # some servers listen so
            sock.sendall(b"".join(line + b"\0" for line in lines))


def _connected(path: Path, kind: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(_PATIENCE)
        sock.connect(str(path))
    except BaseException:
        sock.close()
        raise
    return sock


def _priority(event: Mapping[str, Any]) -> int:
    return _PRIORITIES.get(event["outcome"], _ERROR)
