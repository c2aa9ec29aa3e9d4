"""Notes of connections that a dump holds, for the next command, in case criuctl and CRIU are killed
together.

CRIU locks the connections in the firewall and puts them into repair mode.  If criuctl is killed,
CRIU undoes that; if CRIU is killed, criuctl does.  If both are (a control group is killed, or a
unit that does not stop), the tree runs on and cannot be reached.  So while CRIU has the connections
a file records them, locked by this criuctl (`criuctl.proc.locks`).  A command that finds such a
file without a lock undoes the rest.

From when CRIU may end the tree, the session's record has the firewall table instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import msgspec
from msgspec import Struct

from ..config import Config
from ..connections.repair_mode import Mendable, mend
from ..errors import CriuctlError
from ..proc import locks, netfilter
from ..proc.namespace_sockets import namespace_socket
from ..proc.tree import ProcessIdentity
from .registry import SHIELDS, boot_id, run_folder


class _Shield(Struct):
    """The contents of such a file."""

    boot: str
    pid: int  # of the tree's root
    start_time: int
    table: str
    sockets: list[Mendable]


@contextmanager
def noted(
    config: Config, root: ProcessIdentity, table: str, sockets: Sequence[Mendable]
) -> Iterator[None]:
    """Note, while inside, that CRIU has these; without a place for the note it goes on without
    one.
    """
    path = run_folder(config, SHIELDS) / f"{root.pid}-{root.start_time}"
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(locks.held(path))
            path.write_bytes(
                msgspec.json.encode(
                    _Shield(boot_id(), root.pid, root.start_time, table, list(sockets))
                )
            )
        yield


def sweep(config: Config) -> None:
    """Undo what killed dumps have left."""
    for path in locks.left(run_folder(config, SHIELDS)):
        try:
            shield = msgspec.json.decode(path.read_bytes(), type=_Shield)
        except ValueError:  # it was killed before all was written, and before CRIU could begin
            shield = None
        if shield is not None and shield.boot == boot_id():
            try:
                _undo(shield)
            except CriuctlError:
                continue  # the next one tries again
        path.unlink()


def _undo(shield: _Shield) -> None:
    lives = ProcessIdentity(shield.pid, shield.start_time).alive()
    mend(shield.sockets)  # even if the table stays
    netfilter.delete_table(shield.table, partial(namespace_socket, shield.pid if lives else None))
