"""Starting a session's tree: its namespaces, its init, its command on a terminal.

    holder (outside)
      criuctl-init    PID 1 of the session's PID, mount and IPC namespaces; not dumped; a restore
                      makes a new one
        tini -s       root of the dumped tree: adopts daemons, so that they belong to the session;
                      reaps
          COMMAND     leader of a session of its own, the terminal is its controlling terminal

With `host_pids`, and where the holder may not make namespaces (a plain user), there is no
criuctl-init and there are no namespaces: tini is the holder's child.  In both cases the holder
reaps a process that ends with the command's status; ``init`` in the facts is its PID, if it is not
the root.

Inside, ``CRIUCTL_SESSION`` and ``CRIUCTL_SESSION_ID`` name the session.  The folder
``CRIUCTL_SESSION_DIR`` has the file ``session.json`` with what may change: a restore writes it
again before the tree runs (`Inside.write`); and the file ``generation``, whose content is another
one in each life of the tree (`Inside.renew`).  In namespaces the folder is at the same place on
every host, so the variable stays right.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...errors import CommandFailed, PlatformError
from ...proc import sessionchild
from ...proc.ownership import check_own
from ...proc.privatens import PrivateNamespaces
from ...proc.tree import ProcessIdentity, children
from .. import names
from ..holder.environment import agent_link
from ..holder.environment import link as make_link
from ..terminal import Pty, making
from .plain_spawn import Spawned, SpawnRequest

_FOLDERS = ("/usr/bin", "/usr/local/bin", "/bin", "/sbin", "/usr/sbin")
_TIMEOUT = 20.0  # seconds for the command to be executed
_CAP_SYS_ADMIN = 21


@dataclass(frozen=True, slots=True)
class Inside:
    """The folder that the session sees as ``CRIUCTL_SESSION_DIR``."""

    folder: Path  # where it is on this host
    shown: Path  # where it is inside

    @classmethod
    def of(cls, run_dir: str, name: str, *, private: bool) -> Inside:
        """Return that of session `name`; `private`: it has a mount namespace of its own."""
        folder = names.run_folder(run_dir, name) / "inside"
        return cls(
            folder, Path(run_dir or names.DEFAULT_RUN_DIR) / "session" if private else folder
        )

    @property
    def bind(self) -> tuple[str, str] | None:
        """Return (folder, where to mount it) for a mount namespace; None if it needs no mount."""
        return (str(self.folder), str(self.shown)) if self.shown != self.folder else None

    def write(
        self,
        name: str,
        identifier: str,
        incarnation: int,
        restored: Mapping[str, object] | None = None,
    ) -> None:
        """Write ``session.json``, atomically: a program inside may read it at any time."""
        self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        self.shown.mkdir(mode=0o755, parents=True, exist_ok=True)
        for folder in (self.folder, self.shown):
            check_own(folder)
        self.folder.chmod(0o755)  # whatever the umask is: a program may have given up its user
        temporary = self.folder / ".session.json"
        body = {
            "session": name,
            "id": identifier,
            "incarnation": incarnation,
            "restored": dict(restored) if restored else None,
        }
        temporary.write_text(json.dumps(body) + "\n")
        temporary.chmod(0o644)  # whatever the umask is
        temporary.replace(self.folder / "session.json")
        self.renew()

    def renew(self) -> None:
        """Write a new generation: 128 random bits, and the time in nanoseconds.

        The file stays the same one, of the same size, so that programs can watch it, keep it open
        or map it. A restore writes it once more when everything of that is in place again and the
        tree does not run yet.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(self.folder / "generation", flags, 0o644), "w") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(f"{os.urandom(16).hex()} {time.time_ns()}\n")


