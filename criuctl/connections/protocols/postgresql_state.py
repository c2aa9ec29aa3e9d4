"""The state of a PostgreSQL session, and how it is set up in another one.

One query (`QUESTION`) returns everything as one JSON text, so that a freeze costs few round trips.
`read_state` turns it into the record, or reports what cannot be rebuilt; `rebuild` sets up a new
session from it.

State that a server does not report cannot be rebuilt: settings that no extension defined
(``app.user``; the rule's option ``settings: [app.user]`` names those to save), the unnamed prepared
statement, `currval` and `lastval`, the random seed, how often an advisory lock is held, and the
state of extensions (PL/pgSQL has none, PL/Python has GD).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

from .base import CannotRebuild
from .postgresql_wire import (
    SYNC,
    Conversation,
    Row,
    ServerError,
    bind,
    close_statement,
    execute,
    parse,
    rows,
)

REPORTED = (  # parameters that a server reports to its clients, and on which clients rely
    "server_encoding", "client_encoding", "application_name", "default_transaction_read_only",
    "in_hot_standby", "is_superuser", "DateStyle", "IntervalStyle", "TimeZone",
    "integer_datetimes", "standard_conforming_strings", "server_version",
)  # fmt: skip
_RESTORABLE = (
    "client_encoding",
    "DateStyle",
    "IntervalStyle",
    "TimeZone",
    "standard_conforming_strings",
)
# Client encodings in which a byte of a character may look like ASCII; the others pass through
# latin-1 byte by byte.
_CODECS = {
    "UTF8": "utf-8", "BIG5": "big5", "GBK": "gbk", "GB18030": "gb18030", "SJIS": "cp932",
    "UHC": "cp949", "JOHAB": "johab", "SHIFT_JIS_2004": "shift_jis_2004",
}  # fmt: skip
_NOT_UNDERSTOOD = ("42", "3F")  # syntax, undefined or forbidden objects; undefined schema
_LOCK_SECONDS = 2.0  # the server may need a moment to notice that the old session's client is gone
_CUSTOM = re.compile(r"[a-z_][a-z0-9_$]*(\.[a-z_][a-z0-9_$]*)+", re.IGNORECASE)
_PREPARE = re.compile(r"prepare\b", re.IGNORECASE)
# text that may precede a command: spaces, a comment to the end of a line, the start of a comment
_BEFORE = re.compile(r"\s+|--[^\n]*|/\*")
_COMMENT = re.compile(r"/\*|\*/")

QUESTION = """
SELECT pg_catalog.json_build_object(
 'pid', pg_catalog.pg_backend_pid(),
 'database', pg_catalog.current_database(),
 'authorization', session_user,
 'role', pg_catalog.current_setting('role'),
 'version', pg_catalog.current_setting('server_version_num'),
 'activity', (SELECT pg_catalog.row_to_json(x) FROM (
   SELECT usename, backend_start::text, client_port AS port
   FROM pg_catalog.pg_stat_activity WHERE pid = pg_catalog.pg_backend_pid()) x),
 'settings', (SELECT pg_catalog.json_agg(pg_catalog.row_to_json(x)) FROM (
   SELECT name, setting, source, boot_val, reset_val FROM pg_catalog.pg_settings
   WHERE source IN ('client', 'session') AND context <> 'internal'
     AND pg_catalog.left(name, 12) <> 'transaction_') x),
 'reported', (SELECT pg_catalog.json_object_agg(name, setting)
   FROM pg_catalog.pg_settings WHERE name IN (:reported)),
 'prepared', (SELECT pg_catalog.json_agg(pg_catalog.row_to_json(x)) FROM (
   SELECT name, statement, from_sql, parameter_types::oid[]::text AS oids,
     parameter_types::text AS types
   FROM pg_catalog.pg_prepared_statements
   WHERE pg_catalog.left(name, 9) <> '_criuctl_' ORDER BY prepare_time) x),
 'channels', (SELECT pg_catalog.json_agg(x) FROM pg_catalog.pg_listening_channels() x),
 'locks', (SELECT pg_catalog.json_agg(pg_catalog.row_to_json(x)) FROM (
   SELECT classid::bigint, objid::bigint, objsubid, mode FROM pg_catalog.pg_locks
   WHERE locktype = 'advisory' AND granted AND pid = pg_catalog.pg_backend_pid()) x),
 'temporary', (SELECT pg_catalog.json_agg(x.name) FROM (
   SELECT relname AS name FROM pg_catalog.pg_class
     WHERE relnamespace = pg_catalog.pg_my_temp_schema() AND relkind <> 'i'
   UNION ALL SELECT proname FROM pg_catalog.pg_proc
     WHERE pronamespace = pg_catalog.pg_my_temp_schema()
   UNION ALL SELECT typname FROM pg_catalog.pg_type
     WHERE typnamespace = pg_catalog.pg_my_temp_schema() AND typrelid = 0 AND typelem = 0) x),
 'cursors', (SELECT pg_catalog.json_agg(name) FROM pg_catalog.pg_cursors WHERE is_holdable)
)::text
""".replace(":reported", ", ".join(f"'{name}'" for name in REPORTED))


def codec(encoding: str) -> str:
    """Return the Python codec of a client encoding."""
    return _CODECS.get(encoding, "latin-1")


def read_state(talk: Conversation, custom: Sequence[str] = ()) -> dict[str, Any]:
    """Return the session's state for the record; raise `CannotRebuild` if it cannot be set up
    again, or `ServerError`.

    `custom` are names of settings that the server does not list.
    """
    for name in custom:
        if not _CUSTOM.fullmatch(name):
            raise CannotRebuild(
                f"the rule's option settings: {name!r} is not the name of a setting such as "
                "app.user"
            )
    extra = [f"SELECT pg_catalog.current_setting('{name}', true)".encode() for name in custom]
    answers = talk.ask([b"SHOW client_encoding", QUESTION.encode(), *extra])
    encoding = (_one(answers[0]) or b"").decode("ascii", "replace")
    try:
        state = json.loads((_one(answers[1]) or b"").decode(codec(encoding)))
        values = {name: _one(found) for name, found in zip(custom, answers[2:], strict=True)}
        taken = {name: value.decode(codec(encoding)) for name, value in values.items() if value}
    except ValueError:
        raise CannotRebuild(
            f"the session's state cannot be read in its client encoding {encoding}"
        ) from None
    if state["temporary"]:
        raise CannotRebuild(f"the session has temporary objects: {_some(state['temporary'])}")
    if state["cursors"]:
        raise CannotRebuild(f"the session has WITH HOLD cursors: {_some(state['cursors'])}")
    activity = state["activity"] or {}
    if not activity.get("usename"):
        raise CannotRebuild("the server does not report the session's user")
    startup, session = _settings(state["settings"] or [])
    prepared = [_prepared(item) for item in state["prepared"] or []]
    _check_prepared(talk, [item for item in prepared if item["from_sql"]], codec(encoding))
    return {
        "user": activity["usename"],
        "database": state["database"],
        "authorization": state["authorization"],
        "role": state["role"],
        "encoding": encoding,
        "server_version": int(state["version"]),
        "backend": state["pid"],
        "since": activity["backend_start"],
        "port": activity.get("port"),
        "startup": startup,
        "settings": session | taken,
        "reported": state["reported"],
        "prepared": prepared,
        "channels": sorted(state["channels"] or []),
        "locks": [
            [lock["classid"], lock["objid"], lock["objsubid"], lock["mode"]]
            for lock in state["locks"] or []
        ],
    }


def _one(found: list[Row]) -> bytes | None:
    if len(found) != 1 or len(found[0]) != 1:
        raise CannotRebuild("the server's answer does not fit the question")
    return found[0][0]


def _settings(found: list[dict[str, Any]]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the settings for the StartupMessage, which RESET restores, and those that were SET
    later.
    """
    startup = {s["name"]: s["setting"] for s in found if s["source"] == "client"}
    session = {s["name"]: s["setting"] for s in found if s["source"] == "session"}
    for s in found:
        if (
            s["source"] == "session"
            and s["reset_val"] not in (None, s["boot_val"], "")
            and s["name"] in _RESTORABLE
        ):
            startup[s["name"]] = s["reset_val"]
    return startup, session


