"""Predicates: conditions outside the tree that a checkpoint requires to be worth restoring.

A tree comes back with what it knew at its dump.  If that has changed (a schema, an edited file, a
token that has run out), it goes on from wrong assumptions.  A predicate reports that beforehand.
It is noted at the dump, before the freeze, and checked by a restore before anything starts:

    file:PATH       the file has the contents that it had (this host's file of that name, symlinks
                    followed)
    command:CMD     ``sh -c CMD`` ends with 0
    output:CMD      ``sh -c CMD`` ends with 0 and prints what it printed, for example a query for a
                    schema
    age:SPAN        the checkpoint is not older than that

A predicate that does not hold at the dump is refused there.  A change between the note and the
freeze makes the checkpoint stale, never wrongly good.

A program of the session may ask for predicates as well (`criuctl.inside.invalidate_if`).  It must
not be able to keep the operator from dumping: one that cannot be noted is in the checkpoint as
`unmet`, and a restore finds it stale.  Root reads a file for a program of another user with that
user's rights only, and no more than `MOST_ASKED` bytes of it.

RULE: no command runs here because a checkpoint contains it.  A command of a checkpoint is run only
if this very host noted it (its record bears a MAC under a key that never leaves the state folder)
or if this host's configuration has the same command under ``predicates``.  Neither the key of a
store nor the name of a host in a manifest suffices: a user who may write checkpoints, or get one
imported, could forge it.  A command that is not run counts as stale.

A reader that knows no predicates must not restore: a manifest with some requires the feature
`FEATURE`.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

from blake3 import blake3
from msgspec import Struct

from ..checkpoint.manifest import Manifest, PredicateRecord
from ..config import Config
from ..errors import (
    CommandFailed,
    ConfigError,
    PreflightRefused,
    TimedOut,
    UntrustedPath,
    UsageError,
)
from ..host import key
from ..host.retention import seconds
from ..proc import command, file_access, folder_walk, trustedpath
from ..proc.credentials import Credentials
from ..report import Finding

if TYPE_CHECKING:
    from ..checkpoint.manifest import PredicateKind

FEATURE = "predicates"
KINDS = ("file", "command", "output", "age")
RUN = ("command", "output")  # the kinds that are a command
State = Literal["holds", "stale", "unchecked"]
_MOST = 64  # of one checkpoint
_LONGEST = 4096  # characters
_OUTPUT = 16 << 20  # bytes that a command may print
MOST_ASKED = 64 << 20  # bytes of a file that a program asks for
_REASON = 500  # characters
_FOREIGN = "the command was of another host's checkpoint, and nothing here allows it"
_HINT = "Restore another checkpoint; --force restores it anyway."


class Verdict(Struct, frozen=True):
    """One predicate of a checkpoint, and whether it holds here and now."""

    record: PredicateRecord
    state: State
    why: str = ""
    hint: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return its JSON object."""
        return {
            "kind": self.record.kind,
            "argument": self.record.argument,
            "state": self.state,
            "why": self.why,
        }


def parse(spec: str) -> tuple[PredicateKind, str]:
    """Return kind and argument of ``KIND:ARGUMENT``; `UsageError`."""
    kind, colon, argument = spec.partition(":")
    if not colon or kind not in KINDS or not argument.strip():
        raise UsageError(
            f"{spec!r} is no requirement",
            hint="Write file:PATH, command:CMD, output:CMD or age:SPAN.",
        )
    if len(argument) > _LONGEST or "\0" in argument:
        raise UsageError(
            f"a requirement of {len(argument)} characters is too long, or has a NUL in it"
        )
    if kind == "age" and not seconds(argument):
        raise UsageError(f"{spec!r} would be stale at once")
    if kind == "file":
        argument = os.path.abspath(argument)
    return cast("PredicateKind", kind), argument


def configured(config: Config) -> list[tuple[str, list[tuple[PredicateKind, str]]]]:
    """Return the configuration's patterns with what each requires; `ConfigError`."""
    made = []
    for pattern, specs in config.predicates.items():
        try:
            made.append((pattern, [parse(spec) for spec in specs]))
        except UsageError as error:
            raise ConfigError(
                f"predicates of {pattern!r}: {error.message}", hint=error.hint
            ) from error
    return made


