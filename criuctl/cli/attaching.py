"""Attaching, for `run`, `attach` and `restore --attach`: the session uses this terminal until it
ends or the user detaches.
"""

from __future__ import annotations

import contextlib
import os

from ..config import Config
from ..errors import SessionGone, UsageError
from ..session import names
from ..session.client.attach import Attachment
from ..session.client.local_terminal import NotShown
from ..session.client.notices import leaving_text, say
from ..session.client.reconnect import Connect
from ..session.client.session import Session
from ..session.sessions import around
from . import nesting
from .app import App
from .streams import ResultLost


def attach_to(
    app: App,
    name: str,
    connect: Connect,
    *,
    read_only: bool = False,
    take: bool = False,
    start: int | None = None,
    quiet: bool = False,
    update_env: bool = False,
    patience: float = 10.0,
    session: Session | None = None,
    guest: bool = False,
) -> int:
    """Attach to session `name`; return the session's exit code, or 0 after the detach key.

    `start` shows the log from that offset instead of the current screen; `quiet` prints no message
    when the session ends; `update_env` brings it this terminal's variables. As a `guest` of a
    share, this terminal goes to no other host, and gives its clipboard only if all may have it.
    """
    key = app.config.detach_key
    with contextlib.ExitStack() as stack:

        def follow(url: str) -> Connect:
            from ..session.client.remote import Remote

            remote = Remote.parse(url, app.config)
            stack.callback(remote.close)
            role = "observe" if read_only else "admin" if take else "write"
            return lambda resume: remote.connect(role, resume)

        if session is None:
            try:
                session = connect(None)
            except SessionGone as gone:
                if not gone.details.get("moved_to"):
                    raise
                say(f"criuctl: moved to {gone.details['home']}")
                connect, patience = follow(gone.details["moved_to"]), 3600.0
                session = connect(None)
        own = around(app.config)
        nesting.check(app.config, own, session)
        greeting = update_environment(app.config, session) if update_env else ""
        attachment = Attachment(
            name,
            connect,
            key,
            within=own["id"] if own is not None else "",
            greeting=greeting,
            clipboard="none"
            if guest and app.config.clipboard == "writers"
            else app.config.clipboard,
            read_only=read_only,
            take=take,
            start=start,
            patience=patience,
            follow=None if guest else follow,
        )
        if start == 0 and key and not app.quiet and all(os.isatty(fd) for fd in (0, 1, 2)):
            say(leaving_text(name, key))  # before the program has the screen
        try:
            ended = attachment.run(session)
        except NotShown as error:
            raise ResultLost(
                f"the session's output could not be written: {error.strerror}"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                attachment.session.leave()
    if ended.how == "detached":
        say(f"detached from {name}")
        return 0
    if ended.how == "lost" or ended.exit_code is None:
        raise SessionGone(f"session {name!r} is lost: {ended.text or 'how it ended is not known'}")
    if not quiet:
        say(f"{name} ended with exit code {ended.exit_code}")
    return ended.exit_code


def update_environment(config: Config, session: Session) -> str:
    """Bring the variables of the configuration to the session; return a report.

    One that this terminal does not have is removed there.
    """
    if "environment" not in session.hello["features"]:
        raise UsageError("the session's holder is older than --update-env")
    variables = {name: os.environ.get(name) or None for name in config.update_environment}
    if socket := variables.get(names.AGENT_SOCKET):
        # In a session it is a link, which would lead to itself in another one.
        variables[names.AGENT_SOCKET] = os.path.realpath(socket)
    answer = session.request("update-environment", variables=variables)
    report = f"brought up to date: {', '.join(answer['taken']) or 'nothing'}"
    if answer["refused"]:
        report += f"; the session does not take {', '.join(answer['refused'])}"
    return report
