"""CRIU's lock on the TCP connections of a tree that it dumps.

The lock is a firewall table in the tree's network namespace.
"""

from __future__ import annotations

import socket

from ..criu import driver
from ..errors import CriuctlError
from ..proc import netfilter
from ..proc.namespace_sockets import socket_inside
from ..report import Reporter
from .parts import TreeParts


class ConnectionLock:
    """The table of one dump.

    CRIU removes it, with two exceptions: CRIU ended the tree, whose connections must send nothing
    before a restore, or CRIU was killed.
    """

    def __init__(self, parts: TreeParts, folder: int, reporter: Reporter) -> None:
        """`folder`: the folder of CRIU's images, which hold the id of its run."""
        self._parts, self._folder, self._reporter = parts, folder, reporter

    @property
    def table(self) -> str:
        """Return the name of the table, "" if there is none."""
        run_id = driver.run_id(self._folder) if self._parts.survey.shield else None
        return netfilter.criu_table(run_id) if run_id is not None else ""

    def remove(self) -> None:
        """Remove the table; a failure is a warning."""
        if table := self.table:
            try:
                netfilter.delete_table(table, self._socket)
            except CriuctlError as error:
                self._reporter.warning(error.message, error.hint)

    def _socket(self, family: int, kind: int, protocol: int) -> socket.socket:
        return socket_inside(self._parts.net, family, kind, protocol)
