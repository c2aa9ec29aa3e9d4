"""Stop the copy of a session that another host has taken over, and find such copies.

A copy is stopped in four steps; criuctl may be killed after any of them, and each can be repeated.
Every process is frozen, so that it does nothing any more; attached operators are notified (event
``fenced``), and the reason is recorded; every process is killed; the session is ``lost`` here.  The
copy is frozen, not asked to end: a stale copy that cleans up after itself would write into files
and to peers that belong to the other home by then.

`stand_down` checks every session that runs here and whose lease this home has claimed.  A store
that does not answer, or that has no lease to show, stops nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from ..checkpoint import leases
from ..checkpoint.leases import Head
from ..checkpoint.repository import Repository
from ..config import Config
from ..errors import Conflict, CriuctlError, HomeLost, NoSuchProcess, NotFound, StoreError, TimedOut
from ..proc.tree import ProcessIdentity, read_tree, wait_ended
from ..quoting import quoted
from ..report import Reporter
from ..session.sessions import inside, leftovers, state_of
from ..store import open_store
from .fencing import Fenced, judge, lease_dict
from .journal import events, operation_facts
from .registry import Registry, SessionRecord, check_outside, exclusive_session

_PATIENCE = 20.0  # seconds that processes may take to end after SIGKILL
_MAX_WALKS = 50  # a tree that forks faster than this is stopped by its end

Verdict = Literal["home", "fenced", "unclaimed", "unknown"]


class StandDown(Struct, frozen=True):
    """The result for one session."""

    session: str
    verdict: Verdict
    done: Literal["nothing", "frozen", "ended"] = "nothing"
    processes: int = 0
    store: str = ""
    epoch: int | None = None  # this home's
    lease: Head | None = None  # as it is in the store
    reason: str = ""
    error: CriuctlError | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as ``criuctl fence --json`` prints it."""
        body: dict[str, Any] = {
            "session": self.session,
            "verdict": self.verdict,
            "done": self.done,
            "processes": self.processes,
            "store": self.store or None,
            "epoch": self.epoch,
            "lease": lease_dict(self.lease),
            "reason": self.reason or None,
        }
        return body if self.error is None else body | {"error": self.error.to_dict()}


# -- stopping one
# ------------------------------------------------------------------------------------


@events.recorded("fence", operation_facts.fenced, about=operation_facts.of_session)
def stop(
    config: Config,
    record: SessionRecord,
    reason: str,
    facts: dict[str, Any],
    *,
    end: bool,
    reporter: Reporter,
) -> int:
    """Freeze what runs here as this session, report why, and end it unless `end` is False; return
    the number of processes.

    `Conflict` when another criuctl works on the session, or when criuctl runs inside it.
    """
    with exclusive_session(config, record.name):
        if not record.alive():
            return 0
        state = state_of(config, record.name)
        strays = (
            leftovers(state)
            if state is not None and not state["holder_alive"] and state["id"] == record.id
            else []
        )
        if inside(config) == record.name or os.getpid() in {
            i.pid for i in _members(record, strays)
        }:
            raise Conflict(
                f"criuctl runs inside session {record.name!r}",
                hint="Run it from outside the session.",
            )
        count = _freeze(config, record, strays, reason, facts, reporter)
        Registry(config).put(replace(record, reason=reason))
        if not end:
            return count
        reporter.step("end", session=record.name)
        count = max(count, _end(config, record, strays))
        Registry(config).put(replace(record, state="lost", reason=reason))
        return count


def _holder(config: Config, record: SessionRecord) -> Any:
    """Yield a connection to the holder of this very tree, None when it has none."""
    from ..session.client.session import Session

    state = state_of(config, record.name)
    if (
        state is None
        or not state["holder_alive"]
        or (state["pid"], state["start_time"]) != (record.pid, record.start_time)
    ):
        return None
    return Session.connect(
        record.name, config=config, kind="service", operator="criuctl-fence", role="admin"
    )


def _freeze(
    config: Config,
    record: SessionRecord,
    strays: Sequence[ProcessIdentity],
    reason: str,
    facts: dict[str, Any],
    reporter: Reporter,
) -> int:
    reporter.step("fence", session=record.name)
    session = _holder(config, record)
    if session is not None:
        with session:
            answer = session.request("fence", reason=reason, **facts)
            return int(answer["processes"])
    stopped: set[ProcessIdentity] = set()
    for _walk in range(_MAX_WALKS):
        new = [identity for identity in _members(record, strays) if identity not in stopped]
        if not new:
            break
        _signal(signal.SIGSTOP, new)
        stopped.update(new)
    return len(stopped)


def _end(config: Config, record: SessionRecord, strays: Sequence[ProcessIdentity]) -> int:
    """Send SIGKILL until no process is left; return how many there were."""
    session = _holder(config, record)
    if session is not None:
        with session:
            return int(session.kill(0))
    seen: set[ProcessIdentity] = set()
    deadline = time.monotonic() + _PATIENCE
    while members := _members(record, strays):
        seen.update(members)
        _signal(signal.SIGKILL, members)
        if left := wait_ended(members, max(0.0, deadline - time.monotonic())):
            pids = ", ".join(str(identity.pid) for identity in left)
            raise TimedOut(
                f"session {record.name!r}: processes survive SIGKILL: PID {pids}",
                hint="They are stuck in the kernel.",
            )
    return len(seen)


