"""Starting a holder as a daemon: it survives its launcher, the launcher's terminal and its login.

`start_holder` forks twice (own session, no controlling terminal, child of init), in a systemd scope
of its own where systemd runs, and executes a fresh interpreter without site packages.  The caller
waits until the holder has started the tree; if that fails the reason is raised and nothing is left.
A holder for a session that is to be restored is started without a command: it waits,
``checkpointed``, for `adopt`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import (
    CommandFailed,
    Conflict,
    CriuctlError,
    NotFound,
    PlatformError,
    TimedOut,
    UsageError,
    of_the_host,
)
from ...proc.folders import make_private
from .. import names
from ..sessions import read_state

if TYPE_CHECKING:
    from ...config import Config

PLAIN = "criuctl.session.launch.plain_spawn:spawn_plain"
_ENTRY = Path(__file__).parents[1] / "entry.py"
_TIMEOUT = 30.0
_LOG_TAIL = 2000
# What a holder's own ``criuctl snapshot`` is to use as the command that starts the holder.
_PLACES = (
    *("store", "state_dir", "cache_dir", "run_dir", "host_id", "key_dir", "key_file"),
    *("passphrase_file", "passphrase_command", "s3_endpoint", "s3_region", "criu"),
)


@dataclass(frozen=True, slots=True)
class HolderSpec:
    """The specification of a holder."""

    name: str
    id: str = ""  # "" makes a new one
    incarnation: int = 1
    created: float = 0.0  # 0: now
    argv: Sequence[str] = ()  # the command; with a restored session what it was, for `status`
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"
    rows: int = 24
    cols: int = 80
    labels: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)  # for `status`; the spawner adds its own
    spawner: str = PLAIN  # module:function (see `plain_spawn`); "": wait for `adopt`
    options: Mapping[str, Any] = field(default_factory=dict)  # the spawner's own
    scrollback: int = 0  # bytes of output kept on disk; 0: the configuration's
    hooks: bool = False  # start a shell with the hooks of `shell_hooks`
    linger: float = 3600.0  # seconds that an exit status waits to be collected
    # Of a session that is to be restored:
    # a file, positioned, with the scrollback; its descriptor is passed on
    log_fd: int | None = None
    base: int = 0  # offset of the scrollback's first byte
    input_offset: int = 0  # the output's end when something was typed last
    modes: Mapping[str, Any] = field(default_factory=dict)
    shell: Mapping[str, Any] = field(default_factory=dict)  # the marks of its shell
    roles: Sequence[Sequence[str]] = ()  # [kind, name, role] as `checkpoint-begin` answered
    events: int = 0  # sequence of the last event
    audit: int = 0  # sequence of the last entry of the audit log
    checkpoint: str = ""
    fds: Sequence[int] = ()  # more descriptors that the holder inherits under their numbers


@dataclass(frozen=True, slots=True)
class Started:
    """A holder that was started."""

    name: str
    id: str
    holder_pid: int
    socket: str
    pid: int | None = None  # root of the tree; None while it waits for `adopt`
    start_time: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class WarmHolders:
    """A process that forks holders (`warm_start`), for many that are started at once; `close` it.

    Several processes may use it.
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = str(theirs.fileno())
            argv = [sys.executable, "-I", "-S", str(_ENTRY), "-", "warm", number, "-"]
            child = os.fork()
            if child == 0:
                _become_daemon(argv, Path(os.devnull), [theirs.fileno()])
            os.waitpid(child, 0)

    def close(self) -> None:
        """End the process; its holders go on."""
        self._socket.close()

    def start(self, run_folder: Path, channel: int, kept: Sequence[int]) -> bool:
        """Have it fork a holder, with these descriptors; return whether it is there."""
        request = {"run_folder": str(run_folder), "fds": list(kept)}
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [channel, *kept])
        except OSError:
            return False
        return True


def start_holder(
    config: Config, spec: HolderSpec, *, timeout: float = _TIMEOUT, warm: WarmHolders | None = None
) -> Started:
    """Start a holder and wait until its session stands.

    `warm` forks it, except where it is to have a systemd scope. `Conflict` if there is a holder of
    this name, `NotFound` if there is no such command, `CommandFailed` for other failures.
    """
    run_folder = names.run_folder(config.run_dir, spec.name)
    state_folder = names.state_folder(config.state_dir, spec.name)
    _take_name(spec.name, run_folder)
    _make_folders(spec.name, run_folder, state_folder)
    body = asdict(spec) | {
        "id": spec.id or os.urandom(16).hex(),
        "created": spec.created or round(time.time(), 3),
        "command": list(spec.argv),
        "run_folder": str(run_folder),
        "state_folder": str(state_folder),
        "scrollback": spec.scrollback or config.scrollback_mib << 20,
        "helper_environment": helper_environment(config),
        "update_environment": list(config.update_environment),
    }
    kept = [fd for fd in (spec.log_fd, *spec.fds) if fd is not None]
    prefix, answer = scope(spec.name), None
    if warm is not None and not prefix:
        answer = _launch([], body, run_folder, kept, timeout, warm)
    if answer is None:
        answer = _launch(prefix, body, run_folder, kept, timeout)
    if answer is None and prefix:
        answer = _launch([], body, run_folder, kept, timeout)  # no scope is better than no session
    if answer is None:
        with suppress(OSError):
            raise CommandFailed(f"the holder of {spec.name!r} did not start: {_tail(run_folder)}")
        raise CommandFailed(f"the holder of {spec.name!r} did not start")
    if "error" in answer:
        _forget(run_folder)
        with suppress(OSError):  # an earlier session of the name has left its log there
            os.rmdir(state_folder)
        raise _not_started(spec.name, answer["error"])
    return Started(
        spec.name,
        answer["id"],
        answer["holder_pid"],
        answer["socket"],
        answer.get("pid"),
        answer.get("start_time"),
        answer.get("facts", {}),
    )


