"""The sessions of other hosts: a list for each host, from ``ssh HOST criuctl ls --json``.

A page asks for the lists every few seconds, and gets the last ones at once: no answer waits for a
host. The question starts at most one ssh for each host, in a thread of that host; a host that
fails is asked again later and later. Without a page no host is asked.

What a host answers is untrusted. Its size and time are bounded, its shape is given by `Listed`,
names must be names of sessions, and texts lose their control characters and have a length. ssh asks
for no password, forwards no agent, and writes no more than `_MOST_SAID` bytes of messages.
"""

from __future__ import annotations

import asyncio
import os
import select
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta, Struct, field

from ..config import Config
from ..errors import CriuctlError, DataError, HostUnreachable, NotFound, TimedOut, UsageError
from ..proc.child import Child
from ..session.client.session import Session
from ..session.names import valid_name
from ..transport import ssh
from .views import Desk

_PATIENCE = 20.0  # seconds for one list, ssh's login included
_PERIOD = 3.0  # seconds between two lists of a host that answers
_LONGEST = 60.0  # seconds between two tries of a host that does not
_LARGEST = 1 << 20  # bytes of a list
_MOST_SAID = 16 << 20  # bytes; ssh's standard error is a file in memory
_MOST = 500  # sessions of one host
_WORDS, _LABELS, _TEXT = 20, 16, 200  # the most words of a command, labels, characters of a text

Number = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]


class Listed(Struct):
    """One session in the list of another host; other keys are ignored."""

    session: str
    state: Literal["running", "paused", "checkpointed", "exited", "lost"]
    since: str | None = None
    incarnation: Number = 0
    exit_code: Number | None = None
    exit_signal: Number | None = None
    command: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    holder: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return what the page gets of it."""
        labels = list(self.labels.items())[:_LABELS]
        return {
            "session": self.session,
            "state": self.state,
            "since": plain(self.since) if self.since is not None else None,
            "incarnation": self.incarnation,
            "exit_code": self.exit_code,
            "exit_signal": self.exit_signal,
            "command": [plain(word) for word in self.command[:_WORDS]],
            "labels": {plain(key): plain(value) for key, value in labels},
            "holder": self.holder,
        }


def plain(text: str) -> str:
    """Return a text of another host: one short line without control characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:_TEXT])


def parse_list(answer: bytes) -> list[dict[str, Any]]:
    """Return the sessions in the answer of ``criuctl ls --json``; `DataError` if it is no such
    list. A session whose name cannot be one is left out.
    """
    try:
        found = msgspec.json.decode(answer, type=list[Listed])
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"it answered with something other than a list of sessions: {plain(str(error))}",
            hint="Its criuctl may be another version.",
        ) from None
    by_name = {one.session: one for one in found if valid_name(one.session)}
    return [one.to_dict() for one in list(by_name.values())[:_MOST]]


def careful(config: Config) -> Config:
    """Return the configuration with an ssh that is ended when it writes too much."""
    limit = f"prlimit --fsize={_MOST_SAID}:{_MOST_SAID}"
    return config.with_options(ssh_command=f"{limit} {config.ssh_command}")


Connect = Callable[..., Session]
"""Connects to a session, with the role of a page."""


