"""Receiving a session: the target host's side of a migration.

The other host starts ``criuctl receive`` over ssh, and sends requests:

    examine   can this host run it?  -> findings
    begin     the inbox is opened, and the source's part of it is served as a store (``store.*``)
    restore   the checkpoint is restored and **held**: everything is in place, nothing has run
    go        its old home is gone: let it run
    abort     undo, leave nothing
    settle    (by a later criuctl) the decision on a move that another process here holds, or held

RULE: a sender acts only on what it has sent itself. Names and ids of sessions and moves are no
proof of that; the key by which it writes to the inbox is (`inbox.proof`).

RULE: nothing runs here before the word ``go``. When the link dies while the session is held, it is
unknown here whether the session still runs there. So it stays held for a while, for the other host
to come again and decide (`settle`), and then only its checkpoint is kept. A session that is given
up can still get the word ``go``: it is restored once more.

A large tree's memory follows when it runs, brought by a process that is started at ``begin`` and no
longer needs this one (`feeding`).
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from msgspec.structs import replace

from ..checkpoint.repository import Repository
from ..config import Config
from ..errors import Conflict, CriuctlError, Forbidden, NoSuchCheckpoint, NotFound
from ..host.identity import host_id, host_name
from ..host.maintenance import check_open
from ..host.moves import Incoming, Moves, check_id
from ..host.registry import Registry, boot_id, check_name, check_outside
from ..proc.tree import ProcessIdentity
from ..quoting import quoted
from ..report import Reporter
from ..restore.lazy_memory import LARGE
from ..restore.page_feeder import Feeder
from ..store.serving import StoreServer
from ..transport.link import Link, Request
from ..transport.messages import unknown_verb
from .moving import inbox, rendezvous
from .moving.departure import settle_returned
from .moving.inbox_part import OwnPart
from .moving.incoming import Arrival, listed, running_here
from .moving.target_check import examine

HOLD = 300.0  # seconds that a session is held without a link
_PATIENCE = 60.0  # seconds for another criuctl here to notice that its link is gone
_PAUSE = 0.1  # seconds between two looks
_NEEDED: Mapping[str, Mapping[str, Any]] = {  # arguments of the verbs, and their types
    "examine": {"needs": dict, "clock": (int, float)},
    "begin": dict.fromkeys(("id", "session", "session_id", "origin"), str),
    "restore": {"checkpoint": str},
    "settle": {"id": str, "word": str},
}


def facts(config: Config) -> dict[str, Any]:
    """Return the facts that the other host gets at once."""
    return {"host": host_name(config), "host_id": host_id(config)}


def receive(
    config: Config, reading: int, writing: int, *, reporter: Reporter, hold: float = HOLD
) -> None:
    """Serve one other host over two descriptors, which are closed; return when it has left and no
    session is held any more.
    """
    with ExitStack() as stack:
        progress = _LinkReporter(reporter)
        visit = _Visit(config, progress, hold, stack)
        link = Link(
            reading, writing, visit.answer, timeout=config.link_timeout, facts=facts(config)
        )
        progress.link = link
        stack.callback(link.close)
        link.on_lost(lambda _why: visit.left())
        visit.link = link
        link.start()
        visit.run()


class _LinkReporter(Reporter):
    """Reports progress to the other host, and keeps the warnings for the answer."""

    link: Link

    def __init__(self, reporter: Reporter) -> None:
        super().__init__()
        self._reporter = reporter

    def step(self, name: str, **facts: Any) -> None:
        with suppress(CriuctlError):
            self.link.tell("step", {"what": name})
        with suppress(OSError):  # standard error went with the link
            self._reporter.step(name, **facts)


class _Visit:
    """One other host's visit. The link's threads answer requests; the main thread restores."""

    link: Link

    def __init__(self, config: Config, reporter: Reporter, hold: float, stack: ExitStack) -> None:
        self._config, self._reporter, self._hold, self._stack = config, reporter, hold, stack
        self._moves = Moves(config, Incoming)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._repository: Repository | None = None
        self._serve: StoreServer | None = None
        self._memory = 0  # bytes that the tree has
        self._arrival: Arrival | None = None
        self._verbs: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
            "examine": self._examine,
            "begin": self._begin,
            "restore": self._restore,
            "go": lambda _: self._decide("go"),
            "abort": lambda _: self._decide("abort"),
            "settle": self._settle,
        }

    def run(self) -> None:
        """Run the main thread's part."""
        while (job := self._jobs.get()) is not None:
            job()

    def left(self) -> None:
        """Note that the link is gone."""
        try:
            if self._arrival is not None:
                self._arrival.alone(self._hold)
        finally:
            self._jobs.put(None)

    def answer(self, request: Request) -> Any:
        """Answer a request of the other host."""
        if request.verb.startswith("store."):
            if self._serve is None:
                raise Conflict("nothing was begun")
            return self._serve.handle(request)
        verb = self._verbs.get(request.verb)
        if verb is None:
            raise unknown_verb(request)
        for name, kind in _NEEDED.get(request.verb, {}).items():
            request.argument(name, kind)
        return verb(request.arguments)

    # -- requests ----------------------------------------------------------------------------------

    def _examine(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        found = examine(asked["needs"], self._config, float(asked["clock"]))
        self._memory = int(asked["needs"].get("memory", 0))
        return {"findings": [f.to_dict() for f in found]}

    def _begin(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        check_open(self._config)
        check_outside(self._config, begins=True)
        repository = self._open()
        key = inbox.key_for(repository, check_id(asked["id"]), asked.get("writer"))
        move = Incoming(
            id=asked["id"],
            session=check_name(asked["session"]),
            session_id=check_id(asked["session_id"]),
            origin=asked["origin"][:200],
            writer=key.id.hex(),
            leases=tuple(str(proof)[:64] for proof in listed(asked, "leases")[:8]),
            receiver=_self(),
            boot_id=boot_id(),
        )
        self._check_name_free(move)
        settle_returned(self._config, move, asked.get("arrived"))
        # a move of this sender whose link broke: the session has not left its home
        for earlier in list(self._moves.all()):
            if (earlier.session_id, earlier.writer) == (move.session_id, move.writer):
                if earlier.state != "running":
                    with suppress(CriuctlError):
                        rendezvous.tell(self._config, earlier.id, "abort")
                self._moves.forget(earlier.id)
        feeder: Feeder | None = None
        if self._memory >= LARGE:
            feeder = Feeder(repository.config, self._memory)
            self._stack.callback(feeder.close)
        part = OwnPart(repository, key, move.session)
        self._serve = StoreServer(part, feeder.arrived if feeder is not None else None)
        self._arrival = Arrival(
            self._config, self._reporter, repository, self._moves, move, part, feeder
        )
        self._moves.put(move)
        features = sorted(repository.features)
        return {
            "key": key.text(),
            "store": repository.store.url,
            "store_id": repository.id,
            "features": features,
        }

    def _open(self) -> Repository:
        if self._repository is None:
            self._repository = inbox.opened(self._config)
            self._stack.callback(self._repository.store.close)
            self._stack.callback(self._repository.close)
        return self._repository

    def _restore(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        arrival = self._arrival
        if arrival is None:
            raise Conflict("nothing was begun")
        arrival.prepare(asked)
        self._jobs.put(arrival.restore)
        return arrival.wait_held()

    def _decide(self, word: str) -> Mapping[str, Any]:
        if self._arrival is None:
            return {}
        return self._arrival.decide(word)

    def _settle(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        """Decide on a move whose link has broken, as the home that the session left or stays in
        reports. Only the host that began the move decides on it.
        """
        move, word = self._moves.get(check_id(asked["id"])), str(asked["word"])
        if move is not None:
            self._check_began(move, asked.get("writer"))
        patience = time.monotonic() + _PATIENCE
        while move is not None and move.attended() and move.state != "running":
            try:
                return rendezvous.tell(self._config, move.id, word)
            # it does not listen yet, or no longer: it has not noticed that its link is gone, or is
            # just ending
            except NotFound:
                if time.monotonic() > patience:
                    raise
            time.sleep(_PAUSE)
            move = self._moves.get(move.id)
        if move is None:
            if word == "go":
                raise NoSuchCheckpoint(
                    "that session was never received there, or was given up and removed"
                )
            return {}
        # perhaps with a newer checkpoint: it may have been dumped since
        here = running_here(self._config, move)
        if move.state == "running" or (
            here is not None and (word == "go" or here.checkpoint == move.checkpoint)
        ):
            if word == "go":
                result = move.result or (
                    {"pid": here.pid, "incarnation": here.incarnation} if here is not None else {}
                )
                self._moves.put(replace(move, state="running", result=result))
                return {"result": result}
            raise Conflict(f"session {move.session!r} runs there already")
        arrival = Arrival(
            self._config,
            self._reporter,
            self._open(),
            self._moves,
            replace(move, receiver=_self(), boot_id=boot_id()),
            OwnPart(self._open(), inbox.key_of(self._open(), move.writer), move.session),
        )
        if word == "abort":
            arrival.clean()
            return {}
        self._arrival = arrival
        arrival.prepare({**asked, "checkpoint": move.checkpoint})
        arrival.word = "go"  # so it is not held
        self._jobs.put(arrival.restore)
        return arrival.wait_done()

    def _check_name_free(self, move: Incoming) -> None:
        """Refuse a move whose id or session's name is in use here for something else."""
        if self._moves.get(move.id) is not None:
            raise Conflict(f"a move with the id {move.id[:12]} was begun there already")
        record = Registry(self._config).get(move.session)
        if record is None:
            return
        if record.alive():
            raise Conflict(f"session {move.session!r} is running there as PID {record.pid}")
        if record.id != move.session_id and record.state == "checkpointed" and not record.moved_to:
            raise Conflict(
                f"another session named {move.session!r} is checkpointed there",
                hint=f"`criuctl kill {quoted(move.session)}` there gives that one up.",
            )

    def _check_began(self, move: Incoming, claim: object) -> None:
        """Refuse a host that cannot prove that it began this move."""
        repository = self._open()
        if not move.writer or not inbox.same_proof(
            claim, inbox.proof(inbox.key_of(repository, move.writer), move.id)
        ):
            raise Forbidden(
                f"another host than this one began the move {move.id[:12]}",
                hint="Only the host that sent the session decides on it; "
                "use the same version of criuctl on both.",
            )


def _self() -> tuple[int, int]:
    identity = ProcessIdentity.of(os.getpid())
    return identity.pid, identity.start_time
