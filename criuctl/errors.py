"""The error tree: one class is one sentence, one exit code and one hint.

Every error that a user can meet is a `CriuctlError`.  A class's docstring says what happened in
general; an instance's message says what, where (PID, descriptor, file, object key), and `hint` says
what to do about it.  Foreign errors (botocore, OSError, pycriu, ...) are mapped to these classes
once, at the seam where they enter, with ``raise ... from``.  Only `criuctl.cli` turns an error into
an exit code.

The exit codes are the contract of the command line; `EXIT_CODES` lists them for help and
documentation.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from .redact import redacted

EXIT_CODES: dict[int, str] = {
    0: "done",
    1: "a bug in criuctl",
    2: "usage",
    3: "no such session, checkpoint or process",
    4: "preflight refused, nothing was touched",
    5: "dump failed, the tree runs on",
    6: "restore failed, nothing is left of it",
    7: "store unreachable or denied",
    8: "damaged, wrong key, or a format this version cannot read",
    9: (
        "conflict: name taken, lease held elsewhere, another store or an older checkpoint than "
        "expected"
    ),
    10: "vetoed by a hook or a policy",
    11: "done, but something optional failed",
    12: "timed out",
    13: "CRIU or the kernel is missing or too old, or no rights",
}


class CriuctlError(Exception):
    """Something went wrong that criuctl foresaw."""

    exit_code = 1
    code = "error"

    def __init__(self, message: str, *, hint: str = "", **details: Any) -> None:
        self.message = redacted(message)
        super().__init__(self.message)
        self.hint = redacted(hint or self.default_hint())
        self.details: dict[str, Any] = {
            k: redacted(v) if isinstance(v, str) else v for k, v in details.items()
        }

    @classmethod
    def default_hint(cls) -> str:
        """Return the hint for an error that was raised without one."""
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Return ``error`` of JSON output: code, exit_code, message, hint and any details."""
        body: dict[str, Any] = {
            "code": self.code,
            "exit_code": self.exit_code,
            "message": self.message,
            "hint": self.hint,
        }
        body.update({k: v for k, v in self.details.items() if k not in body})
        return body


# -- usage and names ------------------------------------------------------------------------------


class UsageError(CriuctlError):
    """The command line or an argument makes no sense."""

    exit_code = 2
    code = "usage"


class ConfigError(UsageError):
    """A configuration file has an unknown key or a value of the wrong kind."""

    code = "config"


class InvalidName(UsageError):
    """A session name, tag or label is not one criuctl accepts."""

    code = "invalid-name"


class NotFound(CriuctlError):
    """No such session, checkpoint or process."""

    exit_code = 3
    code = "not-found"


class NoSuchProcess(NotFound):
    """The process does not exist (any more)."""

    code = "no-such-process"


class SessionGone(NotFound):
    """The session's holder does not answer, or the connection to it was lost."""

    code = "session-gone"

    @classmethod
    def default_hint(cls) -> str:
        return "`criuctl ls` shows the sessions of this host."


class NotHeld(SessionGone):
    """The session runs, but criuctl does not hold its terminal."""

    exit_code = 9  # the session exists
    code = "not-held"


class NoSuchCheckpoint(NotFound):
    """The store holds no such checkpoint."""

    code = "no-such-checkpoint"

    @classmethod
    def default_hint(cls) -> str:
        return "`criuctl list` shows what the store holds."


class AmbiguousRef(UsageError):
    """A checkpoint id prefix names more than one checkpoint."""

    code = "ambiguous-ref"


# -- before anything is touched -------------------------------------------------------------------


class PreflightRefused(CriuctlError):
    """The preflight found an obstacle; nothing was touched."""

    exit_code = 4
    code = "preflight"


class FileConflict(PreflightRefused):
    """A file that the checkpoint needs differs on this host, and the policy forbids changing it."""

    code = "file-conflict"


class UntrustedPath(PreflightRefused):
    """A path leads through a file or folder that another user could have made or could change."""

    code = "untrusted-path"


class DumpFailed(CriuctlError):
    """The dump failed; the tree runs on."""

    exit_code = 5
    code = "dump-failed"


class RestoreFailed(CriuctlError):
    """The restore failed; nothing is left of it."""

    exit_code = 6
    code = "restore-failed"


class NumberTaken(RestoreFailed):
    """A number that was free is in use now."""

    again = False  # set: the restore is tried once more, with a new decision


class PidTaken(NumberTaken):
    """A PID of the tree is in use: the restore takes a PID namespace if it still is."""


class TerminalTaken(NumberTaken):
    """The number of one of the tree's terminals is in use: the terminal gets another one."""


# -- the store ------------------------------------------------------------------------------------


class StoreError(CriuctlError):
    """The store could not be used."""

    exit_code = 7
    code = "store"


class StoreUnreachable(StoreError):
    """The store does not answer."""

    code = "store-unreachable"


class LinkLost(StoreUnreachable):
    """The link with criuctl on another host is gone, and with it all that is reached over
    the link.
    """

    code = "link-lost"


class HostUnreachable(CriuctlError):
    """The other host cannot be reached, refuses the login, or has no criuctl that answers."""

    exit_code = 7
    code = "host-unreachable"


class StoreDenied(StoreError):
    """The store refuses these credentials or this operation."""

    code = "store-denied"


class NoSuchBucket(StoreError):
    """The bucket (or the folder of a local store) does not exist."""

    code = "no-such-bucket"


class StoreNotInitialised(StoreError):
    """There is no criuctl store at this address."""

    code = "store-not-initialised"

    @classmethod
    def default_hint(cls) -> str:
        return "Make one with `criuctl store init --store URL`."


class StoreFull(StoreError):
    """The store has no room left."""

    code = "store-full"


