"""``criuctl dump``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from ...quoting import quoted
from .. import complete
from ..app import DEGRADED, App, pass_app
from ..grouping import group_option, only_with_group, print_stored
from ..outcomes import connection_lines
from ..pages import Seconds, page
from ..streams import unheard
from ..text import duration, plural, printable, size

if TYPE_CHECKING:
    from ...dump.manifest_of_tree import DumpResult

POLICIES = click.Choice(["keep", "reconnect", "hangup", "refuse"])

MAX_FREEZE = click.option(
    "--max-freeze",
    metavar="SECONDS",
    type=Seconds(0, 2_000_000),
    help="Undo the dump when the tree has been frozen for this long, 0: never; it runs on, and "
    "the exit code is 12.  [default: the configuration's max_freeze: 300 for a tree that goes on "
    "afterwards, 3600 for one that ends or moves]",
)


WITH_WORKSPACE = click.option(
    "--with-workspace",
    is_flag=True,
    help="Store the session's workspace (run --workspace), too, as it is while the tree is frozen: "
    "`restore --rewind` puts it back, `cp` takes files out.",
)


NO_ENCRYPT = click.option(
    "--no-encrypt",
    is_flag=True,
    help="Where the configured store is made in passing, because its folder is empty or absent: do "
    "not encrypt it. An existing store must not be encrypted then (exit 9).",
)


def parse_labels(
    _ctx: click.Context, param: click.Parameter, values: Sequence[str]
) -> dict[str, str]:
    """Return ``K=V`` words as a mapping; raise a usage error for a word without ``=`` or a key
    given twice.
    """
    labels: dict[str, str] = {}
    for word in values:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{word!r} is not of the form KEY=VALUE", param=param)
        if key in labels:
            raise click.BadParameter(f"{key!r} is given twice", param=param)
        labels[key] = value
    return labels


def outcome_line(result: Mapping[str, Any]) -> str:
    """Return the outcome of a dump as one line."""
    amounts = result["bytes"]
    return (
        f"{printable(result['session'])}: checkpoint {result['checkpoint'][:12]}, "
        f"{plural(result['processes'], 'process', 'processes')}, "
        f"{size(amounts['memory'])} memory, {size(amounts['stored'])} stored, "
        f"frozen {duration(result['frozen_ms'])}, total {duration(result['total_ms'])}"
    )


def _come_back(app: App, result: DumpResult) -> str:
    """Return the line that says that the tree has ended, and how to bring it back."""
    words = ["criuctl restore", quoted(result.manifest.session.name)]
    if result.manifest.terminals:
        words.append("--attach")
    if app.store is not None:  # not the configured one
        words.append(f"--store {quoted(result.store)}")
    pid = result.manifest.processes[0].pid
    return f"PID {pid} has ended. Bring it back with: {' '.join(words)}"


def _outcome(result: Mapping[str, Any], ended: str) -> str:
    """Return the same, how a tree that has `ended` comes back, and the connections whose policy
    differs from the requested one.
    """
    rounds = result.get("precopy", ())
    ahead = (
        [f"  pre-copy: {plural(len(rounds), 'round')}, {size(sum(r['new'] for r in rounds))} ahead"]
        if rounds
        else []
    )
    denied = [c for c in result["connections"] if c["external"] and c["reason"]]
    return "\n".join(
        [
            outcome_line(result),
            *ahead,
            *([f"  {ended}"] if ended else []),
            *(f"  {line}" for line in connection_lines(denied, "policy")),
        ]
    )


@page(
    examples=[
        (
            "Store process 4711 and all its descendants under the name web, and end them:",
            "criuctl dump 4711 --name web",
        ),
        (
            "Take a backup of it and let it run on:",
            "criuctl dump 4711 --name web --leave-running --store s3://backups/trees",
        ),
        (
            "Freeze it for a moment only: store its memory while it runs, then what changed:",
            "criuctl dump 4711 --pre-copy",
        ),
        (
            "Take the database files along as they are at this moment:",
            "criuctl dump 4711 --name db --with-files /srv/db",
        ),
        (
            "It is worth nothing after the schema has changed:",
            "criuctl dump db --require 'output:pg_dump --schema-only app'",
        ),
    ],
    exits=[3, 4, 5, 7, 8, 9, 10, 11, 12, 13],
    see_also=["check", "connections", "restore", "snapshot", "show"],
)
@click.argument(
    "target",
    required=False,
    shell_complete=complete.target,
    help="A PID, a session's name, unit:NAME or cgroup:PATH.",
)
@group_option("Dump all members of this group, as they are at one moment.  [default: TARGET]")
@click.option(
    "--name",
    metavar="NAME",
    shell_complete=complete.session_name,
    help="Name of the session; its checkpoints are NAME@1, NAME@2, ...  [default: the session's "
    "own name, else made from the command and the PID]",
)
@click.option(
    "--leave-running",
    is_flag=True,
    help="Let the tree run on when it is stored.  [default: end it]",
)
@click.option(
    "--pre-copy",
    "precopy",
    is_flag=True,
    help="Store the memory in rounds while the tree runs, and freeze it when little is left to "
    "store: the freeze is shorter, the whole takes longer and may store more.",
)
@click.option(
    "--label",
    "labels",
    metavar="KEY=VALUE",
    multiple=True,
    callback=parse_labels,
    help="Keep this label with the checkpoint; may be given several times.",
)
@click.option(
    "--with-files",
    metavar="PATH",
    multiple=True,
    type=click.Path(),
    help="Store this file or folder, as it is while the tree is frozen, and the target if it is a "
    "link; may be given several times. For other files open for writing, size and hash are "
    "recorded.",
)
@WITH_WORKSPACE
@click.option(
    "--carry-binaries",
    is_flag=True,
    help="Store all programs and libraries that the tree has mapped: a host that lacks them, or "
    "has other versions, can restore it.",
)
@click.option(
    "--connections",
    type=POLICIES,
    help="What a restore does with connections to outside the tree, all of them: keep them alive, "
    "connect them again, let the program see a hang-up; or refuse to dump.  [default: by the "
    "configuration's rules; else its policy, else hangup, and datagram sockets are kept]",
)
@click.option(
    "--require",
    "require",
    metavar="KIND:WHAT",
    multiple=True,
    help="A condition that must hold where this checkpoint is restored; otherwise it is stale and "
    "refused: file:PATH has the contents that it has now, command:CMD exits with 0, output:CMD "
    "prints what it prints now, age:SPAN has not passed; may be given several times.  [default: "
    "the configuration's predicates]",
)
@click.option(
    "--drain",
    metavar="SECONDS",
    type=Seconds(0, 86400),
    default=0.0,
    help=(
        "Before the freeze, wait up to this long until connections to outside are idle.  "
        "[default: by the rules, else 0]"
    ),
)
@MAX_FREEZE
@NO_ENCRYPT
@pass_app
def dump(
    app: App,
    target: str | None,
    group: str | None,
    name: str | None,
    leave_running: bool,
    labels: dict[str, str],
    with_files: tuple[str, ...],
    with_workspace: bool,
    carry_binaries: bool,
    connections: str | None,
    drain: float,
    precopy: bool,
    require: tuple[str, ...],
    max_freeze: float | None,
    no_encrypt: bool,
) -> int:
    """Freeze the process tree under TARGET, write a complete image of it into the store, and then
    end the tree, or let it run on with --leave-running. criuctl finds the options that CRIU needs
    for this tree.

    Everything that can be checked is checked before the tree is frozen: the host, the tree (see
    `criuctl check`), that the store can be written and that the key is the right one. The tree is
    ended only after the checkpoint is complete and durable in the store. If anything fails, the
    tree goes on running, or a complete checkpoint exists. A transient obstacle, for example a
    process that is just ending, is retried up to five times, and the tree runs in between.

    With --connections reconnect, or a rule that says so, the peers of idle connections are asked,
    while the tree is frozen, which state they hold for the session. A connection whose session
    cannot be set up again is hung up at the restore (or refused, by the rule), and the reason is in
    the checkpoint. See `criuctl connections`.

    A tree that is to end stays frozen until its checkpoint is durable in the store: --pre-copy
    makes that short. Each of its rounds stores the changes since the round before. Rounds end when
    the changes are stored in 0.3 seconds, when rounds do not get smaller (the tree writes faster
    than the store takes), or after the fifth.

    With --carry-binaries, if one of the tree's programs and libraries is missing or different at a
    restore, the tree gets its own version in a private mount namespace: the host's files stay as
    they are, and nothing is left when the tree ends. Programs that the tree starts later see these
    versions too. Files that are not mapped, such as scripts and modules, need --with-files. In a
    tree with processes of users other than root, set-uid programs then run without their owners'
    rights; and a file that does not belong to root is never put into a folder of root's, nor to the
    target of a user's link.

    A --require is checked just before the freeze, and is in the checkpoint; a requirement that does
    not hold then is refused. Commands are run by sh, as criuctl's user, for hook_timeout seconds at
    most. At a restore they are run on the host that took the checkpoint, and on hosts whose
    configuration has the same command under `predicates`; elsewhere the checkpoint counts as stale.

    A store that does not answer, or a hook or holder that hangs, cannot keep the tree frozen for
    ever: see --max-freeze. The time begins when CRIU stops the first process. A tree that is to end
    waits for its checkpoint, however large it is and however slow the store, so that limit is high;
    for a tree that continues, being frozen is the harm itself.

    The configured store is made at its first use if its folder is empty or absent, encrypted by a
    key whose path is printed then, once: keep a copy of it elsewhere. A store that --store names
    must exist (`criuctl store init`).

    With --group all members of a group are dumped at one moment, and all end, or none. See
    `criuctl help linked-sessions`.

    Content that the store has already, for example from an earlier dump of the same tree, is not
    stored again.
    """
    only_with_group(group, target, "TARGET", name=name, pre_copy=precopy, drain=drain)
    with app.store_coming() if group is None else nullcontext(), app.reporting() as reporter:
        from ...dump.job import DumpRequest
        from ...dump.story import dump as dump_tree

        request = DumpRequest(
            name=name,
            leave_running=leave_running,
            labels=labels or {},
            with_files=with_files,
            with_workspace=with_workspace,
            carry_binaries=carry_binaries,
            connections=connections,
            drain=drain,
            precopy=precopy,
            require=require,
            max_freeze=max_freeze,
        )
        config = app.config.with_options(plain_store=no_encrypt or None)
        if group is not None:
            from ...ops.group_snapshot import snapshot_group

            stored = snapshot_group(config, group, request=request, reporter=reporter)
            return print_stored(app, stored, outcome_line)
        assert target is not None
        result = dump_tree(config, target, request=request, reporter=reporter)
    body = result.to_dict()
    ended = "" if leave_running else _come_back(app, result)
    lost = unheard(
        lambda: app.emit(body, lambda: _outcome(body, ended), brief=lambda: str(body["checkpoint"]))
    )
    return DEGRADED if result.degraded or lost else 0