def wanted(
    config: Config, session: str, specs: Sequence[str] = ()
) -> list[tuple[PredicateKind, str]]:
    """Return what a checkpoint of `session` is to require: the first matching pattern, and `specs`;
    each once.
    """
    found = next(
        (rules for pattern, rules in configured(config) if fnmatch.fnmatchcase(session, pattern)),
        [],
    )
    every = list(dict.fromkeys([*found, *map(parse, specs)]))
    if len(every) > _MOST:
        raise UsageError(f"a checkpoint can require {_MOST} things, not {len(every)}")
    return every


def note(
    config: Config, requested: Sequence[tuple[PredicateKind, str]]
) -> tuple[PredicateRecord, ...]:
    """Record the present state; `PreflightRefused` for a predicate that does not hold now."""
    return tuple(_noted(config, kind, argument) for kind, argument in requested)


def note_asked(
    config: Config, asked: Sequence[Mapping[str, Any]], user: Credentials
) -> tuple[PredicateRecord, ...]:
    """Record what programs of a session of `user` have asked for: {kind, argument, foreign} each.

    A command that is `foreign`, from a checkpoint of another host, runs only if the configuration
    has it.
    """
    allowed = {rule for _, rules in configured(config) for rule in rules}
    found = []
    for one in asked[:_MOST]:
        try:
            kind, argument = parse(f"{one['kind']}:{one['argument']}")
        except UsageError:
            continue  # no holder keeps such a one; that of a forged checkpoint is worth nothing
        strange = user.uid != 0 or one.get("foreign")
        if kind in RUN and strange and (kind, argument) not in allowed:
            found.append(PredicateRecord(kind, argument, unmet=_FOREIGN))
            continue
        try:
            found.append(_record(config, kind, argument, user))
        except _NotSo as error:
            mac = key.seal(config, f"{kind}:{argument}") if kind in RUN else ""
            found.append(PredicateRecord(kind, argument, mac=mac, unmet=str(error)[:_REASON]))
    return tuple(found)


def _noted(config: Config, kind: PredicateKind, argument: str) -> PredicateRecord:
    try:
        return _record(config, kind, argument)
    except _NotSo as error:
        raise PreflightRefused(
            f"{kind}:{argument}, which the checkpoint is to require, is not so now: {error}"
        ) from error


def _record(
    config: Config, kind: PredicateKind, argument: str, user: Credentials | None = None
) -> PredicateRecord:
    """Return the present state, as `user` sees it if one is given; `_NotSo`."""
    if kind == "file":
        size, digest = _file_of(argument, user) if user is not None else _file(argument)
        return PredicateRecord(kind, argument, size=size, digest=digest)
    if kind in RUN:
        digest = _run(config, argument)
        mac = key.seal(config, f"{kind}:{argument}")
        return PredicateRecord(kind, argument, digest=digest if kind == "output" else "", mac=mac)
    return PredicateRecord(kind, argument)


def with_required(manifest: Manifest, records: tuple[PredicateRecord, ...]) -> Manifest:
    """Return the manifest with its requirements; an older reader will refuse it."""
    if not records:
        return manifest
    return manifest.with_use(predicates=records, features=(*manifest.features, FEATURE))


def examine(config: Config, manifest: Manifest, *, force: bool = False) -> list[Finding]:
    """Report what stands against a restore now; with `force` as warnings."""
    level: Literal["error", "warning"] = "warning" if force else "error"
    return [
        Finding(
            level,
            v.state,
            f"stale: it requires {v.record.kind}:{v.record.argument}: {v.why}",
            "" if force else v.hint,
        )
        for v in verdicts(config, manifest)
        if v.state != "holds"
    ]


def verdicts(config: Config, manifest: Manifest, *, run: bool = True) -> Iterator[Verdict]:
    """Return the verdict on each predicate; without `run` no command is run."""
    if not manifest.predicates:
        return
    allowed = {
        (kind, argument)
        for _, rules in configured(config)
        for kind, argument in rules
        if kind in RUN
    }
    for record in manifest.predicates:
        if record.unmet:
            why = f"a program asked for it, and it could not be noted at the dump: {record.unmet}"
            yield Verdict(record, "stale", why, _HINT)
        elif record.kind in RUN and not run:
            yield Verdict(record, "unchecked", "a restore, or its --dry-run, runs the command")
        elif (
            record.kind in RUN
            and (record.kind, record.argument) not in allowed
            and not _ours(config, record)
        ):
            yield Verdict(
                record,
                "unchecked",
                "the command is from a checkpoint of another host, and nothing here allows it",
                f"If it may run here, put {f'{record.kind}:{record.argument}'!r} under "
                "predicates in the configuration; --force restores unchecked.",
            )
        else:
            why = _stale(config, manifest, record)
            yield Verdict(record, "stale", why, _HINT) if why else Verdict(record, "holds")


