"""One arriving session: restored and **held** until the word to run or to undo arrives; see
`receive`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

from msgspec.structs import replace

from ...checkpoint import leases
from ...checkpoint.repository import Repository
from ...config import Config
from ...errors import Conflict, CriuctlError, NoSuchCheckpoint, RestoreFailed, TimedOut
from ...host.fencing import with_lease
from ...host.identity import host_id, host_name
from ...host.moves import Incoming, Moves, check_id
from ...host.registry import Registry, SessionRecord
from ...proc import addresses
from ...proc.child import InterruptsDeferred
from ...report import Reporter
from ...restore.outcome import RestoreResult
from ...restore.page_feeder import Feeder
from ...restore.partners import Partners
from ...restore.request import RestoreRequest
from ...restore.story import restore
from ...store import open_store
from . import inbox, rendezvous
from .departure import lease_proof
from .inbox_part import OwnPart

_OPTIONS = ("pids", "connections", "connections_deadline", "files", "lazy")


class Arrival:
    """One arriving session."""

    def __init__(
        self,
        config: Config,
        reporter: Reporter,
        repository: Repository,
        moves: Moves[Incoming],
        move: Incoming,
        part: OwnPart,
        feeder: Feeder | None = None,
    ) -> None:
        self._config, self._reporter, self._repository, self._moves = (
            config,
            reporter,
            repository,
            moves,
        )
        self._part = part  # of the inbox: what the sending host has stored
        self._move, self._feeder = move, feeder
        self._options: dict[str, Any] = {}
        self._state = threading.Condition()
        self.word = ""  # go | abort
        self._given_up_at: float | None = None  # monotonic: when waiting for the other host ends
        self._held: dict[str, Any] | None = None
        self._result: dict[str, Any] | None = None
        self._error: CriuctlError | None = None
        self._begun = self._over = False
        self._ran_at = 0.0  # monotonic
        self._addresses: list[dict[str, Any]] = []
        self._brought: list[addresses.BroughtAddress] = []
        self._going = ExitStack()  # open from the start of the session until that is reported

    # -- asked by the other threads
    # ------------------------------------------------------------------

    def prepare(self, asked: Mapping[str, Any]) -> None:
        """Prepare the restore from the request."""
        checkpoint = check_id(asked["checkpoint"])
        name = self._part.brought(checkpoint)
        if not name:
            raise NoSuchCheckpoint(
                "the host that sends the session has not sent this checkpoint of it"
            )
        session = self._repository.manifest_at(name).session
        if (session.name, session.id) != (self._move.session, self._move.session_id):
            raise Conflict(
                f"checkpoint {checkpoint[:12]} is of session {session.name!r} ({session.id[:12]}), "
                f"not of the announced {self._move.session!r} ({self._move.session_id[:12]})"
            )
        self._options = {key: asked[key] for key in _OPTIONS if asked.get(key) is not None}
        self._addresses = [
            described for described in listed(asked, "addresses") if isinstance(described, dict)
        ]
        self._move = self._moves.put(replace(self._move, checkpoint=checkpoint))
        self._begun = True  # so a thread that undoes it waits until `restore` is over

    def wait_held(self) -> dict[str, Any]:
        """Wait until it is held; raise the reason if it is not."""
        with self._state:
            self._state.wait_for(lambda: self._held is not None or self._over)
            if self._held is None:
                raise self._error or RestoreFailed("the session could not be restored there")
            return self._held

    def wait_done(self) -> dict[str, Any]:
        """Wait until it runs; raise the reason if it does not."""
        with self._state:
            self._state.wait_for(lambda: self._over)
            if self._result is None:
                raise self._error or RestoreFailed("the session could not be started there")
            return {"result": self._result, "ran_for": time.monotonic() - self._ran_at}

    def decide(self, word: str) -> dict[str, Any]:
        """Decide ``go`` or ``abort``; the first word wins. Return when it is carried out."""
        with self._state:
            if not self.word:
                self.word = word
            self._state.notify_all()
            if self.word != word:
                raise Conflict(f"the word {self.word} was given already")
            if self._begun:
                self._state.wait_for(lambda: self._over)
            self._over = True
        if word == "go":
            return self.wait_done()
        self.clean()
        return {}

    def alone(self, hold: float) -> None:
        """Handle the end of the link: a held session waits `hold` seconds for another link, one
        that is not held yet is given up.
        """
        with self._state:
            self._given_up_at = time.monotonic() + (hold if self._held is not None else 0)
            self._state.notify_all()
        if self._begun or self._over:
            return
        # It may have arrived whole, and its home may be gone: resolving the move, or sending it
        # again, removes it.
        try:
            arrived = bool(self._repository.list(self._move.session))
        except CriuctlError:
            arrived = True
        if arrived:
            self._moves.put(replace(self._move, state="given-up"))
        else:
            self._moves.forget(self._move.id)

    def clean(self) -> None:
        """Remove everything of it here, also what its host has sent to the inbox."""
        self._tidy()
        self._moves.forget(self._move.id)

    def _tidy(self, *keep: str) -> None:
        """Keep in the inbox, of what this host has sent of the name, the checkpoint to keep, and
        the one of a move that may still get the word to run.
        """
        name, mine = self._move.session, self._move.id
        others = (
            move
            for move in self._moves.all()
            if move.session == name and move.id != mine and move.state != "running"
        )
        with suppress(CriuctlError):
            inbox.tidy(
                self._repository,
                self._part,
                name,
                {*keep, *(move.checkpoint for move in others)},
                self._reporter,
            )

    # -- done by the main thread
    # ---------------------------------------------------------------------

    def restore(self) -> None:
        """Restore, hold, and let run or undo. After the word to run no signal interrupts this: the
        session has no other home.
        """
        with self._going:
            self._restore()

    def _restore(self) -> None:
        try:
            with rendezvous.listening(self._config, self._move.id, self.decide):
                self._bring()
                began = time.monotonic()
                # The home that the session leaves has allowed the take-over.
                request = RestoreRequest(**{"lazy": None, "take_over": True} | self._options)
                result = restore(
                    inbox.configured(self._config),
                    self._move.checkpoint,
                    request=request,
                    reporter=self._reporter,
                    repository=self._repository,
                    partners=Partners(held=self._hold, feeder=self._feeder),
                )
                assert isinstance(result, RestoreResult)
                self._ran_at = began + result.elapsed_ms / 1000
                self._finish(result.to_dict() | {"degraded": result.degraded}, None)
        except BaseException as error:
            why = (
                error
                if isinstance(error, CriuctlError)
                else RestoreFailed(f"{type(error).__name__}: {error}")
            )
            here = running_here(self._config, self._move) if self.word == "go" else None
            if here is None:
                self._undo_addresses()
                self._finish(None, why)
            else:  # it was too late to keep it from running
                self._ran_at = time.monotonic()
                running = {"pid": here.pid, "incarnation": here.incarnation, "degraded": True}
                self._finish(running | {"warnings": [*self._reporter.warnings, why.message]}, None)
            if not isinstance(error, Exception):
                raise
        if self._result is not None:
            self._claim()
            self._tidy(self._move.checkpoint)

    def _claim(self) -> None:
        """Claim the session in this host's store, if it is known there: its old home then finds
        itself replaced. Only a host that has that store's key takes the lease from another one.
        """
        registry = Registry(self._config)
        record = registry.get(self._move.session)
        if record is None or not record.alive():
            return
        try:
            with (
                open_store(self._config.store, self._config) as store,
                Repository.open(store, self._config) as repository,
            ):
                head = (
                    leases.read_head(repository, record.name)
                    if repository.capabilities.conditional_create
                    else None
                )
                if head is None or head.session.id != record.id:
                    return
                if lease_proof(repository, record.id) not in self._move.leases:
                    return
                host = host_id(self._config)
                claim = leases.claim(
                    repository,
                    record.name,
                    record.id,
                    record.incarnation,
                    host=host,
                    host_name=host_name(self._config),
                    take_over=True,
                )
                registry.put(with_lease(record, repository, claim.head.epoch))
                claim.keep()
                claim.clear()
        except CriuctlError as error:
            self._reporter.warning(
                f"the lease of {record.name!r} could not be claimed: {error.message}", error.hint
            )

    def _bring(self) -> None:
        """Add the addresses that move along; they stay until `_undo_addresses`."""
        for described in self._addresses:
            wanted = described.get("wanted_device")
            self._brought.append(
                addresses.bring(str(described.get("ip")), described, device=wanted)
            )

    def _undo_addresses(self) -> None:
        while self._brought:
            brought = self._brought.pop()
            try:
                brought.undo()
            except CriuctlError as error:
                self._reporter.warning(
                    f"{brought.ip} could not be removed again: {error.message}", error.hint
                )

    def _hold(self, connections: list[dict[str, Any]]) -> None:
        """Wait for the word, in the post-restore step."""
        self._move = self._moves.put(replace(self._move, state="held"))
        self._reporter.step("held")
        with self._state:
            self._held = {"connections": connections, "warnings": list(self._reporter.warnings)}
            self._state.notify_all()
            while not self.word:
                left = None if self._given_up_at is None else self._given_up_at - time.monotonic()
                if left is not None:
                    self._undo_addresses()  # its old home may use them again
                if left is not None and left <= 0:
                    self.word = "abort"
                    self._moves.put(replace(self._move, state="given-up"))
                    raise TimedOut(
                        "the host that sent the session did not come back to say whether it may run"
                    )
                self._state.wait(left)
            if self.word != "go":
                raise RestoreFailed("the host that sent the session lets it go on there")
        self._going.enter_context(InterruptsDeferred())
        self._reporter.step("go")
        if not self._brought:
            self._bring()
        for brought in self._brought:
            brought.announce()

    def _finish(self, result: dict[str, Any] | None, error: CriuctlError | None) -> None:
        if result is not None:
            try:
                self._move = self._moves.put(replace(self._move, state="running", result=result))
            # it runs nevertheless, and its home must be notified of that
            except OSError as trouble:
                self._reporter.warning(
                    f"that {self._move.session!r} runs here could not be recorded: "
                    f"{trouble.strerror}"
                )
        elif self.word != "abort":
            with suppress(OSError):
                self._moves.put(replace(self._move, state="given-up"))
        with self._state:
            self._result, self._error, self._over = result, error, True
            self._state.notify_all()


def listed(asked: Mapping[str, Any], name: str) -> list[Any]:
    """Return the list that a request has under `name`; an empty one if it has none."""
    value = asked.get(name)
    return value if isinstance(value, list) else []


def running_here(config: Config, move: Incoming) -> SessionRecord | None:
    """Return the session of this move, if it runs on this host."""
    record = Registry(config).get(move.session)
    return (
        record if record is not None and record.id == move.session_id and record.alive() else None
    )
