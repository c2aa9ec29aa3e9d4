"""What this host knows of its sessions: one small JSON file per name under ``state_dir/sessions``.

A session's name and id outlive its processes; the file records where it is now: running here as
which process (PID, start time and boot, never a PID alone), or checkpointed, and as which
checkpoint.  The file is a memory, not the truth: `SessionRecord.alive` asks the kernel.  Writes are
atomic renames.

`exclusive` is the lock against two operations on one tree or one name at a time, a file in
``run_dir/locks`` (`criuctl.proc.locks`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from ..config import Config
from ..errors import Conflict, PlatformError
from ..proc import locks, netfilter
from ..proc.folders import make_private
from ..proc.ownership import check_own
from ..proc.tree import ProcessIdentity
from ..quoting import quoted
from ..session import sessions
from ..session.names import DEFAULT_RUN_DIR, check_name, valid_name

_NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)
_INSTEAD = Path("/dev/shm/criuctl")  # of /run
LOCKS, SHIELDS, GPUS = "locks", "shields", "gpus"
# state of a copy that has not run yet: no session, only a note of its firewall lock
RESTORING = "restoring"
_ROOM = 4096  # bytes of a record that there is room for
_LONGEST = 200  # bytes of the name of a lock's file

__all__ = [
    "GPUS",
    "RESTORING",
    "SHIELDS",
    "Registry",
    "SessionRecord",
    "boot_id",
    "check_name",
    "check_outside",
    "exclusive",
    "exclusive_session",
    "run_folder",
    "write_record",
]


def boot_id() -> str:
    """Return the kernel's id of this boot; PIDs and start times mean nothing beyond it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class SessionRecord(Struct, frozen=True):
    """One session as this host knows it."""

    name: str
    id: str = field(default_factory=lambda: os.urandom(16).hex())
    incarnation: int = 1
    state: str = "running"  # running | checkpointed | lost | restoring
    pid: int = 0  # root of the tree as criuctl sees it, when running
    start_time: int = 0
    boot_id: str = ""
    store: str = ""  # URL of the store with its newest checkpoint
    checkpoint: str = ""  # id of that checkpoint
    # CRIU's firewall table, from before the tree is ended until it is removed
    lock_table: str = ""
    lock_kept: bool = False  # it stays until the restore, because connections are to be kept
    moved_to: str = ""  # ssh:// of the session on the host that it has moved to
    home: str = ""  # that host's name for itself
    # claims of this life: see `fencing`
    leases: dict[str, dict[str, Any]] = field(default_factory=dict)
    reason: str = ""  # why it is lost, or about to be
    forked_from: str = ""  # the session that it is a copy of, made by `fork`
    updated: float = 0.0  # unix seconds
    # its processes cannot be seen from inside a session; never written
    hidden: bool = False

    @property
    def identity(self) -> ProcessIdentity:
        """Return the root process."""
        return ProcessIdentity(self.pid, self.start_time)

    def alive(self) -> bool:
        """Return whether the session runs on this host now.

        One that is recorded as checkpointed runs if its dump was killed after that was recorded,
        and CRIU let it go on; not if it is only about to end, which much memory can delay.  One
        that cannot be seen is as it was recorded.
        """
        if self.hidden:
            return True
        here = self.state != "lost" and self.boot_id == boot_id() and self.identity.alive()
        return here and (self.state == "running" or not self.identity.doomed())


def restore_command(config: Config, ref: str, store: str, *, copy: bool = False) -> str:
    """Return the command that restores `ref`, in backquotes, with the store that holds it if
    another one is configured.
    """
    words = f"`criuctl restore {quoted(ref)}"
    if copy:
        words += " --as NAME"
    if store and store != config.store:
        words += f" --store {quoted(store)}"
    return words + "`"


_KEYS = frozenset(SessionRecord.__struct_fields__) - {"hidden"}
_LOCKED = b'"lock_table": "' + netfilter.CRIU_TABLE.encode()


