"""A private PID (and mount, perhaps net) namespace for one tree; criuctl's side of `criuctl.proc.nsinit`."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from ..errors import NoSuchProcess, PlatformError
from . import command
from .namespaces import entry_prefix, namespaces
from .tree import ProcessIdentity, wait_gone

_GUESTS = 200  # PIDs that CRIU and its helpers may need
_TIMEOUT = 20.0  # seconds to make the namespaces


def _room_behind(reserved: Iterable[int]) -> int:
    """A number after which `_GUESTS` PIDs are none of these."""
    limit = int(Path("/proc/sys/kernel/pid_max").read_text()) - _GUESTS
    before = 1
    for number in sorted(reserved):
        if number - before > _GUESTS:
            break
        before = max(before, number)
    if before > limit:
        raise PlatformError("the PID numbers of this host do not suffice for the tree", hint="Raise kernel.pid_max.")
    return before


class PrivateNamespaces:
    """Fresh namespaces with a PID 1 of ours; they vanish on leaving the ``with`` unless `keep` was called.

    `reserved` are the PIDs that the tree will have: whoever enters before it gets other ones.
    """

    def __init__(self, *, net: bool = False, reserved: Iterable[int] = ()) -> None:
        self.net = net
        self.kept = False
        ours, theirs = socket.socketpair()
        self._channel = ours
        self._channel.settimeout(_TIMEOUT)
        try:
            with theirs:
                script = Path(__file__).with_name("nsinit.py")
                arguments = [str(theirs.fileno()), str(_room_behind(reserved)), *(["net"] if net else [])]
                helper = command.spawn(
                    [sys.executable, "-I", "-S", "-E", str(script), *arguments], pass_fds=[theirs.fileno()], new_session=True
                )
            words: dict[str, str] = {}
            pending = b""
            while "pid" not in words or "ready" not in words:
                received = ours.recv(4096)
                pending += received
                *lines, pending = pending.split(b"\n")
                words.update((line.decode() + " ").split(" ", 1) for line in lines)  # type: ignore[misc]  # pairs by construction
                if "error" in words or not received:
                    raise PlatformError(f"private namespaces cannot be made: {words.get('error', 'the helper died').strip()}")
            helper.wait(_TIMEOUT)
            self.init = ProcessIdentity.of(int(words["pid"]))
            self.pid_namespace = namespaces(self.init.pid)["pid"]
        except TimeoutError as error:
            ours.close()
            raise PlatformError("private namespaces were not ready in time") from error
        except BaseException:
            ours.close()
            raise

    @property
    def entry(self) -> list[str]:
        """The argv prefix that runs a command inside."""
        return entry_prefix(self.init.pid, {"pid", "mnt", "net"} if self.net else {"pid", "mnt"})

    @property
    def net_entry(self) -> list[str]:
        """The argv prefix that runs a command in the net namespace alone."""
        return entry_prefix(self.init.pid, {"net"})

    def keep(self) -> None:
        """The tree is in; from now on the namespaces end with it, not with us."""
        self._channel.sendall(b"go\n")
        self.kept = True
        self._channel.close()

    def discard(self) -> None:
        """End PID 1, and with it everything inside; returns when it is gone."""
        self._channel.close()
        try:
            fd = self.init.open_pidfd()
        except NoSuchProcess:
            return
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended when the channel closed
        finally:
            os.close(fd)
        wait_gone([self.init], 5.0)

    def __enter__(self) -> PrivateNamespaces:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.kept:
            self.discard()
