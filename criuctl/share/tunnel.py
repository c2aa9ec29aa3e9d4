"""The reverse tunnel: the system's ssh, kept alive.

The relay listens on a port, and each connection to it comes out at the keeper's socket. The relay
chooses the port the first time; later connections ask for the same one, so the address stays. ssh
ends within 20 seconds of silence, and is started again, at least every few seconds.

A relay that has lost its client silently would keep the port for hours. So a line of shell runs
there, which reads a sign of life from its input every few seconds, and ends the login that it
belongs to when there is none. On a relay that runs no commands there is no such line (``ssh -N``);
its sshd has to notice by itself (ClientAliveInterval).

The relay is not trusted: it gets no agent, display or file of this host, what it says is bounded,
and a connection that it makes leads to the keeper's socket only.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import HostUnreachable
from ..proc import command
from ..proc.child import Child
from ..transport import ssh

_MOST_SAID = 16 << 20  # bytes; ssh's standard error is a file in memory
_BEAT = 5.0  # seconds between two signs of life
_SILENCE = 20  # seconds without one until the relay ends the login
_RETRY = (0.2, 0.5, 1.0, 2.0, 3.0)  # seconds before the next try
_SETTLED = 3.0  # seconds after which an ``ssh -N`` that still runs is taken for connected
_READY = b"criuctl-share-ready"
_ALLOCATED = re.compile(r"^Allocated port (\d{1,5}) for remote forward", re.MULTILINE)
# `timeout` and `dd` so that no shell needs a read with a time limit.
_WATCH = (
    f"echo {_READY.decode()}; "
    f'while [ "$(timeout {_SILENCE} dd bs=1 count=1 2>/dev/null)" = . ]; do :; done; '
    'kill "$PPID"'
)
_OPTIONS = (
    "BatchMode=yes",
    "ExitOnForwardFailure=yes",
    "ConnectTimeout=5",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "TCPKeepAlive=yes",
    "LogLevel=INFO",  # it says which port was allocated
    "ControlMaster=no",
    "ControlPath=none",
    "ForwardAgent=no",
    "ForwardX11=no",
    "PermitLocalCommand=no",
    "StreamLocalBindUnlink=no",
    "RequestTTY=no",
    "RemoteCommand=none",
    "SessionType=default",
    "StdinNull=no",
    "ForkAfterAuthentication=no",
)


class Tunnel:
    """The tunnel of one share."""

    def __init__(
        self, host: ssh.Host, program: Sequence[str], target: Path, changed: Callable[[], None]
    ) -> None:
        """`target` is the socket to which connections lead; `changed` is called when what is known
        of the tunnel has changed.
        """
        self._host, self._program, self._target = host, tuple(program), target
        self._changed = changed
        self._plain = False  # the relay runs no commands
        self._failures = 0  # since it stood last
        self.port = 0
        self.up = False
        self.trouble = ""

    async def run(self) -> None:
        """Keep the tunnel, until this is cancelled."""
        while True:
            connected = await self._once()
            self._failures = 0 if connected else self._failures + 1
            await asyncio.sleep(_RETRY[min(self._failures, len(_RETRY) - 1)])

    async def open(self, patience: float) -> None:
        """Wait until the tunnel, which `run` keeps, stands; `HostUnreachable`."""
        deadline = asyncio.get_running_loop().time() + patience
        while not (self.up and self.port):
            late = asyncio.get_running_loop().time() >= deadline
            # The first failure may have shown that the relay runs no commands.
            if late or self._failures > int(self._plain):
                raise HostUnreachable(
                    f"{self._host.name} does not take the tunnel: "
                    f"{self.trouble or f'no answer in {patience:g} s'}",
                    hint="Log in there without a question first: "
                    f"`ssh -o BatchMode=yes {shlex.quote(self._host.address.destination)} true`.",
                )
            await asyncio.sleep(0.02)

    # -- one ssh ----------------------------------------------------------------------------------

    def _words(self) -> list[str]:
        wanted = [*_OPTIONS, *self._host.options]
        if self._plain:
            wanted = [option for option in wanted if not option.startswith("SessionType=")]
        forward = f"*:{self.port}:{self._target}"
        return [
            "prlimit",
            f"--fsize={_MOST_SAID}:{_MOST_SAID}",
            "setpriv",
            "--pdeathsig=TERM",
            "--",
            *self._program,
            *(["-N"] if self._plain else []),
            *(word for option in wanted for word in ("-o", option)),
            *("-R", forward),
            *self._host.address.words(),
            *([] if self._plain else [f"exec sh -c {shlex.quote(_WATCH)}"]),
        ]

    async def _once(self) -> bool:
        """Run ssh until it ends; return whether the tunnel stood."""
        (reading, theirs_out), (theirs_in, writing) = os.pipe(), os.pipe()
        try:
            child = command.spawn(
                self._words(),
                stdin=theirs_in,
                stdout=theirs_out,
                env=ssh.environment(),
                new_session=True,
            )
        except BaseException:
            os.close(reading)
            os.close(writing)
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        os.set_blocking(writing, False)
        try:
            return await self._follow(child, reading, writing)
        finally:
            os.close(reading)
            os.close(writing)
            child.end()
            child.close()

    async def _follow(self, child: Child, reading: int, writing: int) -> bool:
        loop = asyncio.get_running_loop()
        over, said = asyncio.Event(), bytearray()

        def read() -> None:
            with suppress(OSError):
                data = os.read(reading, 4096)
                said.extend(data)
                if data and len(said) < 4096 and _READY not in said:
                    return
            loop.remove_reader(reading)  # nothing more is wanted of it

        loop.add_reader(reading, read)
        loop.add_reader(child.pidfd, over.set)
        began, beat, stood = loop.time(), loop.time(), False
        try:
            while not over.is_set():
                if not self.port and (found := _ALLOCATED.search(child.stderr_tail())):
                    self.port = min(int(found[1]), 65535)
                ready = loop.time() - began >= _SETTLED if self._plain else _READY in said
                if ready and self.port and not stood:
                    stood = True
                    self._is(up=True, trouble="")
                if loop.time() >= beat:
                    beat += _BEAT
                    with suppress(OSError):  # the relay does not read; ssh finds out why
                        os.write(writing, b".")
                with suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), _BEAT if stood else 0.02)
        finally:
            loop.remove_reader(reading)
            loop.remove_reader(child.pidfd)
        code, last, hint = await asyncio.to_thread(ssh.last_output, child, trusted=False)
        text = "" if _ALLOCATED.match(last) else "".join(c for c in last if c.isprintable())[:300]
        if not stood and code != 255 and not self._plain:
            self._plain = True  # it logged in, and no shell ran there
        self._is(up=False, trouble=text or hint or f"exit code {code} of ssh")
        return stood

    def _is(self, *, up: bool, trouble: str) -> None:
        self.up, self.trouble = up, trouble
        self._changed()
