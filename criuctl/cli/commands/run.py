"""``criuctl run``."""

from __future__ import annotations

import re
from collections.abc import Mapping

import click

from ...errors import UsageError
from ..app import App, pass_app
from ..grouping import group_option
from ..pages import page
from ..sessions import command_argument, environment_variables
from ..streams import tell
from ..text import printable
from .dump import parse_labels


def _size(
    _ctx: click.Context, _param: click.Parameter, value: str | None
) -> tuple[int, int] | None:
    """Parse ``COLSxROWS`` as rows and columns."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,4})x(\d{1,4})", value)
    if match is None or not int(match[1]) or not int(match[2]):
        raise click.BadParameter(f"{value!r} is not COLUMNSxROWS, like 80x24")
    return int(match[2]), int(match[1])


@page(
    examples=[
        ("A build that outlives the login, watched now:", "criuctl run --name build -- make -j8"),
        ("In the background; its name is printed:", "criuctl run -d --name web -- npm run dev"),
        ("A shell to come back to:", "criuctl run --name work -- bash"),
    ],
    exits=[3, 9, 12],
    see_also=["attach", "ls", "dump", "kill"],
)
@click.option(
    "--name",
    metavar="NAME",
    help="The session's name.  [default: after the command: bash, bash-2, ...]",
)
@click.option(
    "-d",
    "--detach",
    is_flag=True,
    help="Leave at once; the name is printed.  [default: stay attached]",
)
@click.option(
    "--host-pids",
    is_flag=True,
    help=(
        "Share the host's PIDs, System V and POSIX IPC.  [default: PID and IPC namespaces of its "
        "own]"
    ),
)
@click.option(
    "--no-io-uring",
    is_flag=True,
    help=(
        "Deny the session io_uring, which cannot be dumped; programs work without it, as in most "
        "containers.  [default: allowed]"
    ),
)
@click.option(
    "--mptcp",
    is_flag=True,
    help=(
        "Allow the session Multipath TCP, whose sockets cannot be dumped.  [default: denied; "
        "programs use TCP instead]"
    ),
)
@click.option(
    "--no-shell-hooks",
    is_flag=True,
    help=(
        "Start a shell without the hooks by which criuctl exec and wait --prompt know its prompt."
        "  [default: bash, zsh, fish, sh and dash get them]"
    ),
)
@click.option(
    "--label",
    "labels",
    metavar="KEY=VALUE",
    multiple=True,
    callback=parse_labels,
    help="Keep this label with the session; may be given several times.",
)
@group_option(
    "Put it into this group: sessions that are stored and restored together (criuctl snapshot "
    "--group).  [default: none]"
)
@click.option(
    "--env",
    "variables",
    metavar="KEY=VALUE",
    multiple=True,
    callback=environment_variables,
    help="A variable of its environment besides; may be given several times.  [default: this "
    "command's environment, see below]",
)
@click.option(
    "--workspace",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Start in this folder, which is the session's own: it travels along when the session is "
    "migrated.  [default: the current folder, which does not]",
)
@click.option(
    "--cwd",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Start in this folder.  [default: that of --workspace, else the current folder]",
)
@click.option(
    "--size",
    metavar="COLSxROWS",
    callback=_size,
    help="The terminal's size at first.  [default: this terminal's, else 80x24]",
)
@command_argument(required=True, help="The command and its arguments.")
@pass_app
def run(
    app: App,
    name: str | None,
    detach: bool,
    host_pids: bool,
    no_io_uring: bool,
    mptcp: bool,
    no_shell_hooks: bool,
    labels: Mapping[str, str],
    group: str | None,
    variables: Mapping[str, str],
    workspace: str | None,
    cwd: str | None,
    size: tuple[int, int] | None,
    command: tuple[str, ...],
) -> int:
    """Start CMD as a session: with its own terminal, under a small process that belongs to no login
    and no client. The session continues when this command, its terminal or its connection ends.

    By default this terminal is attached, and the exit status is the session's own (3 as well when
    there is no such command). The detach key (detach_key in the configuration, C-] by default)
    leaves the session running; criuctl attach comes back.

    Inside, CRIUCTL_SESSION is the name, and session.json in the folder CRIUCTL_SESSION_DIR contains
    the incarnation.

    The session inherits the environment, which is then part of its checkpoints, but of the
    variables CRIUCTL_* only plain settings (folders, store, numbers): no passphrase, key, command
    or rule. AWS_* is inherited, as its program may use S3 itself; where criuctl's own store is on
    S3, a warning names the secret ones. --env sets a variable whatever it is. With --detach, a TERM
    that is missing or dumb, as in a job of cron, becomes xterm-256color.
    """
    from ...ops.groups import grouped
    from ...ops.new_session import run as start
    from ...ops.sessions import connect
    from ...session.client.local_terminal import Terminal

    if app.json and not detach:
        raise UsageError("--json needs --detach: attached, standard output is the session's")
    labels = grouped(labels, group)
    here = Terminal().size
    session = start(
        app.config,
        command,
        name=name,
        size=size or (here[:2] if here is not None else (24, 80)),
        host_pids=host_pids,
        io_uring=not no_io_uring,
        mptcp=mptcp,
        hooks=not no_shell_hooks,
        labels=labels,
        workspace=workspace,
        cwd=cwd,
        more_env=variables,
        detached=detach,
    )
    if not app.json and not app.quiet:
        for warning in session.warnings:
            tell(f"criuctl: warning: {printable(warning)}")
    if detach:
        body = session.to_dict()
        app.emit(body, lambda: printable(session.name))
        return 0
    from ..attaching import attach_to

    return attach_to(
        app,
        session.name,
        lambda resume: connect(app.config, session.name, resume=resume),
        start=0,
        quiet=True,
    )
