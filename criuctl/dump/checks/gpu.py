"""Check GPU processes: find what NVIDIA's driver cannot checkpoint before anything is touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ...errors import CommandFailed, CriuctlError
from ...gpu import use
from ...gpu.driver_process import OLDEST_API, DriverProcess
from ...gpu.use import DeviceUser
from ...proc.procfs import available_memory
from ...proc.tree import Process
from ...report import Finding
from .scene import Scene

if TYPE_CHECKING:
    from ...gpu.devices import DeviceUse
    from ...gpu.holdings import Holdings

_GIB = 1 << 30
_KEPT = 1 << 28  # bytes of memory that a dump leaves to the host


def check_gpu(scene: Scene) -> Iterator[Finding]:
    """Check the processes that hold an NVIDIA device; nothing is loaded where there is none."""
    found = use.users(scene.opened, scene.mapped)
    if not found:
        return
    from ...gpu import survey  # only trees with devices need all that

    first = min(found)
    try:
        driver = DriverProcess()
    except (CriuctlError, OSError) as error:
        yield Finding("error", "gpu-driver", f"NVIDIA's driver cannot be asked: {error}", pid=first)
        return
    with driver:
        yield from _driver(driver, first, OLDEST_API)
        if driver.error or driver.api < OLDEST_API:
            return
        stopped = {p.pid for p in scene.tree if p.state in ("T", "t")}
        parents = {p.pid: p.ppid for p in scene.tree}
        try:
            holdings = survey.survey(driver, found, parents, stopped)
            used = driver.use()
        except CommandFailed as error:
            yield Finding("error", "gpu-driver", str(error), pid=first)
            return
        yield from _states(holdings, scene.by_pid)
        yield from _abilities(holdings, used)
        needed = sum(survey.memory_of(user.pid, used) for user in holdings.contexts)
        if holdings.contexts:
            yield from _room(holdings.contexts[0], needed)


def _driver(driver: DriverProcess, pid: int, oldest: int) -> Iterator[Finding]:
    if driver.error:
        yield Finding(
            "error",
            "gpu-driver",
            f"an NVIDIA device is open, and the driver's library cannot be used: {driver.error}",
            "Make libcuda.so.1 of the installed driver available to root (ldconfig -p).",
            pid=pid,
        )
    elif driver.api < oldest:
        yield Finding(
            "error",
            "gpu-driver-old",
            f"NVIDIA's driver {driver.driver or driver.api} is too old to checkpoint processes",
            "Install driver 570 or newer.",
            pid=pid,
        )


def _states(found: Holdings, by_pid: Mapping[int, Process]) -> Iterator[Finding]:
    for user in found.others:
        yield _error(
            "gpu-other-use",
            user,
            f"{by_pid[user.pid]} uses {_paths(user)} by something other than CUDA (graphics, "
            "video)",
            "Have it let go of the device before the dump: the driver checkpoints CUDA only.",
        )
    for user in found.silent:
        yield _error(
            "gpu-stopped",
            user,
            f"{by_pid[user.pid]} is stopped, and its GPU can only be checkpointed while it runs",
            "Let it run first: `criuctl resume NAME`, or `kill -CONT PID`.",
        )
    for user in found.left:
        yield _error(
            "gpu-locked",
            user,
            f"{by_pid[user.pid]} was locked by another program that checkpoints GPUs",
            "End that program's work first: `cuda-checkpoint --action unlock --pid PID`.",
        )
    for user in found.failed:
        yield _error(
            "gpu-failed",
            user,
            f"an earlier GPU checkpoint of {by_pid[user.pid]} has failed; it cannot use its device",
            "Restore it from its last checkpoint, or start it again.",
        )
    if found.inherited:
        pids = ", ".join(str(user.pid) for user in found.inherited)
        yield Finding(
            "info",
            "gpu-inherited",
            f"forked children hold their parent's GPU descriptors and mappings, which are of no use"
            f" to them (PID {pids}); a dump takes them away",
        )
    for user in found.idle:
        yield Finding(
            "warning",
            "gpu-idle",
            f"{by_pid[user.pid]} has {_paths(user)} open without using CUDA; it is opened again "
            "after the dump and after a restore, and has forgotten what was set on it",
            "Have it close the device, if it needs to keep that.",
            pid=user.pid,
            fd=user.opened[0].fd,
        )


def _abilities(found: Holdings, used: tuple[DeviceUse, ...]) -> Iterator[Finding]:
    """Check what the driver would refuse, or do only in part."""
    for user in found.contexts:
        if user.managed:
            yield _error(
                "gpu-managed-memory",
                user,
                f"{user.managed >> 20} MiB of managed memory (cudaMallocManaged) are allocated,"
                " which NVIDIA's driver cannot checkpoint",
                "Configure the program to use ordinary device memory.",
            )
        if user.injected:
            yield _error(
                "gpu-debugger",
                user,
                f"a GPU debugger or profiler is in the process ({user.injected})",
                "Detach it (cuda-gdb, Nsight), or run the program without it.",
            )
        on = [device for device in used if user.pid in device.processes]
        if any(device.mig for device in on):
            yield _error(
                "gpu-mig",
                user,
                "the process runs on an instance of a device (MIG), which NVIDIA's driver cannot "
                "checkpoint",
                "Run it on a whole device.",
            )
        if any(user.pid in device.mps for device in on):
            yield _error(
                "gpu-mps",
                user,
                "the process shares its device through MPS, which NVIDIA's driver cannot "
                "checkpoint",
                "Run it without nvidia-cuda-mps-control.",
            )
        if len(on) > 1:
            yield Finding(
                "warning",
                "gpu-several",
                f"the process uses {len(on)} devices; the driver refuses to checkpoint it if they"
                " access each other's memory (peer access), and it then runs on",
                "Turn peer access off (NCCL_P2P_DISABLE=1).",
                pid=user.pid,
            )


def _room(user: DeviceUser, needed: int) -> Iterator[Finding]:
    """Check that host memory has room for the device memory that is moved there."""
    free = available_memory()
    if needed and needed + _KEPT > free:
        yield _error(
            "gpu-host-memory",
            user,
            f"{needed / _GIB:.1f} GiB of device memory have no room in the host's memory: "
            f"{free / _GIB:.1f} GiB are available",
            "Free host memory, or have the program release cached blocks first"
            " (torch.cuda.empty_cache; see the pre-dump hook in hooks/examples).",
        )


def _error(code: str, user: DeviceUser, text: str, hint: str) -> Finding:
    return Finding("error", code, text, hint, pid=user.pid)


def _paths(user: DeviceUser) -> str:
    try:
        return next(d.target for d in user.opened)
    except StopIteration:
        return user.mapped[0].path
