"""A trial restore: whether a checkpoint comes back, tested next to the live session without
touching it.

It is an ordinary restore (`criuctl.restore.story`) in a shadow of this host
(`criuctl.proc.shadow`), as a copy:

- processes, names, IPC: in PID, mount, IPC, UTS and network namespaces of their own, with every PID
  free;
- files: all are under overlays in memory; the tree opens, changes and removes its files only there,
  and files that have changed since the dump are put back only there. Where no overlay is possible,
  nothing can be written: those places are reported, and a tree that has to write there cannot be
  tried;
- connections to outside: all are hung up; its network reaches no other host;
- lease, record, hooks, events: no lease is claimed, criuctl writes its records in the shadow, and
  hooks are not run;
- predicates (`predicates`) are not checked: a stale checkpoint may be sound.

Then the probe, a command of the operator's (never of the checkpoint's), runs inside the tree's
namespaces. When the trial ends, even by SIGKILL of criuctl, nothing of it is left.
"""

from __future__ import annotations

import fnmatch
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from ..checkpoint.manifest import Manifest
from ..checkpoint.repository import Repository
from ..config import Config
from ..errors import (
    CommandFailed,
    CriuctlError,
    NoSuchProcess,
    PreflightRefused,
    RestoreFailed,
    TimedOut,
    Vetoed,
)
from ..host.failures.command_failures import reraised_as
from ..proc import command, shadow
from ..proc.namespaces import entry_prefix, foreign
from ..proc.procfs import available_memory
from ..proc.tree import ProcessIdentity
from ..report import Reporter
from ..restore import newest
from ..restore.outcome import RestoreResult
from ..restore.request import RestoreRequest
from ..session.names import DEFAULT_RUN_DIR
from ..store import Capabilities, open_store
from ..transport.frames import decode_error, encode_error

_TAIL = 4096  # characters of a probe's output that are reported
_OUTPUT = 16 << 20  # bytes that a probe may print
_KINDS = {"pid", "mnt", "net", "ipc", "uts"}


class Trial(Struct, frozen=True):
    """The result of a trial."""

    checkpoint: str
    session: str
    number: int
    restored: bool
    alive: bool  # the tree's root lived on after the restore, and at the end of the probe
    restore_ms: float
    elapsed_ms: float = 0.0
    # command, exit_code (None: not done in time, or could not be run), output
    probe: dict[str, Any] | None = None
    connections: list[dict[str, Any]] = field(default_factory=list)
    read_only: list[str] = field(default_factory=list)  # paths that could not be written
    warnings: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Restored, and the probe, if there was one, succeeded."""
        return self.restored and (self.probe is None or self.probe["exit_code"] == 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of ``verify --restore``."""
        return {"ok": self.ok, **asdict(self)}


def probe_of(config: Config, session: str) -> str | None:
    """Return the configured probe of a session: the first pattern that fits."""
    return next(
        (
            probe
            for pattern, probe in config.probes.items()
            if fnmatch.fnmatchcase(session, pattern)
        ),
        None,
    )


def trial(
    config: Config,
    ref: str,
    *,
    probe: str | None = None,
    timeout: float = 300.0,
    reporter: Reporter,
) -> Trial:
    """Restore the checkpoint that `ref` names for a trial, and run `probe` (default: the
    configuration's) next to it.

    Raise `RestoreFailed` if it cannot be restored, whether because of the checkpoint or this host;
    `TimedOut`; and like `restore` for what prevents the trial: no such checkpoint, no store, no
    key, damage.
    """
    began = time.monotonic()
    reporter.step("trial", ref=ref)

    def work() -> dict[str, Any]:
        try:
            return {"done": asdict(_inside(config, ref, probe, began + timeout))}
        except CriuctlError as error:
            return {"error": encode_error(error)}

    with reraised_as(RestoreFailed, lambda: "nothing is left of it"):
        answer = shadow.run(work, timeout=timeout)
    if "error" in answer:
        raise decode_error(answer["error"], "a shadow of this host")
    if "done" not in answer:
        raise RuntimeError(answer.get("bug", "no answer"))
    found = Trial(**answer["done"])
    for warning in found.warnings:
        reporter.warning(warning)
    return replace(found, elapsed_ms=round((time.monotonic() - began) * 1000, 1))


