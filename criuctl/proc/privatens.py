"""A private PID (and mount, perhaps net) namespace for one tree: criuctl's side of `nsinit`."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from ..errors import CommandFailed, NoSuchProcess, PlatformError
from . import command
from .namespaces import entry_prefix, namespaces
from .tree import ProcessIdentity, wait_gone

_GUESTS = 200  # PIDs that CRIU and its helpers may need
_TIMEOUT = 20.0  # seconds to make the namespaces


def _room_behind(reserved: Iterable[int], last: int = 1) -> int:
    """Return a number followed by `_GUESTS` PIDs that are not reserved, at least `last` if
    possible.
    """
    limit = int(Path("/proc/sys/kernel/pid_max").read_text()) - _GUESTS
    reserved = sorted(reserved)
    before = last
    for number in reserved:
        if number - before > _GUESTS:
            break
        before = max(before, number)
    if before > limit and last > 1:
        return _room_behind(reserved)  # start again from the lowest numbers, as the kernel does
    if before > limit:
        raise PlatformError(
            "this host has too few PID numbers for the tree", hint="Raise kernel.pid_max."
        )
    return before


class PrivateNamespaces:
    """New namespaces with a PID 1 of ours; leaving the ``with`` ends them unless `keep` was called.

    `reserved`: the PIDs that the tree will have; processes that enter before it get other ones.
    `last`: the last PID given where the tree comes from, so none is given again soon. `bind`: shows
    a folder (the first) at the place of another one inside. `layers`: a detached tmpfs with files
    that are shown inside, by its list. `start`: starts PID 1 in another way than as a child of
    ours.
    """

    def __init__(
        self,
        *,
        net: bool = False,
        ipc: bool = False,
        reserved: Iterable[int] = (),
        last: int = 1,
        bind: tuple[str, str] | None = None,
        layers: int | None = None,
        start: command.Starter | None = None,
    ) -> None:
        self.net = net
        self.ipc = ipc
        self.kept = False
        ours, theirs = socket.socketpair()
        self._channel = ours
        self._channel.settimeout(_TIMEOUT)
        try:
            with theirs:
                script = Path(__file__).with_name("nsinit.py")
                arguments = [
                    str(theirs.fileno()),
                    str(_room_behind(reserved, last)),
                    *(["net"] if net else []),
                    *(["ipc"] if ipc else []),
                    *(["layers", str(layers)] if layers is not None else []),
                ]
                fds = [theirs.fileno(), *([layers] if layers is not None else [])]
                argv = [
                    sys.executable,
                    "-I",
                    "-S",
                    "-E",
                    str(script),
                    *arguments,
                    *(["bind", *bind] if bind else []),
                ]
                helper = None
                if start is not None:
                    start(argv, fds)
                else:
                    helper = command.spawn(argv, pass_fds=fds, new_session=True)
            words: dict[str, str] = {}
            pending = b""
            while "pid" not in words or "ready" not in words:
                received = ours.recv(4096)
                pending += received
                *lines, pending = pending.split(b"\n")
                words.update((line.decode() + " ").split(" ", 1) for line in lines)  # type: ignore[misc]  # pairs by construction
                if "error" in words or not received:
                    if "error" not in words:
                        raise CommandFailed(
                            "private namespaces cannot be made: the helper ended without an answer"
                        )
                    raise PlatformError(
                        f"private namespaces cannot be made: {words['error'].strip()}"
                    )
            if helper is not None:
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
        """Return the argv prefix that runs a command inside."""
        return entry_prefix(self.init.pid, {"pid", "mnt", "net"} if self.net else {"pid", "mnt"})

    @property
    def net_entry(self) -> list[str]:
        """Return the argv prefix that runs a command in the net namespace alone."""
        return entry_prefix(self.init.pid, {"net"})

    def keep(self, root: int, *, ends_with_root: bool = False) -> None:
        """Make the namespaces end with the tree, whose root has PID `root` inside, and not with
        us.
        """
        self._channel.sendall(f"{'go' if ends_with_root else 'wait'} {root}\n".encode())
        self.kept = True
        self._channel.close()

    def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        groups: Sequence[str] = (),
        umask: int = 0o022,
    ) -> int:
        """Start the tree's root (argv[0] is a path); return its PID inside.

        It leads a new session without a terminal, in the control groups with these ``cgroup.procs``
        files. The namespaces end with it.
        """
        order = {"argv": list(argv), "env": dict(env), "groups": list(groups), "umask": umask}
        self._channel.sendall(b"run " + json.dumps(order).encode() + b"\n")
        answer = self._channel.recv(64).split()
        if len(answer) != 2 or answer[0] != b"root":
            raise PlatformError("the first process of the private namespaces could not be started")
        self.kept = True
        self._channel.close()
        return int(answer[1])

    def discard(self) -> None:
        """End PID 1, and with it all processes inside; returns when it is gone."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.kept:
            self.discard()
