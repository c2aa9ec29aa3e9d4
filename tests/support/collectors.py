"""Hosts that dump, verify and collect at once and are killed at it: ``collectors.py URL FOLDER
SEED``.

Everything goes on in processes of its own, forked before any connection is made.  Dumps and
collections die (kill -9) before the n-th change that they make to the store; another collection,
and a process that verifies what is listed, begin again whenever something has happened.  The
session's name says what a checkpoint holds.  Prints the sessions whose dump has returned and how
many were killed, and exits with 1 if anything failed that was not killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from criuctl.checkpoint.gc import Collection
from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.errors import Conflict, CriuctlError, Damaged, NoSuchCheckpoint, ObjectMissing
from criuctl.proc import syscalls
from criuctl.report import Reporter
from criuctl.store import Store, open_store
from criuctl.store.base import Data
from support import checkpoints as kit

TURNS = 4  # dumps of each dumper
_DUMPERS = 2
_CHANGES = 12  # more than a collection of this makes; after that the counting begins again
_PATIENCE = 100.0  # seconds for a listed checkpoint to be found whole


def content(session: str) -> kit.Content:
    """What the checkpoint of the session ``s<dumper>-<turn>-<piece>-<piece>`` holds."""
    pieces = [random.Random(piece).randbytes(kit.WINDOW) for piece in session.split("-")[2:]]
    return kit.Content(b"".join(pieces), {"a.img": b"image"}, session.encode())


def dying(store: Store, changes: int) -> Store:
    """The store, whose user dies (kill -9) instead of making the n-th change to it."""
    put, delete, left = store.put, store.delete, [changes]

    def change() -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying_put(name: str, data: Data, *, if_absent: bool = False) -> None:
        change()
        put(name, data, if_absent=if_absent)

    def dying_delete(name: str) -> None:
        change()
        delete(name)

    store.put, store.delete = dying_put, dying_delete  # type: ignore[method-assign]
    return store


class Site:
    """The store and what its hosts have noted."""

    def __init__(self, url: str, folder: Path, seed: int) -> None:
        self.url, self.folder, self.rng = url, folder, random.Random(seed)
        self.notes = folder / "notes"

    def repository(self, host: str, changes: int = 0) -> Repository:
        folders = {"cache_dir": host, "key_dir": "keys", "state_dir": "state"}
        paths = {key: str(self.folder / name) for key, name in folders.items()}
        config = Config(workers=1, buffers_mib=8, uploads=2, **paths)  # type: ignore[arg-type]
        store = open_store(self.url, config)
        return Repository.open(dying(store, changes) if changes else store, config)

    def note(self, word: str, session: str) -> None:
        with self.notes.open("a") as file:
            file.write(f"{word} {session}\n")

    def killed_or_fine(self, status: int) -> None:
        if status == signal.SIGKILL:
            self.note("killed", "-")
        elif status:
            raise RuntimeError(f"it ended with status {status}")

    def news(self) -> Iterator[None]:
        """Once now, and again whenever something was noted; until the dumpers have ended."""
        seen = -1
        while not self.ended():
            size = self.notes.stat().st_size if self.notes.exists() else 0
            if size != seen:
                seen = size
                yield
            time.sleep(0.05)  # between looks at what other processes note

    def ended(self) -> bool:
        return (self.folder / "ended").exists()


def run(what: Callable[[], object]) -> int:
    """Run something in a process of its own; its wait status."""
    return os.waitpid(start(what), 0)[1]


def start(what: Callable[[], object]) -> int:
    """Start something in a process of its own."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        syscalls.set_parent_death_signal(signal.SIGKILL)  # nothing of this outlives the test
        what()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def dump(site: Site, host: str, session: str, changes: int = 0, *, remove: bool = False) -> bool:
    """Whether the checkpoint was committed."""
    repository = site.repository(host, changes)
    try:
        summary = kit.write(repository, content(session), session=session)
    except (Conflict, Damaged):
        return False  # a collection was faster: the tree would run on
    site.note("committed", session)
    if remove:
        site.note("removing", session)
        repository.remove(summary)
    return True


def dumper(site: Site, number: int) -> None:
    rng = random.Random(site.rng.random() + number)
    for turn in range(TURNS):
        session = "-".join(map(str, [f"s{number}", turn, *rng.sample(range(5), 2)]))
        changes = rng.choice([0, 0, 1, 2, 3, 4, 5])

        site.killed_or_fine(
            run(partial(dump, site, f"dumper{number}", session, changes, remove=turn % 3 == 0))
        )
    while not dump(site, f"dumper{number}", f"s{number}-last-0-{number}"):
        pass


def collect(site: Site, host: str, changes: int = 0) -> None:
    Collection(site.repository(host, changes), Reporter(), grace=0).run()


def crasher(site: Site) -> None:
    """Collections that die before their first, second, ... change."""
    changes = 0
    while not site.ended() or changes < _CHANGES:
        changes = changes % (2 * _CHANGES) + 1
        site.killed_or_fine(run(partial(collect, site, "crasher", changes)))


def collector(site: Site) -> None:
    for _ in site.news():
        collect(site, "collector")


def verifier(site: Site) -> None:
    for _ in site.news():
        repository = site.repository("verifier")
        for summary in repository.list():
            deadline = time.monotonic() + _PATIENCE
            while True:
                try:
                    kit.check(repository, summary, content(summary.session))
                    break
                except (Damaged, ObjectMissing, NoSuchCheckpoint) as error:
                    # Without a grace time what is read may move; a reader that looks again finds
                    # it, or sees that it was removed.
                    repository = site.repository("verifier")
                    if isinstance(error, NoSuchCheckpoint) or summary.session not in {
                        s.session for s in repository.list()
                    }:
                        break
                    if time.monotonic() > deadline:
                        raise


def main(url: str, folder: str, seed: str) -> int:
    site = Site(url, Path(folder), int(seed))
    dumpers = [start(partial(dumper, site, number)) for number in range(_DUMPERS)]
    others = [start(partial(role, site)) for role in (crasher, collector, verifier)]
    statuses = [os.waitpid(pid, 0)[1] for pid in dumpers]
    (site.folder / "ended").touch()
    statuses += [os.waitpid(pid, 0)[1] for pid in others]
    notes = (
        [line.split() for line in site.notes.read_text().splitlines()]
        if site.notes.exists()
        else []
    )
    removing = {session for word, session in notes if word == "removing"}
    committed = {session for word, session in notes if word == "committed"} - removing
    print(
        json.dumps(
            {"committed": sorted(committed), "killed": sum(word == "killed" for word, _ in notes)}
        )
    )
    return int(any(statuses))


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except CriuctlError as error:
        sys.exit(error.message)
