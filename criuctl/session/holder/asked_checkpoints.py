"""Checkpoints that programs of the session ask for (`criuctl.inside.checkpoint`).

A request has a token and is repeated until it has an answer, because no connection may be open
while the tree is dumped. A request that waits is satisfied by the first checkpoint whose dump
begins after it, of whatever program: the freeze takes all that wait (`taken`), and `stored` answers
them. So the same tokens are in the checkpoint, and a program that is restored in the middle of its
call gets the answer ``restored`` (`returned`).

The checkpoint is made by the session's supervisor, if one is connected (`news`, `refuse`), else by
a helper, ``criuctl snapshot NAME``, with the store and the folders of the command that started this
holder. Requests are bounded in number, and checkpoints in rate: between two of them the tree runs
at least a second, and as long as the last one took.
"""

from __future__ import annotations

import json
import os
import pwd
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...steps import states
from ...steps.states import StepRefused
from .audit_log import AuditWriter
from .event_loop import Loop, Timer
from .helper_processes import HelperProcesses
from .session_state import SessionState
from .steps import Again, Message, Peer

MAX_LABEL = 200  # characters
_MAX_WAITING = 8
_MAX_KNOWN = 64  # requests whose outcome is remembered
_PAUSE = 1.0  # seconds between two checkpoints, at least
_TRIES = 60  # while another criuctl works on the session
_CONFLICT = 9  # its exit code
_FINE = (0, 11)
_MAX_OUTPUT = 256 << 10  # bytes of a helper's answer
_PACKAGE = Path(__file__).parents[3]  # the folder that has criuctl


@dataclass(slots=True)
class _Asked:
    """One request."""

    token: str
    label: str = ""
    state: str = "waiting"  # or taken (a dump has it), done, failed
    checkpoint: str = ""
    restored: bool = False
    code: str = ""
    message: str = ""


