"""Restoring what maintenance, or the end of the host, has ended: by rising order, and each at most
`TRIES` times.

A try is counted, durably, before it is made: a restore that takes the host down with it is not
tried endlessly. The counts last over all calls, until `again` resets them. Restored or running
sessions are not tried again; a configured tree that the host has started again meanwhile is left as
it is and reported. A session that another host has restored has moved, which is no failure. When
nothing is left to try the door is open again, even if some did not come back; the record stays
while there are such.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from ..config import Config
from ..errors import Conflict, CriuctlError, NotFound, RestoreFailed, StoreUnreachable
from ..host import configured_trees
from ..host.journal import events, operation_facts
from ..host.maintenance import Item, Record, forget, read, write
from ..host.registry import Registry, SessionRecord, boot_id, check_outside, restore_command
from ..report import Reporter
from ..session import names
from .maintenance import LOCK_PATIENCE, lock_of, runs, settle
from .scheduling import batch
from .scheduling.subjects import order_of
from .store_recovery import homeless, taken

TRIES = 3
# seconds before failed restores are tried again: the network, a store, a peer may be late
PAUSE = 5.0


def end(
    config: Config,
    *,
    jobs: int,
    pause: float = PAUSE,
    again: bool = False,
    abandon: bool = False,
    reporter: Reporter,
) -> Iterator[Item]:
    """Restore what maintenance has ended, and open the door; yield each item when its outcome is
    known.

    With `again` given-up items are tried again; with `abandon` nothing is tried and the record is
    removed.
    """
    return _abandon(config) if abandon else _end(config, jobs, pause, again, reporter=reporter)


@events.recorded_each("maintenance-abandon", operation_facts.abandoned)
def _abandon(config: Config) -> Iterator[Item]:
    lock, busy = lock_of(config)
    with batch.alone(config, lock, busy, wait=LOCK_PATIENCE):
        record = _noted(config)
        settle(config, record)
        forget(config)
        yield from record.items


@events.recorded_each("maintenance-end", operation_facts.maintained)
def _end(
    config: Config, jobs: int, pause: float, again: bool, *, reporter: Reporter
) -> Iterator[Item]:
    check_outside(config, begins=True)
    lock, busy = lock_of(config)
    with batch.alone(config, lock, busy, wait=LOCK_PATIENCE):
        record = _noted(config)
        if again:
            _forget_tries(record)
        yield from _bring_back(config, record, jobs, pause, reporter)


def _noted(config: Config) -> Record:
    record = read(config)
    if record is None:
        raise NotFound(
            "this host is not in maintenance", hint="`criuctl maintenance begin` begins it."
        )
    return record


@events.recorded_each("recover", operation_facts.recovered)
def recover(
    config: Config,
    *,
    every: bool,
    jobs: int,
    pause: float = PAUSE,
    again: bool = False,
    from_store: Mapping[str, str] | None = None,
    reporter: Reporter,
) -> Iterator[Item]:
    """Recover at boot: as `end`, if there is anything to end; with `every` also sessions that the
    host has lost; with `from_store` also those of the store with these labels that live nowhere.
    """
    check_outside(config, begins=True)
    lock, busy = lock_of(config)
    with batch.alone(config, lock, busy, wait=LOCK_PATIENCE):
        record = read(config)
        if record is not None:
            settle(config, record)
        if every:
            record = _with_lost(config, record)
        problem: CriuctlError | None = None
        if from_store:
            try:
                record = _with_homeless(config, record, from_store, pause, reporter)
            except CriuctlError as error:
                problem = error  # what is recorded here comes back nevertheless
        if record is not None:
            if again:
                _forget_tries(record)
            yield from _bring_back(config, record, jobs, pause, reporter)
        if problem is not None:
            raise problem


def _forget_tries(record: Record) -> None:
    for item in record.items:
        if item.state == "given-up":
            item.state, item.tries = "stored", 0


# -- what the host has lost


def _with_lost(config: Config, record: Record | None) -> Record | None:
    """Return the record with every session added that lived here, in an earlier boot, when its host
    went down.
    """
    for known in lost(config):
        noted = record.of(known.name) if record is not None else None
        if noted is not None and (noted.state == "gone" or noted.checkpoint == known.checkpoint):
            continue
        if record is None:
            record = Record("lost", phase="over")
        if noted is not None:
            record.items.remove(noted)
        tree = configured_trees.trees(config).get(known.name)
        order = order_of(tree.labels, tree.order) if tree is not None else configured_trees.ORDER
        item = Item(known.name, order, tree is not None, "stored", known.store, known.checkpoint)
        record.items.append(item)
    return record


def _with_homeless(
    config: Config,
    record: Record | None,
    labels: Mapping[str, str],
    pause: float,
    reporter: Reporter,
) -> Record | None:
    """Return the record with the sessions of the store added that live nowhere.

    A store that does not answer is asked as often as a restore is tried.
    """
    for tried in range(1, TRIES + 1):
        try:
            homeless_ones = homeless(config, labels, reporter)
            break
        except StoreUnreachable:
            if tried == TRIES:
                raise
            time.sleep(pause)
    for found in homeless_ones:
        if record is None:
            record = Record("lost", phase="over")
        noted = record.of(found.name)
        if noted is not None and noted.state != "gone":
            continue
        if noted is not None:
            record.items.remove(noted)
        item = Item(found.name, order_of(found.labels), False, "stored", config.store)
        item.checkpoint, item.ended = found.checkpoint, True
        record.items.append(item)
    return record


def lost(config: Config) -> list[SessionRecord]:
    """Return sessions that ran here in an earlier boot, have a checkpoint, and whose end was not
    observed.
    """
    here = boot_id()
    return [
        known
        for known in Registry(config).all()
        if known.state == "running"
        and known.boot_id != here
        and known.checkpoint
        and not _saw_end(config, known)
    ]


def _saw_end(config: Config, known: SessionRecord) -> bool:
    """Return whether the session's holder has recorded that it ended by itself in this life."""
    try:
        said = json.loads(
            (names.state_folder(config.state_dir, known.name) / names.ENDED).read_text()
        )
        return (said["id"], said["incarnation"]) == (known.id, known.incarnation)
    except (OSError, ValueError, KeyError, TypeError):
        return False


