"""``criuctl step run|list|show|resolve``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from ...errors import UsageError
from ..app import App, pass_app
from ..pages import Entry, LazyGroup, page
from ..sessions import command_argument, name_argument
from ..streams import tell
from ..tables import Column
from ..text import facts, printable

_SELF = "criuctl.cli.commands.step"
_KINDS = click.Choice(["safe", "once", "resumable"])

step = LazyGroup(
    "step",
    entries={
        "run": Entry(f"{_SELF}:run", "Run a command as a step, unless it is done."),
        "list": Entry(f"{_SELF}:list_", "List the steps of a session."),
        "show": Entry(f"{_SELF}:show", "Show one step."),
        "resolve": Entry(f"{_SELF}:resolve", "State how an unknown step has ended."),
    },
    summary="Durable steps: what is done is not done again.",
    help="""\
    A step is a piece of work inside a session with an id that its program chooses. What is done
    is recorded outside the memory that a checkpoint holds, so a restore, which takes the program
    back in time, does not make it do the work again. A step of the kind once whose attempt was
    lost between its effect and its record is unknown: --verify, the step's key, or an operator
    says what happened. `criuctl help steps` has the whole story.""",
    examples=[
        (
            "In a script that runs in a session:",
            "criuctl step run migrate-7 --verify './applied 7' -- ./migrate 7",
        ),
        (
            "What is unknown?",
            "criuctl step list work --json | jq '.[] | select(.state==\"unknown\")'",
        ),
    ],
    exits=[3, 8, 9],
    see_also=["status", "log", "supervise"],
)


@page(
    examples=[
        ("Inside a session:", "criuctl step run backup-2026-11-26 --kind safe -- ./backup"),
        (
            "The command gets the step's key, for a receiver that recognises it:",
            "criuctl step run charge-42 --by-key -- ./pay 42",
        ),
        (
            "From outside, for a session:",
            "criuctl step run load-3 --session db --verify './loaded 3' -- ./load 3",
        ),
    ],
    exits=[3, 9, 10],
    see_also=["step list", "step resolve"],
)
@click.argument("id", help="The step's id: 1 to 200 of A-Za-z0-9._:/@+=,-.")
@click.option(
    "--session",
    metavar="NAME",
    help="The session whose step it is.  [default: the one in which this command runs]",
)
@click.option(
    "--kind",
    type=_KINDS,
    default="once",
    show_default=True,
    help="safe and resumable steps run again after a lost attempt; a once step is unknown.",
)
@click.option("--once", "kind", flag_value="once", help="The same as --kind once.")
@click.option(
    "--verify",
    metavar="CMD",
    help="A line of shell that finds out whether the effect of a lost attempt has happened: exit "
    "code 0 yes, 1 no.  [default: none]",
)
@click.option(
    "--by-key",
    is_flag=True,
    help="Run again after a lost attempt: the receiver recognises CRIUCTL_STEP_KEY.",
)
@command_argument(required=True, help="The command and its arguments.")
@pass_app
def run(
    app: App,
    id: str,
    session: str | None,
    kind: str,
    verify: str | None,
    by_key: bool,
    command: tuple[str, ...],
) -> int:
    """Run a command as a step, and exit with its exit code. A step that is done is not run again:
    exit 0. The command finds the step's id in CRIUCTL_STEP and its key, which is the same in every
    attempt and after every restore, in CRIUCTL_STEP_KEY.

    Exit code 0 of the command is done, another one failed: it had no effect, and may run again. A
    command that was ended by a signal may have had one: a once step is unknown then, and so it is
    if the command or criuctl is killed. Another attempt finds out by --verify, or relies on
    --by-key, or ends with 9. While another attempt is under way, exit with 9. Outside any session,
    without --session, the steps are kept in the file CRIUCTL_STEPS_FILE.
    """
    from ...ops.steps import run as run_step

    done = run_step(
        app.config,
        id,
        command,
        session=session,
        kind=kind,
        verify=verify,
        by_key=by_key,
        quiet=app.json,
    )
    if app.json:
        app.emit(done.to_dict(), lambda: "")
    elif not done.ran and not app.quiet:
        tell(f"step {printable(id)} is done")
    return done.exit_code


@page(
    examples=[
        ("The steps of a session:", "criuctl step list work"),
        ("For a program:", "criuctl step list work --json | jq '.[].state'"),
    ],
    exits=[3, 8, 10],
    see_also=["step show", "status"],
)
@name_argument
@pass_app
def list_(app: App, name: str) -> int:
    """List the steps of a session in the order in which they began: done, failed, began (an attempt
    is under way, or was lost and may run again) or unknown. Also for a session that has ended,
    while this host keeps its journal. In JSON: id, kind, state, key, session, incarnation, began,
    ended, result, progress, cursor, attempts, error.
    """
    from ...ops.steps import steps

    found = steps(app.config, name)
    columns = [
        Column("id"),
        Column("kind", rank=3),
        Column("state"),
        Column("progress", right=True, rank=2),
    ]
    columns += [
        Column("attempts", right=True, rank=5),
        Column("began", rank=4),
        Column("ended", rank=6),
        Column("error", rank=1, prose=True),
    ]
    rows = [
        [
            printable(one["id"]),
            one["kind"],
            one["state"],
            _percent(one["progress"]),
            str(one["attempts"]),
            one["began"] or "",
            one["ended"] or "",
            printable(one["error"]),
        ]
        for one in found
    ]
    brief = "\n".join(printable(one["id"]) for one in found)
    app.emit_table(found, columns, rows, empty="no steps", brief=lambda: brief)
    return 0


@page(
    examples=[("All about a step:", "criuctl step show work charge-42")],
    exits=[3, 8, 10],
    see_also=["step list", "step resolve"],
)
@name_argument
@click.argument("id", help="The step's id.")
@pass_app
def show(app: App, name: str, id: str) -> int:
    """Show one step of a session: state, key, attempts, times, progress, cursor and result."""
    from ...ops.steps import step as step_of

    body = step_of(app.config, name, id)
    app.emit(body, lambda: _text(body), brief=lambda: str(body["state"]))
    return 0


@page(
    examples=[
        ("The payment was found in the bank's books:", "criuctl step resolve work charge-42 done"),
        ("It was not, and may be tried again:", "criuctl step resolve work charge-42 failed"),
    ],
    exits=[3, 8, 9, 10],
    see_also=["step show", "log"],
)
@name_argument
@click.argument("id", help="The step's id.")
@click.argument("outcome", type=click.Choice(["done", "failed"]), help="How it has ended.")
@click.option(
    "--result",
    metavar="JSON",
    help="The result that the program gets, if it is done.  [default: null]",
)
@pass_app
def resolve(app: App, name: str, id: str, outcome: str, result: str | None) -> int:
    """State how a step has ended whose state is unknown, or whose process is gone. A step that is
    done never runs again; one that failed runs again when its program comes to it. It is recorded
    in the audit log.
    """
    from ...ops.steps import resolve as resolve_step

    try:
        value = json.loads(result) if result is not None else None
    except ValueError as error:
        raise UsageError(f"--result is no JSON: {error}") from error
    body = resolve_step(app.config, name, id, outcome, value)
    text = f"{printable(name)}: step {printable(id)} is {body['state']}"
    app.emit(body, lambda: text, brief=lambda: "")
    return 0


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{fraction:.0%}"


def _text(body: Mapping[str, Any]) -> str:
    rows = [
        ("step", printable(body["id"])),
        ("kind", body["kind"]),
        ("state", body["state"]),
        ("key", printable(body["key"])),
        ("session", f"{printable(body['session'] or '')}, incarnation {body['incarnation']}"),
        ("attempts", str(body["attempts"])),
        ("began", body["began"] or ""),
    ]
    if body["ended"]:
        rows.append(("ended", body["ended"]))
    if body["progress"] is not None:
        rows.append(("progress", _percent(body["progress"])))
    values = {key: body[key] for key in ("cursor", "result") if body[key] is not None}
    rows += [(key, printable(json.dumps(value))) for key, value in values.items()]
    if body["error"]:
        rows.append(("error", printable(body["error"])))
    return facts(rows)