def helper_environment(config: Config) -> dict[str, str]:
    """Return the variables by which another criuctl uses the same store and folders; the rest is
    read from the configuration files again.
    """
    found = {f"CRIUCTL_{key.upper()}": str(getattr(config, key)) for key in _PLACES}
    found["CRIUCTL_HOOK_DIRS"] = ":".join(config.hook_dirs)
    return {key: value for key, value in found.items() if value}


def _take_name(name: str, run_folder: Path) -> None:
    """Refuse a name that a holder has; remove the control group of a holder that was killed."""
    present = read_state(run_folder)
    if present is None:
        return
    if present["holder_alive"]:
        raise Conflict(
            f"session {name!r} exists ({present['state']})",
            hint="Attach to it, or choose another name.",
        )
    if present.get("cgroup"):
        with suppress(OSError):  # a process is still in it
            os.rmdir(present["cgroup"])


def _make_folders(name: str, *folders: Path) -> None:
    """Make the session's folders, which only this user may enter."""
    try:
        for folder in folders:
            make_private(folder)
            os.chmod(folder, 0o700)
    except OSError as error:
        raise PlatformError(
            f"session {name!r} has no place for its files: {error.filename}: {error.strerror}",
            hint="Configure a run_dir and a state_dir that may be written.",
        ) from error


def scope(name: str) -> list[str]:
    """Return the command that puts a process into a systemd scope, where systemd runs."""
    if not os.path.isdir("/run/systemd/system") or shutil.which("systemd-run") is None:
        return []
    whose = [] if os.getuid() == 0 else ["--user"]
    unit = f"--unit=criuctl-{name}-{os.urandom(3).hex()}"
    return [
        "systemd-run",
        *whose,
        "--scope",
        "--quiet",
        "--collect",
        "--property=Delegate=yes",
        unit,
        "--",
    ]


def _not_started(name: str, why: Mapping[str, Any]) -> CriuctlError:
    """Return the error of a session that did not start.

    A command that the kernel does not run is the caller's mistake, not criuctl's failure.
    """
    text, number = f"session {name!r} could not be started: {why['message']}", why.get("errno")
    if number in (errno.ENOENT, errno.ENOTDIR):
        return NotFound(text)
    if number == errno.EACCES:
        return UsageError(text, hint="It is a folder, or may not be executed: see `ls -ld` of it.")
    if number == errno.ENOEXEC:
        return UsageError(
            text, hint="A script begins with #! and its interpreter; or name that: `-- sh SCRIPT`."
        )
    if number in (errno.ENAMETOOLONG, errno.E2BIG, errno.ELOOP):
        return UsageError(text)
    if (
        number is not None
        and (known := of_the_host(OSError(number, text, why.get("file")))) is not None
    ):
        return PlatformError(text, hint=known.hint)
    return CommandFailed(text)


def _launch(
    prefix: list[str],
    body: dict[str, Any],
    run_folder: Path,
    kept: list[int],
    timeout: float,
    warm: WarmHolders | None = None,
) -> dict[str, Any] | None:
    """Start the daemon and return its answer; None: it ended without one."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            argv = [
                *prefix,
                sys.executable,
                "-I",
                "-S",
                str(_ENTRY),
                body["name"],
                "fresh",
                str(theirs.fileno()),
                str(run_folder),
            ]
            if warm is None:
                child = os.fork()
                if child == 0:
                    _become_daemon(argv, run_folder / "holder.log", [theirs.fileno(), *kept])
                os.waitpid(child, 0)
            elif not warm.start(run_folder, theirs.fileno(), kept):
                return None
        ours.settimeout(timeout)
        try:
            ours.sendall(json.dumps(body).encode())
            ours.shutdown(socket.SHUT_WR)
            with ours.makefile("rb") as file:
                answer = file.read()
        except TimeoutError:
            raise TimedOut(
                f"the holder of {body['name']!r} did not answer in {timeout:g} s"
            ) from None
        except OSError:
            return None
    return dict(json.loads(answer)) if answer else None


def _become_daemon(argv: list[str], log_file: Path, kept: list[int]) -> None:
    """Fork again and execute, in the child; never return."""
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.chdir("/")
        os.umask(0o077)
        null = os.open("/dev/null", os.O_RDWR)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        log = os.open(log_file, flags, 0o600)
        for number, fd in enumerate((null, null, log)):
            os.dup2(fd, number)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in kept:
                with suppress(OSError):  # the listing's own descriptor
                    os.close(int(name))
        for fd in kept:
            os.set_inheritable(fd, True)
        path = os.environ.get(
            "PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        )
        environment = {"PATH": path, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
        for variable in ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS"):
            if variable in os.environ:
                environment[variable] = os.environ[variable]
        os.execvpe(argv[0], argv, environment)
    finally:
        os._exit(127)


def _tail(run_folder: Path) -> str:
    """Return the last line of the holder's log."""
    data = (run_folder / "holder.log").read_bytes()[-_LOG_TAIL:]
    lines = data.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _forget(run_folder: Path) -> None:
    """Remove the folder of a session that was never started."""
    if read_state(run_folder) is None:
        shutil.rmtree(run_folder, ignore_errors=True)