# -- bringing back


def _bring_back(
    config: Config, record: Record, jobs: int, pause: float, reporter: Reporter
) -> Iterator[Item]:
    settle(config, record)
    tried = any(item.state == "stored" for item in record.items)
    if tried:
        record.phase = "returning"
    write(config, record)
    for order in sorted({item.order for item in record.items}):
        items = [item for item in record.items if item.order == order]
        for item in items:
            if item.state == "given-up" and taken(config, item.session, item.store):
                item.state, item.error = "moved", None
            if item.state == "gone" or _is_here(config, record, item) or item.state != "stored":
                yield item
        yield from _try(
            config,
            record,
            [item for item in items if item.state == "stored"],
            jobs,
            pause,
            reporter,
        )
    record.phase = "over"
    record.items = [item for item in record.items if item.state == "given-up"]
    if record.items:
        write(config, record)
    else:
        forget(config)
    reporter.step("done")


def _is_here(config: Config, record: Record, item: Item) -> bool:
    """Return whether nothing needs to be restored, since it runs, or has ended by itself; set its
    state.
    """
    known = Registry(config).get(item.session)
    if runs(config, record, item):
        item.state, item.error = "back", None
        item.pid = known.pid if known is not None and known.alive() else item.root[0]
        return True
    if item.state != "stored":
        return False
    # it lived on when it was stored; the remains of a failed try here prove nothing
    if not item.ended and not item.tries:
        if (
            known is None
            or known.state != "running"
            or known.boot_id == boot_id()
            or _saw_end(config, known)
        ):
            item.state = "gone"  # killed, dumped, moved, or ended by itself
            return True
        item.checkpoint, item.store = known.checkpoint, known.store  # it may have been stored again
    return item.tree and _is_restarted(config, item)


def _is_restarted(config: Config, item: Item) -> bool:
    """Return whether the host has started a new instance of this tree."""
    try:
        root = configured_trees.find(config, item.session)
    except CriuctlError:
        return False
    if root is None:
        return False
    error = Conflict(
        f"tree {item.session!r} runs already, as PID {root.pid}: it was started again",
        hint=(
            f"End it, and {restore_command(config, item.checkpoint[:12], item.store)} brings back "
            "what was stored."
        ),
    )
    item.state, item.error = "given-up", error.to_dict()
    return True


def _try(
    config: Config,
    record: Record,
    items: Sequence[Item],
    jobs: int,
    pause: float,
    reporter: Reporter,
) -> Iterator[Item]:
    """Try these until they are restored or given up."""
    todo = list(items)
    while todo:
        for item in [item for item in todo if item.tries >= TRIES]:
            todo.remove(item)
            item.state = "given-up"
            if item.error is None:
                text = (
                    f"each of {item.tries} restores of {item.session!r} was cut off, by the end "
                    "of criuctl or of the host"
                )
                hint = (
                    f"{restore_command(config, item.checkpoint[:12], item.store)} shows, with -v, "
                    "how far one gets."
                )
                item.error = RestoreFailed(text, hint=hint).to_dict()
            write(config, record)
            reporter.step("given-up", session=item.session, tries=item.tries)
            yield item
        failed = []
        named = {item.session: item for item in todo}

        def begins(session: str, named: dict[str, Item] = named) -> None:
            named[session].tries += 1
            write(config, record)

        work = [(item.session, _restore(config, item)) for item in todo]
        for outcome in batch.each(
            work, reporter=reporter, jobs=jobs, broken=RestoreFailed, begins=begins
        ):
            item = named[outcome.key]
            if outcome.answer is not None:
                item.state, item.pid, item.error = "back", outcome.answer["pid"], None
                item.degraded = outcome.answer["degraded"]
            else:
                assert outcome.error is not None
                item.error = outcome.error.to_dict()
                if taken(config, item.session, item.store):
                    item.state, item.error = "moved", None  # another host was faster
                elif not _is_here(config, record, item):  # another process was faster
                    failed.append(item)
            write(config, record)
            reporter.step("noted", session=item.session)
            if item not in failed:
                yield item
        todo = failed
        if any(item.tries < TRIES for item in todo):
            time.sleep(pause)


def _restore(config: Config, item: Item) -> batch.Work:
    def work(reporter: Reporter) -> dict[str, object]:
        from ..restore.outcome import RestoreResult
        from ..restore.request import RestoreRequest
        from ..restore.story import restore

        result = restore(
            replace(config, store=item.store),
            item.checkpoint,
            request=RestoreRequest(returning=True),
            reporter=reporter,
        )
        assert isinstance(result, RestoreResult)
        return {"pid": result.pid, "degraded": result.degraded}

    return work
