"""A home that stops its session before another host may take it over: ``supervise
--self-fence``.

A home that is cut off from the store cannot renew its lease, and does not see when another host
takes the session over. So after each renewal the holder of its session
(`session.holder.self_fence`) gets a time limit for the tree: until `SHARE` of the lease's time to
live has passed since that renewal was *begun*. Then it stops the tree. The rest of the time is for
the stopping itself, and for clocks that run at different speeds. When the lease is renewed after
all, no other host has the session, and the tree goes on; otherwise the copy is ended like any stale
copy.

The holder counts the time, so this also works when the supervisor is killed or stopped, or is busy
with a dump.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ...config import Config
from ...errors import CriuctlError, PreflightRefused, WrongState
from ...session.holder.self_fence import clock
from ..sessions import connect

if TYPE_CHECKING:
    from ...session.client.session import Session

SHARE = 0.75  # of the time to live
_AT_ONCE = 0.001
# OSError: on this side, for example no descriptor left, which must not stop the heartbeat
_TROUBLE = (CriuctlError, OSError)

__all__ = ["SHARE", "SelfFence", "clock"]


class SelfFence:
    """Sends time limits to the holder of one session; one thread at a time."""

    def __init__(self, config: Config, name: str, ttl: float) -> None:
        self._config, self._name, self._allowed = config, name, ttl * SHARE
        self._until: float | None = None
        self._session: Session | None = None

    @property
    def holds(self) -> bool:
        """Return whether the tree must be stopped by now."""
        return self._until is not None and clock() >= self._until

    def renewed(self, began: float) -> None:
        """Record that the lease was renewed; the renewal was begun at `began` by `clock`."""
        self._until = began + self._allowed
        # it has ended, or the next renewal goes to its new holder
        with suppress(*_TROUBLE):
            self._tell()

    def unknown(self) -> None:
        """Start the limit when the store has not answered since the session is here: it is unknown
        when its lease expires, if it does.
        """
        self._until = self._until or clock()
        with suppress(*_TROUBLE):
            # a former supervisor has had an answer
            if not self._connected().status()["self_fence"]:
                self._connected().request("self-fence", seconds=_AT_ONCE)

    def lifted(self) -> None:
        """Remove the limit: the lease does not expire any more."""
        self._until = None
        with suppress(*_TROUBLE):
            self._connected().request("self-fence", seconds=0)

    def check(self) -> None:
        """Raise `PreflightRefused` if no holder would stop the tree."""
        try:
            self._connected()
            self._tell()
        except WrongState:
            return  # it has ended just now, which its supervisor is about to see
        except CriuctlError as error:
            raise PreflightRefused(
                f"no holder could stop session {self._name!r} in time: {error.message}",
                hint=(
                    "--self-fence is for sessions whose terminal criuctl holds, as `criuctl run` "
                    "starts them."
                ),
            ) from error

    def close(self) -> None:
        """Disconnect from the holder, which continues to count."""
        if self._session is not None:
            session, self._session = self._session, None
            session.close()

    def _tell(self) -> None:
        left = self._until - clock() if self._until is not None else 0.0
        if left > 0:  # otherwise the renewal took so long that it allows no time
            try:
                # A holder that does not answer must not block the renewal of the lease.
                self._connected().request(
                    "self-fence", seconds=left, timeout=max(1.0, self._allowed / 3)
                )
            except _TROUBLE:
                self.close()  # its holder has changed since it was restored
                raise

    def _connected(self) -> Session:
        self._session = self._session or _connect(self._config, self._name)
        return self._session


def lift(config: Config, name: str) -> None:
    """Remove the limit of a former supervisor: the present one does not use it, and has renewed the
    lease.
    """
    with suppress(*_TROUBLE), _connect(config, name) as session:
        if session.hello["status"].get("self_fence"):
            session.request("self-fence", seconds=0)


def _connect(config: Config, name: str) -> Session:
    return connect(config, name, kind="service", role="admin", operator="criuctl-supervise")
