"""Redis (and compatible servers): the session's state is read over a second connection, and set up
again on a new one.

The state of a session at the server, and how it is handled:

    database, client name, RESP version, user    set up again (the password is the rule's secret)
    library name and version, NO-EVICT,          set up again; the facts list what the server does
    NO-TOUCH                                     not have or allow now; nothing depends on it
    READONLY of a cluster's replica              set up again
    CLIENT TRACKING                              only with ``stale_cache: true``: invalidations
                                                 between dump and restore are lost, so the
                                                 program's cache may be stale; never with REDIRECT
    MULTI, WATCH, subscriptions, MONITOR, a      cannot be rebuilt: other clients may have changed
    command that blocks or is half sent,         keys meanwhile, and messages of that time are lost
    replies turned off, TLS

`redis_look` explains how the state is read without harm, and what ``ask: own`` means. Options of a
rule: ``user``; ``ask`` (``beside`` or ``own``), ``ask_user`` and ``ask_secret`` for reading the
state; ``watch: never`` for servers before 7.0, which do not report WATCH (it asserts that the
program does not use WATCH); and ``stale_cache``.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Any

from ...checkpoint.connection_record import ConnectionRecord
from ...errors import CriuctlError
from .. import secrets
from . import redis_look as look
from .base import CannotRebuild, PeerAway, Settings
from .redis_wire import ErrorReply, Resp, as_map
from .wire import Wire

_OPTIONS: dict[str, type | tuple[str, ...]] = {
    "user": str,
    "ask": ("beside", "own"),
    "ask_user": str,
    "ask_secret": Mapping,
    "watch": ("never",),
    "stale_cache": bool,
}
_AWAY = frozenset({"LOADING", "MASTERDOWN", "BUSY", "TRYAGAIN", "CLUSTERDOWN"})
_NO_PASSWORD_SET = ("without any password configured", "no password is set")
_NO_SUCH_COMMAND = "ERR unknown command"
_STATES = {
    "x": "a transaction is open (MULTI)",
    "d": "WATCH is in force, and a watched key has changed",
    "O": "it is a MONITOR",
    "S": "it is a replica's connection",
    "M": "it is the connection to a master",
    "P": "it has subscriptions",
    "c": "the server is closing it",
    "A": "the server is closing it",
}


class Redis:
    """The protocol `redis`; stateless."""

    name = "redis"

    def inspect(
        self, sock: socket.socket, record: ConnectionRecord, settings: Settings, deadline: float
    ) -> dict[str, Any]:
        """See `base.ApplicationProtocol`."""
        _check_options(settings.options)
        try:
            return self._inspect(sock, record, settings, deadline)
        except PeerAway as error:
            raise CannotRebuild(error.message, hint=error.hint) from error

    def _inspect(
        self, sock: socket.socket, record: ConnectionRecord, settings: Settings, deadline: float
    ) -> dict[str, Any]:
        wire = Wire(sock, deadline, f"the server {record.peer}".rstrip())
        _at_rest(wire)
        options = settings.options
        asking = (
            options.get("ask_secret", settings.secret),
            options.get("ask_user", options.get("user", "")),
        )
        password = _secret(asking[0], deadline)
        place = look.place_of(sock, wire.peer)
        with look.second_connection(place, deadline) as second:
            look.must_be_plain(second)
            server = _enter(second, asking[1], password, 2)
            if options.get("ask") == "own":
                with look.speaking(wire) as own:
                    sight = look.look_own(own, server)
            elif str(server.get("version", "")).startswith("7."):
                with look.second_connection(place, deadline) as idle:
                    _enter(idle, asking[1], password, 2)
                    sight = look.look_over_second(place, second, idle, server)
            else:
                sight = look.look_over_second(place, second, None, server)
        watch = _judge(sight, options)
        _at_rest(wire)  # an answer may have arrived meanwhile
        row = sight.row
        session = {
            "server": server,
            "asked": options.get("ask", "beside"),
            "id": row.number("id"),
            "user": row.text("user") or "default",
            "db": row.number("db"),
            "name": row.text("name"),
            "resp": row.number("resp", 2),
            "lib_name": row.text("lib-name"),
            "lib_ver": row.text("lib-ver"),
            "no_evict": "e" in row.text("flags"),
            "no_touch": "T" in row.text("flags"),
            "readonly": "r" in row.text("flags"),
            "watch": watch,
            "last_command": row.text("cmd"),
        }
        # before 7.0; by now it is known that a question on the program's connection does no harm
        if not row.has("resp"):
            with look.speaking(wire) as own:
                session["resp"] = _resp_of(own)
        if "t" in row.text("flags"):
            with look.speaking(wire) as own:
                session |= _tracking(own)
        return session

    def reconnect(
        self, sock: socket.socket, record: ConnectionRecord, settings: Settings, deadline: float
    ) -> dict[str, Any]:
        """See `base.ApplicationProtocol`."""
        _check_options(settings.options)
        session = record.session
        db, protocol, user = (
            _field(session, "db", int, 0),
            _field(session, "resp", int, 2),
            _field(session, "user", str, "default"),
        )
        if protocol not in (2, 3) or db < 0:
            raise CannotRebuild("the record of the session is not valid")
        tracking = session.get("tracking")
        if tracking and not settings.options.get("stale_cache"):
            raise _stale()
        resp = Resp(Wire(sock, deadline, f"the server {record.peer}".rstrip()))
        facts = self._log_in(resp, user, protocol, settings, deadline)
        if db:
            _must(resp, "SELECT", db)
        facts |= _set_optional(resp, session)
        if session.get("readonly") is True:
            _must(resp, "READONLY")
        if tracking:
            _must(resp, *_tracking_words(tracking))
            facts["stale_cache"] = (
                "invalidations between the dump and now are lost; the program's cache may be stale"
            )
        alive = resp.ask("PING")
        if isinstance(alive, ErrorReply) and alive.code != "NOPERM":
            raise _refusal(alive, "PING")
        before, now = session.get("server"), facts["server"].get("role")
        was = before.get("role") if isinstance(before, dict) else None
        if was and now and was != now:
            facts["role_changed"] = f"the server was {was} and is {now} now"
        return {**facts, "db": db, "resp": protocol}

    def _log_in(
        self, resp: Resp, user: str, protocol: int, settings: Settings, deadline: float
    ) -> dict[str, Any]:
        """Log in as the rule's user, or as the session's if the rule names none; return facts."""
        known = str(settings.options.get("user", user))
        password = _secret(settings.secret, deadline)
        server: dict[str, Any] | None = None
        if user == "default" and known != "default":
            # The rule has another user's password; a session that needed none must not get that
            # user's rights.
            server = _as_default(resp, protocol)
            known = "default" if server is not None else known
        if server is None:
            server = _enter(resp, known if known != "default" else "", password, protocol)
        facts = {"server": server, "user": known}
        if known != user:
            facts["user_changed"] = f"it was {user} and is {known} now, as the rule says"
        return facts


PROTOCOL = Redis()


# -- at the freeze --------------------------------------------------------------------------------


def _at_rest(wire: Wire) -> None:
    """Raise `CannotRebuild` if data is in flight in either direction, as far as this side can
    see.
    """
    if unread := wire.unread():
        raise CannotRebuild(f"{unread} bytes from the server have not been read by the program")
    if wire.closed():
        raise CannotRebuild("the server has closed the connection")
    if wire.unsent() or wire.unanswered():
        raise CannotRebuild(
            "a command has not been answered: it is on its way, or it blocks, or replies are "
            "turned off"
        )


def _judge(sight: look.Sight, options: Mapping[str, Any]) -> str:
    """Return how WATCH was judged; raise `CannotRebuild` if the session has state that cannot be
    set up again.
    """
    # the field `multi` differs between servers, the flag x does not
    row, flags = sight.row, sight.row.text("flags")
    if not flags or not row.has("db"):
        raise CannotRebuild("the server does not report the state of the connection")
    if "b" in flags or "u" in flags:
        raise CannotRebuild(f"a command blocks ({row.text('cmd')})")
    for flag, state in _STATES.items():
        if flag in flags:
            raise CannotRebuild(state)
    if channels := sum(row.number(name) for name in ("sub", "psub", "ssub")):
        raise CannotRebuild(f"it has {channels} subscriptions")
    # with `ask: own` it is criuctl's own question
    if options.get("ask") != "own" and (row.number("qbuf") or row.number("argv-mem")):
        raise CannotRebuild("a command is half sent")
    if row.number("oll") or row.number("omem"):
        raise CannotRebuild("the server has queued answers for it")
    if row.number("id", -1) in sight.targets:
        raise CannotRebuild("another connection's invalidations are redirected to it")
    if "t" in flags and not options.get("stale_cache"):
        raise _stale()
    if row.number("redir", -1) > 0:
        raise CannotRebuild(
            "its invalidations are redirected to another connection (CLIENT TRACKING REDIRECT)"
        )
    watching = look.watching(sight)
    if watching:
        raise CannotRebuild("WATCH is in force")
    if watching is None:
        if options.get("watch") != "never":
            version = sight.server.get("version", "before 6")
            raise CannotRebuild(
                f"this server (Redis {version}) does not report whether WATCH is in force "
                "(option watch)",
                hint="If the program does not use WATCH, set `watch: never` in the rule.",
            )
        return "none, by the rule"
    return "none" if row.has("watch") else "none, judged by memory and the last command"


def _stale() -> CannotRebuild:
    return CannotRebuild(
        "it has CLIENT TRACKING on, and keys that are invalidated meanwhile would stay in the "
        "program's cache (option stale_cache)",
        hint="If the program tolerates that, set `stale_cache: true` in the rule.",
    )


def _resp_of(own: Resp) -> int:
    """Ask for the RESP version on the program's connection; servers before 7.0 report it only
    there.
    """
    answer = own.ask("HELLO")
    if not isinstance(answer, ErrorReply):
        version = as_map(answer).get("proto")
        if version in (2, 3):
            return int(version)
    elif answer.text.startswith(_NO_SUCH_COMMAND):
        return 2  # Redis 5
    # HELLO of Redis 6.0 requires a version; but RESP3 has a separate type for human-readable text
    else:
        own.ask("CLIENT", "LIST")
        if own.kind in "$=":
            return 3 if own.kind == "=" else 2
    raise CannotRebuild("this server does not report which version of RESP the session speaks")


def _tracking(own: Resp) -> dict[str, Any]:
    """Ask for the options of CLIENT TRACKING on the program's connection: only it gets them."""
    info = as_map(own.ask("CLIENT", "TRACKINGINFO"))
    flags, prefixes = info.get("flags"), info.get("prefixes")
    if (
        not isinstance(flags, list)
        or not isinstance(prefixes, list)
        or not all(isinstance(p, str) for p in prefixes)
    ):
        raise CannotRebuild("this server does not report the options of CLIENT TRACKING")
    if {"caching-yes", "caching-no", "broken_redirect"} & {str(flag) for flag in flags}:
        raise CannotRebuild(
            "CLIENT CACHING is set for the next command, or the redirection of CLIENT TRACKING is "
            "broken"
        )
    chosen = {name: name in flags for name in ("bcast", "optin", "optout", "noloop")}
    found: dict[str, Any] = {"tracking": {**chosen, "prefixes": sorted(prefixes)}}
    if own.pushes:
        found["lost_pushes"] = own.pushes
    return found