def spawn_session(request: SpawnRequest) -> Spawned:
    """Start the command in its namespaces, as described above; called in the holder.

    Options: ``host_pids``, ``io_uring``, ``mptcp``, ``run_dir``, ``umask``.
    """
    tini = _tini()
    private = not request.options.get("host_pids") and _may_make_namespaces()
    inside = Inside.of(str(request.options.get("run_dir") or ""), request.name, private=private)
    inside.write(request.name, request.id, request.incarnation)
    env = {
        "TERM": "xterm-256color",
        **request.env,
        "CRIUCTL_SESSION": request.name,
        "CRIUCTL_SESSION_ID": request.id,
        names.SESSION_DIR: str(inside.shown),
    }
    agent, link = request.env.get(names.AGENT_SOCKET, ""), agent_link(str(inside.shown))
    if agent.startswith("/") and link:
        # A program keeps its environment: what the path leads to can be changed.
        make_link(inside.folder, agent)
        env[names.AGENT_SOCKET] = link
    with making():
        pty = Pty(request.rows, request.cols)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        report = f"criuctl/spawn/{os.urandom(16).hex()}"
        listener.bind(f"\0{report}")
        listener.listen(1)
        argv = [tini, "-s", "--", *_first_program(request, pty.path, report), *request.argv]
        umask = int(request.options.get("umask", 0o022))
        if private:
            root, init = _start_private(argv, env, request, umask, inside)
        else:
            root, init = _start_here(argv, env, request, umask), 0
        start_time = _await_command(listener, root, request)
        pty.close_slave()
    except BaseException:
        pty.close()
        raise
    finally:
        listener.close()
    return Spawned(root, pty.master, {"init": init, "private": private}, start_time)


def _tini() -> str:
    """Return the path of tini.  Not with shutil.which, which would stay in the holder's memory."""
    for folder in _FOLDERS:
        path = f"{folder}/tini"
        if os.access(path, os.X_OK):
            return path
    hint = "Install the package tini, the init inside of a session; `criuctl doctor --fix` does."
    raise PlatformError("tini is not installed", hint=hint)


def _first_program(request: SpawnRequest, terminal: str, report: str) -> list[str]:
    """Return the program that takes the terminal, reports to the holder and executes the
    command.
    """
    refused = [what for what in ("io_uring", "mptcp") if not request.options.get(what, True)]
    python = [sys.executable, "-I", "-S", "-E", sessionchild.__file__]
    return [*python, terminal, report, request.cwd, ",".join(refused) or "-"]


def _may_make_namespaces() -> bool:
    with open("/proc/self/status") as file:
        capabilities = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    return bool(capabilities >> _CAP_SYS_ADMIN & 1)


def _start_private(
    argv: list[str], env: Mapping[str, str], request: SpawnRequest, umask: int, inside: Inside
) -> tuple[int, int]:
    """Start the tree in new namespaces; return the PIDs of its root and of PID 1, as seen here."""
    with PrivateNamespaces(ipc=True, bind=inside.bind) as spaces:
        spaces.run(argv, env, groups=request.cgroup_procs, umask=umask)
        (root,) = children(spaces.init.pid)
        return root, spaces.init.pid


def _start_here(argv: list[str], env: Mapping[str, str], request: SpawnRequest, umask: int) -> int:
    """Start the tree as a child; return its PID.  Only system calls between fork and exec."""
    pid = os.fork()
    if pid:
        return pid
    try:
        for path in request.cgroup_procs:
            with open(path, "w") as file:
                file.write("0")
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        os.closerange(3, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") > 0 else 1 << 16)
        os.umask(umask)
        os.chdir("/")
        os.execve(argv[0], argv, dict(env))
    finally:
        os._exit(127)


def _called(listener: socket.socket, init: int) -> socket.socket:
    """Accept the command's connection; any user may connect to an abstract address."""
    until = time.monotonic() + _TIMEOUT
    while True:
        ready, _, _ = select.select(
            [listener.fileno(), init], [], [], max(0.0, until - time.monotonic())
        )
        if listener.fileno() not in ready:
            raise CommandFailed(
                "the session's init could not start its command"
                if ready
                else "the session did not start in time"
            )
        channel, _ = listener.accept()
        _pid, uid, _gid = struct.unpack(
            "iII", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        if uid == os.geteuid():
            return channel
        channel.close()


def _await_command(listener: socket.socket, root: int, request: SpawnRequest) -> int:
    """Let the command begin, wait until it is executed, and return the root's start time.

    `OSError` if it cannot be executed.
    """
    try:
        pidfd = os.pidfd_open(root)
    except ProcessLookupError as error:
        raise CommandFailed("the session's init ended at once") from error
    try:
        with _called(listener, pidfd) as channel:
            channel.settimeout(_TIMEOUT)
            # Before the command begins: it may end, and its init be reaped, at once.
            start_time = ProcessIdentity.of(root).start_time
            # it has failed already, and says so
            with suppress(BrokenPipeError, ConnectionResetError):
                channel.sendall(b"!")
            failure = channel.recv(4)
    except TimeoutError as error:
        raise CommandFailed("the session's command did not start in time") from error
    finally:
        os.close(pidfd)
    if failure:
        (number,) = struct.unpack("i", failure)
        raise OSError(number, os.strerror(number), request.argv[0])
    return start_time
