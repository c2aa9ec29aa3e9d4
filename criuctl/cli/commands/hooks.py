"""``criuctl hooks list|run``."""

from __future__ import annotations

import json
import re
from typing import Any

import click
from click.shell_completion import CompletionItem

from ...errors import CriuctlError
from .. import complete
from ..app import DEGRADED, App, pass_app
from ..pages import Entry, LazyGroup, page
from ..tables import Column
from ..text import printable

_SELF = "criuctl.cli.commands.hooks"
_EXITS = {"ok": 0, "veto": 10, "warn": DEGRADED}

hooks = LazyGroup(
    "hooks",
    entries={
        "list": Entry(
            f"{_SELF}:list_", "List the hooks that run at a dump or a restore, in their order."
        ),
        "run": Entry(f"{_SELF}:run", "Try a hook by hand against a live tree or a checkpoint."),
    },
    summary="List hooks, and try one by hand.",
    help="""\
    A hook is a program of yours that criuctl runs at a turning point of a dump or a restore, and
    that may say no. It is an executable in FOLDER/PHASE/, where FOLDER is one of the configured
    hook_dirs (/etc/criuctl/hooks) and PHASE is pre-dump, frozen, post-dump, post-commit,
    dump-failed, pre-restore, reconnect, post-restore, post-resume, restore-failed or
    snapshot-failed, or, of criuctl supervise, loss-exceeded, recovered or gave-up. It reads JSON
    and may answer with JSON.

    A hook that others than its owner can write to is not run.""",
    examples=[("Which hooks are there, and which are refused?", "criuctl hooks list")],
    exits=[2],
    see_also=["dump", "restore", "snapshot"],
)


def complete_phase(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the phases."""
    from ...hooks.contract import PHASES

    return [
        CompletionItem(name, help=phase.when)
        for name, phase in PHASES.items()
        if name.startswith(incomplete)
    ]


def complete_name(
    ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the executables of the typed phase."""
    from ...hooks.find import executables

    try:
        found = executables((ctx.find_object(App) or App()).config, str(ctx.params.get("phase")))
    except CriuctlError:
        return []  # the command itself reports the error
    return [
        CompletionItem(hook.name, help=hook.path)
        for hook in found
        if hook.name.startswith(incomplete)
    ]


@page(
    examples=[
        ("All hooks, those built in included:", "criuctl hooks list"),
        ("For a script:", "criuctl hooks list --json"),
    ],
    exits=[2],
    see_also=["hooks run"],
)
@pass_app
def list_(app: App) -> int:
    """List every hook by phase, in the order in which they run: those built into criuctl, those
    that ship with it, and those in the configured folders. A hook that would be refused is listed
    with the reason and what to do.
    """
    from ...ops.hook_trial import list_hooks

    found = list_hooks(app.config)
    rows = []
    for hook in found:
        what = (
            f"REFUSED: {hook['refused']} ({hook['hint']})"
            if "refused" in hook
            else hook.get("about") or hook.get("path", "")
        )
        rows.append(
            [
                hook["phase"],
                str(hook["order"]),
                printable(hook["name"]),
                hook["origin"],
                printable(what),
            ]
        )
    columns = [
        Column("phase"),
        Column("order", right=True, rank=2),
        Column("name"),
        Column("origin", rank=3),
        Column("what", rank=1, prose=True),
    ]
    app.emit_table(found, columns, rows, empty="there are no hooks")
    return 0


def _descriptor(
    _ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int | None, int] | None:
    if value is None:
        return None
    match = re.fullmatch(r"(?:([0-9]{1,10}):)?([0-9]{1,10})", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not of the form FD or PID:FD", param=param)
    return (int(match[1]) if match[1] else None), int(match[2])


def _report(body: dict[str, Any]) -> str:
    lines = []
    for asked, answer in zip(body["requests"], body["results"], strict=True):
        lines += [
            f"{printable(answer['name'])} got as input:",
            _indented(asked),
            "and answered:",
            _indented(answer),
        ]
    verdicts = {
        "ok": "the operation would go on",
        "veto": "the operation would be stopped",
        "warn": "it would be reported as a warning",
    }
    lines.append(
        verdicts[body["verdict"]] if body["results"] else f"there is no hook for {body['phase']}"
    )
    return "\n".join(lines)


def _indented(value: Any) -> str:
    return "\n".join(
        f"  {printable(line)}"
        for line in json.dumps(value, indent=2, ensure_ascii=False).splitlines()
    )


@page(
    examples=[
        ("Would the hooks let PID 4711 be dumped?", "criuctl hooks run pre-dump --target 4711"),
        (
            "One hook, with the facts of a checkpoint:",
            "criuctl hooks run post-restore announce --ref web@3",
        ),
        (
            "Connect a new socket as the program's descriptor 5 is:",
            "criuctl hooks run reconnect lines --target web --fd 5",
        ),
    ],
    exits=[3, 7, 8, 10, 11],
    see_also=["hooks list"],
)
@click.argument(
    "phase",
    shell_complete=complete_phase,
    help="The phase whose hooks are to run; see criuctl hooks list.",
)
@click.argument(
    "name",
    required=False,
    shell_complete=complete_name,
    help="Run only the hook of this file name.",
)
@click.option(
    "--target",
    shell_complete=complete.target,
    metavar="TARGET",
    help="Give the hook the facts of this running tree.  [default: none]",
)
@click.option(
    "--ref",
    shell_complete=complete.checkpoint_ref,
    metavar="REF",
    help="Give it the facts of this checkpoint.  [default: none]",
)
@click.option(
    "--fd",
    metavar="[PID:]FD",
    callback=_descriptor,
    help=(
        "For reconnect: the connection to be tried, by a descriptor of the tree's.  [default: none]"
    ),
)
@pass_app
def run(
    app: App,
    phase: str,
    name: str | None,
    target: str | None,
    ref: str | None,
    fd: tuple[int | None, int] | None,
) -> int:
    """Run the hooks of a phase, or one of them, and print the input and the answer of each. Nothing
    is dumped, frozen or restored: a hook of frozen sees a running tree, and one of reconnect
    connects a new socket of the same kind, never the program's own. The actions of a hook itself
    are real; its input contains "trial": true.

    Exit with 10 if a dump or restore would be stopped, and with 11 if the failure would only be
    reported.
    """
    from ...ops.hook_trial import try_hooks

    body = try_hooks(app.config, phase, name, target=target, ref=ref, fd=fd).to_dict()
    app.emit(body, lambda: _report(body), brief=lambda: str(body["verdict"]))
    return _EXITS[body["verdict"]]
