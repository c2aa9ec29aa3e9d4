"""The steps of a session: its journal, and which attempts still run.

A step is begun, and ended, by a process of the tree (`step_socket`) or by an operator
(`step_operations`). `criuctl.steps` has the rules. This module adds what the rules need to know:
who asks, whether the process of an attempt lives, and what a restore has brought back.

- A step belongs to the user whose process began it. Another user's process in the tree is refused;
  an operator may do all.
- An attempt lives as long as its process. A process is known by PID and start time; across a
  restore by its PID in the tree, if the checkpoint has the same attempt under way.
- A dump waits a moment until no step of the kind ``once`` is under way (`quiet`), and lets none
  begin until it has ended: a restore to the middle of such a step would run its effect again.

The journal is opened when the first step is begun: a session without steps has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ...errors import CriuctlError
from ...proc.namespaces import ns_pids
from ...proc.tree import ProcessIdentity
from ...steps import states
from ...steps.journal import Journal
from ...steps.states import Attempt, Owner, Step, StepRefused
from .audit_log import AuditWriter
from .connection import Connection
from .event_loop import Loop, Timer
from .events import Events
from .processes import Tree
from .session_files import SessionFiles
from .session_state import SessionState

Message = dict[str, Any]
_TELL_PROGRESS = 1.0  # seconds between two events of progress


class Again(Exception):
    """Nothing is decided yet: the client asks again in a moment."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who asks."""

    uid: int
    pid: int
    inside: bool  # a process of the tree; else an operator
    who: Message  # as the audit log names it


