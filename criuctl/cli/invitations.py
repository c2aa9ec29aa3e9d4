"""Invitations of ``criuctl share`` on a command line, for `attach` and `ui`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .extras import need

if TYPE_CHECKING:
    from ..share.invitation import Invitation


def invitation(text: str) -> Invitation:
    """Return the invitation of ``share://...``; ``share:`` asks for it at the terminal, where no
    other user sees it. `UsageError`, `PlatformError`.
    """
    need("share", "asyncssh")
    from ..share.invitation import Invitation

    if text == "share:":
        text = click.prompt("Invitation", hide_input=True, err=True)
    return Invitation.parse(text)