def _prepared(item: dict[str, Any]) -> dict[str, Any]:
    oids = [int(oid) for oid in item["oids"].strip("{}").split(",") if oid]
    return {
        "name": item["name"],
        "statement": item["statement"],
        "from_sql": item["from_sql"],
        "oids": oids,
        "types": item["types"],
    }


def _check_prepared(talk: Conversation, items: list[dict[str, Any]], encoding: str) -> None:
    """Raise `CannotRebuild` for a SQL PREPARE whose recorded text has other commands too: the text
    is run again.

    The server records everything that was sent together with the PREPARE. The server's own parser
    checks the text here without executing it.
    """
    for item in items:
        name = b"_criuctl_check"
        alone = _begins_with_prepare(item["statement"])
        if alone:
            talk.begin(
                parse(name, item["statement"].encode(encoding)) + close_statement(name) + SYNC
            )
            _messages, failed = talk.until_ready()
            alone = failed is None
        if not alone:
            raise CannotRebuild(
                f"the prepared statement {item['name']} was made by several commands sent together"
            )


def _begins_with_prepare(statement: str) -> bool:
    """Return whether the first command is PREPARE, after spaces and comments.

    The text is matched piece by piece: a single regular expression would backtrack over every way
    to divide the part before the command.
    """
    at = 0
    while (piece := _BEFORE.match(statement, at)) is not None:
        at = piece.end()
        open_comments = int(piece.group() == "/*")  # they nest
        while open_comments:
            mark = _COMMENT.search(statement, at)
            if mark is None:
                return False
            at, open_comments = mark.end(), open_comments + (1 if mark.group() == "/*" else -1)
    return _PREPARE.match(statement, at) is not None


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# -- setting up a session -------------------------------------------------------------------------


