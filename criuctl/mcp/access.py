"""What the tools do with sessions: the one module of this package that talks to them.

Each method blocks and returns an answer for a client, bounded and marked (`bounds`).  It works on
behalf of the client whose `acting.Call` its thread has entered.

A method that waits returns after `seconds` with ``running`` true and a ``cursor`` with which the
wait goes on; nothing that it waits for is ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import Config
from ..errors import SessionGone, TimedOut, UsageError
from ..host import rights
from ..ops import commands, new_session, output, pause, sessions, typing
from ..ops.kill import kill as end_session
from ..ops.logs import left_output
from ..quoting import quoted
from ..session.client.commands import New
from ..session.screen.plain_text import strip
from . import bounds, patterns
from .bounds import DATA

_MOST_SESSIONS, _MOST_PROCESSES = 200, 500  # in one answer
_BEGINS = 15.0  # seconds for a command to begin
_MOST_TAIL = 1 << 20  # bytes at the end of a log that are looked at
_FACTS = (
    *("session", "state", "pid", "incarnation", "exit_code", "exit_signal", "since", "home"),
    *("id", "moved_to", "halted", "paused_by", "lease", "operators", "offset", "steps"),
    *("checkpoint", "tracking"),
)
Answer = dict[str, Any]


class Access:
    """The sessions of this host."""

    def __init__(self, config: Config) -> None:
        self._config = config

    # -- looking ----------------------------------------------------------------------------------

    def list(self) -> Answer:
        """Return all sessions, in short."""
        found = sessions.sessions(self._config)
        shown = [
            {key: body[key] for key in ("session", "state", "pid", "exit_code", "since")}
            | {DATA: _program(body)}
            for body in found[:_MOST_SESSIONS]
        ]
        return {"sessions": shown, "left_out": len(found) - len(shown)}

    def status(self, name: str) -> Answer:
        """Return the state of one session."""
        body = sessions.status(self._config, name)
        known: Answer = {key: body[key] for key in _FACTS if key in body}
        for operator in known.get("operators") or ():
            operator["name"] = bounds.short(operator["name"])
        data = _program(body)
        data["title"] = bounds.short((body.get("modes") or {}).get("title") or "")
        data["foreground"] = bounds.foreground(body.get("foreground"))
        return known | {DATA: data}

    def capture(self, name: str, what: str, limit: int) -> Answer:
        """Return what the terminal shows (``screen``), or all that is kept (``scrollback``)."""
        if what == "scrollback":  # as text: to draw all of it would take long
            return self.log(name, limit)
        body = output.capture(self._config, name)
        text, missing = bounds.cut(bounds.text_of("\n".join(body["lines"])), limit)
        answer = {key: body[key] for key in ("session", "state", "size", "alternate")}
        answer["cursor"] = body["offset"]
        answer["terminal_cursor"] = body["cursor"]
        data = {"text": text, "title": bounds.short(body["title"])}
        how = f"capture with since={body['from']} reads it from the beginning"
        return answer | {DATA: data} | bounds.left_out(missing, "before this text", how)

    def read(self, name: str, since: int, limit: int) -> Answer:
        """Return output from the offset `since` on, at most `limit` bytes, without a gap."""
        try:
            with sessions.connect(self._config, name, role="observe") as session:
                state, end = session.status()["state"], int(session.status()["offset"])
                start = min(since, end)
                piece = session.read(start, min(end, start + limit))
                at, data = piece.offset, piece.data
        except SessionGone as gone:
            status, base, kept = left_output(self._config, name, gone)
            state, end, at = status["state"], base + len(kept), max(base, since)
            data = kept[at - base : at - base + limit]
        text, cursor = _whole(data, at, last=at + len(data) >= end and state in ("exited", "lost"))
        lost = max(0, at - since)
        answer = {"session": name, "state": state, "cursor": cursor, "more": cursor < end}
        if lost:
            answer["left_out"] = {"bytes": lost, "where": "before this text", "why": "not kept"}
        return answer | {DATA: {"text": text}}

    def log(self, name: str, limit: int) -> Answer:
        """Return the end of the output that is kept."""
        try:
            with sessions.connect(self._config, name, role="observe") as session:
                status = session.hello["status"]
                base, end = int(status["base"]), int(status["offset"])
                piece = session.read(max(base, end - _MOST_TAIL), end)
                at, data = piece.offset, piece.data
        except SessionGone as gone:
            status, base, kept = left_output(self._config, name, gone)
            at = max(base, base + len(kept) - _MOST_TAIL)
            data = kept[at - base :]
        text, missing = bounds.cut(bounds.text_of(strip(data)[0].decode(errors="replace")), limit)
        answer = {"session": name, "state": status["state"], "cursor": at + len(data)}
        how = f"capture with since={base} reads it from the beginning"
        answer |= bounds.left_out(missing + at - base, "before this text", how)
        return answer | {DATA: {"text": text}}

    def tree(self, name: str) -> Answer:
        """Return the processes of a session."""
        from ..host.registry import Registry
        from ..proc.tree import read_tree

        root = Registry(self._config).lookup(name)
        found = read_tree(root.pid) if root is not None and root.alive() else []
        shown = [
            {"pid": p.pid, "ppid": p.ppid, "state": p.state, "uid": p.uid, "rss": p.rss}
            | {DATA: {"command": bounds.short(p.command), "argv": bounds.words(list(p.argv))}}
            for p in found[:_MOST_PROCESSES]
        ]
        return {"session": name, "processes": shown, "left_out": len(found) - len(shown)}

    # -- working ----------------------------------------------------------------------------------

    def run(
        self,
        command: Sequence[str],
        name: str | None,
        cwd: str | None,
        env: Mapping[str, str],
        labels: Mapping[str, str],
    ) -> Answer:
        """Start a session."""
        if cwd is not None and not os.path.isabs(cwd):
            raise UsageError(f"cwd {bounds.short(cwd)!r} is no absolute path")
        made = new_session.run(
            self._config,
            command,
            name=name,
            cwd=cwd,
            labels=labels,
            env={**os.environ, **env} if env else None,
        ).to_dict()
        keys = ("session", "id", "state", "pid", "warnings")
        return {key: made[key] for key in keys}

    def send(self, name: str, parts: Sequence[tuple[str, str]], *, take: bool) -> Answer:
        """Type into a session."""
        return typing.type_into(self._config, name, parts, take=take)

    def exec(
        self,
        name: str,
        words: Sequence[str],
        new: New | None,
        seconds: float,
        limit: int,
        *,
        take: bool,
    ) -> Answer:
        """Run a command in the session's shell, or next to its terminal."""
        until = time.monotonic() + seconds
        limits = commands.Limits(begin=_BEGINS)
        if new is not None:
            begun = commands.run_new(self._config, name, words, None, new, limits, detach=True)
        else:
            begun = commands.run_in_shell(
                self._config, name, words, None, limits, detach=True, take=take
            )
        left = max(0.0, until - time.monotonic())
        return self.wait_command(name, begun["command_id"], None, left, limit)

    def wait_command(
        self, name: str, command_id: str, since: int | None, seconds: float, limit: int
    ) -> Answer:
        """Wait for a command; its output from `since` on is in the answer."""
        body = commands.wait(self._config, name, command_id, seconds, since=since, plain=True)
        return _command(body, limit)

    def wait(
        self,
        name: str,
        until: str,
        seconds: float,
        *,
        pattern: str | None,
        idle: float,
        since: int | None,
    ) -> Answer:
        """Wait until the session has ended (exit), is silent for `idle` seconds, has printed
        `pattern` (match), is at a shell's prompt, or reads its terminal (reading).
        """
        cursor = since
        if until == "match" and since is None:  # the same place if the wait goes on
            known = sessions.describe(self._config, name)
            cursor = since = known.get("input_offset")
        try:
            body = self._wait(name, until, seconds, pattern, idle, since)
        except TimedOut:
            return {"session": name, "running": True, "until": until, "cursor": cursor}
        answer = {"session": name, "running": False, "until": until}
        answer |= {key: body[key] for key in ("state", "exit_code", "exit_signal") if key in body}
        answer["cursor"] = body.get("offset", cursor)
        data: Answer = {}
        if "match" in body:
            data["match"] = bounds.short(body["match"], bounds.DEFAULT_LIMIT)
            data["groups"] = [None if g is None else bounds.short(g) for g in body["groups"]]
        if "foreground" in body:
            data["foreground"] = bounds.foreground(body["foreground"])
        return answer | ({DATA: data} if data else {})

    def _wait(
        self,
        name: str,
        until: str,
        seconds: float,
        pattern: str | None,
        idle: float,
        since: int | None,
    ) -> Answer:
        if until == "exit":
            return output.wait_exit(self._config, name, seconds)
        if until == "idle":
            return output.wait_idle(self._config, name, idle, seconds)
        if until == "match":
            if not pattern:
                raise UsageError("until=match needs a pattern")
            return output.wait_match(
                self._config, name, pattern, since, seconds, search=patterns.search
            )
        if until == "prompt":
            return output.wait_prompt(self._config, name, since, seconds)
        return output.wait_reading(self._config, name, seconds)

    # -- ending -----------------------------------------------------------------------------------

    def interrupt(self, name: str, command_id: str | None, limit: int) -> Answer:
        """Interrupt the program in the foreground, as ^C does, or one command."""
        if command_id is not None:
            return _command(commands.interrupt(self._config, name, command_id), limit)
        with typing.writer(self._config, name, take=False) as session:
            return {"session": name, "signalled": session.signal("INT", "foreground")}

    def halt(self, name: str) -> Answer:
        """Freeze a session at once."""
        return pause.halt(self._config, name).to_dict()

    def kill(self, name: str, identity: str, grace: float) -> Answer:
        """End the session of this id; another one that has got the name since is left alone."""
        if sessions.describe(self._config, name)["id"] != identity:
            raise SessionGone(f"session {name!r} is another one now than the one to be ended")
        return end_session(self._config, name, grace)

    def kill_command(self, name: str, command_id: str, grace: float, limit: int) -> Answer:
        """End one command."""
        return _command(commands.kill(self._config, name, command_id, grace), limit)

    # -- authority --------------------------------------------------------------------------------

    def need(self, name: str, operation: str) -> None:
        """Raise `Forbidden` unless the client may do this, before its user is asked for consent."""
        rights.check(self._config, operation, name)

    def lives(self, name: str) -> bool:
        """Return whether this is the name of a session that runs, or is paused."""
        found = sessions.sessions(self._config)
        return any(b["session"] == name and b["state"] in ("running", "paused") for b in found)

    def check_lives(self, name: str) -> None:
        """Raise `SessionGone` unless the session runs, or is paused."""
        if not self.lives(name):
            raise SessionGone(f"no session {name!r} runs on this host")

    def writes(self, name: str) -> tuple[str, str] | None:
        """Return the other operator that has the write lease now: its description and its id."""
        lease = sessions.describe(self._config, name).get("lease")
        if lease is None:
            return None
        return f"{lease['kind']} {bounds.short(lease['name'])!r}", str(lease["operator"])

    def what_ends(self, name: str) -> tuple[str, str]:
        """Return the session that a kill would end, as text, and its id.

        The text holds nothing that changes while it lives.
        """
        known = sessions.describe(self._config, name)
        command = " ".join(bounds.words(known["command"])[:10])
        text = f"session {bounds.short(name)!r}: {command} (since {known.get('created')})"
        return text, str(known["id"])

    def how_much_ends(self, name: str) -> str:
        """Return how many processes and which checkpoints a session has, as text."""
        processes = self.tree(name)["processes"]
        names = sorted({bounds.short(p[DATA]["command"], 30) for p in processes})
        checkpoint = sessions.status(self._config, name)["checkpoint"]
        stored = f"its newest checkpoint is {checkpoint['id']}" if checkpoint else "no checkpoint"
        return f"{len(processes)} processes ({', '.join(names[:10])}), {stored}"


