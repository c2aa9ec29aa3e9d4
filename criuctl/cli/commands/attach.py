"""``criuctl attach``."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import click

from ...errors import UsageError
from ...quoting import quoted
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
        ("As a guest, with the line of criuctl share:", "criuctl attach 'share://relay:2222/...'"),
    ],
    exits=[3, 7, 9, 10],
    see_also=["run", "ls", "send", "capture", "share"],
)
@click.argument(
    "name",
    shell_complete=complete.session,
    help="The session's name, ssh://[USER@]HOST[:PORT]/NAME, or an invitation of criuctl share; "
    "share: asks for that.",
)
@click.option(
    "--read-only", is_flag=True, help="Watch only: type nothing, and keep the window's size."
)
@click.option(
    "--take",
    is_flag=True,
    help="Take the write lease from its holder.  [default: type once it is free]",
)
@click.option(
    "--update-env",
    is_flag=True,
    help="Bring this terminal's SSH_AUTH_SOCK, DISPLAY and the like to the session.",
)
@click.option(
    "--via",
    metavar="HOST",
    help="With an invitation: log in to the relay by ssh, and reach the share from there: "
    "ssh://[USER@]HOST[:PORT], or a name under hosts in the configuration.  [default: connect to "
    "the address of the invitation]",
)
@click.option(
    "--stdio",
    is_flag=True,
    help="Carry the holder's protocol on standard input and output, for ssh://.",
)
@command_argument(required=False, help="Start this as the session NAME if there is none.")
@pass_app
def attach(
    app: App,
    name: str,
    read_only: bool,
    take: bool,
    update_env: bool,
    via: str | None,
    stdio: bool,
    command: tuple[str, ...],
) -> int:
    """Show a session on this terminal and type into it. Any number of terminals can do so at a
    time. One of them writes: it holds the write lease, and the session's window has its size. The
    others see the same output; one that is smaller shows the part of the screen around the cursor.

    The screen is drawn in its current state, full-screen programs included, and earlier output goes
    to this terminal's scrollback. The detach key (detach_key in the configuration, C-] by default)
    leaves the session running, and undoes what its programs have changed in this terminal; in
    pasted text it is ordinary text. When the session ends, its exit status is that of this command.

    When a session is checkpointed, this command reports it, and continues when the session is
    restored on this host. When it moves to another host, this command follows it there, over ssh. A
    lost connection is made again, and continues where it broke.

    A program keeps the environment that it was started with. --update-env takes the variables of
    update_environment in the configuration (where an ssh agent or a display is) from this terminal
    to what can still get them: commands of exec, a shell with hooks at its next prompt, and, for
    SSH_AUTH_SOCK, every program of the session, as it names a link that is changed. A running
    program does not see a new DISPLAY.

    An invitation of criuctl share attaches to a session of someone else's, by way of a relay that
    sees ciphertext only, with the role that it was made for. It can be used once: by this command,
    which also comes back with it after a lost connection. Arguments are visible to the users of
    this machine until then; share: asks for the line instead.

    Each client states its own role: all processes of the session's user, and root, may do
    everything. Roles and the lease prevent mistakes between clients; they do not protect from a
    process of the same user.
    """
    from ...ops.new_session import run
    from ...ops.sessions import ended
    from ..attaching import attach_to

    _check_options(app, name, read_only, take, update_env, stdio)
    if name.startswith("share:"):
        if command or stdio or take:
            raise UsageError("a guest attaches with the role of the share, and to nothing else")
        return _attach_as_guest(app, name, via, read_only)
    if via is not None:
        raise UsageError("--via is for an invitation of `criuctl share`")
    role = "observe" if read_only else "admin" if take else "write"
    if name.startswith("ssh://"):
        if command or stdio:
            raise UsageError(
                "a session on another host is started there: `ssh HOST criuctl run ...`"
            )
        return _attach_elsewhere(app, name, role)

    if stdio:
        from ...session.client.remote import relay

        relay(app.config, name)
        return 0
    connect = partial(_connect, app.config, name, role)
    if command and ended(app.config, name):
        from ...session.client.local_terminal import Terminal

        size = Terminal().size
        run(app.config, command, name=name, size=size[:2] if size else (24, 80), detached=False)
        return attach_to(app, name, connect, read_only=read_only, take=take, start=0)
    return attach_to(app, name, connect, read_only=read_only, take=take, update_env=update_env)


def _check_options(
    app: App, name: str, read_only: bool, take: bool, update_env: bool, stdio: bool
) -> None:
    """Raise `UsageError` for options that contradict each other, and where no one can type."""
    if app.json:
        raise UsageError(
            "attach has no JSON: standard output is the session's",
            hint="`criuctl capture NAME --json` has.",
        )
    if read_only and take:
        raise UsageError("--read-only and --take contradict each other")
    if update_env and (read_only or stdio or name.startswith(("ssh://", "share:"))):
        raise UsageError(
            "--update-env needs a session of this host, and the right to write",
            hint="On another host: `ssh -t HOST criuctl attach NAME --update-env`.",
        )
    if not (read_only or stdio or os.isatty(0)):
        raise UsageError(
            "attach types what it reads, and standard input is no terminal",
            hint=f"Watch with `criuctl capture {quoted(name)} --follow`, type with "
            f"`criuctl send {quoted(name)}`.",
        )


def _attach_elsewhere(app: App, name: str, role: str) -> int:
    """Attach to a session of another host, ``ssh://HOST/NAME``."""
    from ...session.client.remote import Remote
    from ..attaching import attach_to

    remote = Remote.parse(name, app.config)
    try:
        return attach_to(
            app,
            remote.name,
            lambda resume: remote.connect(role, resume),
            read_only=role == "observe",
            take=role == "admin",
            patience=3600.0,
        )
    finally:
        remote.close()


def _attach_as_guest(app: App, line: str, via: str | None, read_only: bool) -> int:
    """Attach by an invitation, or by the one that the user pastes."""
    from ..invitations import invitation

    there = invitation(line)
    from ...share.guest import Guest
    from ...transport import ssh
    from ..attaching import attach_to

    relay = ssh.Host.parse(via, app.config) if via is not None else None
    with Guest(there, relay, tuple(ssh.program(app.config)) if relay else ()) as guest:
        session = guest.connect()
        name = str(session.hello["status"]["session"])
        return attach_to(
            app,
            name,
            guest.connect,
            read_only=read_only or session.role == "observe",
            patience=3600.0,
            session=session,
            guest=True,
        )


def _connect(config: Config, name: str, role: str, resume: tuple[str, str] | None) -> Session:
    from ...ops.sessions import connect

    return connect(config, name, role=role, resume=resume)
