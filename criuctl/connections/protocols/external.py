"""An application protocol that is an executable of the operator's: a hook of phase ``reconnect``
(see `criuctl.hooks`).

It gets the socket unconnected and connects it itself.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Any

from ...checkpoint.connection_record import ConnectionRecord
from ...config import Config
from .. import secrets
from .base import CannotRebuild, PeerAway, Settings


class External:
    """The hook `name` as an `ApplicationProtocol`."""

    connects = True  # the hook connects the socket itself
    # data in flight is in the record (rqueue, wqueue): the hook decides whether its protocol can go
    # on
    any_time = True

    def __init__(self, config: Config, name: str, facts: Mapping[str, Any]) -> None:
        self.config = config
        self.name = name
        self.facts = facts  # about the restore, as for hooks of every phase

    def inspect(
        self, sock: socket.socket, record: ConnectionRecord, settings: Settings, deadline: float
    ) -> dict[str, Any]:
        """See `base.ApplicationProtocol`; a hook that needs facts finds them in its phase
        ``frozen``.
        """
        return {}

    def reconnect(
        self, sock: socket.socket, record: ConnectionRecord, settings: Settings, deadline: float
    ) -> dict[str, Any]:
        """See `base.ApplicationProtocol`."""
        # a restore without such a rule does not need it
        from ...hooks.reconnect import run_reconnect

        try:
            secret = secrets.resolve(settings.secret, timeout=max(0.1, deadline - time.monotonic()))
        except secrets.SecretUnavailable as error:
            raise CannotRebuild(error.message, hint=error.hint) from error
        answer = run_reconnect(
            self.config,
            self.name,
            sock.fileno(),
            record.to_dict(),
            options=settings.options,
            secret=secret,
            deadline=deadline,
            facts=self.facts,
        )
        if answer["outcome"] != "reconnected":
            kind = PeerAway if answer["retry"] else CannotRebuild
            raise kind(answer["reason"], hint=answer["hint"])
        data: dict[str, Any] = answer["data"]
        return data
