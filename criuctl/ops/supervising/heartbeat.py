"""Renewing the lease while a home supervises, in a thread, so that a long dump does not let it
expire.

It renews only what this host holds, several times in the time to live, on its own connection to the
store. A store that does not answer is asked again; a take-over by another host is recorded
(`taken`), and the supervisor is woken.

With a `SelfFence` the session's holder is notified of each beat, and stops the tree when none
comes. That is before any host may take over, since those wait the whole time to live from when a
beat was seen, which is after it was begun.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

from ...checkpoint import leases
from ...checkpoint.leases import Head
from ...checkpoint.manifest import SessionRef
from ...checkpoint.repository import Repository
from ...config import Config
from ...host.identity import host_id
from ...store import open_store
from .self_fence import SelfFence, clock

BEATS = 4  # beats in a time to live
_LAST = 5.0  # seconds that the last beat may take


class Heartbeat:
    """Renews the lease of one session, between `start` and `stop`."""

    def __init__(
        self, config: Config, ttl: float, wake: int, fence: SelfFence | None = None
    ) -> None:
        """Prepare the thread; `ttl` in seconds; `wake` is an eventfd that is written to when the
        lease is gone.
        """
        self._fence = fence
        self._pause = ttl / BEATS
        # No single request may take so long that the lease expires meanwhile.
        self._config = config.with_options(
            s3_retries=1, s3_timeout=min(config.s3_timeout, max(1.0, self._pause))
        )
        self._ttl, self._wake = round(ttl * 1000), wake
        self._host = host_id(config)
        self._session: SessionRef | None = None
        self._now, self._over = threading.Event(), threading.Event()
        self._lock = threading.Lock()  # one beat at a time
        self._stack = ExitStack()
        self._repository: Repository | None = None
        self._thread: threading.Thread | None = None
        self.taken: Head | None = None  # another host has the session
        self.beaten: float | None = None  # when it was last renewed, by the monotonic clock

    def start(self, session: SessionRef) -> None:
        """Start renewing: this host has the session, or is about to claim it; the first beat is
        made at once, and waited for.
        """
        with self._lock:
            self._session, self.taken, self.beaten = session, None, None
            self._beat(self._ttl)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()

    def check_fence(self) -> None:
        """Raise `PreflightRefused` if a session that must be stopped in time cannot be."""
        if self._fence is not None:
            with self._lock:
                self._fence.check()

    def hurry(self) -> None:
        """Make the next beat now. The first is waited for: a lease that was claimed and never
        renewed does not expire.
        """
        if self.beaten is not None:
            self._now.set()
            return
        with self._lock:
            self._beat(self._ttl)

    def rest(self) -> None:
        """Stop renewing until the next `start`: this host does not have the session any more."""
        with self._lock:
            self._session = None

    def stop(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """Stop supervising. A lease of this host then does not expire any more; call `on_failure`
        if the store could not record that.
        """
        self._over.set()
        self._now.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            written = True
            if self._session is not None:
                self._config = self._config.with_options(
                    s3_timeout=min(self._config.s3_timeout, _LAST)
                )
                written = self._beat(0) or self.beaten is None
            self._close()
            if self._fence is not None:
                self._fence.close()
        if not written:
            on_failure()

    def _run(self) -> None:
        while True:
            self._now.wait(self._pause)
            self._now.clear()
            if self._over.is_set():
                return
            with self._lock:
                self._beat(self._ttl)

    def _beat(self, ttl: int) -> bool:
        """Renew the lease once, if this host has one; return whether the store has answered."""
        if self._session is None:
            return True
        began = clock()
        try:
            head = leases.renew(self._opened(), self._session, host=self._host, ttl=ttl)
        # a thread that ended here would silently lose the lease: the next beat tries again
        except Exception:
            self._close()
            if self._fence is not None and self.beaten is None and ttl:
                self._fence.unknown()
            return False
        if head is None or head.session != self._session:
            return True
        if head.host == self._host:
            self.beaten = time.monotonic() if head.state == "held" else self.beaten
            if self._fence is not None and head.state == "held":
                self._fence.renewed(began) if ttl else self._fence.lifted()
        elif self.beaten is not None and self.taken is None:
            self.taken = head
            os.eventfd_write(self._wake, 1)
        return True

    def _opened(self) -> Repository:
        if self._repository is None:
            store = open_store(self._config.store, self._config)
            self._stack.callback(store.close)
            self._repository = Repository.open(store, self._config)
            self._stack.callback(self._repository.close)
        return self._repository

    def _close(self) -> None:
        self._repository = None
        with suppress(Exception):
            self._stack.close()
