"""Files whose permission the kernel checks when they are opened: the processes of a restored tree
open them themselves, at the last moment.

CRIU opens with root's rights, and before any process has its own: a user would get the memory of a
process that has executed a set-uid program since the dump, or a file of a control group that acts
with the rights of the process that has opened it.  In CRIU's pre-resume every process has its
credentials and its dumpable flag, and nothing of it has run.  There the holder opens the file again
under the number that it had, in a call of its own (`criuctl.proc.traced_calls`), and the kernel
decides, as for any other open(2).

A file of /proc about a process that the kernel refuses stays that of an ended process, which CRIU
has put there (`criuctl.criu.procfiles`), and is reported.  Another file of the kernel's has no such
form: then the restore fails, and nothing of the tree is left.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack

from ..criu.heldfiles import Use
from ..criu.procfiles import OwnFile, about
from ..errors import CriuctlError, RestoreFailed
from ..proc import inject, traced_calls
from ..proc.procfs import read_link
from ..proc.traced_calls import Tracee
from ..report import Reporter

_F_GETFD = 1
_NOT_AGAIN = os.O_CREAT | os.O_EXCL | os.O_TRUNC  # flags that the kernel does not report
_HINT = "Have root open it for the program again, or have the program close it before the dump."


def open_own(
    files: Iterable[OwnFile], pids: Mapping[int, int], tracer: int, reporter: Reporter
) -> None:
    """Have each file opened by its holders, which `tracer` holds; `pids`: PID in the tree -> PID on
    this host.  `RestoreFailed`.
    """
    files = list(files)
    if not files:
        return
    with ExitStack() as stack:
        refused: Exception | None = None
        try:
            stack.enter_context(inject.stopped(tracer))
        except (OSError, CriuctlError) as error:
            refused = error
        for file in files:
            _open_one(file, pids, tracer, reporter, refused)


def _open_one(
    file: OwnFile,
    pids: Mapping[int, int],
    tracer: int,
    reporter: Reporter,
    refused: Exception | None,
) -> None:
    """Open it in its first holder; the others share that open file, if the kernel lets them."""
    first: Use | None = None
    if not file.uses:
        reporter.warning(
            f"{file.path} is in a message on a socket, where no process can open it again; reading "
            "it says that the process has ended"
        )
    for use in file.uses:
        if use.pid not in pids:
            continue
        try:
            if refused is not None:
                raise refused
            with traced_calls.calling(tracer, pids[use.pid]) as tracee:
                if use.role not in ("descriptor", "working folder"):
                    raise OSError(errno.EPERM, "only root can give it back")
                if use.role == "working folder":
                    _checked(_with_path(tracee, pids[use.pid], inject.CHDIR, file.path))
                    continue
                new = _shared(tracee, first, use) if first is not None else -1
                if new < 0:
                    new = _opened(tracee, pids[use.pid], file)
                flags = _checked(tracee.run(inject.FCNTL, use.number, _F_GETFD))
                cloexec = os.O_CLOEXEC if flags else 0
                _checked(tracee.run(inject.DUP3, new, use.number, cloexec))
                tracee.run(inject.CLOSE, new)
                first = first or use
        except (OSError, CriuctlError) as error:
            _report(file, use, error, reporter)


def _opened(tracee: Tracee, pid: int, file: OwnFile) -> int:
    flags = file.flags & ~_NOT_AGAIN | os.O_NOCTTY | os.O_CLOEXEC
    new = _checked(_with_path(tracee, pid, inject.OPEN, file.path, flags, 0))
    if file.position > 0:
        tracee.run(inject.LSEEK, new, file.position, os.SEEK_SET)
    return new


def _with_path(tracee: Tracee, pid: int, number: int, path: str, *arguments: int) -> int:
    """Run a system call on a path, which is one of our root folder, in a process that may have
    another one.
    """
    root = read_link(pid, "root").rstrip("/")
    seen = path.removeprefix(root) if path.startswith(f"{root}/") else path
    with tracee.placed(os.fsencode(seen) + b"\0") as address:
        return tracee.run(number, address, *arguments)


def _shared(tracee: Tracee, first: Use, use: Use) -> int:
    """Take the open file of the first holder over; negative if the kernel refuses that."""
    if first.pid == use.pid:
        return int(tracee.run(inject.FCNTL, first.number, inject.F_DUPFD_CLOEXEC, 0))
    handle = int(tracee.run(inject.PIDFD_OPEN, first.pid, 0))
    if handle < 0:
        return handle
    new = int(tracee.run(inject.PIDFD_GETFD, handle, first.number, 0))
    tracee.run(inject.CLOSE, handle)
    return new


def _report(file: OwnFile, use: Use, error: Exception, reporter: Reporter) -> None:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = f"PID {use.pid} ({use}): {file.path} cannot be opened with its own rights: {why}"
    if about(file.path) is None:
        raise RestoreFailed(text, hint=_HINT, pid=use.pid) from error
    reporter.warning(f"{text}; reading it says that the process has ended")


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result
