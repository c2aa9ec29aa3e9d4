"""The GPUs of a tree that is restored: each process gets its device back before anything of the
program runs.

CRIU has restored the tree and has not let it run yet.  The driver's work is done by a thread of
each process, its *restore thread*, so that one must run, and nothing else may: a program that
touched its device now would end (JAX does at once).  Hence the order in `bring_back`:

1. every process is set to stop at its first step, then CRIU ends (`criuctl.proc.heldthreads`);
2. all threads but the restore threads are held;
3. the driver restores all processes, in parallel, and unlocks them;
4. `release`, when everything else is settled.

A failure ends the tree: nothing of it has run.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Self

from ..checkpoint.gpu_records import GpuRecord
from ..errors import CriuctlError, NoSuchProcess, RestoreFailed
from ..gpu.driver_process import Answer, DriverProcess
from ..host.gpus import HostGpus, gpu_facts, judge
from ..proc.credentials import Credentials
from ..proc.file_access import access_of, may_open
from ..proc.heldthreads import HeldThreads
from ..proc.namespaces import ns_pids
from ..proc.procfs import all_tids
from ..proc.reopen import reopen
from ..proc.trustedpath import opened
from ..report import Finding, Reporter

_MOVE = 900.0  # seconds for the driver to move all device memory


class RestoredDevices:
    """The GPUs of one checkpoint on this host; a context manager, which closes the driver's
    helper.
    """

    def __init__(self, record: GpuRecord, reporter: Reporter) -> None:
        self._record, self._reporter = record, reporter
        self._stack = ExitStack()
        self._driver: DriverProcess | None = None
        self._held: HeldThreads | None = None
        self._pairs: dict[str, str] = {}
        self.timings: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def judge(self) -> list[Finding]:
        """Report what this host lacks for them."""
        findings, self._pairs = judge(self._record, self._host())
        return findings

    def _host(self) -> HostGpus:
        if not self._record.processes:
            return HostGpus()
        try:
            driver = self._driver = self._stack.enter_context(DriverProcess())
            if driver.error:
                return HostGpus(error=driver.error)
            free = sum(device.free for device in driver.use())
            return HostGpus(
                driver=driver.driver, api=driver.api, devices=driver.devices(), free=free
            )
        except CriuctlError as error:
            return HostGpus(error=str(error))

    def reopen(self, pids: Mapping[int, int], users: Mapping[int, Credentials]) -> None:
        """Open devices that were open without use; the tree is in place, and has not run.

        `pids`: PID in the tree -> PID on this host; `users`: the future credentials of each
        process, by its PID in the tree.  CRIU has not given it its user yet, so what its user may
        open is judged here, and only if root alone controls the path, so that the process opens
        what was judged.
        """
        for one in self._record.opened:
            try:
                with opened(one.path) as place:
                    if place.way_fault is not None:
                        raise PermissionError(errno.EACCES, place.way_fault.reason, one.path)
                    if not may_open(users[one.pid], place.walked, access_of(one.flags)):
                        raise PermissionError(errno.EACCES, "its user may not open it", one.path)
                reopen(pids[one.pid], one.path, one.flags, [(one.fd, one.cloexec)])
            except (OSError, KeyError, CriuctlError) as error:
                self._reporter.warning(
                    f"PID {one.pid}: {one.path} (fd {one.fd}) is /dev/null now: {error}"
                )

    @property
    def needed(self) -> bool:
        """Return whether a process has device memory to get back."""
        return bool(self._record.processes)

    def bring_back(
        self, pids: Mapping[int, int], stopped: Collection[int], end_criu: Callable[[], bool]
    ) -> None:
        """Give the processes their devices before they run; CRIU still holds the tree.
        `RestoreFailed`.

        `stopped`: PIDs in the tree of processes that job control had stopped: they do not run
        anyway.
        """
        assert self._driver is not None  # `judge` has started it, or refused
        outer = [pids[p.pid] for p in self._record.processes if p.pid in pids]
        if len(outer) < len(self._record.processes):
            raise RestoreFailed("a process that used a GPU has ended before it got its device back")
        free = {self._thread(pids[p.pid], p.thread) for p in self._record.processes}
        self._held = HeldThreads([pid for inner, pid in pids.items() if inner not in stopped], free)
        self._held.stop()
        if not end_criu():
            raise RestoreFailed(
                "CRIU could not be ended, so the threads of the tree could not be held"
            )
        try:
            self._held.hold()
            self._reporter.step("gpu-restore", processes=outer)
            self._call("restore", outer, self._pairs)
            self._reporter.step("gpu-unlock")
            self._call("unlock", outer)
        except BaseException:
            self._held.kill()
            raise

    def facts(self) -> dict[str, Any]:
        """Return the facts for the result of the restore."""
        return gpu_facts(self._record, self.timings)

    def release(self) -> None:
        """Let the tree run."""
        if self._held is not None:
            self._held.release()

    def _call(self, what: str, pids: list[int], pairs: Mapping[str, str] | None = None) -> None:
        assert self._driver is not None
        began = time.monotonic()
        answers: dict[int, Answer] = self._driver.each(what, pids, _MOVE, pairs=pairs)
        self.timings[f"{what}_ms"] = round((time.monotonic() - began) * 1000, 1)
        for pid, answer in answers.items():
            if not answer.ok:
                raise RestoreFailed(
                    f"NVIDIA's driver could not {what} PID {pid} ({answer.name}); nothing is "
                    "left of it",
                    hint=(
                        "`nvidia-smi` shows whether its devices have room; `criuctl restore` can "
                        "be tried again."
                    ),
                )

    @staticmethod
    def _thread(pid: int, inner: int) -> int:
        """Return the thread's ID on this host; `inner` is its ID in the tree."""
        for tid in all_tids(pid):
            with suppress(NoSuchProcess):
                if ns_pids(tid)[-1] == inner:
                    return tid
        raise RestoreFailed(f"PID {pid} lacks its thread {inner}, which gives it its GPU back")
