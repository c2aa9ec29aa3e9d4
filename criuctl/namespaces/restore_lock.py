"""The firewall lock of a restore: no packet of the tree's kept connections may pass before all of
it is restored.

The first packet of a restored socket would otherwise reach a peer that is not restored yet, and the
connection would be reset.  The table has the name that CRIU gave it at the dump, so CRIU itself
removes it when the tree is complete; `unlock` is for every path on which CRIU does not get that
far.  Sockets that come back unconnected are not in it: their packets pass when `hand_back` connects
them.
"""

from __future__ import annotations

import socket

from msgspec import Struct

from ..criu import socketimages
from ..criu.images import ImageSet
from ..errors import CriuctlError
from ..proc import netfilter
from ..proc.namespace_sockets import socket_inside
from ..report import Reporter

_NEXT = "The next `criuctl dump` or `restore` takes it down."


def table_of(images: ImageSet) -> str:
    """Return the name of the table that a restore from `images` will lock connections with; "" if
    it locks none.
    """
    run_id = images.run_id()
    return (
        netfilter.criu_table(run_id)
        if run_id is not None and socketimages.connections(images)
        else ""
    )


class ConnectionLock(Struct):
    """The lock on the connections in `images`, in the net namespace that the tree gets."""

    images: ImageSet
    reporter: Reporter
    net: int | None = None  # descriptor of that namespace; None for criuctl's
    # a namespace made for the tree, which `net` does not lead to and which ends with it
    fresh: bool = False
    stood: bool = False  # the dump's own lock was still there

    def make(self, enter: list[str]) -> None:
        """Lock; CRIU unlocks.  `enter` is the command that enters the namespace."""
        pairs = socketimages.connections(self.images)
        run_id = self.images.run_id()
        if run_id is None:
            return
        table = netfilter.criu_table(run_id)
        # The dump's own lock still stands while a connection is to be kept. It is on all
        # connections of the dump, and a reconnected one might get its old port again: the lock
        # becomes one on the kept ones, without a moment in between.
        self.stood = not self.fresh and table in netfilter.tables(self._socket)
        if pairs:
            netfilter.lock_connections(table, pairs, enter=enter, replace=self.stood)
        elif self.stood:
            netfilter.delete_table(table, self._socket)

    def remove(self, *, failed: bool) -> bool:
        """Remove the lock, which CRIU does only on success; after a failure the dump's own stays
        for the next try.

        Return whether it could be removed, if that was to be done.
        """
        run_id = self.images.run_id()
        if run_id is None or self.fresh or (failed and self.stood):
            return True
        try:
            netfilter.delete_table(netfilter.criu_table(run_id), self._socket)
        except CriuctlError as error:
            self.reporter.warning(error.message, error.hint)
            return False
        except OSError as error:
            self.reporter.warning(
                f"the lock on the connections could not be taken down: {error.strerror or error}",
                _NEXT,
            )
            return False
        return True

    def _socket(self, family: int, kind: int, protocol: int) -> socket.socket:
        if self.net is None:
            return socket.socket(family, kind, protocol)
        return socket_inside(self.net, family, kind, protocol)