# -- logging in -----------------------------------------------------------------------------------


def _enter(resp: Resp, user: str, password: str | None, protocol: int) -> dict[str, Any]:
    """Log in and select the protocol; return the server's facts about itself."""
    if password is not None:
        answer = resp.ask("AUTH", user, password) if user else resp.ask("AUTH", password)
        if isinstance(answer, ErrorReply) and not any(
            words in answer.text for words in _NO_PASSWORD_SET
        ):
            raise _refusal(answer, "AUTH")
    server, error = look.about_server(resp, protocol)
    # Redis 5 has no HELLO, and Redis 6.0 needs a permission for it; RESP2 works without it.
    if error is not None and not (
        protocol == 2 and (error.text.startswith(_NO_SUCH_COMMAND) or error.code == "NOPERM")
    ):
        raise _refusal(error, f"HELLO {protocol}")
    return server


def _set_optional(resp: Resp, session: Mapping[str, Any]) -> dict[str, Any]:
    """Set names and flags on which no program depends; return those that the server rejected."""
    name, lib_name, lib_ver = (
        _field(session, key, str, "") for key in ("name", "lib_name", "lib_ver")
    )
    commands: list[tuple[bool, tuple[str, ...]]] = [
        (bool(name), ("CLIENT", "SETNAME", name)),
        (bool(lib_name), ("CLIENT", "SETINFO", "LIB-NAME", lib_name)),
        (bool(lib_ver), ("CLIENT", "SETINFO", "LIB-VER", lib_ver)),
        (session.get("no_evict") is True, ("CLIENT", "NO-EVICT", "ON")),
        (session.get("no_touch") is True, ("CLIENT", "NO-TOUCH", "ON")),
    ]
    answers = [(words, resp.ask(*words)) for wanted, words in commands if wanted]
    refused = [
        f"{' '.join(words[:2])}: {answer.text}"
        for words, answer in answers
        if isinstance(answer, ErrorReply)
    ]
    return {"left_out": refused} if refused else {}