class _Unclaimed(Repository):
    """A store in which no lease is claimed: a copy that is discarded needs none, and must leave no
    trace.
    """

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, conditional_create=False)


def _inside(config: Config, ref: str, probe: str | None, deadline: float) -> Trial:
    """Restore and probe, in the shadow."""
    from ..restore.story import restore

    read_only = shadow.enter()
    # same path as outside: the tree's own records are there
    shadow.empty(config.run_dir or DEFAULT_RUN_DIR)
    own = config  # has the pin of the store, and the session's record
    config = config.with_options(
        state_dir=tempfile.mkdtemp(prefix="criuctl-"), hook_dirs=(), events="none"
    )
    reporter = Reporter()
    store = open_store(config.store, config)
    repository = _Unclaimed.open(store, own)
    manifest = repository.manifest(ref)
    newest.look(own, repository, ref, manifest, older=True)
    _check(manifest, read_only)
    began = time.monotonic()
    try:
        request = RestoreRequest(
            new_name=manifest.session.name, connections="hangup", files="restore", alone=True
        )
        result = restore(
            config, manifest.id, request=request, reporter=reporter, repository=repository
        )
    except (PreflightRefused, Vetoed) as error:
        raise RestoreFailed(error.message, hint=error.hint, **error.details) from error
    assert isinstance(result, RestoreResult)  # it was no dry run
    restore_ms = round((time.monotonic() - began) * 1000, 1)
    probe = probe if probe is not None else probe_of(config, manifest.session.name)
    probed = _probe(result, manifest, probe, deadline) if probe else None
    return Trial(
        checkpoint=manifest.id,
        session=manifest.session.name,
        number=manifest.number,
        restored=True,
        alive=_alive(result.pid),
        restore_ms=restore_ms,
        probe=probed,
        connections=result.connections,
        read_only=read_only,
        warnings=result.warnings,
    )


def _check(manifest: Manifest, read_only: Sequence[str]) -> None:
    """Check that all files which the tree writes to are writable, and that its memory, and a copy
    of each such file, fit.
    """
    for file in manifest.files:
        place = next(
            (p for p in read_only if file.path == p or file.path.startswith(f"{p.rstrip('/')}/")),
            None,
        )
        if place is not None and file.kind in ("written", "carried"):
            raise PreflightRefused(
                f"a trial would have to write to {file.path}, and no copy-on-write view of "
                f"{place} is possible",
                hint=(
                    "Try it on another host that has the store, or with the files on a file "
                    "system that overlayfs can cover."
                ),
            )
    copied = [
        f.size for f in manifest.files if f.kind in ("written", "carried") or f.data is not None
    ]
    needed = sum(copied) + sum(image.data.size for image in manifest.memory)
    free = available_memory()
    if needed > free:
        raise PreflightRefused(
            f"a trial needs {needed >> 20} MiB of memory, for the tree and for copies of the "
            f"files that it writes to; {free >> 20} MiB are free",
            hint="Try it on another host that has the store.",
        )


def _alive(pid: int) -> bool:
    try:
        return ProcessIdentity.of(pid).alive()
    except NoSuchProcess:
        return False


def _probe(result: RestoreResult, manifest: Manifest, text: str, deadline: float) -> dict[str, Any]:
    """Run the probe inside the tree's namespaces; return its end, and its last output."""
    outcome: dict[str, Any] = {"command": text, "exit_code": None, "output": ""}
    left = deadline - time.monotonic() - 1.0  # time for the report
    env: Mapping[str, str] = {
        "CRIUCTL_SESSION": manifest.session.name,
        "CRIUCTL_CHECKPOINT": manifest.id,
        "CRIUCTL_PID": str(result.inner_pid),
    }
    try:
        argv = [
            *entry_prefix(result.pid, foreign(result.pid) & _KINDS),
            "sh",
            "-c",
            f"exec 2>&1\n{text}",
        ]
        done = command.run(
            argv, timeout=max(left, 0.1), check=False, env=env, cwd="/", max_stdout=_OUTPUT
        )
    except NoSuchProcess:
        return {**outcome, "output": "the tree's root has ended at once"}
    except TimedOut:
        return {**outcome, "output": "the probe was not done in time"}
    except CommandFailed as error:
        return {**outcome, "output": error.message}
    return {**outcome, "exit_code": done.returncode, "output": done.text[-_TAIL:]}