class OtherHost:
    """Another host, and what is known of its sessions."""

    def __init__(self, host: ssh.Host, desk: Desk) -> None:
        """Set up. `desk` is this host's own, so that its threads delay nothing else."""
        self.host, self.desk = host, desk
        self._sessions: list[dict[str, Any]] | None = None
        self._error: dict[str, Any] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._child: Child | None = None
        self._again = 0.0  # the monotonic time before which it is not asked
        self._failures = 0
        self._closed = False

    def look(self) -> dict[str, Any]:
        """Return what is known of it now, and ask it if it is time."""
        if (self._asking is None or self._asking.done()) and time.monotonic() >= self._again:
            self._asking = asyncio.create_task(self._ask())
        known = self._sessions is not None or self._error is not None
        return {
            "host": self.host.name,
            "command": _shown(self.host),
            "state": "asking" if not known else "ok" if self._error is None else "unreachable",
            "error": self._error,
            "sessions": self._sessions or [],
        }

    def terminal(self, name: str) -> Connect | None:
        """Return what connects to a session there; None: criuctl there does, over ssh."""
        return None

    async def _ask(self) -> None:
        try:
            answer = await self.desk.off(self._run)
            self._sessions, self._error = await self.desk.off(parse_list, answer), None
            self._failures = 0
        except CriuctlError as error:
            self._sessions = None
            self._error = {"message": plain(error.message), "hint": plain(error.hint)}
            self._failures += 1
        except Exception as error:  # it is shown, and concerns this host only
            self._sessions = None
            self._error = {"message": f"a bug in criuctl: {type(error).__name__}", "hint": ""}
            self._failures += 1
        pause = min(_LONGEST, _PERIOD * 2**self._failures) if self._failures else _PERIOD
        self._again = time.monotonic() + pause

    def _run(self) -> bytes:
        """Return what ``criuctl ls --json`` prints there."""
        child, reading, writing = ssh.connect(self.host, ["ls", "--json"], self.desk.config)
        os.close(writing)
        self._child = child
        try:
            answer = _read(reading, time.monotonic() + _PATIENCE) if not self._closed else b""
            code, said, hint = ssh.last_output(child, trusted=False)
        finally:
            os.close(reading)
            self._child = None
            child.end()
            child.close()
        if code:
            raise HostUnreachable(said or f"its criuctl ended with exit code {code}", hint=hint)
        return answer

    def close(self) -> None:
        """End its ssh, if one runs, and do not wait for it."""
        self._closed = True
        if (child := self._child) is not None:
            with suppress(OSError):
                child.kill()
        self.desk.close()


def _shown(host: ssh.Host) -> str:
    """Return how a person calls criuctl there."""
    words = ["ssh", *(word for word in host.address.words() if word != "--")]
    return f"{shlex.join(words)} {host.command}"


def _read(descriptor: int, deadline: float) -> bytes:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    answer = bytearray()
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise TimedOut(f"it did not answer in {_PATIENCE:g} s")
        data = os.read(descriptor, 1 << 16)
        if not data:
            return bytes(answer)
        answer += data
        if len(answer) > _LARGEST:
            raise DataError(f"its list of sessions is larger than {_LARGEST >> 20} MiB")


class Hosts:
    """The other hosts of one server, by the name that `ui --host` gave."""

    def __init__(
        self,
        hosts: Sequence[ssh.Host] = (),
        desk: Desk | None = None,
        shared: Sequence[OtherHost] = (),
    ) -> None:
        self._known = {host.host.name: host for host in shared} | {
            host.name: OtherHost(host, Desk(careful(desk.config), desk.read_only, desk.reporter))
            for host in hosts
            if desk is not None
        }

    def find(self, name: str) -> OtherHost:
        """Return one of them; `NotFound`."""
        try:
            return self._known[name]
        except KeyError:
            raise NotFound("this page does not show such a host") from None

    def look(self) -> list[dict[str, Any]]:
        """Return what is known of each; see `OtherHost.look`."""
        return [host.look() for host in self._known.values()]

    def close(self) -> None:
        """End what runs for them."""
        for host in self._known.values():
            host.close()


HOSTS = web.AppKey("hosts", Hosts)


def parse_hosts(texts: Sequence[str], config: Config) -> list[ssh.Host]:
    """Return the hosts of `ui --host`, addresses or names in the configuration; `UsageError`."""
    found: dict[str, ssh.Host] = {}
    for text in texts:
        name = text.removeprefix("ssh://")
        host = ssh.unattended(ssh.Host.parse(text, config))
        if found.setdefault(name, msgspec.structs.replace(host, name=name)).address != host.address:
            raise UsageError(f"--host: two hosts have the name {name!r}")
    return list(found.values())


async def hosts(request: web.Request) -> web.Response:
    """Return the other hosts and their sessions, as they were a few seconds ago."""
    return web.json_response(request.app[HOSTS].look())
