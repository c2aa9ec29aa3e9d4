"""PostgreSQL: a program's idle session is examined over its own connection, and set up again on a
new one.

Options of a rule: ``user`` and ``database`` (for the second login that `postgresql_rest` may need;
the restore takes them from the session), ``tls: false`` (asserts that the session is not
encrypted), ``settings: [app.user]`` (settings that the application defines itself, which a server
does not list).

`postgresql_state` describes what is rebuilt and what makes that impossible. After a restore the
client's copy of the cancel key is stale: the server ignores a cancel request of the program.
Notifications sent between dump and restore are lost, as for any client that was disconnected.
"""

from __future__ import annotations

import os
import pwd
import socket
import time
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ...checkpoint.connection_record import ConnectionRecord
from ...errors import CriuctlError
from ...proc.tree import read_process
from ..secrets import SecretUnavailable, resolve
from .base import CannotRebuild, PeerAway, Settings
from .postgresql_auth import Login, PasswordFile, from_password_file, log_in
from .postgresql_rest import Title, environment_of, require_plain, require_quiet, user_name
from .postgresql_state import codec, read_state, rebuild
from .postgresql_wire import SYNC, Conversation, ServerError
from .wire import Wire

_READY = b"Z\0\0\0\5"
_TOGETHER = 0.5  # seconds that the tree may be held until both answers have arrived
# more seconds for the answer to a question that was sent: leaving it unread would be worse
_GRACE = 1.0
_KEY_NOTE = "the cancel key is a new one: the program's cancel requests have no effect"


class PostgreSQL:
    """See the module's docstring."""

    name = "postgresql"

    def inspect(
        self, sock: socket.socket, record: ConnectionRecord, settings: Settings, deadline: float
    ) -> dict[str, Any]:
        """Return the session's state; raise `CannotRebuild` if it cannot be set up again."""
        wire = Wire(sock, deadline, _name(sock, record))
        try:
            title = require_quiet(wire, record)
            plain = require_plain(
                wire,
                record,
                settings.options.get("tls") is False,
                lambda environment: _second_login(wire, record, settings, title, environment),
            )
            _require_ready(wire)
        except PeerAway as error:
            raise CannotRebuild(error.message) from error
        wire.deadline += _GRACE
        talk = Conversation(wire)
        try:
            state = read_state(talk, _names(settings))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CannotRebuild(
                f"the server's answer does not fit the question ({type(error).__name__})"
            ) from error
        except ServerError as error:
            raise CannotRebuild(
                f"the server does not report the session's state: {error}"
            ) from None
        except PeerAway as error:
            # The program would take a late answer for the answer to its next query: end the
            # connection instead.
            _shut(sock)
            raise CannotRebuild(f"the connection had to be ended: {error.message}") from error
        except CannotRebuild:
            if talk.owed:
                _shut(sock)
            raise
        state["plain"] = plain
        state["direct"] = sock.family == socket.AF_UNIX or state["port"] == sock.getsockname()[1]
        state["password_file"], state["uid"] = _password_file_path(record.pid), _uid(record.pid)
        state["notifications"] = [[n.channel, n.payload, n.pid] for n in talk.notifications]
        if talk.notifications:
            texts = "; ".join(f"{n.channel}: {n.payload}" for n in talk.notifications)
            state["warnings"] = [
                (
                    "notifications arrived while the session was examined, and do not reach the "
                    f"program: {texts}"
                )
            ]
        return state

    def reconnect(
        self, sock: socket.socket, record: ConnectionRecord, settings: Settings, deadline: float
    ) -> dict[str, Any]:
        """Log in and set up the session; return facts for the report. Raise `PeerAway` if another
        try may work.
        """
        state = record.session
        if not state.get("user"):
            raise CannotRebuild("the checkpoint has no state of the session")
        wire = Wire(sock, deadline, _name(sock, record))
        talk = Conversation(wire)
        warnings: list[str] = []
        # older checkpoints do not have it
        uid = state["uid"] if isinstance(state.get("uid"), int) else None
        try:
            encoding = codec(state["encoding"])
            login = Login(
                user=state["user"].encode(encoding),
                database=state["database"].encode(encoding),
                password=lambda: _password(
                    wire,
                    record,
                    settings,
                    (state.get("password_file", ""), uid),
                    state["database"],
                    state["user"],
                    warnings,
                ),
                parameters=[
                    (name.encode(encoding), value.encode(encoding))
                    for name, value in state["startup"].items()
                ],
                warnings=warnings,
            )
            log_in(talk, login)
            rebuild(talk, state, warnings)
        except ServerError as error:
            raise error.mapped(f"setting up the session at {wire.peer}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise CannotRebuild(
                f"the record of the session is not one of this version ({type(error).__name__})"
            ) from error
        if wire.unread() and wire.peek(1) not in (b"A", b"N", b"S"):
            raise CannotRebuild(f"{wire.peer} sends data that was not requested")
        if not state.get("direct", True):
            warnings.append(
                "the connection goes through an address translation or a pooler; of a pooler's "
                "sessions only one was examined"
            )
        lost = [
            f"{channel}: {payload}" for channel, payload, _pid in state.get("notifications", [])
        ]
        lost += [f"{n.channel}: {n.payload}" for n in talk.notifications]
        if lost:
            warnings.append(f"notifications that the program did not get: {'; '.join(lost)}")
        if state["channels"]:
            warnings.append("notifications between dump and restore, if there were any, are lost")
        return {
            "user": state["user"],
            "database": state["database"],
            "backend": talk.backend,
            "settings": len(state["settings"]),
            "prepared": len(state["prepared"]),
            "channels": len(state["channels"]),
            "locks": len(state["locks"]),
            "notes": [_KEY_NOTE],
            "warnings": warnings,
        }


