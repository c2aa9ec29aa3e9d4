"""Find the CRIU to use, and start it.

Order: the configuration (a binary, or a prefix folder), the record that set-up left in its prefix,
then ``criu`` on the PATH. A record is JSON: ``{"argv": [...], "version": "4.2.1"}``; its argv goes
through the prefix's own loader, so that a newer suite's CRIU runs on an older userland.

CRIU is started without the host's CRIU configuration files (``/etc/criu/default.conf`` and the
like), which would silently change what a dump means; `criuctl doctor` reports when such a file
exists.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from msgspec import Struct

from .. import preparation
from ..config import Config
from ..errors import CriuctlError, PlatformError, TimedOut, UntrustedPath
from ..proc import command
from ..proc.ownership import opened_own
from . import features, hang_detection
from .rpc import Swrk

MINIMUM = (4, 2)
"""Oldest CRIU that is known to dump TCP sockets on current kernels (source: facts about 4.1.1 on
6.16).
"""

# our own environment lies in the prefix
SETUP_PREFIXES = (Path(sys.prefix).parent, preparation.PREFIX)
# CRIU needs more descriptors than any process of the tree, and reads its limit when it starts. It
# raises the limit by itself only with CAP_SYS_RESOURCE; the usual 1024 is too few for many servers.
_ALL_DESCRIPTORS = 'ulimit -Sn "$(ulimit -Hn)"; exec "$@"'
# A CRIU that is killed while it dumps leaves the tree's processes and connections in their present
# state. Stopping a unit sends SIGTERM to all of its processes, a memory limit may kill any, and
# `ulimit -f` and the end of criuctl send signals that are ignored here: CRIU sees a call fail, or
# our end, and releases the tree in order.
_IGNORED = "HUP INT QUIT USR1 USR2 PIPE TERM XCPU XFSZ"
_TO_THE_END = (
    f'trap "" {_IGNORED}; {{ echo -1000 >/proc/self/oom_score_adj; }} 2>/dev/null; '
    f"{_ALL_DESCRIPTORS}"
)
HOST_CONFIGS = ("/etc/criu/default.conf", "~/.criu/default.conf")


class CriuBinary(Struct, frozen=True):
    """A CRIU that can be started: `argv` without a subcommand."""

    argv: tuple[str, ...]
    origin: str
    recorded_version: str = ""  # as recorded by set-up; `version` asks CRIU itself

    @contextlib.contextmanager
    def swrk(
        self,
        *,
        enter: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
        stderr: int | None = None,
        start: command.Starter | None = None,
        to_the_end: bool = False,
    ) -> Iterator[Swrk]:
        """Yield a running ``criu swrk``.

        `enter` is an argv prefix that puts it into other namespaces. `to_the_end`: it ignores all
        signals that can be ignored. `start` starts it as another process's child, which becomes the
        parent of what it restores. On leaving, our end is closed and CRIU is waited for: it ends by
        itself, having rolled back what it had not finished; if it hangs and is expendable, it is
        killed with all that it has made.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                shell = ["sh", "-c", _TO_THE_END if to_the_end else _ALL_DESCRIPTORS, "sh"]
                argv = [
                    *shell,
                    *enter,
                    *self.argv,
                    "--no-default-config",
                    "swrk",
                    str(theirs.fileno()),
                ]
                # A new session: criuctl handles a ^C at the terminal, never CRIU.
                wait: Callable[[float | None], object]
                with features.cache_descriptors(self.argv) as features_fds:
                    fds = [theirs.fileno(), *pass_fds, *features_fds]
                    if start is None:
                        child = command.spawn(argv, pass_fds=fds, stderr=stderr, new_session=True)
                        pid, wait = child.pid, child.wait
                    else:
                        pid = start(argv, fds)
                        wait = command.waiter(pid)
            swrk = Swrk(ours, pid)
            try:
                yield swrk
            finally:
                swrk.close()
                try:
                    wait(
                        None
                        if not swrk.expendable
                        else 0.0
                        if swrk.hangs
                        else hang_detection.ROLLBACK
                    )
                except TimedOut:
                    hang_detection.end(pid)  # the PID is still CRIU's: it has not been reaped
                    wait(None)
        finally:
            ours.close()

    def version(self) -> tuple[int, int, int]:
        """Return the version that CRIU itself reports."""
        with self.swrk() as swrk:
            answer = swrk.call("VERSION").version
        return (
            answer.major_number,
            answer.minor_number,
            answer.sublevel if answer.HasField("sublevel") else 0,
        )


def find(config: Config) -> CriuBinary:
    """Return the CRIU to use, or raise a `PlatformError` that says how to get one."""
    if config.criu:
        path = Path(config.criu)
        if path.is_dir():
            return _from_record(path / "criu.json", named=True)
        if not os.access(path, os.X_OK):
            raise PlatformError(
                f"{path} is not an executable CRIU",
                hint="Set `criu` in the configuration to a binary or to a prefix folder.",
            )
        return CriuBinary((str(path),), origin="config")
    for prefix in SETUP_PREFIXES:
        if (prefix / "criu.json").is_file():
            return _from_record(prefix / "criu.json", named=prefix == SETUP_PREFIXES[0])
    found = shutil.which("criu") or shutil.which("criu", path="/usr/local/sbin:/usr/sbin:/sbin")
    if found is None:
        raise PlatformError("CRIU was not found on this host", hint=preparation.advice())
    return _new_enough(CriuBinary((found,), origin="PATH"))


@cache
def _new_enough(found: CriuBinary) -> CriuBinary:
    """Return the CRIU of the PATH, which nothing has tried on this kernel yet, if it is not too
    old.
    """
    try:
        version = found.version()
    except PlatformError:
        raise  # pycriu is missing
    except CriuctlError as error:
        text = f"{found.argv[0]} does not answer: {error.message}"
        raise PlatformError(text, hint=preparation.advice()) from error
    if version[: len(MINIMUM)] < MINIMUM:
        raise PlatformError(
            f"{found.argv[0]} is CRIU {'.'.join(map(str, version))}, which is too old; criuctl "
            f"needs {'.'.join(map(str, MINIMUM))}",
            hint=preparation.advice(),
        )
    return found


def _from_record(record: Path, *, named: bool) -> CriuBinary:
    """Return the CRIU of a record.

    `named`: the operator names it, or it belongs to this criuctl's own installation; a user who can
    change that record could change criuctl itself. Any other record must be changeable only by
    root, or by us.
    """
    try:
        if named:
            text = record.read_bytes()
        else:
            with opened_own(record) as fd, open(fd, "rb", closefd=False) as file:
                text = file.read()
        found = json.loads(text)
        argv, version = [str(word) for word in found["argv"]], str(found.get("version", ""))
        for word in argv if not named else ():
            if word.startswith("/") and os.path.isfile(word):
                with opened_own(word):
                    pass
    except UntrustedPath as error:
        hint = (
            f"{error.hint}, or set `criu` in the configuration."
            if error.hint
            else "Set `criu` in the configuration."
        )
        raise PlatformError(
            f"the CRIU of {record} is not used: {error.message}", hint=hint
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlatformError(
            f"{record} is not a record of an installed CRIU: {error}",
            hint="`criuctl doctor --fix` writes it again.",
        ) from error
    return CriuBinary(tuple(argv), origin=str(record), recorded_version=version)


def host_configs() -> list[str]:
    """Return the CRIU configuration files of this host (which criuctl makes CRIU ignore)."""
    return [path for path in map(os.path.expanduser, HOST_CONFIGS) if os.path.exists(path)]
