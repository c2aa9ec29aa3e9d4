"""A session on another host, through ``ssh HOST criuctl attach --stdio NAME``.

The holder's protocol runs over ssh's standard streams.  The system's ssh handles keys, agents, jump
hosts and known hosts.  On the other host `relay` copies bytes between ssh and the holder's socket,
as the user that logged in, and does not interpret them.
"""

from __future__ import annotations

import os
import select
import shlex
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import SessionGone, UsageError
from ...proc import command
from ...proc.child import Child
from ...proc.ownership import check_own
from ...transport import ssh
from .. import names
from . import caller
from .session import Session

if TYPE_CHECKING:
    from ...config import Config


@dataclass(slots=True)
class Remote:
    """A session with the address ``ssh://[USER@]HOST[:PORT]/NAME``."""

    host: ssh.Host
    name: str
    program: tuple[str, ...] = ("ssh",)
    session: type[Session] = Session  # what speaks with the holder
    _ssh: Child | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, config: Config) -> Remote:
        """Parse an address; a host in the configuration has its settings there.  `UsageError`."""
        try:
            address = ssh.Address.parse(url)
        except UsageError:
            address = None
        name = address.path.removesuffix("/") if address is not None else ""
        if address is None or not name or "/" in name:
            raise UsageError(
                f"{url!r} is no session's address", hint="Like ssh://user@host:22/NAME."
            )
        known = (ssh.Host.parse(host, config) for host in config.hosts)
        there = (address.destination, address.port)
        plain = ssh.Host(address.destination, address)
        host = next((h for h in known if (h.address.destination, h.address.port) == there), plain)
        return cls(host, names.check_name(name), tuple(ssh.program(config)))

    def connect(self, role: str, resume: tuple[str, str] | None) -> Session:
        """Connect through a new ssh, and end the one before, if any."""
        self.close()
        there = f"{self.host.command} {shlex.join(['attach', '--stdio', self.name])}"
        options = [word for option in self.host.options for word in ("-o", option)]
        ours, theirs = socket.socketpair()
        with theirs:
            self._ssh = command.spawn(
                [
                    *self.program,
                    "-T",
                    *options,
                    "-o",
                    "ServerAliveInterval=10",
                    *self.host.address.words(),
                    there,
                ],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env=ssh.environment(),
            )
        try:
            return self.session(ours, kind=caller.kind(), role=role, resume=resume)
        except SessionGone as error:
            said = self._ssh.stderr_tail().strip().splitlines()
            why = said[-1] if said else error.message
            raise SessionGone(
                f"session {self.name!r} cannot be reached at {self.host.address.destination}: "
                f"{why}",
                hint="criuctl must be on the PATH there.",
            ) from error

    def close(self) -> None:
        """End ssh."""
        if self._ssh is not None:
            self._ssh.end()
            self._ssh.close()
            self._ssh = None


def relay(config: Config, name: str) -> None:
    """Copy bytes between the standard streams and the holder of `name` until one side closes."""
    folder = names.run_folder(config.run_dir, name)
    check_own(folder)
    try:
        holder = names.connect(folder / "socket", 10.0)
    except OSError as error:
        raise SessionGone(
            f"session {name!r} has no holder on this host ({error.strerror or error})"
        ) from error
    with holder:
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(holder, select.POLLIN)
        while True:
            for fd, _events in poll.poll():
                try:
                    data = os.read(fd, 1 << 16)
                    if not data:
                        return
                    if fd == 0:
                        holder.sendall(data)
                    else:
                        _write_all(1, data)
                except OSError as error:
                    raise SessionGone(
                        f"the connection to session {name!r} broke: {error.strerror}"
                    ) from error


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