def _as_default(resp: Resp, protocol: int) -> dict[str, Any] | None:
    """Return the server's facts about itself, asked without a password; None if it requires one, or
    has no HELLO (Redis 5).
    """
    server, error = look.about_server(resp, protocol)
    if error is None:
        return server
    if error.code == "NOAUTH" or error.text.startswith(_NO_SUCH_COMMAND):
        return None
    raise _refusal(error, f"HELLO {protocol}")


def _must(resp: Resp, *words: str | int) -> None:
    answer = resp.ask(*words)
    if isinstance(answer, ErrorReply):
        raise _refusal(answer, " ".join(str(word) for word in words[:2]))


def _refusal(error: ErrorReply, command: str) -> CriuctlError:
    """Return the exception for an error: `PeerAway` if another try may help, else `CannotRebuild`.

    A server's error never contains a password.
    """
    if error.code in _AWAY or "max number of clients" in error.text:
        return PeerAway(f"the server answers {error.text[:200]}")
    hint = ""
    if error.code in ("NOAUTH", "WRONGPASS") or "invalid password" in error.text:
        hint = "Give the rule the user and a secret reference that the server accepts now."
    return CannotRebuild(f"the server refuses {command}: {error.text[:200]}", hint=hint)


def _secret(reference: Any, deadline: float) -> str | None:
    try:
        return secrets.resolve(reference, timeout=max(0.1, deadline - time.monotonic()))
    except CriuctlError as error:
        raise CannotRebuild(error.message, hint=error.hint) from error


def _tracking_words(tracking: Any) -> list[str]:
    if not isinstance(tracking, dict):
        raise CannotRebuild("the record of the session is not valid")
    words = ["CLIENT", "TRACKING", "ON"]
    words += [
        name.upper()
        for name in ("bcast", "optin", "optout", "noloop")
        if tracking.get(name) is True
    ]
    for prefix in tracking.get("prefixes") or ():
        words += ["PREFIX", str(prefix)]
    return words


def _field(session: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """Return a field of a record from a manifest; raise `CannotRebuild` for another type."""
    value = session.get(name, default)
    if type(value) is not kind:
        raise CannotRebuild(f"the record of the session is not valid: {name}")
    return value


def _check_options(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        allowed = _OPTIONS.get(name)
        if allowed is None:
            raise CannotRebuild(
                f"the rule has an option that redis does not know: {name}",
                hint=f"It knows {', '.join(_OPTIONS)}.",
            )
        if not (value in allowed if isinstance(allowed, tuple) else isinstance(value, allowed)):
            what = " or ".join(allowed) if isinstance(allowed, tuple) else "of another type"
            raise CannotRebuild(f"the rule's option {name} must be {what}")
