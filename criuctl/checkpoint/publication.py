"""The commit of one checkpoint: its index segments, then its manifest.

Writing order, which every reader may rely on: packs, index segments, manifest. Once a segment is
published other writers may rely on its packs, so from then on nothing is deleted any more, whatever
fails. An `Intent` in the store covers the commit, so that garbage collections on other hosts know
of it. It ends when the manifest exists, or certainly never will.

Without a commit, `Publication.close` deletes the packs of the checkpoint, which no other writer can
know of, as far as the store allows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import CriuctlError, Damaged, StoreUnreachable
from ..proc.threads import Later, side_by_side
from .gclists import Intent
from .manifest import Manifest
from .packs import PackIndex, object_name
from .pipeline import Pipeline
from .summary import CheckpointSummary

if TYPE_CHECKING:
    from ..report import Reporter
    from .repository import Repository

_CHECKERS = 8  # threads that check packs at the commit


class Publication:
    """The commit of what went through `pipeline`, or its removal."""

    def __init__(self, repository: Repository, pipeline: Pipeline, reporter: Reporter) -> None:
        self._repository, self._pipeline, self._reporter = repository, pipeline, reporter
        self.committed = False
        self._published: list[str] = []  # index segments that other writers may have seen
        self._unused: list[PackIndex] = []  # packs that no other writer can know of
        self._intent: Intent | None = None  # set until the manifest exists, or certainly never will
        self._committing: threading.Thread | None = None
        self._ending: threading.Thread | None = None

    def publish(
        self, manifest: Manifest, allowed: Callable[[], object] | None = None
    ) -> CheckpointSummary:
        """Publish `manifest` under the session's next number; all that it names must be durable.

        `allowed` is called just before that, while the packs are checked. It raises to forbid the
        commit.

        Raise `Damaged` when a pack of the checkpoint is gone, for example one that it shares with
        older checkpoints (the next dump stores it again), `Conflict` when a garbage collection is
        deleting one, and every error of the store. Then there is no checkpoint, except after
        `StoreUnreachable` or an interrupt, which leave it open whether there is one. A thread makes
        the store's requests, so that the caller can be interrupted wherever the store hangs.
        """
        work = Later(lambda: self._publish(manifest, allowed))
        thread = threading.Thread(target=work.run, name="criuctl-commit", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads can be made
            work.run()
        else:
            self._committing = thread
        try:
            return work.result()
        except BaseException as error:
            if thread.is_alive():  # interrupted: stop the thread before it puts the manifest
                self._pipeline.fail(error)
            raise

    def wait(self, until: float | None) -> bool:
        """Wait until no commit is under way, at most to the monotonic time `until`; return whether
        that is so.
        """
        if self._committing is None:
            return True
        self._committing.join(None if until is None else max(0.0, until - time.monotonic()))
        return not self._committing.is_alive()

    def close(self) -> None:
        """End the intent; without a commit, delete the packs that no other writer can know of."""
        if self._intent is not None:
            self._intent.end()
        if self._ending is not None:
            self._ending.join()
        if not self.committed and not self._published:
            self._unused += self._pipeline.packs
            self._pipeline.packs = []
        while self._unused:
            try:
                self._repository.store.delete(object_name(self._unused.pop().pack))
            except StoreUnreachable:
                # The other deletions would fail too: the garbage collection removes these packs.
                self._unused.clear()
            except CriuctlError:
                continue

    def _publish(
        self, manifest: Manifest, allowed: Callable[[], object] | None
    ) -> CheckpointSummary:
        self._unused += self._pipeline.leave_out_unused()
        self._reporter.step("index")
        index = self._repository.index
        packs = {
            **self._pipeline.referenced,
            **{pack.pack: pack.size for pack in self._pipeline.packs},
        }
        self._intent = intent = Intent(self._repository.store, self._repository.sealer, packs)
        intent.begin()
        threads = max(self._repository.config.uploads, _CHECKERS)
        missing, number, _ = side_by_side(
            "criuctl-commit",
            lambda: index.check_packs(
                packs, threads, listings=self._repository.capabilities.conditional_create
            ),
            lambda: self._repository.next_number(manifest),
            allowed or (lambda: None),
        )
        if missing:
            raise Damaged(
                "packs of this checkpoint, or of older ones, are missing or cut off in the "
                f"store: {', '.join(missing[:4])}",
                hint=(
                    "Dump again, which stores their content again. `criuctl verify --all` shows "
                    "which checkpoints are damaged."
                ),
                object=missing[0],
            )
        try:
            index.publish(self._pipeline.packs, self._published)
        except BaseException as error:
            # The segment may exist, and other hosts may see it. This is also so when a signal has
            # ended the wait for the store's answer.
            if isinstance(error, StoreUnreachable) or not isinstance(error, CriuctlError):
                self._published.append("perhaps")
            raise
        self._reporter.step("manifest")
        intent.check()
        self._pipeline.check()
        # after an interrupt from here on it is unknown whether there is a manifest
        self._intent = None
        try:
            summary = self._repository.publish(manifest, number)
        except CriuctlError as error:
            self._intent = None if isinstance(error, StoreUnreachable) else intent
            raise
        self.committed = True
        self._end_in_background(intent)
        return summary

    def _end_in_background(self, intent: Intent) -> None:
        """Remove the intent in a thread: the manifest exists, so the frozen tree need not wait for
        this.
        """
        thread = threading.Thread(target=intent.end, name="criuctl-intent", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads can be made
            intent.end()
        else:
            self._ending = thread