def rebuild(talk: Conversation, state: dict[str, Any], warnings: list[str]) -> None:
    """Set up `state` in the new session.

    Raise `CannotRebuild` or `PeerAway`, naming what failed.
    """
    encoding = codec(state["encoding"])
    settings = dict(state["settings"])
    # a default that was changed meanwhile: the client relies on the value that it was sent
    for name in _RESTORABLE:
        was = state["reported"].get(name)
        if name not in settings and was is not None and talk.parameters.get(name, was) != was:
            settings[name] = was
    for name in sorted(settings, key=lambda name: name != "client_encoding"):
        _set(talk, name, settings[name], encoding)
    _locks(talk, state["locks"])
    if state["authorization"] != state["user"]:
        _set(talk, "session_authorization", state["authorization"], encoding)
    if state["role"] != "none":
        _set(talk, "role", state["role"], encoding)
    _types(talk, state["prepared"])
    _prepare(talk, state["prepared"], encoding, warnings)
    for channel in state["channels"]:
        quoted = '"' + channel.replace('"', '""') + '"'
        talk.carry_out(_once(f"LISTEN {quoted}".encode(encoding)), f"LISTEN {quoted}")
    for name in REPORTED:
        was, now = state["reported"].get(name), talk.parameters.get(name)
        if was is not None and now is not None and was != now:
            warnings.append(f"{name} was {was} and is {now}")


def _once(statement: bytes, *values: bytes) -> bytes:
    return parse(b"", statement) + bind(b"", b"", values) + execute(b"")


def _set(talk: Conversation, name: str, value: str, encoding: str) -> None:
    batch = _once(
        b"SELECT pg_catalog.set_config($1, $2, false)",
        name.encode(encoding),
        value.encode(encoding),
    )
    if len(rows(talk.carry_out(batch, f"SET {name}"))) != 1:
        raise CannotRebuild(f"SET {name}: the server's answer does not fit the question")


def _prepare(
    talk: Conversation, items: list[dict[str, Any]], encoding: str, warnings: list[str]
) -> None:
    """Prepare the statements: those of the protocol in one round trip, or one by one if that fails,
    to find out which one failed.

    A statement that the server rejects now, because its table was dropped for example, would have
    failed in the old session too: it is only a warning.
    """
    plain = [item for item in items if not item["from_sql"]]
    parsing = {
        id(i): parse(i["name"].encode(encoding), i["statement"].encode(encoding), i["oids"])
        for i in plain
    }
    if plain and _done(talk, b"".join(parsing.values())) is not None:
        for item in plain:
            # it may be one that was prepared in the first attempt
            fresh = close_statement(item["name"].encode(encoding))
            _check(item["name"], _done(talk, fresh + parsing[id(item)]), warnings)
    for item in items:
        if item["from_sql"]:
            _check(item["name"], _done(talk, _once(item["statement"].encode(encoding))), warnings)


def _done(talk: Conversation, batch: bytes) -> ServerError | None:
    talk.begin(batch + SYNC)
    return talk.until_ready()[1]


def _check(name: str, failed: ServerError | None, warnings: list[str]) -> None:
    if failed is None:
        return
    if not failed.state.startswith(_NOT_UNDERSTOOD):
        raise failed.mapped(f"preparing {name}")
    warnings.append(f"the prepared statement {name} does not exist any more: {failed}")


def _types(talk: Conversation, items: list[dict[str, Any]]) -> None:
    """Raise `CannotRebuild` if parameter types have changed: user-defined types have other numbers
    in each database.
    """
    for item in items:
        if not item["from_sql"] and any(oid >= 16384 for oid in item["oids"]):
            array = "{" + ",".join(map(str, item["oids"])) + "}"
            question = b"SELECT $1::oid[]::regtype[]::text"
            now = rows(talk.carry_out(_once(question, array.encode()), f"types of {item['name']}"))
            if not now or (now[0][0] or b"").decode(errors="replace") != item["types"]:
                raise CannotRebuild(
                    f"the parameter types of the prepared statement {item['name']} have changed"
                )


def _locks(talk: Conversation, locks: list[list[Any]]) -> None:
    for high, low, kind, mode in locks:
        shared = "_shared" if mode == "ShareLock" else ""
        if kind == 1:
            key = high << 32 | low
            arguments = f"{key - (1 << 64) if key >> 63 else key}::bigint"
        else:
            arguments = ", ".join(
                f"{part - (1 << 32) if part >> 31 else part}::integer" for part in (high, low)
            )
        _lock(talk, f"pg_catalog.pg_try_advisory_lock{shared}({arguments})", arguments)


def _lock(talk: Conversation, call: str, arguments: str) -> None:
    until = min(time.monotonic() + _LOCK_SECONDS, talk.wire.deadline)
    while True:
        got = rows(talk.carry_out(_once(f"SELECT {call}".encode()), f"advisory lock ({arguments})"))
        if got and got[0][0] == b"t":
            return
        if time.monotonic() > until:
            raise CannotRebuild(
                f"the advisory lock ({arguments}) is held by another session",
                hint=(
                    "It may be the old session, as long as the server has not noticed that its "
                    "client is gone."
                ),
            )
        time.sleep(0.05)
