"""Storing the steps of a supervised session, in a thread, before they count as done.

The session's holder keeps the journal of steps, and lets a step wait until the supervisor states
that it is in the store (`session.holder.step_replication`). This thread asks the holder for what
has changed, stores it (`checkpoint.step_replica`), and asks again with that statement.

It begins when this host has the session's lease. From then on the holder waits, whatever happens to
the supervisor: after a ``kill -9`` the programs of the session wait for the next one. A supervisor
that ends in order releases them (`stop`). A store that does not answer is asked again.

By the same answers the holder asks for a checkpoint that a program of the session wants (`asked`).
The supervisor's main loop takes it; if that fails, it says so (`refuse`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ...checkpoint.manifest import SessionRef
from ...checkpoint.step_replica import Replica
from ...config import Config
from ...errors import CommandFailed, Conflict, CriuctlError, SessionGone
from ...host.identity import host_id
from ...session.client.session import Answer, Session
from .context import Post

OPERATOR = "criuctl-steps"
_LONGEST = 2000  # characters of a reason
_PAUSE = 0.5  # seconds before another try
_LOOK = 0.25  # seconds between two looks at whether the thread is to end
_AGAIN = 5.0  # seconds after which a holder that has replaced itself is asked again


class StepStoring:
    """Stores the steps of one session, between `start` and `rest` or `stop`."""

    def __init__(
        self, post: Post, failed: Callable[[CriuctlError], None], asked: Callable[[], None]
    ) -> None:
        """Prepare the thread; `failed` is called with an error of the store, once in a row, `asked`
        when a program waits for a checkpoint; both in the thread.
        """
        self._post, self._failed, self._asked = post, failed, asked
        self._config: Config = post.config
        self._session: SessionRef | None = None
        self._changed, self._over = threading.Event(), False
        self._thread: threading.Thread | None = None

    def start(self, session: SessionRef) -> None:
        """Store the steps of this session from now on."""
        self._session = session
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="steps", daemon=True)
            self._thread.start()

    def rest(self) -> None:
        """Store nothing: the session is not here any more. What waits goes on waiting."""
        self._session = None

    def stop(self) -> None:
        """Stop supervising: no step waits for the store from now on."""
        session, self._session, self._over = self._session, None, True
        self._changed.set()
        if self._thread is not None:
            self._thread.join()
        if session is not None:
            with suppress(CriuctlError, OSError), self._connect() as holder:
                if _is(holder, session):
                    holder.request("step-replica-stop")

    def refuse(self, message: str) -> None:
        """Let programs know that the checkpoint which they have asked for failed."""
        session = self._session
        if session is not None:
            with suppress(CriuctlError, OSError), self._connect() as holder:
                if _is(holder, session):
                    holder.request("checkpoint-refused", message=message[:_LONGEST])

    def _run(self) -> None:
        reported = ""
        while not self._over:
            session = self._session
            if session is None:
                self._changed.wait()
                self._changed.clear()
                continue
            try:
                self._store(session)
                reported = ""
            # no lease yet, or not any more; no holder yet, or not any more
            except (Conflict, SessionGone):
                time.sleep(_PAUSE)
            # a thread that ended here would let all steps wait for ever: the next try may succeed
            except Exception as error:
                known = error if isinstance(error, CriuctlError) else CommandFailed(str(error))
                if known.code != reported:
                    reported = known.code
                    self._failed(known)
                time.sleep(_PAUSE)

    def _store(self, session: SessionRef) -> None:
        """Store what the holder has, until the session changes."""
        with self._connect() as holder, self._post.repository() as repository:
            if not _is(holder, session):
                raise SessionGone("the holder is of another session, or too old")
            replica = Replica(repository, session, host_id(self._config))
            stored = 0
            while self._session is session:
                answer = self._news(holder, session, stored)
                if answer is None:
                    continue
                if answer.body["steps"]:
                    replica.put(answer.body["steps"])
                    stored = int(answer.body["sequence"])
                if answer.body.get("checkpoint_asked"):
                    self._asked()

    def _news(self, holder: Session, session: SessionRef, stored: int) -> Answer | None:
        """Ask for steps that have changed since record `stored`; None: ask again."""
        request = holder.submit("step-replicate", stored=stored)
        until = time.monotonic() + _AGAIN
        while self._session is session and time.monotonic() < until:
            message = holder.receive(_LOOK)
            if isinstance(message, Answer) and message.id == request:
                if message.error is not None:
                    raise message.error
                return message
        return None

    def _connect(self) -> Session:
        return Session.connect(
            self._post.name, config=self._config, kind="service", operator=OPERATOR, role="admin"
        )


def _is(holder: Session, session: SessionRef) -> bool:
    """Whether this is the session's holder, and knows steps."""
    return "steps" in holder.hello["features"] and holder.hello["status"]["id"] == session.id