class AskedCheckpoints:
    """The requests of one session, and who serves them.

    `busy` returns whether a dump or restore is under way; `on_asked` is called when requests wait
    for the supervisor, and returns False if there is none.
    """

    def __init__(
        self,
        loop: Loop,
        session: SessionState,
        helpers: HelperProcesses,
        audit: AuditWriter,
        busy: Callable[[], bool],
    ) -> None:
        self._loop, self._session, self._helpers = loop, session, helpers
        self._audit, self._busy = audit, busy
        self._known: dict[str, _Asked] = {}
        self._helper: list[str] | None = None  # tokens that the helper serves; None: there is none
        self._handed: set[str] = set()  # tokens that the supervisor serves
        self._timer: Timer | None = None
        self._ready, self._began, self._tries = 0.0, 0.0, 0
        self.environment: dict[str, str] = {}  # of a helper: folders and store
        self.on_asked: Callable[[], bool] = lambda: False

    # -- what a program asks ----------------------------------------------------------------------

    def ask(self, peer: Peer, message: Message) -> Message:
        """Return the outcome of a request; `Again` while it has none, `StepRefused` if it failed or
        is not possible.
        """
        token = states.check_token(message.get("attempt"))
        asked = self._known.get(token)
        if asked is None:
            asked = self._add(token, _label(message.get("label", "")))
            self._audit.write("checkpoint-asked", peer.who, label=asked.label)
        if asked.state == "done":
            return {"checkpoint": asked.checkpoint, "restored": asked.restored}
        if asked.state == "failed":
            raise StepRefused(asked.code, asked.message)
        self._loop.soon(self.look)
        raise Again

    def _add(self, token: str, label: str) -> _Asked:
        state = self._session.state
        if state != "running":
            raise StepRefused("state", f"the session is {state}", state=state)
        if sum(map(self._pending, self._known)) >= _MAX_WAITING:
            raise StepRefused("busy", f"{_MAX_WAITING} checkpoints of this session are asked for")
        ended = [t for t, one in self._known.items() if one.state in ("done", "failed")]
        for old in ended[: max(0, len(self._known) + 1 - _MAX_KNOWN)]:
            del self._known[old]
        self._known[token] = asked = _Asked(token, label)
        return asked

    # -- serving them -----------------------------------------------------------------------------

    def look(self) -> None:
        """Have requests served that wait, as soon as that is possible."""
        waiting = self._waiting()
        if not waiting or self._helper is not None or self._handed or self._busy():
            return
        now = time.monotonic()
        if now < self._ready:
            if self._timer is None:
                self._timer = self._loop.after(self._ready - now, self._due)
            return
        if not self.on_asked():
            self._start_helper(waiting)

    def _due(self) -> None:
        self._timer = None
        self.look()

    def _waiting(self) -> list[str]:
        return [token for token, one in self._known.items() if one.state == "waiting"]

    def _start_helper(self, tokens: list[str]) -> None:
        self._began, self._helper = time.monotonic(), tokens
        output = os.memfd_create("snapshot", os.MFD_CLOEXEC)
        name = self._session.identity.name
        argv = [sys.executable, "-P", "-m", "criuctl", "--json", "snapshot", name]

        def ended(status: int) -> None:
            with open(output, "rb") as file:
                file.seek(0)
                data = file.read(_MAX_OUTPUT)
            self._helper_ended(tokens, status, data)

        try:
            home = {"HOME": pwd.getpwuid(os.getuid()).pw_dir} if "HOME" not in os.environ else {}
        except KeyError:
            home = {}
        env = {**os.environ, **home, **self.environment, "PYTHONPATH": str(_PACKAGE)}
        try:
            self._helpers.start(argv, {1: output}, ended, env)
        except OSError as error:
            os.close(output)
            self._helper = None
            self._fail(tokens, "failed", f"criuctl snapshot: {error.strerror or error}")

    def _helper_ended(self, tokens: list[str], status: int, data: bytes) -> None:
        if self._helper is not tokens:
            return  # the tree that asked for it is gone, and another one is back
        self._helper = None
        code = os.waitstatus_to_exitcode(status)
        left = [token for token in tokens if self._pending(token)]
        again = code == _CONFLICT and self._tries < _TRIES
        self._tries = self._tries + 1 if again else 0
        self._rest(_PAUSE if again else None)
        if left and not again:
            why = "it does not hold this request" if code in _FINE else _reason(data, code)
            self._fail(left, "failed", f"the checkpoint failed: {why}")
        self.look()

    def _rest(self, pause: float | None = None) -> None:
        """Let the tree run before the next checkpoint."""
        now = time.monotonic()
        self._ready = now + (pause or max(_PAUSE, now - self._began))

    def _fail(self, tokens: Iterable[str], code: str, message: str) -> None:
        for token in filter(self._pending, tokens):
            asked = self._known[token]
            asked.state, asked.code, asked.message = "failed", code, message

    def _pending(self, token: str) -> bool:
        return token in self._known and self._known[token].state in ("waiting", "taken")

    # -- the supervisor ---------------------------------------------------------------------------

    def news(self) -> list[str]:
        """Return requests that the supervisor is to serve now; it has got no others meanwhile."""
        if self._helper is not None or self._handed or time.monotonic() < self._ready:
            return []
        self._handed = set(self._waiting())
        self._began = time.monotonic()
        return sorted(self._handed)

    def refuse(self, message: str) -> None:
        """The supervisor's checkpoint has failed."""
        handed, self._handed = self._handed, set()
        self._rest()
        self._fail(handed, "failed", f"the checkpoint failed: {message}")
        self.look()

    def supervisor_left(self, seconds: float = 5.0) -> None:
        """The supervisor is gone: what it was to serve waits for the next one, or for a helper."""
        self._handed = set()
        self._ready = time.monotonic() + seconds
        self._loop.soon(self.look)

    # -- dumps and restores -----------------------------------------------------------------------

    def taken(self) -> list[str]:
        """The tree is frozen: return the requests that its checkpoint satisfies, and all whose
        answer a program in it may still wait for.
        """
        for token in self._waiting():
            self._known[token].state = "taken"
        return list(self._known)

    def labels(self) -> str:
        """Return the labels of the requests that a dump which froze the tree has taken."""
        found = [one.label for one in self._known.values() if one.state == "taken" and one.label]
        return "; ".join(dict.fromkeys(found))[:MAX_LABEL]

    def stored(self, checkpoint: str) -> None:
        """The checkpoint of the frozen tree exists."""
        for asked in self._known.values():
            if asked.state == "taken":
                asked.state, asked.checkpoint = "done", checkpoint
        if self._handed and not self._handed.intersection(self._waiting()):
            self._handed = set()
            self._rest()

    def released(self) -> None:
        """No dump has the tree: what was taken and not stored waits again."""
        if not self._busy():
            for asked in self._known.values():
                if asked.state == "taken":
                    asked.state = "waiting"
            self._loop.soon(self.look)

    def returned(self, tokens: object, checkpoint: str) -> None:
        """A restore has brought the tree: these requests are in its memory."""
        given = tokens if isinstance(tokens, list) else []
        self._handed, self._helper = set(), None
        self._known = {}
        for token in given[:_MAX_KNOWN]:
            with suppress(StepRefused):
                known = states.check_token(token)
                self._known[known] = _Asked(
                    known, state="done", checkpoint=checkpoint, restored=True
                )

    # -- re-exec ----------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return all of it, for the next program of this holder."""
        known = [asdict(one) for one in self._known.values()]
        return {"asked_checkpoints": {"known": known, "environment": self.environment}}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `to_state` returned; what a helper or a supervisor served is served
        again.
        """
        given = state.get("asked_checkpoints") or {}
        self.environment = dict(given.get("environment") or {})
        self._known = {one["token"]: _Asked(**one) for one in given.get("known") or ()}
        self.released()


def _label(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_LABEL or not (value.isprintable()):
        text = f"'label' must be printable text of at most {MAX_LABEL} characters"
        raise StepRefused("bad-request", text)
    return value


def _reason(data: bytes, code: int) -> str:
    """Return why ``criuctl snapshot`` failed, from its JSON."""
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        answer = json.loads(data)
        error = (answer[0] if isinstance(answer, list) else answer)["error"]
        return f"{error['message']}" + (f" ({error['hint']})" if error.get("hint") else "")
    return f"the snapshot ended with exit code {code}"