def _program(body: Mapping[str, Any]) -> Answer:
    return {"command": bounds.words(body.get("command")), "labels": bounds.labels(body["labels"])}


def _command(body: Mapping[str, Any], limit: int) -> Answer:
    """Return a command's result, as `ops.commands` has it, as an answer."""
    running = body["state"] in ("timed-out", "running")
    answer: Answer = {
        "session": body["session"],
        "command_id": body["command_id"],
        "running": running,
        "state": "running" if running else body["state"],
        "exit_code": body["exit_code"],
        "cursor": body["end"],
    }
    new = "stdout" in body
    data, missing = {}, 0
    for stream in ("stdout", "stderr") if new else ("output",):
        text, left = bounds.cut(bounds.text_of(body[stream], body["encoding"]), limit)
        data[stream] = text
        missing += left
    identifier = body["command_id"]
    command = f"criuctl output {quoted(body['session'])} --command {quoted(identifier)}"
    how = f"{command} prints all of it"
    if not new:
        how = f"capture with since={body['offset']}"
    answer |= bounds.left_out(missing, "before this text", how)
    if body["missing"]:
        answer["not_kept"] = {"bytes": body["missing"]}
    if not running and "error" in body:
        answer["error"] = body["error"]
    return answer | {DATA: data}


def _whole(data: bytes, at: int, *, last: bool) -> tuple[str, int]:
    """Return `data`, output from offset `at` on, as text, and the offset behind it.

    A character or a control sequence that is cut at the end is left for the next piece, unless it
    is the `last`, or is all there is.
    """
    plain, carry = strip(data)
    rest = len(carry)
    if not rest:
        for back in range(1, min(4, len(data) + 1)):
            if data[-back] >= 0xC0:  # the first byte of a character
                length = 2 if data[-back] < 0xE0 else 3 if data[-back] < 0xF0 else 4
                rest = back if back < length else 0
                break
            if data[-back] < 0x80:
                break
        if rest:
            plain = plain[:-rest]
    if last or rest == len(data):
        rest, plain = 0, strip(data)[0]
    return bounds.text_of(plain.decode(errors="replace")), at + len(data) - rest
