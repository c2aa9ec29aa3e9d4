"""Maintenance of a host: everything that runs is stored, new sessions are refused, and what to
restore is recorded.

The record is ``STATE_DIR/maintenance.json``, written durably before and after each step. So after
any interruption of `begin`, a power cut included, the next `begin` continues where it was:

    storing    the door is shut (`check_open`), and things are being stored, by falling order
    stored     all is stored that could be
    returning  things are being restored (`criuctl.ops.recovery`)
    over       the door is open; the record is kept for what has not come back

An item is recorded as ``waiting`` before its dump is begun. Whether an interrupted dump has ended
it is in its session's record, which names the checkpoint before the tree is ended, and never before
the checkpoint is complete. Trees that were started while the door was being shut are found by
looking again until nothing new is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..config import Config
from ..errors import Conflict, CriuctlError, DumpFailed, NotFound
from ..host.journal import events, operation_facts
from ..host.maintenance import How, Item, Record, read, write
from ..host.registry import Registry, boot_id
from ..proc.tree import ProcessIdentity
from ..quoting import quoted
from ..report import Reporter
from ..session.sessions import inside
from .scheduling.batch import alone
from .scheduling.subjects import Subject, ranks, running

LOCK_PATIENCE = 30.0  # seconds for another one that was killed to clean up

Grouped = Callable[[list[Subject]], list[list[Subject]]]


def _by_order(found: list[Subject]) -> list[list[Subject]]:
    return ranks(found, ending=True)


def lock_of(config: Config) -> tuple[str, str]:
    """Return the lock for all changes of the record, and the message for when it is held."""
    return f"maintenance/{config.state_dir}", "another criuctl begins or ends maintenance"


@events.recorded_each(
    "maintenance-begin", operation_facts.maintained, about=operation_facts.of_maintenance
)
def begin(
    config: Config,
    how: How,
    reason: str,
    *,
    jobs: int,
    until: float | None = None,
    grouped: Grouped = _by_order,
    reporter: Reporter,
) -> Iterator[Item]:
    """Shut the door and store everything; yield each item as soon as its outcome is known and
    recorded.

    An interrupted call is continued. What fails runs on, and is tried again by the next call.
    `grouped` decides what is stored side by side, and in which order.
    """
    around = inside(config)
    if around is not None:
        raise Conflict(
            f"this runs inside session {around!r}, which is to be stored, too",
            hint="Run it from outside of any.",
        )
    lock, busy = lock_of(config)
    with alone(config, lock, busy, wait=LOCK_PATIENCE):
        record = _opened(config, how, reason)
        reporter.step("shut", how=record.how)
        yield from _store(config, record, jobs, until, grouped, reporter)
        if not any(item.state in ("failed", "waiting") for item in record.items):
            record.phase = "stored"
            write(config, record)
        reporter.step("done")


def _opened(config: Config, how: How, reason: str) -> Record:
    """Return the record to continue with: the door is shut from here on."""
    record = read(config)
    if record is not None and record.phase == "returning":
        raise Conflict(
            "maintenance is being ended", hint="`criuctl maintenance end` goes on with that."
        )
    if record is None or record.phase == "over":
        record = Record(
            how,
            reason,
            items=[item for item in record.items if item.state == "given-up"] if record else [],
        )
    elif record.phase == "stored" or record.how != how:
        for item in record.items:  # items that still run need a new snapshot
            item.state = "waiting" if runs(config, record, item) else item.state
    record.how, record.reason, record.phase = how, reason or record.reason, "storing"
    write(config, record)
    return record


def _store(
    config: Config,
    record: Record,
    jobs: int,
    until: float | None,
    grouped: Grouped,
    reporter: Reporter,
) -> Iterator[Item]:
    from .snapshot import snapshot

    settle(config, record)
    tried: set[str] = set()
    while found := [
        s for s in running(config) if s.name not in tried and not _kept(record, s.name)
    ]:
        tried |= {subject.name for subject in found}
        _note(config, record, found)
        for rank in grouped(found):
            outcomes = snapshot(
                config,
                rank,
                reporter=reporter,
                jobs=jobs,
                until=until,
                leave_running=record.how == "snapshot",
            )
            for outcome in outcomes:
                item = record.of(outcome.target)
                assert item is not None
                if outcome.result is not None:
                    item.state, item.error, item.degraded = "stored", None, outcome.degraded
                    item.ended = record.how == "dump"
                    item.checkpoint, item.store = (
                        outcome.result["checkpoint"],
                        outcome.result["store"],
                    )
                else:
                    assert outcome.error is not None
                    item.state, item.error = "failed", outcome.error.to_dict()
                    settle(config, record)
                write(config, record)
                reporter.step("noted", session=item.session)
                yield item


def _kept(record: Record, name: str) -> bool:
    """Return whether an interrupted `begin` has its snapshot already."""
    item = record.of(name)
    return item is not None and record.how == "snapshot" and item.state == "stored"


def _note(config: Config, record: Record, found: Sequence[Any]) -> None:
    """Record the items that are about to be stored."""
    registry = Registry(config)
    if record.boot_id != boot_id():
        record.boot_id = boot_id()
        for item in record.items:
            item.root = (0, 0)
    for subject in found:
        earlier = record.of(subject.name)
        if earlier is not None:
            record.items.remove(earlier)
        kept = (
            (earlier.store, earlier.checkpoint)
            if earlier is not None and earlier.checkpoint
            else (config.store, "")
        )
        known = registry.get(subject.name)
        root = (subject.root.pid, subject.root.start_time) if subject.root is not None else (0, 0)
        before = known.checkpoint if known is not None else ""
        record.items.append(
            Item(
                subject.name,
                subject.order,
                subject.tree,
                "waiting",
                *kept,
                before=before,
                root=root,
            )
        )
    write(config, record)


def settle(config: Config, record: Record) -> None:
    """Find the outcomes of interrupted dumps."""
    registry = Registry(config)
    for item in record.items:
        if item.state not in ("waiting", "failed") or runs(config, record, item):
            continue
        known = registry.get(item.session)
        went_down = record.boot_id != boot_id()
        if known is not None and known.checkpoint and known.checkpoint != item.before:
            item.state, item.checkpoint, item.store, item.error = (
                "stored",
                known.checkpoint,
                known.store,
                None,
            )
            item.ended = known.state == "checkpointed"
        elif went_down and item.checkpoint:  # by an earlier `begin` that left it running
            item.state, item.error = "stored", None
        elif not went_down and (
            item.state == "waiting" or (item.error or {}).get("exit_code") == NotFound.exit_code
        ):
            item.state, item.error = "gone", None
        elif (
            not went_down and item.tree and not item.root[0] and item.session not in _found(config)
        ):
            # its process could not be identified, and none matches any more
            item.state, item.error = "gone", None
        elif item.state == "waiting":
            hint = (
                f"`criuctl restore {quoted(item.before)}` brings back what it was before."
                if item.before
                else ""
            )
            error = DumpFailed(
                f"{item.session!r} was not stored before this host went down", hint=hint
            )
            item.state, item.error = "failed", error.to_dict()


def _found(config: Config) -> set[str]:
    return {subject.name for subject in running(config)}


def runs(config: Config, record: Record, item: Item) -> bool:
    """Return whether it runs here: as the session, or as the recorded process."""
    known = Registry(config).get(item.session)
    if known is not None and known.alive():
        return True
    return (
        bool(item.root[0]) and record.boot_id == boot_id() and ProcessIdentity(*item.root).alive()
    )


def failure(item: Item) -> CriuctlError | None:
    """Return an item's error as it was raised."""
    if item.error is None:
        return None
    error = CriuctlError(item.error["message"], hint=item.error["hint"])
    error.code, error.exit_code = item.error["code"], item.error["exit_code"]
    return error
