"""How a dump holds the connections of its tree, noted for the next dump or restore, should criuctl
and CRIU be killed together.

CRIU locks them in the firewall and puts them into repair mode, and undoes that when criuctl is
killed; criuctl does when CRIU is.  When both are (what is killed is a control group, or a unit that
does not stop), the tree runs on and nobody can reach it.  So for as long as CRIU has the
connections a file tells of them, locked by this criuctl (`criuctl.proc.locks`).  Who finds one that
nobody holds any more does what is left to do.

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
from ..proc.sockdiag import namespace_socket
from ..proc.tree import ProcessIdentity
from .registry import SHIELDS, boot_id, run_folder


class _Shield(Struct):
    """What such a file says."""

    boot: str
    pid: int  # of the tree's root
    start_time: int
    table: str
    sockets: list[Mendable]


@contextmanager
def noted(
    config: Config, root: ProcessIdentity, table: str, sockets: Sequence[Mendable]
) -> Iterator[None]:
    """While inside, CRIU has these; without a place for the note it goes without."""
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
        except ValueError:  # it was killed before all was written, and CRIU could begin
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
