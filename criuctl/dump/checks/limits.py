"""Check limits of processes that leave CRIU no room: descriptors, memory and mappings.

CRIU works inside each process at the dump, and needs descriptors above the process's own at the
restore.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator

from ...errors import NoSuchProcess
from ...proc.limits import CAP_SYS_RESOURCE
from ...proc.procfs import read_raw, read_text
from ...proc.tree import Process
from ...quoting import quoted
from ...report import Finding
from .scene import Scene

_ROOM = 4  # descriptors that CRIU opens inside a process to examine it
_HELPER = 64 << 10  # bytes that it maps there for that, at least
_HELPER_MAPPINGS = 2
_SERVICE, _PAD, _ALIGNMENT = 16, 16, 128  # CRIU: criu/servicefd.c, choose_service_fd_base()


def check_limits(scene: Scene, process: Process) -> Iterator[Finding]:
    """Check the limits of one process: descriptors, memory, mappings."""
    yield from _numbers(scene, process)
    yield from _address_space(process)
    yield from _mappings(scene, process)


def _numbers(scene: Scene, process: Process) -> Iterator[Finding]:
    """Check that descriptor numbers are left: for CRIU in the process now, and above the highest
    one at a restore.
    """
    opened = [d.fd for d in scene.opened.get(process.pid, ())]
    try:
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    except OSError:  # it has ended, or is another user's, which is reported elsewhere
        return
    left = soft - sum(fd < soft for fd in opened)
    if left < _ROOM:
        more = f"`prlimit --pid {process.pid} --nofile={soft + _ROOM}:{max(hard, soft + _ROOM)}`"
        yield Finding(
            "error",
            "descriptors-used-up",
            f"{process} can open {left} more descriptors (ulimit -n: {soft}); CRIU needs {_ROOM} "
            "inside it",
            "Have it close some, or raise its limit: "
            f"{more}{'' if hard >= soft + _ROOM else ' (needs CAP_SYS_RESOURCE)'}.",
            pid=process.pid,
        )
    most = _restorable(scene)
    if most <= 0:  # reported once, for the root
        if process.pid == scene.root.pid:
            yield Finding(
                "error",
                "descriptors-few",
                f"criuctl may have {_limit(scene)} descriptors (ulimit -Hn); CRIU needs "
                f"{_ALIGNMENT} at least",
                "Start criuctl with a higher `ulimit -n`.",
                pid=process.pid,
            )
        return
    if opened and max(opened) > most:
        yield Finding(
            "error",
            "descriptor-number",
            f"{process} has a descriptor numbered {max(opened)}; CRIU, which needs some above "
            f"it, restores {most} at most",
            "Start criuctl with a higher `ulimit -n` (CAP_SYS_RESOURCE, fs.nr_open), or the "
            "program with a lower one.",
            pid=process.pid,
            fd=max(opened),
        )
    shared = sum(
        m.shared and m.deleted and m.path == "/dev/zero" for m in scene.mapped.get(process.pid, ())
    )
    yield from many_shared(process, len(opened), shared, _limit(scene))


def many_shared(process: Process, opened: int, shared: int, limit: int) -> Iterator[Finding]:
    """Check that `limit` descriptors suffice for CRIU: those of the process and one per shared
    mapping.
    """
    if opened + shared + _SERVICE + _PAD > limit:
        yield Finding(
            "error",
            "shared-mappings",
            f"{process} has {shared} mappings of shared memory; CRIU restores each with a "
            f"descriptor, and can have {limit} in all",
            "Start criuctl with a higher `ulimit -Hn` (CAP_SYS_RESOURCE, fs.nr_open).",
            pid=process.pid,
        )


def _address_space(process: Process) -> Iterator[Finding]:
    """Check that CRIU can map its helper there, which counts as the process's own memory."""
    try:
        limit = resource.prlimit(process.pid, resource.RLIMIT_AS)[0]
        used = int(read_text(process.pid, "statm").split()[0]) * resource.getpagesize()
    # it has ended, or is another user's, which is reported elsewhere
    except (NoSuchProcess, OSError):
        return
    if limit != resource.RLIM_INFINITY and limit - used < _HELPER:
        yield Finding(
            "error",
            "address-space-used-up",
            f"{process} may map {limit >> 10} KiB of memory (ulimit -v) and has {used >> 10}; "
            f"CRIU needs {_HELPER >> 10} there",
            f"Have it unmap some, or raise its limit: `prlimit --pid {process.pid} "
            f"--as={used + 16 * _HELPER}:`.",
            pid=process.pid,
        )


def _mappings(scene: Scene, process: Process) -> Iterator[Finding]:
    """Check that CRIU's helper, which is two mappings, fits into the limit of mappings
    (vm.max_map_count).
    """
    limit = int(read_raw("/proc/sys/vm/max_map_count"))
    # the kernel does not count it as a mapping
    used = sum(mapping.path != "[vsyscall]" for mapping in scene.mapped.get(process.pid, ()))
    if limit - used < _HELPER_MAPPINGS:
        yield Finding(
            "error",
            "mappings-used-up",
            f"{process} has {used} memory mappings, and may have {limit} (vm.max_map_count); CRIU "
            f"needs {_HELPER_MAPPINGS} more there",
            f"Raise the limit: `sysctl vm.max_map_count={quoted(2 * limit)}`.",
            pid=process.pid,
        )


def _restorable(scene: Scene) -> int:
    """Return the highest descriptor number for which CRIU finds room for its own descriptors."""
    return _limit(scene) // _ALIGNMENT * _ALIGNMENT - _SERVICE - _PAD


def _limit(scene: Scene) -> int:
    return descriptor_limit(scene.own_capabilities)


def descriptor_limit(capabilities: int) -> int:
    """Return how many descriptors CRIU can have, with the limit that it can give itself."""
    if capabilities >> CAP_SYS_RESOURCE & 1:
        return int(read_raw("/proc/sys/fs/nr_open"))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]