def _members(record: SessionRecord, strays: Sequence[ProcessIdentity]) -> list[ProcessIdentity]:
    """Return all living processes, parents before children."""
    found: list[ProcessIdentity] = []
    with suppress(NoSuchProcess):
        if record.identity.exists():
            found = [process.identity for process in read_tree(record.pid)]
    found += [identity for identity in strays if identity not in found]
    return [identity for identity in found if identity.alive()]


def _signal(number: int, to: Sequence[ProcessIdentity]) -> None:
    for identity in to:
        with suppress(NoSuchProcess, ProcessLookupError):
            fd = identity.open_pidfd()
            try:
                signal.pidfd_send_signal(fd, number)
            finally:
                os.close(fd)


@contextmanager
def stopping(config: Config, reporter: Reporter) -> Iterator[None]:
    """Stop the copy if an operation finds its home fenced, after it has released the copy, and say
    so in the error.
    """
    try:
        yield
    except HomeLost as error:
        record = Registry(config).get(error.details["session"])
        if record is None or not record.alive():
            raise
        try:
            count = stop(
                config, record, error.message, _facts(error.details), end=True, reporter=reporter
            )
        except CriuctlError as trouble:
            hint = (
                f"Its copy here could not be stopped ({trouble.message}): run `criuctl fence "
                f"{quoted(record.name)}`."
            )
            raise HomeLost(error.message, hint=hint, **error.details) from error
        text = (
            f"{error.message}; its copy here was ended ({count} "
            f"{'process' if count == 1 else 'processes'})"
        )
        hint = f"`criuctl attach` it there; `criuctl status {quoted(record.name)}`."
        raise HomeLost(text, hint=hint, **error.details) from error


def _facts(found: dict[str, Any]) -> dict[str, Any]:
    """Return the facts for attached operators, in addition to the reason."""
    lease = found["lease"]
    return {"epoch": lease["epoch"], "host": lease["host"]}


# -- finding them
# ------------------------------------------------------------------------------------


def stand_down(
    config: Config,
    names: Sequence[str],
    *,
    every: bool = False,
    freeze_only: bool = False,
    reporter: Reporter,
) -> Iterator[StandDown]:
    """Check the leases of these sessions (of all that run here, with `every`), and stop those that
    run elsewhere now.

    Yields each outcome as soon as it is known; a failure with one is in its outcome, and the next
    is checked.
    """
    check_outside(config)
    registry = Registry(config)
    wanted = (
        [record.name for record in registry.all() if record.alive()]
        if every
        else list(dict.fromkeys(names))
    )
    with ExitStack() as stack:
        stores = _Stores(config, stack)
        for name in wanted:
            record = registry.get(name)
            if record is None or not record.alive():
                yield StandDown(
                    name, "unknown", error=NotFound(f"no session {name!r} is running on this host")
                )
                continue
            found, fenced = _look(config, stores, record)
            if fenced is None:
                yield found
                continue
            try:
                facts = _facts(fenced.to_dict())
                count = stop(
                    config, record, fenced.text, facts, end=not freeze_only, reporter=reporter
                )
            except CriuctlError as error:
                yield replace(found, error=error)
            else:
                yield replace(found, done="frozen" if freeze_only else "ended", processes=count)


class _Stores:
    """The stores that leases are in, each opened once, and not asked again once it did not
    answer.
    """

    def __init__(self, config: Config, stack: ExitStack) -> None:
        self._config, self._stack = config, stack
        self._opened: dict[str, Repository | CriuctlError] = {}

    def open(self, url: str) -> Repository:
        """Return the store at `url`; a failure is raised again at each call."""
        if url not in self._opened:
            self._opened[url] = self._try(url)
        found = self._opened[url]
        if isinstance(found, CriuctlError):
            raise found
        return found

    def failed(self, url: str, error: CriuctlError) -> None:
        """Note that it does not answer any more."""
        self._opened[url] = error

    def _try(self, url: str) -> Repository | CriuctlError:
        config = self._config.with_options(store=url)
        try:
            store = open_store(url, config)
            self._stack.callback(store.close)
            repository = Repository.open(store, config)
        except CriuctlError as error:
            return error
        self._stack.callback(repository.close)
        return repository


def _look(
    config: Config, stores: _Stores, record: SessionRecord
) -> tuple[StandDown, Fenced | None]:
    """Return what the stores say of one session: the first "fenced" counts, then the first without
    an answer.
    """
    best = StandDown(record.name, "unclaimed")
    for store_id, claimed in record.leases.items():
        url, epoch = str(claimed.get("url", "")), int(claimed.get("epoch", 0))
        found = StandDown(record.name, "unknown", store=url, epoch=epoch)
        try:
            repository = stores.open(url)
            if repository.id != store_id:
                raise StoreError(
                    f"{url} is another store than the one that has the lease of {record.name!r}"
                )
            head = leases.read_head(repository, record.name)
        except CriuctlError as error:
            if isinstance(error, StoreError):
                stores.failed(url, error)
            found = replace(found, reason=error.message, error=error)
        else:
            fenced = judge(config, repository, record, head)
            if fenced is not None:
                return replace(found, verdict="fenced", lease=head, reason=fenced.text), fenced
            if head is None:
                found = replace(found, reason="the store has no lease of this session")
            elif head.session.id != record.id:
                found = replace(
                    found, lease=head, reason="the lease is of another session of this name"
                )
            else:
                found = replace(found, verdict="home", lease=head)
        if best.verdict in ("unclaimed", "home") and found.verdict != best.verdict:
            best = found if best.verdict == "unclaimed" or found.verdict == "unknown" else best
    return best, None
