"""``criuctl attach``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from ...errors import UsageError
from .. import complete
from ..app import App, pass_app
from ..pages import page
from ..sessions import command_argument

if TYPE_CHECKING:
    from ...config import Config
    from ...session.client.session import Session


@page(
    examples=[
        ("Come back to a session:", "criuctl attach build"),
        ("Watch what an agent does, without touching it:", "criuctl attach agent --read-only"),
        ("Come back to it, or start it:", "criuctl attach work -- bash"),
        ("On another host:", "criuctl attach ssh://me@build.example.com/work"),
    ],
    exits=[3, 9, 10],
    see_also=["run", "ls", "send", "capture"],
)
@click.argument(
    "name",
    shell_complete=complete.session,
    help="The session's name, or ssh://[USER@]HOST[:PORT]/NAME.",
)
@click.option(
    "--read-only", is_flag=True, help="Only look: nothing is typed, the window keeps its size."
)
@click.option(
    "--take",
    is_flag=True,
    help="Take the write lease from whoever holds it.  [default: type once it is free]",
)
@click.option(
    "--stdio",
    is_flag=True,
    help="Carry the holder's protocol on standard input and output, for ssh://.",
)
@command_argument(required=False, help="Start this as the session NAME if there is none.")
@pass_app
def attach(
    app: App, name: str, read_only: bool, take: bool, stdio: bool, command: tuple[str, ...]
) -> int:
    """Shows a session on this terminal and types into it; any number of terminals can do so at a
    time. One of them
    writes: it holds the write lease, and the session's window has its size. The others see the
    same.

    The screen is drawn as it is now, full-screen programs included, with what it scrolled by in
    this terminal's own scrollback. The detach key (detach_key in the configuration, C-] by default)
    leaves the session running; in pasted text it is text. When the session ends, the exit status is
    its own.

    A session that is checkpointed meanwhile says so and goes on here when it is restored on this
    host; one that moves to another host is followed there, over ssh. A connection that is lost is
    made again, and continues where it broke.

    Who may look, write or take is what each client says of itself: all processes of the session's
    user, and root, may do everything. Roles and the lease keep those apart who want to be; they
    protect from no process of the same user.
    """
    from ..attaching import attach_to

    if app.json:
        raise UsageError(
            "attach has no JSON: standard output is the session's",
            hint="`criuctl capture NAME --json` has.",
        )
    if read_only and take:
        raise UsageError("--read-only and --take contradict each other")
    role = "observe" if read_only else "admin" if take else "write"
    if name.startswith("ssh://"):
        from ...session.client.remote import Remote

        if command or stdio:
            raise UsageError(
                "a session on another host is started there: `ssh HOST criuctl run ...`"
            )
        remote = Remote.parse(name, app.config)
        try:
            return attach_to(
                app,
                remote.name,
                lambda resume: remote.connect(role, resume),
                read_only=read_only,
                take=take,
                patience=3600.0,
            )
        finally:
            remote.close()
    from ...ops.sessions import ended, run
    from ...session.sessions import inside

    if stdio:
        from ...session.client.remote import relay

        relay(app.config, name)
        return 0
    if inside(app.config) == name:
        raise UsageError(
            f"this terminal is inside of session {name!r}", hint="Attach from outside of it."
        )

    connect = partial(_connect, app.config, name, role)
    if command and ended(app.config, name):
        from ...session.client.local_terminal import Terminal

        size = Terminal().size
        run(app.config, command, name=name, size=size[:2] if size is not None else (24, 80))
        return attach_to(app, name, connect, read_only=read_only, take=take, start=0)
    return attach_to(app, name, connect, read_only=read_only, take=take)


def _connect(config: Config, name: str, role: str, resume: tuple[str, str] | None) -> Session:
    from ...ops.sessions import connect

    return connect(config, name, role=role, resume=resume)