class Registry:
    """The sessions of this host."""

    def __init__(self, config: Config) -> None:
        # its files decide which process is killed, and which commands are criuctl's own
        check_own(config.state_dir)
        self._config = config
        self.folder = Path(config.state_dir) / "sessions"
        self._around: str | None = None  # see `check_outside`
        self._looked = False

    def get(self, name: str, *, restoring: bool = False) -> SessionRecord | None:
        """Return the record of `name`, None when there is none or it cannot be read.

        `restoring`: also that of a copy that has not run yet.  A holder knows its session better:
        what it runs is the session, whether or not it was ever dumped.
        """
        record = self._recorded(name)
        if record is not None and record.alive():
            return replace(record, state="running")
        held = self._held(sessions.state_of(self._config, name), name, record)
        if held is None and record is not None and record.state == RESTORING and not restoring:
            return None
        return held or record

    def _held(
        self, state: Mapping[str, Any] | None, name: str, record: SessionRecord | None
    ) -> SessionRecord | None:
        if (
            state is None
            or not state["holder_alive"]
            or state["state"] not in ("running", "paused")
            or not state["pid"]
        ):
            return None
        known = (
            record
            if record is not None and record.id == state["id"]
            else SessionRecord(name, state["id"])
        )
        here = replace(
            known, state="running", incarnation=state["incarnation"], boot_id=state["boot_id"]
        )
        return self._seen(replace(here, pid=state["pid"], start_time=state["start_time"]))

    def _seen(self, record: SessionRecord) -> SessionRecord:
        if not self._looked:
            self._around, self._looked = sessions.secluded(self._config), True
        hidden = (
            self._around is not None and record.state == "running" and record.boot_id == boot_id()
        )
        return replace(record, hidden=hidden)

    def _recorded(self, name: str, holding: bytes = b"") -> SessionRecord | None:
        try:
            with open(f"{self.folder}/{check_name(name)}.json", "rb") as file:
                text = file.read()
            if holding not in text:
                return None
            loaded: dict[str, Any] = json.loads(text)
            return self._seen(SessionRecord(**{k: v for k, v in loaded.items() if k in _KEYS}))
        except (FileNotFoundError, ValueError, TypeError, AttributeError):
            return None

    def _names(self) -> list[str]:
        """Return the names that have a record."""
        try:
            return sorted(
                file[:-5]
                for file in os.listdir(self.folder)
                if file.endswith(".json") and valid_name(file[:-5])
            )
        except FileNotFoundError:
            return []

    def all(self) -> list[SessionRecord]:
        """Return every record, by name."""
        states = {str(state["session"]): state for state in sessions.all_states(self._config)}
        records = {name: self._recorded(name) for name in self._names()}
        for name, state in states.items():
            record = records.get(name)
            if record is None or not record.alive():
                records[name] = self._held(state, name, record) or record
        return [
            record
            for _, record in sorted(records.items())
            if record is not None and record.state != RESTORING
        ]

    def of_pid(self, pid: int) -> list[SessionRecord]:
        """Return those whose root has, or had, this PID.

        A host may have thousands of records, and few of them are read for this.
        """
        names = {
            name for name in self._names() if self._recorded(name, b'"pid": %d,' % pid) is not None
        }
        names |= {
            str(state["session"])
            for state in sessions.all_states(self._config)
            if state["pid"] == pid
        }
        return [
            record
            for name in sorted(names)
            if (record := self.get(name)) is not None and record.pid == pid
        ]

    def locked(self) -> list[SessionRecord]:
        """Return those with a firewall table."""
        return [r for name in self._names() if (r := self._recorded(name, _LOCKED)) is not None]

    def find(self, identity: ProcessIdentity) -> SessionRecord | None:
        """Return the running session whose root is this process; if it has several names, the last
        one that it was given.
        """
        here = boot_id()
        known = (
            record
            for record in self.of_pid(identity.pid)
            if record.state == "running" and record.boot_id == here
        )
        return max(
            (r for r in known if r.identity == identity),
            key=lambda record: record.updated,
            default=None,
        )

    def held(self, identity: ProcessIdentity, likely: str = "") -> str | None:
        """Return the name of the session with a holder, and so with a terminal, whose root is this
        process; the others are not read if it is the `likely` one.
        """

        def states() -> Iterator[dict[str, Any]]:
            if likely and (state := sessions.state_of(self._config, likely)) is not None:
                yield state
            yield from sessions.all_states(self._config)

        root = (identity.pid, identity.start_time)
        held = (one for one in states() if one["holder_alive"])
        return next((str(s["session"]) for s in held if (s["pid"], s["start_time"]) == root), None)

    def lookup(self, name: str) -> ProcessIdentity | None:
        """Return the root process of session `name`, if it runs here, else of the configured tree
        of that name.
        """
        record = self.get(name)
        if record is not None and record.alive():
            if record.hidden:
                check_outside(self._config)
            return record.identity
        if name not in self._config.trees:
            return None
        from . import configured_trees

        return configured_trees.find(self._config, name)

    def session_of(self, identity: ProcessIdentity) -> str | None:
        """Return the name of the session whose root is this process."""
        record = self.find(identity)
        return record.name if record is not None else None

    def put(self, record: SessionRecord) -> SessionRecord:
        """Write a record, durably, and return it with its time."""
        record = replace(record, updated=time.time())
        write_record(
            self.folder,
            check_name(record.name),
            {k: v for k, v in asdict(record).items() if k in _KEYS},
        )
        return record

    def check_writable(self) -> None:
        """Raise `OSError`, with the folder, if records cannot be written; called before anything is
        touched.
        """
        # the state folder itself: folders made on the way are open to all users
        make_private(self.folder.parent)
        make_private(self.folder)
        probe = self.folder / f".probe.{os.getpid()}"
        try:
            with open(os.open(probe, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
                file.write(bytes(_ROOM))
        except OSError as error:
            error.filename = str(self.folder)
            raise
        finally:
            probe.unlink(missing_ok=True)

    def forget(self, name: str) -> None:
        """Remove the record; a missing file is no error."""
        (self.folder / f"{check_name(name)}.json").unlink(missing_ok=True)


def write_record(folder: Path, name: str, body: dict[str, Any]) -> None:
    """Write ``NAME.json``, whole or not at all; it survives a power cut once this returns."""
    if not folder.parent.exists():  # usually the state folder
        make_private(folder.parent)
    make_private(folder)
    temporary = folder / f".{name}.{os.getpid()}"
    try:
        with open(os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as file:
            json.dump(body, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / f"{name}.json")
    except OSError as error:
        if error.filename is None:  # a full disk: the call was about a descriptor
            error.filename = str(folder)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)  # the name, too
    finally:
        os.close(descriptor)


def run_folder(config: Config, name: str) -> Path:
    """Return a folder of files that live as long as the process that has locked them, and no longer
    than the host runs (`criuctl.proc.locks`).

    `UntrustedPath` if another user has made it, or could put something else there.
    """
    folder = Path(config.run_dir or DEFAULT_RUN_DIR)
    if (
        not config.run_dir
        and os.geteuid() == 0
        and not os.access(folder if folder.exists() else folder.parent, os.W_OK)
    ):
        folder = _INSTEAD  # for example, in a container whose root is read-only
    check_own(folder / name)  # in /dev/shm any user could have made it
    return folder / name


def _lock_name(what: str) -> str:
    """Return the name of a lock's file; a name that is too long is replaced by its hash."""
    name = what.replace("%", "%25").replace("/", "%2F")
    if len(os.fsencode(name)) <= _LONGEST:
        return name
    import hashlib  # slow to import, and seldom needed

    return (
        f"{what.partition('/')[0]}-{hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()}"
    )


@contextlib.contextmanager
def exclusive(config: Config, what: str, busy: str) -> Iterator[None]:
    """Hold the lock `what` on this host; `Conflict` with the sentence `busy` when another process
    has it.
    """
    path = run_folder(config, LOCKS) / _lock_name(what)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locks.held(path))
        except BlockingIOError as error:
            pid = locks.holder(path)
            raise Conflict(
                busy, hint=f"Wait for the other criuctl{f' (PID {pid})' if pid else ''} to finish."
            ) from error
        except OSError as error:
            if error.errno not in _NO_PLACE:
                raise
            raise PlatformError(
                f"there is no place for the locks of criuctl: {error.filename}: {error.strerror}",
                hint=(
                    "Run criuctl as root, or configure a run_dir and a state_dir that may be "
                    "written."
                ),
            ) from error
        yield


def check_outside(config: Config, *, begins: bool = False) -> None:
    """Raise `Conflict` inside a session that has PIDs of its own: every other session would look
    gone from there.

    What `begins` a tree is refused in every session: the tree would be a part of it, and end with
    it.
    """
    around = sessions.secluded(config)
    if around is None and begins and (around := sessions.inside(config)) is not None:
        raise Conflict(
            f"this runs inside session {around!r}, and what is restored would be a part of it",
            hint="Run it from outside of any session.",
        )
    if around is not None:
        raise Conflict(
            f"this runs inside session {around!r}, from where the processes of other sessions "
            "cannot be seen",
            hint="Run it from outside of any session.",
        )


def exclusive_session(config: Config, name: str) -> contextlib.AbstractContextManager[None]:
    """Hold the session `name` of this state folder; `Conflict` when another criuctl works on it."""
    return exclusive(
        config,
        f"session/{config.state_dir}/{name}",
        f"session {name!r} is in use by another criuctl",
    )
