"""The GPUs of a tree that is dumped: taken before CRIU starts, given back when the tree runs on.

The driver moves each process's device memory into its ordinary memory; then CRIU finds no device
any more.  The order, and what each step must not leave behind:

1. *lock* every process, until no process with a context appears any more (a locked one can fork,
   but not start work on the device).  If one does not come to rest in time, all are unlocked: exit
   12.
2. *checkpoint* all, in parallel.  If the driver refuses one, all are given back: exit 5.
3. take away what forked children have inherited, and devices that are open without use.
4. run CRIU.  If the tree runs on, for whatever reason: *restore*, *unlock*.

If criuctl is killed, its helper does this: it gives everything back when criuctl's end of its
socket closes.  If both are killed, the next dump or restore finds the note that `noted` keeps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress

import msgspec

from ..checkpoint.gpu_records import GpuDescriptor, GpuDevice, GpuProcess, GpuRecord
from ..config import Config
from ..errors import (
    CommandFailed,
    CriuctlError,
    DumpFailed,
    NoSuchProcess,
    PreflightRefused,
    TimedOut,
)
from ..gpu import driver_process, survey, use
from ..gpu.devices import DeviceUse
from ..gpu.driver_process import Answer, DriverProcess
from ..gpu.holdings import Holdings
from ..gpu.hugepages import HugePages
from ..gpu.use import DeviceUser
from ..host.gpu_notes import MOVE_SECONDS, noted
from ..proc.descriptors import descriptors
from ..proc.mappings import mappings
from ..proc.namespaces import ns_pids
from ..proc.reopen import reopen, unmap
from ..proc.tree import ProcessIdentity, read_tree
from ..report import Reporter

_CALL = 10.0  # seconds that a lock may take beyond the time that the driver was given
_PAUSES = (0.2, 1.0, 2.0)  # seconds after a try to give a device back
_RUNS_ON = "; the tree runs on"
_ROUNDS = 5  # rounds of looking for processes that were started meanwhile


class DumpedDevices:
    """The GPUs of one tree in one dump; `close` it."""

    def __init__(
        self, config: Config, reporter: Reporter, root: int, *, max_freeze: float = 0.0
    ) -> None:
        """`max_freeze`: seconds that the driver may take to move the memory, 0: `MOVE_SECONDS`."""
        self._config, self._reporter, self._pid = config, reporter, root
        self._patience = min(max_freeze or MOVE_SECONDS, MOVE_SECONDS)
        self._stack = ExitStack()
        self._driver: DriverProcess | None = None
        self._held: dict[int, ProcessIdentity] = {}  # locked, by PID
        # (PID in criuctl's namespace, path and flags to open again)
        self._idle: list[tuple[int, GpuDescriptor]] = []
        self._record: GpuRecord | None = None
        self.taken_at = 0.0  # monotonic, when the first process was locked; 0 if there is none
        self.timings: dict[str, float] = {}
        self.lost: list[str] = []  # one sentence per process that has lost its device

    def take(self) -> None:
        """Lock and checkpoint every process of the tree that uses a device; on an error everything
        is given back.
        """
        users = self._users()
        if not users:
            return
        try:
            self._take(users)
        except BaseException as error:
            self.give_back()
            if isinstance(error, CriuctlError) and self.lost:
                error.message = f"{error.message.removesuffix(_RUNS_ON)}; {'; '.join(self.lost)}"
                error.args = (error.message,)
            raise

    def _take(self, users: Mapping[int, DeviceUser]) -> None:
        driver = self._driver = DriverProcess()
        self._stack.callback(driver.close)
        holdings = self._sorted(users)
        used = driver.use()
        self._reporter.step("gpu-lock", processes=[user.pid for user in holdings.contexts])
        for _ in range(_ROUNDS):
            new = [user.pid for user in holdings.contexts if user.pid not in self._held]
            if not new:
                break
            self._lock(new)
            holdings = self._sorted(self._users(), known=self._held)
        self._record = self._described(used)
        self._checkpoint()
        self._take_away(holdings)

    def _users(self) -> dict[int, DeviceUser]:
        opened, mapped = {}, {}
        for process in read_tree(self._pid):
            with suppress(NoSuchProcess):
                held = descriptors(process.pid) if not process.zombie else []
                # a program that closed its device may still have it mapped
                if any(use.opened_device(d) for d in held):
                    opened[process.pid], mapped[process.pid] = held, mappings(process.pid)
        return use.users(opened, mapped)

    def _sorted(self, users: Mapping[int, DeviceUser], known: Iterable[int] = ()) -> Holdings:
        assert self._driver is not None
        tree = read_tree(self._pid)
        parents, stopped = (
            {p.pid: p.ppid for p in tree},
            {p.pid for p in tree if p.state in ("T", "t")},
        )
        found = survey.survey(self._driver, users, parents, stopped)
        in_tree = tuple(user for user in found.left if user.pid in known)
        found = msgspec.structs.replace(
            found,
            contexts=found.contexts + in_tree,
            left=tuple(u for u in found.left if u not in in_tree),
        )
        for refused in (found.others, found.silent, found.left, found.failed):
            if refused:  # it was started since the preflight, which reports why
                pids = ", ".join(str(user.pid) for user in refused)
                raise PreflightRefused(
                    f"PID {pids} uses its NVIDIA device in a way that cannot be checkpointed",
                    hint=f"`criuctl check {self._pid}` says what it is, and what to do.",
                )
        return found

    def _lock(self, pids: list[int]) -> None:
        assert self._driver is not None
        seconds = self._config.gpu_lock_timeout
        self.taken_at = self.taken_at or time.monotonic()
        for pid in pids:
            self._held[pid] = ProcessIdentity.of(pid)
        self._stack.enter_context(noted(self._config, self._held.values()))
        answers = self._driver.each("lock", pids, seconds + _CALL, timeout_ms=int(seconds * 1000))
        for pause in _PAUSES:
            busy = [
                pid
                for pid, answer in answers.items()
                if answer.result == driver_process.ILLEGAL_STATE
            ]
            if not busy:
                break
            time.sleep(pause)  # the helper of a dump that was killed is giving it back
            answers |= self._driver.each(
                "lock", busy, seconds + _CALL, timeout_ms=int(seconds * 1000)
            )
        self._count("lock_ms", answers)
        for pid, answer in answers.items():
            if answer.result == driver_process.NOT_READY:
                raise TimedOut(
                    f"PID {pid}: its GPU has not come to rest within {seconds:g} s (a kernel "
                    "runs for longer); the tree runs on",
                    hint=(
                        "Dump it between two steps, or allow more time: `gpu_lock_timeout` in the "
                        "configuration."
                    ),
                )
            self._expect(pid, answer, "lock")

    def _checkpoint(self) -> None:
        assert self._driver is not None
        if not self._held:
            return
        self._reporter.step("gpu-checkpoint", processes=list(self._held))
        with HugePages(self._held):
            answers = self._driver.each("checkpoint", list(self._held), self._patience)
        self._count("checkpoint_ms", answers)
        for pid, answer in answers.items():
            self._expect(pid, answer, "checkpoint")

    @staticmethod
    def _expect(pid: int, answer: Answer, what: str) -> None:
        if answer.ok:
            return
        why = (
            "the program uses managed memory, peer access or shared memory of a device, which the "
            "driver cannot move"
        )
        raise DumpFailed(
            f"NVIDIA's driver could not {what} PID {pid} ({answer.name}); the tree runs on",
            hint=f"Most likely {why}." if answer.result == driver_process.NOT_SUPPORTED else "",
            pid=pid,
        )

    def _take_away(self, found: Holdings) -> None:
        """Take away descriptors and mappings that their holders cannot use, and that CRIU would
        refuse.
        """
        for user in found.inherited:
            self._empty(user)
        for user in found.idle:
            inner = ns_pids(user.pid)[-1]
            for d in user.opened:
                one = GpuDescriptor(
                    pid=inner, fd=d.fd, path=d.target, flags=d.flags, cloexec=d.cloexec
                )
                self._idle.append((user.pid, one))
            self._empty(user)
        if self._idle and self._record is not None:
            opened = tuple(one for _, one in self._idle)
            self._record = msgspec.structs.replace(self._record, opened=opened)
        if found.inherited:
            pids = ", ".join(str(user.pid) for user in found.inherited)
            self._reporter.warning(
                f"PID {pids}: GPU descriptors and mappings inherited from the parent were taken "
                "away",
                "They are of no use to a forked child.",
            )

    @staticmethod
    def _empty(user: DeviceUser) -> None:
        try:
            if user.opened:
                reopen(user.pid, "/dev/null", 2, [(d.fd, d.cloexec) for d in user.opened])
            if user.mapped:
                unmap(user.pid, [(m.start, m.end) for m in user.mapped])
        except (OSError, CriuctlError) as error:
            raise DumpFailed(
                f"PID {user.pid}: its GPU descriptors could not be taken away: {error}; the tree "
                "runs on"
            ) from error

    def _described(self, used: Iterable[DeviceUse]) -> GpuRecord:
        assert self._driver is not None
        processes = []
        for pid in self._held:
            answer = self._driver.thread(pid)
            self._expect(pid, answer, "name the restore thread of")
            thread = ns_pids(answer.number)[-1]
            processes.append(GpuProcess(ns_pids(pid)[-1], thread, survey.memory_of(pid, used)))
        on = {device.uuid for device in used if any(pid in device.processes for pid in self._held)}
        devices = [d for d in self._driver.devices() if d.uuid in on or not on]
        return GpuRecord(
            driver=self._driver.driver,
            api=self._driver.api,
            devices=tuple(GpuDevice(d.uuid, d.name, d.memory, d.capability) for d in devices),
            processes=tuple(processes),
        )

    def record(self) -> GpuRecord | None:
        """Return the record for the manifest."""
        return self._record

    def give_back(self) -> None:
        """Give every process its device back, so that it can run on; `lost` lists the failures."""
        if self._driver is None:
            return
        began = time.monotonic()
        if self._held:
            self._reporter.step("gpu-restore", processes=list(self._held))
            try:
                # After an interrupt the result of a call under way is seen here.
                self._driver.settle(_CALL)
                self.lost = self._restored()
            except (TimedOut, CommandFailed) as error:
                self.lost = self._restored_by_another(error)
            self.timings["restore_ms"] = round((time.monotonic() - began) * 1000, 1)
        for pid, one in self._idle:
            try:
                reopen(pid, one.path, one.flags, [(one.fd, one.cloexec)])
            except (OSError, CriuctlError) as error:
                self._reporter.warning(
                    f"PID {pid}: {one.path} (fd {one.fd}) could not be opened again: {error}"
                )
        self._held.clear()
        self._idle.clear()
        self.close()

    def _restored_by_another(self, error: CriuctlError) -> list[str]:
        """Finish with a new helper after the first was killed, or hangs."""
        assert self._driver is not None
        try:
            self._driver.close()
            self._driver.wait_given_back()
            self._driver = DriverProcess()
            self._stack.callback(self._driver.close)
            return self._restored()
        except CriuctlError as again:
            return [f"NVIDIA's driver does not answer: {error.message}; {again.message}"]

    def _restored(self) -> list[str]:
        """Restore and unlock every process, in several tries; return a sentence for each that has
        lost its device.
        """
        assert self._driver is not None
        left = {pid: Answer(0, "") for pid, identity in self._held.items() if identity.alive()}
        for pause in _PAUSES:
            states = self._driver.each("state", list(left), MOVE_SECONDS)
            by_state: dict[int, list[int]] = {}
            for pid, state in states.items():
                by_state.setdefault(state.number, []).append(pid)
            moved = by_state.get(driver_process.CHECKPOINTED, [])
            answers = self._driver.each("restore", moved, MOVE_SECONDS)
            locked = by_state.get(driver_process.LOCKED, []) + [
                pid for pid in moved if answers[pid].ok
            ]
            answers |= self._driver.each("unlock", locked, MOVE_SECONDS)
            failed = {pid: states[pid] for pid in by_state.get(driver_process.FAILED, [])}
            left = {
                pid: answer
                for pid, answer in answers.items()
                if not answer.ok and self._held[pid].alive()
            }
            if not left:
                break
            time.sleep(pause)
        return [
            *(
                (
                    f"PID {pid}: the driver's checkpoint has failed, and the process cannot use "
                    "its GPU any more"
                )
                for pid in failed
            ),
            *(
                f"PID {pid} waits for its GPU, which the driver does not give back ({a.name})"
                for pid, a in left.items()
            ),
        ]

    def ended(self) -> None:
        """Note that the dump has ended the tree: nothing is to be given back."""
        if self._driver is not None:
            with suppress(CriuctlError):
                self._driver.keep(self._held)
        self._held.clear()
        self.close()

    def close(self) -> None:
        """Close the helper and the note; the helper gives back what was not given back yet."""
        self._stack.close()
        self._driver = None

    def _count(self, name: str, answers: Mapping[int, Answer]) -> None:
        longest = max((answer.ms for answer in answers.values()), default=0.0)
        self.timings[name] = round(self.timings.get(name, 0.0) + longest, 1)
