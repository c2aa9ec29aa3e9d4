"""A session that another host shares, in the page of the guest.

The page's server runs at the guest, who opens it on the same machine; what crosses the relay is the
holder's protocol inside the share's own ssh, as with `criuctl attach`. So no page, no script and no
token comes from the relay, and TLS, with a certificate that a browser would have to be made to
trust, is not needed. What the sharing host sends is as untrusted as that of any other host.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from ..errors import CriuctlError, NotFound
from ..report import utc_text
from ..session.client.session import Session
from ..share.guest import Guest
from ..share.invitation import Invitation
from ..transport import ssh
from .hosts import Connect, OtherHost, careful
from .remote_terminal import GuardedSession
from .views import Desk

_PATIENCE = 20.0  # seconds for an answer
_COPIED = ("session", "state", "incarnation", "exit_code", "exit_signal", "command", "labels")


class SharedHost(OtherHost):
    """A share, as a host with one session."""

    def __init__(self, invitation: Invitation, desk: Desk) -> None:
        where = ssh.Address(invitation.host, str(invitation.port), "")
        own = Desk(careful(desk.config), desk.read_only, desk.reporter)
        super().__init__(ssh.Host(invitation.name, where), own)
        self._guest = Guest(invitation, session=GuardedSession)
        self._asked: Session | None = None  # the connection that is asked for the status

    def look(self) -> dict[str, Any]:
        """As of any host; there is no command for the rest."""
        return super().look() | {"command": ""}

    def terminal(self, name: str) -> Connect:
        """Return what connects to the session, if that is its name."""
        if self._sessions is not None and name not in [one["session"] for one in self._sessions]:
            raise NotFound("this share is of another session")

        def connect(*, role: str, operator: str = "") -> Session:
            assert not operator
            return self._guest.connect(role=role)

        return connect

    def _run(self) -> bytes:
        """Return the list of the one session."""
        try:
            if self._asked is None:
                self._asked = self._guest.connect(role="observe")
            status = self._asked.request("status", timeout=_PATIENCE)["status"]
        except CriuctlError:
            if self._asked is not None:
                self._asked.close()
                self._asked = None
            raise
        since = status.get("since")
        one = {key: status[key] for key in _COPIED if key in status}
        one["since"] = utc_text(since) if isinstance(since, int | float) else None
        return json.dumps([one | {"holder": True}]).encode()

    def close(self) -> None:
        """Leave the share."""
        super().close()
        with suppress(OSError):
            if self._asked is not None:
                self._asked.break_off()
        self._guest.close()
