"""Attaching inside of a session: which sessions are shown where, and no session within itself.

A terminal inside session A that attaches to B shows B's output in A's.  If A is shown in B,
directly or through others, each drawing makes output that is drawn again, without end.  So a client
says in which session its terminal is (`within` of the operation `attach`), and before it
attaches it follows those of the clients around it.

Which session a terminal is in is known by ancestry (`sessions.around`), on this host alone: what
was reached by a plain ``ssh`` in a session is not seen.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..errors import CriuctlError, UsageError
from ..session.client.session import Session
from ..session.sessions import all_states

if TYPE_CHECKING:
    from ..config import Config

OVERRIDE = "CRIUCTL_NESTED"
_MOST = 64  # sessions that are asked


def check(config: Config, own: dict[str, Any] | None, target: Session) -> None:
    """Raise `UsageError` if `target` is session `own`, or shows it.

    `own` is the state of the session in which this process runs.
    """
    if own is None or os.environ.get(OVERRIDE):
        return
    wanted, name = target.hello["status"]["id"], target.hello["status"]["session"]
    states = {state["id"]: state for state in all_states(config)}
    asked: list[str] = []
    waiting = [own["id"]]
    while waiting and len(asked) < _MOST:
        shown = waiting.pop()
        if shown == wanted:
            raise _refused(own["session"], name)
        if shown not in asked:
            asked.append(shown)
            waiting += _around(config, states.get(shown))


def _refused(own: str, name: str) -> UsageError:
    text = f"this terminal is inside session {own!r}"
    if own != name:
        text += f", which is shown in {name!r}: {name!r} would be drawn inside of itself"
    return UsageError(
        text, hint=f"Attach from outside of it, or set {OVERRIDE}=1 to do it nevertheless."
    )


def _around(config: Config, state: dict[str, Any] | None) -> list[str]:
    """Return the ids of the sessions in which this session is shown now."""
    if state is None or not state["holder_alive"]:
        return []  # of another host
    found: list[str] = []
    with (
        suppress(CriuctlError),
        Session.connect(state["session"], kind="service", config=config, role="observe") as asked,
    ):
        found += [
            operator["within"]
            for operator in asked.hello["status"]["operators"]
            if operator.get("within")
        ]
    return found
