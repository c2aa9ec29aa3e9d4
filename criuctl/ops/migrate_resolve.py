"""Finishing what interrupted migrations left open: ``criuctl migrate --resolve``."""

from __future__ import annotations

import time
from typing import Any

from ..config import Config
from ..dump.after_commit import AfterCommit
from ..errors import CriuctlError, NotFound, TimedOut
from ..host import rights
from ..host.journal import events, operation_facts
from ..host.moves import Incoming, Moves, Outgoing
from ..host.registry import exclusive_session
from ..quoting import quoted
from ..report import Reporter
from .moving import inbox
from .moving.delivery import SETTLE, put_back
from .moving.departure import moved_away
from .moving.other_host import RESTORE, reach


@events.recorded("resolve", operation_facts.settled, about=operation_facts.of_session)
def resolve(config: Config, session: str | None, *, reporter: Reporter) -> list[dict[str, Any]]:
    """Finish moves that were interrupted; return one answer for each."""
    moves = Moves(config, Outgoing)
    found = [m for m in moves.all() if session in (None, m.session)]
    if session is not None and not found:
        raise NotFound(
            f"no move of {session!r} was interrupted on this host", hint=_arrived(config, session)
        )
    answers: list[dict[str, Any]] = []
    for move in found:
        answer = {
            "session": move.session,
            "host": move.host or move.to,
            "checkpoint": move.checkpoint,
            "error": "",
        }
        stays = True
        try:
            rights.check(config, "migrate --resolve", move.session)
            with exclusive_session(config, move.session):
                stays = _stays(move)
                answer |= {"outcome": "stays" if stays else "in-doubt"}
                if stays and move.addresses:
                    move = moves.put(put_back(move, reporter))
                with reach(config, move.to, reporter) as there:
                    asked = {
                        "id": move.id,
                        "word": "abort" if stays else "go",
                        "writer": move.proof,
                        "addresses": list(move.addresses),
                        **move.options,
                    }
                    settled = there.link.ask("settle", asked, timeout=RESTORE).arguments
                if not stays:
                    answer |= {"outcome": "moved", "pid": settled["result"].get("pid")}
                    host = str(there.link.hello.get("host_id", ""))
                    moved_away(
                        config, move, host, settled["result"], reporter, AfterCommit(reporter)
                    )
                else:
                    moves.forget(move.id)
        except CriuctlError as error:
            answer |= {"error": error.message}
        answers.append({"outcome": "busy", **answer})  # without an answer it is unknown where it is
    return answers


def _arrived(config: Config, session: str) -> str:
    """Return what can be done here about an arrived session that was not allowed to run."""
    move = Moves(config, Incoming).of(session)
    if move is None or move.state == "running":
        return ""
    inbox_store = inbox.configured(config).store
    return (
        f"It has come here from {move.origin}, which has not said that it is gone there: resolve "
        f"it there. If that host is lost for good: `criuctl restore {quoted(session)} --store "
        f"{quoted(inbox_store)} --take-over`."
    )


def _stays(move: Outgoing) -> bool:
    """Return whether the tree is at home after all. A CRIU that is just ending it, or letting it
    go, is waited for.
    """
    deadline = time.monotonic() + SETTLE
    while (
        move.state == "handed-over"
        and move.alive()
        and ((doomed := move.doomed()) or move.traced())
    ):
        if time.monotonic() > deadline:
            why = (
                f"{move.session!r} was killed and does not end"
                if doomed
                else f"CRIU still holds {move.session!r}"
            )
            raise TimedOut(why, hint="Find out what it waits for: `ps axf`.")
        time.sleep(0.05)
    return move.state == "sending" or move.alive()
