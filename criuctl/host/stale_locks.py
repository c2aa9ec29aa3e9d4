"""Remove what killed dumps have left on this host; done by the next command."""

from __future__ import annotations

from msgspec.structs import replace

from ..config import Config
from ..errors import Conflict
from ..proc import locks, netfilter
from .registry import (
    GPUS,
    LOCKS,
    RESTORING,
    SHIELDS,
    Registry,
    boot_id,
    exclusive_session,
    run_folder,
)


def forget_stale_locks(config: Config) -> None:
    """Remove the firewall tables of killed dumps, and the files of criuctl's locks that are not
    held.
    """
    locks.sweep(run_folder(config, LOCKS))
    if any(True for _ in locks.left(run_folder(config, SHIELDS))):
        from . import connection_locks  # seldom

        connection_locks.sweep(config)
    if any(True for _ in locks.left(run_folder(config, GPUS))):
        from . import gpu_notes  # seldom

        gpu_notes.sweep(config)
    registry = Registry(config)
    for name in [record.name for record in registry.locked() if not record.lock_kept]:
        try:
            with exclusive_session(config, name):
                # as the previous holder of the lock has left it
                record = registry.get(name, restoring=True)
                if record is None or not record.lock_table or record.lock_kept:
                    continue
                if record.boot_id == boot_id():
                    netfilter.delete_table(record.lock_table)
                if record.state == RESTORING:  # a killed copy: none of it is left
                    registry.forget(name)
                else:
                    registry.put(replace(record, lock_table=""))
        except Conflict:
            continue  # that dump still runs