class Steps:
    """The steps of one session; `on_change` is called after each record."""

    def __init__(
        self,
        loop: Loop,
        session: SessionState,
        files: SessionFiles,
        tree: Tree,
        events: Events,
        audit: AuditWriter,
    ) -> None:
        self._loop, self._session, self._files, self._tree = loop, session, files, tree
        self._events, self._audit = events, audit
        # Attempts in the checkpoint that is restored: id -> token, PID in the tree.
        self._under_way: dict[str, tuple[str, int]] = {}
        self._quiet: tuple[Connection, Callable[[], None]] | None = None
        self._quiet_timer: Timer | None = None
        self._told = 0.0
        self.on_change: Callable[[], None] = lambda: None

    @property
    def journal(self) -> Journal | None:
        """The journal, if the session has one."""
        return self._files.step_journal(create=False)

    # -- what a program asks ----------------------------------------------------------------------

    def begin(self, peer: Peer, message: Message) -> Message:
        """Begin a step, or say that it is done, or unknown."""
        self._needs_tree(peer)
        name = states.check_id(message.get("step"))
        journal = self.writable()
        step = self._owned(journal.get(name), peer)
        kind = message.get("kind", "once")
        cursor = states.check_size("cursor", message.get("cursor"), states.MAX_CURSOR)
        asked = Attempt(
            kind if isinstance(kind, str) else "",
            states.check_token(message.get("attempt")),
            peer.uid,
            self._session.identity.incarnation,
            self._owner(peer),
            cursor,
            message.get("again") is True,
        )
        lives = step is not None and self.lives(step)
        key = states.key_of(self._session.identity.id, name)
        new, word = states.begin(step, name, key, asked, lives=lives, now=_now())
        if word == "run" and new is not step and new.kind == "once" and self._quiet is not None:
            raise Again
        self._put({"run": "began", "unknown": "lost"}.get(word, word), peer.who, step, new)
        return {**_answer(new), "run": word == "run"}

    def done(self, peer: Peer, message: Message) -> Message:
        """End an attempt: its work is done."""
        step, token = self._known(peer, message), states.check_token(message.get("attempt"))
        result = states.check_size("result", message.get("result"), states.MAX_RESULT)
        verified = message.get("verified") is True
        new = states.done(step, token, result, verified=verified, now=_now())
        self._put("verified" if verified else "done", peer.who, step, new)
        return _answer(new)

    def failed(self, peer: Peer, message: Message) -> Message:
        """End an attempt: its work has failed."""
        step, token = self._known(peer, message), states.check_token(message.get("attempt"))
        error, unknown = message.get("error", ""), message.get("unknown") is True
        if not isinstance(error, str):
            raise StepRefused("bad-request", "'error' must be text")
        new = states.failed(step, token, error, unknown=unknown, now=_now())
        self._put("failed", peer.who, step, new)
        return _answer(new)

    def progress(self, peer: Peer, message: Message) -> Message:
        """Note how far a step has come; one that has not begun begins now, as resumable."""
        name, fraction = states.check_id(message.get("step")), message.get("fraction")
        if not isinstance(fraction, int | float) or isinstance(fraction, bool):
            raise StepRefused("bad-request", "'fraction' must be a number from 0 to 1")
        if not 0 <= fraction <= 1:
            raise StepRefused("bad-request", "'fraction' must be a number from 0 to 1")
        cursor = states.check_size("cursor", message.get("cursor"), states.MAX_CURSOR)
        step = self._owned(self.writable().get(name), peer)
        if step is None or (step.state == "failed" and step.kind != "once"):
            self.begin(peer, {**message, "kind": step.kind if step is not None else "resumable"})
            step = self._known(peer, message)
        new = states.progressed(step, float(fraction), cursor)
        self._put("progress", peer.who, step, new)
        return _answer(new)

    def show(self, peer: Peer, message: Message) -> Message:
        """Return one step."""
        self.settle()
        return {"step": self.described(self._known(peer, message))}

    # -- what an operator asks --------------------------------------------------------------------

    def listed(self, since: int) -> list[Message]:
        """Return the steps that have changed after record `since`, in the order of change."""
        self.settle()
        journal = self.journal
        found = journal.steps(since) if journal is not None else ()
        return [{**self.described(step), "sequence": number} for number, step in found]

    def resolve(self, peer: Peer, message: Message) -> Message:
        """State how an unknown step has ended."""
        step, outcome = self._known(peer, message), message.get("outcome")
        result = states.check_size("result", message.get("result"), states.MAX_RESULT)
        text = outcome if isinstance(outcome, str) else ""
        new = states.resolve(step, text, result, lives=self.lives(step), now=_now())
        self._put("resolved", peer.who, step, new)
        return {"step": self.described(new)}

    def described(self, step: Step) -> Message:
        """Return a step as answers have it."""
        return {**step.to_dict(), "session": self._session.identity.name}

    def counts(self) -> Message:
        """Return how many steps run, are done, and are unknown, for the status."""
        try:
            self.settle()
            journal = self.journal
        except OSError as error:  # a damaged journal
            return {"running": 0, "done": 0, "unknown": 0, "failed": 0, "error": str(error)}
        counts = journal.counts if journal is not None else {}
        return {
            "running": counts.get("began", 0),
            "done": counts.get("done", 0),
            "unknown": counts.get("unknown", 0),
            "failed": counts.get("failed", 0),
        }

    # -- attempts ---------------------------------------------------------------------------------

    def lives(self, step: Step) -> bool:
        """Whether the process of the attempt lives."""
        owner = step.owner
        if step.state != "began" or owner is None or owner.pid <= 0:
            return False
        if owner.inner and step.incarnation != self._session.identity.incarnation:
            return False
        return ProcessIdentity(owner.pid, owner.start_time).alive()

    def settle(self) -> None:
        """Note the attempts whose process is gone without a word.

        While the tree is in a checkpoint only, or is just coming back, its attempts are, too.
        """
        away = self._session.state == "checkpointed" or bool(self._under_way)
        journal = None if away else self.journal
        for name in sorted(journal.began) if journal is not None else ():
            assert journal is not None
            step = journal.get(name)
            if step is not None and step.owner is not None and not self.lives(step):
                self._put("lost", {}, step, states.lost(step))

    def running_once(self) -> list[str]:
        """Return the steps of the kind ``once`` that are under way."""
        journal = self.journal
        if journal is None:
            return []
        found = (journal.get(name) for name in sorted(journal.began))
        return [s.id for s in found if s is not None and s.kind == "once" and self.lives(s)]

    # -- dumps and restores -----------------------------------------------------------------------

    def quiet(self, connection: Connection, seconds: float, answer: Callable[[], None]) -> None:
        """Let no step of the kind ``once`` begin; `answer` when none is under way, or too late."""
        if self._quiet is not None and self._quiet[0] is not connection:
            raise StepRefused("busy", "a checkpoint of this session is being made")
        self._stop_timer()
        self._quiet = (connection, answer)
        self._quiet_timer = self._loop.after(seconds, self._now_quiet)
        self._look_quiet()

    def go_on(self) -> None:
        """The dump has ended: steps may begin again."""
        self._stop_timer()
        self._quiet = None

    def lost(self, connection: Connection) -> None:
        """A client is gone; it may be the one that dumps."""
        if self._quiet is not None and self._quiet[0] is connection:
            self.go_on()

    def _look_quiet(self) -> None:
        if self._quiet_timer is not None and not self.running_once():
            self._now_quiet()

    def _now_quiet(self) -> None:
        self._stop_timer()
        if self._quiet is not None:
            self._quiet[1]()

    def _stop_timer(self) -> None:
        if self._quiet_timer is not None:
            self._quiet_timer.cancel()
            self._quiet_timer = None

    def merge(
        self, given: list[Any], *, checkpoint: bool = False, replicated: bool | None = None
    ) -> int:
        """Take over what a checkpoint or the store knows of the steps; return how many were new.

        `replicated`: whether steps wait for the store from now on; None: as before.

        The session's own journal is never set back: of two records of a step the one wins that
        knows more.
        """
        try:
            steps = [Step.from_dict(one) for one in given]
        except ValueError as error:
            raise StepRefused("bad-request", str(error)) from None
        if not steps and not replicated and self.journal is None:
            return 0
        journal = self.writable()
        fresh = []
        for step in steps:
            mine = journal.get(step.id)
            inner = step.owner.inner if step.owner is not None else 0
            if checkpoint and step.state == "began":
                self._under_way[step.id] = (step.attempt, inner)
            other = replace(step, owner=Owner(inner=inner) if inner else None)
            best = states.merge(mine, other)
            if best is not mine:
                fresh.append(best)
        journal.put_all("merged", fresh)
        if replicated is not None:
            journal.replicate(replicated)
        self.on_change()
        return len(fresh)

    def came_back(self) -> Message:
        """A restore has brought the tree: find the attempts that it has brought in the middle.

        Return those that go on, and those whose step is done already: their process, whose memory
        is older, may make the effect again.
        """
        journal = self.journal
        under_way, self._under_way = self._under_way, {}
        in_flight, repeated = list[str](), list[str]()
        if journal is None:
            return {"in_flight": in_flight, "repeated": repeated}
        inner = self.inner_pids()
        incarnation = self._session.identity.incarnation
        for name in sorted(journal.began | set(under_way)):
            step = journal.get(name)
            assert step is not None
            token, pid = under_way.get(name, ("", 0))
            owner = inner.get(pid)
            if step.state == "done":
                repeated.append(name)
            elif token == step.attempt and owner is not None and step.state != "failed":
                in_flight.append(name)
                self._put("restored", {}, step, states.continued(step, owner, incarnation))
            else:
                self._put("lost", {}, step, states.lost(step))
        if in_flight or repeated:
            self._events.emit("steps-restored", in_flight=in_flight, repeated=repeated)
        return {"in_flight": in_flight, "repeated": repeated}

    def inner_pids(self) -> dict[int, Owner]:
        """Return the processes of the tree by their PID in it."""
        found = {}
        for identity in self._tree.members():
            try:
                inner = ns_pids(identity.pid)[-1]
            except CriuctlError:
                continue
            found[inner] = Owner(identity.pid, identity.start_time, inner)
        return found

    # -- inside -----------------------------------------------------------------------------------

    def _needs_tree(self, peer: Peer) -> None:
        if self._session.state not in ("running", "paused"):
            state = self._session.state
            raise StepRefused("state", f"the session is {state}", state=state)

    def writable(self) -> Journal:
        """Return the journal; make it if the session has none."""
        journal = self._files.step_journal(create=True)
        assert journal is not None
        return journal

    def _owned(self, step: Step | None, peer: Peer) -> Step | None:
        if step is not None and peer.inside and step.uid != peer.uid:
            raise StepRefused("forbidden", f"step {step.id!r} belongs to the user {step.uid}")
        return step

    def _known(self, peer: Peer, message: Message) -> Step:
        name = states.check_id(message.get("step"))
        journal = self.journal
        step = self._owned(journal.get(name) if journal is not None else None, peer)
        if step is None:
            raise StepRefused("not-found", f"there is no step {name!r}")
        return step

    def _owner(self, peer: Peer) -> Owner | None:
        try:
            start = ProcessIdentity.of(peer.pid).start_time
            inner = ns_pids(peer.pid)[-1] if peer.inside else 0
        except CriuctlError:
            return None
        return Owner(peer.pid, start, inner)

    def _put(self, how: str, who: Message, before: Step | None, step: Step) -> None:
        """Write a step that has changed; report it."""
        if step is before:
            return
        self.writable().put(how, step)
        facts = {"id": step.id, "kind": step.kind, "state": step.state, "how": how}
        if how == "progress":
            if time.monotonic() - self._told >= _TELL_PROGRESS:
                self._told = time.monotonic()
                self._events.emit("step", **facts, progress=step.progress)
        else:
            entry = {**facts, "attempts": step.attempts}
            entry["step_kind"] = entry.pop("kind")  # that of an entry is its operator's
            self._audit.write("step", who, **entry)
            self._events.emit("step", **facts, attempts=step.attempts)
        self.on_change()
        self._look_quiet()


def _answer(step: Step) -> Message:
    """Return what a program is answered."""
    keys = ("kind", "state", "key", "attempt", "attempts", "incarnation", "result")
    body = {key: getattr(step, key) for key in keys}
    return {**body, "progress": step.progress, "cursor": step.cursor, "failure": step.error}


def _now() -> float:
    return round(time.time(), 3)