class StoreCannot(StoreError):
    """This store lacks an ability that the operation needs, for example conditional writes."""

    code = "store-cannot"


class ObjectMissing(StoreError):
    """An object that must be in the store is not there."""

    code = "object-missing"


class ObjectExists(StoreError):
    """An object of this name is in the store already; nothing was overwritten."""

    code = "object-exists"


class KeyMissing(StoreError):
    """The store is encrypted and no key for it was found."""

    code = "key-missing"


class StoreChanged(StoreError):
    """The store at this place is not the one that this host has pinned."""

    exit_code = 9  # the store answers; `supervise` treats it as one that does not
    code = "store-changed"


class StoreNotTrusted(StoreError):
    """A store without encryption that this host has not been set to trust."""

    exit_code = 9
    code = "store-not-trusted"


# -- data that cannot be trusted
# --------------------------------------------------------------------


class DataError(CriuctlError):
    """Data is damaged, sealed by another key, or of a format this version cannot read."""

    exit_code = 8
    code = "data"


class Damaged(DataError):
    """An object's content is not what was written."""

    code = "damaged"


class WrongKey(DataError):
    """The key does not open this store."""

    code = "wrong-key"


class Foreign(DataError):
    """Another host wrote it, and this write-only host has no key for it."""

    code = "foreign"

    @classmethod
    def default_hint(cls) -> str:
        return "A host with the store's key can read it."


class UnsupportedFormat(DataError):
    """Written by a newer criuctl, or not by criuctl at all."""

    code = "unsupported-format"


# -- the rest
# ---------------------------------------------------------------------------------------


class Conflict(CriuctlError):
    """The name is taken, or another process or host holds the lease or lock."""

    exit_code = 9
    code = "conflict"


class OlderCheckpoint(Conflict):
    """The newest checkpoint found is older than the last one that this host knows of."""

    code = "older-checkpoint"


class AnotherSession(Conflict):
    """The checkpoint is of another session than the one that this host knows by this name."""

    code = "another-session"


class LeaseHeld(Conflict):
    """Another client holds the session's write lease."""

    code = "lease-held"

    @classmethod
    def default_hint(cls) -> str:
        return "Wait until it is yielded, or take it (`criuctl attach --take`)."


class HomeLost(Conflict):
    """Another host has taken this session over; this host's copy must not run on."""

    code = "fenced"


class WrongState(Conflict):
    """The session is not in a state in which this is possible."""

    code = "wrong-state"


class Vetoed(CriuctlError):
    """A hook or a policy refused."""

    exit_code = 10
    code = "vetoed"


class Forbidden(Vetoed):
    """The operator's role does not allow it."""

    code = "forbidden"


class TimedOut(CriuctlError):
    """It took longer than allowed."""

    exit_code = 12
    code = "timed-out"


class FrozenTooLong(TimedOut):
    """The tree stood still for longer than max_freeze; the dump was undone, and the tree
    runs on.
    """

    code = "frozen-too-long"

    @classmethod
    def default_hint(cls) -> str:
        return (
            "--max-freeze SECONDS allows more, 0 any time; max_freeze in the configuration is "
            "what is allowed without it."
        )


class InDoubt(TimedOut):
    """A session has left its home, and the host that has it did not confirm that it may run."""

    code = "in-doubt"


class PlatformError(CriuctlError):
    """CRIU or the kernel is missing something."""

    exit_code = 13
    code = "platform"


class CommandFailed(CriuctlError):
    """A helper program failed."""

    code = "command-failed"


NO_MEMORY = PlatformError(
    "there is not enough memory for criuctl itself",
    hint="Check the free memory, the limit of the control group, and `ulimit -v`.",
)
NO_THREADS = PlatformError(
    "criuctl cannot start another thread",
    hint=(
        "See the limits of processes (`ulimit -u`, the control group's pids.max) and of memory "
        "(`ulimit -v`)."
    ),
)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


def _is_nowhere() -> bool:
    """Return whether the current folder has been removed, so that no relative path can be
    resolved.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def of_the_host(error: OSError) -> CriuctlError | None:
    """Map an error of this host (rights, space, descriptors) to a `CriuctlError`; return None if it
    is a bug.
    """
    if error.errno == errno.ENOSPC and error.filename == "/dev/ptmx":
        hint = "End programs that hold many terminals, or raise the sysctl kernel.pty.max."
    elif error.errno in _NO_ROOM:
        hint = (
            "Free space there, or name other folders in the configuration (state_dir, run_dir, "
            "cache_dir)."
        )
    elif error.errno in _NO_DESCRIPTORS:
        hint = (
            "Raise the limit of open files: `ulimit -Hn` before criuctl, LimitNOFILE= of a unit, "
            "or fs.file-max."
        )
    elif error.errno == errno.EFBIG:
        hint = (
            "Raise the limit of file sizes: `ulimit -f` before criuctl, or LimitFSIZE= of a unit."
        )
    elif error.errno == errno.ENOMEM:
        return NO_MEMORY
    elif error.errno in _NOT_ALLOWED and error.filename is not None:
        hint = "Run criuctl as root." if os.geteuid() else "Check owner, mode and mount options."
    elif error.errno == errno.ENOENT and error.filename is None and _is_nowhere():
        return UsageError(
            "the current folder is gone", hint="Go to one that is there, or write whole paths."
        )
    elif error.errno == errno.ENOTDIR and error.filename is not None:
        hint = (
            "A file is where a folder should be: see state_dir, run_dir, cache_dir and key_dir in "
            "the configuration."
        )
    else:
        return None
    where = (
        os.fsdecode(error.filename)
        if isinstance(error.filename, str | bytes)
        else "a file of criuctl's own"
    )
    return PlatformError(f"{where}: {error.strerror}", hint=hint)
