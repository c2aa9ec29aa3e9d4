"""Notes of GPUs that a dump has taken from processes, for the next command, in case criuctl and its
helper are killed.

While a dump has the devices of a tree, a file lists the processes, locked by this criuctl
(`criuctl.proc.locks`).  A note without a lock is of a killed dump: `sweep` gives the devices back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import msgspec
from msgspec import Struct

from ..config import Config
from ..errors import CriuctlError
from ..gpu import driver_process
from ..gpu.driver_process import DriverProcess
from ..proc import locks
from ..proc.tree import ProcessIdentity
from .registry import GPUS, boot_id, run_folder

MOVE_SECONDS = 900.0  # for the driver to move all device memory


class _Note(Struct):
    """The contents of a note: the processes whose devices this criuctl has taken."""

    boot: str
    processes: list[tuple[int, int]]  # PID, start time


@contextmanager
def noted(config: Config, processes: Iterable[ProcessIdentity]) -> Iterator[None]:
    """Note, while inside, that these processes may be without their devices; without a place for
    the note it goes on without one.
    """
    listed = [(identity.pid, identity.start_time) for identity in processes]
    path = run_folder(config, GPUS) / f"{listed[0][0]}-{listed[0][1]}-{len(listed)}"
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(locks.held(path))
            path.write_bytes(msgspec.json.encode(_Note(boot_id(), listed)))
        yield


def sweep(config: Config, driver: Callable[[], DriverProcess] = DriverProcess) -> None:
    """Give back the devices of a killed dump whose helper was killed as well."""
    for path in locks.left(run_folder(config, GPUS)):
        try:
            note = msgspec.json.decode(path.read_bytes(), type=_Note)
        except ValueError:  # it was killed before all was written, and nothing was locked yet
            note = _Note("", [])
        alive = [pid for pid, start in note.processes if ProcessIdentity(pid, start).alive()]
        if note.boot == boot_id() and alive:
            try:
                with driver() as one:
                    for pid in alive:
                        state = one.state(pid).number
                        if state == driver_process.CHECKPOINTED:
                            one.each("restore", [pid], MOVE_SECONDS)
                        if state in (driver_process.LOCKED, driver_process.CHECKPOINTED):
                            one.each("unlock", [pid], MOVE_SECONDS)
            except CriuctlError:
                continue  # the next one tries again
        path.unlink()