class _NotSo(Exception):
    """The reason why a predicate does not hold."""


def _stale(config: Config, manifest: Manifest, record: PredicateRecord) -> str:
    """Return why it does not hold any more; "" if it does."""
    try:
        if record.kind == "age":
            return _age(manifest, record.argument)
        if record.kind == "file":
            size, digest = _file(record.argument, only=record.size)
            if size != record.size:
                return f"it was {record.size} bytes at the dump and is {size} now"
            return "" if digest == record.digest else "it has other contents than at the dump"
        printed = _run(config, record.argument)
        return (
            ""
            if record.kind == "command" or printed == record.digest
            else "it prints something else than at the dump"
        )
    except _NotSo as error:
        return str(error)


def _age(manifest: Manifest, span: str) -> str:
    try:
        most = timedelta(seconds=seconds(span))
        made = datetime.fromisoformat(manifest.created).astimezone(UTC)
    except (UsageError, ValueError, OverflowError):
        raise _NotSo("it cannot be read") from None
    age = datetime.now(UTC) - made
    return "" if age <= most else f"it was taken {age.total_seconds() / 3600:.1f} hours ago"


def _file_of(path: str, user: Credentials) -> tuple[int, str]:
    """Return size and BLAKE3 of a file that `user` may read, as `_file` does; `_NotSo` for a large
    one.
    """
    if user.uid == 0:
        return _file(path, most=MOST_ASKED)
    try:
        with trustedpath.opened(path, trusted={0, user.uid}) as place:
            if not file_access.may_open(user, place.walked, os.R_OK):
                raise _NotSo(f"user {user.uid} may not read it")
            # Read as a restore will read it: what that refuses must not be noted.
            return _file(path, most=MOST_ASKED, inode=place.status)
    except UntrustedPath as error:
        raise _NotSo(f"it cannot be read: {error.message}") from error
    except OSError as error:
        raise _NotSo(f"it cannot be read: {error.strerror}") from error


def _file(
    path: str,
    only: int | None = None,
    most: int | None = None,
    inode: os.stat_result | None = None,
) -> tuple[int, str]:
    """Return size and BLAKE3 of a regular file; if its size is not `only`, the contents are not
    read. `_NotSo` if it has more than `most` bytes, or is another file than `inode`.
    """
    from .contents import digest

    try:
        # Nothing is opened that has side effects, and no link leads to what its maker may not read.
        top = os.open("/", os.O_PATH | os.O_CLOEXEC)
        try:
            last = list(folder_walk.trail(path, top))[-1:]
        finally:
            os.close(top)
        if not last:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not stat.S_ISREG(os.lstat(last[0]).st_mode):
            raise _NotSo("it is no regular file")
        fd = folder_walk.regular(last[0])
    except OSError as error:
        raise _NotSo(f"it cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if inode is not None and not os.path.samestat(status, inode):
            raise _NotSo("it has just been replaced")
        if most is not None and status.st_size > most:
            raise _NotSo(f"it has {status.st_size} bytes, of at most {most}")
        if only is not None and status.st_size != only:
            return status.st_size, ""
        if status.st_size == 0 and os.read(fd, 1):
            raise _NotSo("the kernel reports no size for it; require output:CMD of what prints it")
        return status.st_size, digest(fd, status.st_size)
    except OSError as error:
        raise _NotSo(f"it cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)


def _run(config: Config, text: str) -> str:
    """Return the BLAKE3 of what the command prints."""
    try:
        done = command.run(
            ["sh", "-c", text],
            timeout=config.hook_timeout,
            check=False,
            cwd="/",
            max_stdout=_OUTPUT,
        )
    except TimedOut:
        raise _NotSo(
            f"the command was not done after {config.hook_timeout:g} s (hook_timeout)"
        ) from None
    except CommandFailed as error:
        raise _NotSo(error.message) from error
    if done.returncode != 0:
        said = done.error_text.strip()[-300:]
        raise _NotSo(f"the command ended with {done.returncode}" + (f": {said}" if said else ""))
    return blake3(done.stdout).hexdigest()


def _ours(config: Config, record: PredicateRecord) -> bool:
    return key.is_sealed(config, f"{record.kind}:{record.argument}", record.mac)