def _names(settings: Settings) -> list[str]:
    names = settings.options.get("settings", [])
    return [str(name) for name in (names if isinstance(names, list | tuple) else [names])]


def _require_ready(wire: Wire) -> None:
    """Send Sync and expect only ReadyForQuery; an answer to the program's own query is left
    unread.
    """
    wire.send(SYNC)
    seen = wire.peek(1)
    if seen != b"Z":
        _await_ours(wire)
        raise CannotRebuild("a query is in flight" if seen else "the server closed the connection")
    seen = wire.peek(6)
    if seen[:5] != _READY:
        raise CannotRebuild(f"{wire.peer} does not speak PostgreSQL's protocol")
    wire.receive(6)
    if seen[5:] != b"I":
        raise CannotRebuild("a transaction is open")


def _await_ours(wire: Wire) -> None:
    """Wait until the answer to our Sync is directly behind the answer to the program's own query,
    which has arrived first.

    libpq ignores a second ReadyForQuery that it reads together with the one it waits for; one that
    arrives later would end its next query too early. After `_TOGETHER`, or if the answer is too
    large for the queue, that risk remains.
    """
    until = min(wire.deadline, time.monotonic() + _TOGETHER)
    while time.monotonic() < until and not wire.closed():
        data, at, ready = wire.peek(wire.unread() or 1), 0, 0
        while at + 5 <= len(data):
            ready += data[at : at + 1] == b"Z"
            at += 1 + max(4, int.from_bytes(data[at + 1 : at + 5], "big"))
        if ready >= 2 and at == len(data):
            return
        time.sleep(0.005)


def _second_login(
    wire: Wire,
    record: ConnectionRecord,
    settings: Settings,
    title: Title | None,
    environment: Mapping[str, str],
) -> Login | None:
    """Return the login for a second connection, or None if no user name can be found."""
    user = (
        settings.options.get("user") or (title.user if title else None) or environment.get("PGUSER")
    )
    user = user or user_name(_uid(record.pid))
    if not user:
        return None
    database = str(
        settings.options.get("database")
        or (title.database if title else None)
        or environment.get("PGDATABASE")
        or user
    )
    file = _password_file_path(record.pid), _uid(record.pid)
    settings = replace(settings, process=record.pid)
    warnings: list[str] = []
    return Login(
        user=str(user).encode(),
        database=database.encode(),
        password=lambda: _password(wire, record, settings, file, database, str(user), warnings),
        parameters=[(b"application_name", b"criuctl")],
        warnings=warnings,
        cleartext=False,
    )


def _password(
    wire: Wire,
    record: ConnectionRecord,
    settings: Settings,
    file: tuple[str, int | None],
    database: str,
    user: str,
    warnings: list[str],
) -> str | None:
    """Return the password; `file` is the path of the program's password file, and the program's
    user.
    """
    try:
        found = resolve(settings.secret, timeout=min(10.0, wire.deadline - time.monotonic()))
    except SecretUnavailable as error:
        raise CannotRebuild(error.message, hint=error.hint) from None
    if found is None and settings.process:
        found = environment_of(settings.process).get("PGPASSWORD") or None
    path, uid = file
    if found is not None or not path:
        return found
    address = wire.sock.getpeername()
    if wire.sock.family == socket.AF_UNIX:
        folder, _, name = os.fsdecode(address).rpartition("/")
        hosts, port = (
            ["localhost", folder],
            int(name.rpartition(".")[2]) if name.rpartition(".")[2].isdigit() else 0,
        )
    else:
        plain = address[0].removeprefix("::ffff:") if "." in address[0] else address[0]
        hosts, port = [record.host, plain], address[1]
        if plain == "::1" or plain.startswith("127."):
            hosts.append("localhost")
    passwords = PasswordFile(path, tuple(host for host in hosts if host), port, uid)
    return from_password_file(passwords, database, user, warnings)


def _password_file_path(pid: int) -> str:
    """Return the path of the password file that libpq in that process would read."""
    environment = environment_of(pid)
    named = environment.get("PGPASSFILE")
    if named:
        return named if os.path.isabs(named) else ""
    home = environment.get("HOME")
    if not home:
        try:
            home = pwd.getpwuid(_uid(pid)).pw_dir
        except KeyError:
            return ""
    return os.path.join(home, ".pgpass")


def _uid(pid: int) -> int:
    """Return the process's effective user ID, -1 if unknown. The owner of its folder in /proc is
    not used: that is root where the process may not dump core.
    """
    try:
        return read_process(pid).uid
    except CriuctlError:
        return -1


def _name(sock: socket.socket, record: ConnectionRecord) -> str:
    try:
        address = sock.getpeername()
    except OSError as error:
        raise PeerAway(f"{record.peer} is not connected: {error.strerror}") from error
    where = (
        os.fsdecode(address)
        if sock.family == socket.AF_UNIX
        else record.peer or f"{address[0]}:{address[1]}"
    )
    return f"the PostgreSQL server at {where}"


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is gone already


PROTOCOL = PostgreSQL()
