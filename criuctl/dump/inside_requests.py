"""What the programs of a session have asked for, before the tree is frozen: to be called, and what
the checkpoint is to require (`criuctl.inside`).

RULE: nothing of this costs frozen time, and none of it can lose the tree. A program may veto the
dump, with a reason, as a pre-dump hook may: the tree runs on. A function that raises, or does not
return in time, is a warning, and the dump goes on: a program that hangs must not keep its own
checkpoint from being taken. What cannot be noted is a warning too, and the checkpoint is stale for
a restore.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..checkpoint.manifest import PredicateRecord
from ..errors import NoSuchProcess, Vetoed
from ..files import predicates
from ..host.dumped_holder import DumpedHolder
from ..proc.credentials import credentials_of
from .job import DumpJob

_SHOWN = 3  # programs that a message names


def call_back(job: DumpJob, holder: DumpedHolder) -> None:
    """Have programs prepare for the checkpoint; `Vetoed` if one of them says no."""
    answer = holder.call_back(job.config.hook_timeout)
    if answer["called"] or answer["failures"]:
        job.reporter.step("programs", called=answer["called"])
    if answer["vetoes"]:
        said = _named(answer["vetoes"])
        raise Vetoed(
            f"a program of the session says no: {said}",
            hint=(
                "Its function for inside.before_checkpoint has raised inside.Veto. In a paused "
                "session (criuctl pause) no function is called."
            ),
        )
    if answer["failures"]:
        job.reporter.warning(
            f"a program was not prepared for the checkpoint: {_named(answer['failures'])}",
            "It has functions for inside.before_checkpoint; hook_timeout is the time for them.",
        )


def note_conditions(
    job: DumpJob, holder: DumpedHolder, required: Sequence[PredicateRecord]
) -> tuple[PredicateRecord, ...]:
    """Return what the operator requires (`required`), and what the programs ask for, once each."""
    known = {(one.kind, one.argument) for one in required}
    conditions, leader = holder.conditions()
    asked = [one for one in conditions if (one.get("kind"), one.get("argument")) not in known]
    if not asked or leader is None:
        return tuple(required)
    user = credentials_of(leader.pid)
    if not leader.alive():  # the PID may be another process's by now
        raise NoSuchProcess(f"PID {leader.pid}, which leads the session, has just ended")
    noted = predicates.note_asked(job.config, asked, user)
    unmet = [f"{one.kind}:{one.argument}: {one.unmet}" for one in noted if one.unmet]
    if unmet:
        job.reporter.warning(
            f"the checkpoint is stale already, by what a program asked for: {unmet[0]}"
            + (f" (and {len(unmet) - 1} more)" if unmet[1:] else ""),
            "`criuctl restore --force` restores it nevertheless.",
        )
    return (*required, *noted)


def _named(programs: Sequence[dict[str, object]]) -> str:
    shown = [f"PID {one['pid']}: {one['reason']}" for one in programs[:_SHOWN]]
    return "; ".join(shown) + (f" (and {len(programs) - _SHOWN} more)" if programs[_SHOWN:] else "")
