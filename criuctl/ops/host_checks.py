"""Checks of what each dump or restore needs of this host: rights, CRIU, kernel, programs, memory,
folders.

Each function yields findings; `doctor` asks them all, and a restore of another host's checkpoint
those that matter for it (`doctor.readiness`). They try the parts themselves: CRIU is started, a
private tmpfs is made. Nothing is left behind.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .. import preparation
from ..config import Config
from ..criu import binary
from ..dump.checks.host import SECCOMP, UNFILTERED
from ..errors import PlatformError, UntrustedPath
from ..proc import command, netfilter, written_pages
from ..proc.limits import effective_capabilities, is_filtered
from ..proc.memory import soft_dirty
from ..proc.namespaces import KINDS
from ..proc.ownership import check_own, check_place
from ..proc.procfs import read_raw
from ..proc.scratch import Scratch
from ..proc.sockets import sockets
from ..proc.syscalls import pidfd_getfd
from ..report import Finding

_CHECK_TIMEOUT = 60.0  # seconds for `criu check`
_NEEDED = {
    2: "CAP_DAC_READ_SEARCH",
    5: "CAP_KILL",
    6: "CAP_SETGID",
    7: "CAP_SETUID",
    12: "CAP_NET_ADMIN",
    19: "CAP_SYS_PTRACE",
    21: "CAP_SYS_ADMIN",
    24: "CAP_SYS_RESOURCE",
}
_OPTIONAL = {24: "trees of other users than root cannot be dumped"}
_PROGRAMS = {
    "nsenter": ("util-linux", "to reach trees in other namespaces"),
    "unshare": ("util-linux", "to restore into a private PID namespace"),
    "tini": ("tini", "as the first process of a session"),
}
_LOW_MEMORY = 256 << 20


def dotted(version: tuple[int, ...]) -> str:
    """Return a version as text: 4.2."""
    return ".".join(map(str, version))


def rights(_config: Config) -> Iterator[Finding]:
    """Check that this is root, with the capabilities that CRIU needs."""
    if os.geteuid() != 0:
        yield Finding(
            "error",
            "platform",
            "criuctl does not run as root",
            "Dumping and restoring need root: use sudo.",
        )
        return
    have = effective_capabilities()
    missing = {number: name for number, name in _NEEDED.items() if not have >> number & 1}
    for number, name in missing.items():
        if number in _OPTIONAL:
            yield Finding(
                "warning",
                "capabilities",
                f"{name} is missing: {_OPTIONAL[number]}",
                "Ordinary hosts have it; a container must be given it.",
            )
        else:
            yield Finding(
                "error",
                "platform",
                f"{name} is missing",
                "Run criuctl as root on the host, or give the container this capability.",
            )


def seccomp(_config: Config) -> Iterator[Finding]:
    """Check that no seccomp filter restricts CRIU: under one it saves no process with a filter."""
    if is_filtered():
        yield Finding(
            "error",
            SECCOMP,
            "criuctl has a seccomp filter, which CRIU inherits; processes with a filter, as all of "
            "a container and of `criuctl run` have, cannot be dumped or restored then",
            UNFILTERED,
        )


def criu(config: Config) -> Iterator[Finding]:
    """Check the CRIU that criuctl would use, also by `criu check`."""
    found = binary.find(config)
    version = found.version()
    yield Finding(
        "info", "criu", f"CRIU {dotted(version)} ({found.origin}): {' '.join(found.argv)}"
    )
    if version[: len(binary.MINIMUM)] < binary.MINIMUM:
        yield Finding(
            "error",
            "platform",
            f"CRIU {dotted(version)} is too old; criuctl needs {dotted(binary.MINIMUM)}",
            preparation.advice(),
        )
    checked = command.run(
        [*found.argv, "--no-default-config", "check"], timeout=_CHECK_TIMEOUT, check=False
    )
    if checked.returncode != 0:
        lines = [
            line for line in (checked.text + checked.error_text).splitlines() if "Error" in line
        ]
        yield Finding(
            "error",
            "platform",
            "`criu check` fails on this kernel: "
            f"{lines[0].strip() if lines else 'no reason given'}",
            f"{preparation.advice()} The kernel must have CONFIG_CHECKPOINT_RESTORE.",
        )
    for path in binary.host_configs():
        yield Finding(
            "warning",
            "criu-config",
            f"{path} exists; criuctl makes CRIU ignore it, while criu on the command line obeys it",
            "No action is needed.",
        )


def kernel(config: Config) -> Iterator[Finding]:
    """Check the features of the kernel."""
    yield Finding("info", "kernel", f"Linux {platform.release()} on {platform.machine()}")
    lacking = [kind for kind in KINDS if not os.path.exists(f"/proc/self/ns/{kind}")]
    if lacking:
        yield Finding(
            "warning",
            "namespaces",
            f"this kernel has no {', '.join(lacking)} namespaces",
            "Trees that need them cannot be restored here.",
        )
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        yield Finding(
            "error",
            "platform",
            "this kernel lacks CONFIG_PROC_CHILDREN, which CRIU needs",
            "Use a distribution's stock kernel.",
        )
    try:
        sockets()
    except PlatformError as error:
        yield Finding(
            "error",
            error.code,
            error.message,
            "The kernel needs CONFIG_INET_DIAG and CONFIG_UNIX_DIAG.",
        )
    if not has_pidfd_getfd():
        yield Finding(
            "warning",
            "pidfd-getfd",
            "this kernel lacks pidfd_getfd(2) (Linux 5.6)",
            "Connections cannot be handed back.",
        )
    try:
        netfilter.tables()
    except PlatformError as error:
        yield Finding(
            "warning",
            "nftables",
            error.message,
            "Trees with TCP connections need nftables (CONFIG_NF_TABLES).",
        )
    if not os.path.exists("/proc/sys/vm/unprivileged_userfaultfd"):
        yield Finding(
            "warning",
            "userfaultfd",
            "this kernel lacks userfaultfd",
            "`restore --lazy` does not work here.",
        )
    if soft_dirty():
        yield Finding(
            "info",
            "soft-dirty",
            "this kernel tracks changed pages: later rounds of pre-copy read only those",
        )
    else:
        yield Finding(
            "info",
            "soft-dirty",
            "this kernel does not track changed pages (CONFIG_MEM_SOFT_DIRTY)",
            "Every round of pre-copy reads all memory; what is stored stays the same.",
        )
    yield Finding("info", "written-pages", _short_freezes(config))


def _short_freezes(config: Config) -> str:
    """Say how long trees that are left running are frozen, and why."""
    if not written_pages.supported():
        return (
            "this kernel does not show written pages to others (Linux 6.7, x86-64): a tree is "
            "frozen while all its memory is read"
        )
    if not config.track_writes_mib:
        return (
            "this kernel shows written pages to others; track_writes_mib is 0, so a tree is frozen "
            "while all its memory is read"
        )
    return (
        f"trees of {config.track_writes_mib} MiB or more are frozen only while what they wrote "
        f"last is read; {_kept_tracking()}"
    )


def _kept_tracking() -> str:
    """Say whether the tracking stays from one snapshot to the next one."""
    if written_pages.forgets_moved():
        return "the next snapshot reads only what was written to since"
    return "each snapshot reads all memory once while the tree runs (before Linux 6.13)"


def has_pidfd_getfd() -> bool:
    """Return whether the kernel has pidfd_getfd(2)."""
    pidfd = os.pidfd_open(os.getpid())
    try:
        os.close(pidfd_getfd(pidfd, pidfd))
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def programs(_config: Config) -> Iterator[Finding]:
    """Check that the programs that criuctl starts are there."""
    path = command.environment()["PATH"]
    for name, (package, why) in _PROGRAMS.items():
        if shutil.which(name, path=path) is None:
            yield Finding(
                "error",
                "platform",
                f"{name} is not installed; criuctl needs it {why}",
                f"Install the package {package}"
                + (", or let `criuctl doctor --fix` do it." if preparation.on_debian() else "."),
            )


def memory(_config: Config) -> Iterator[Finding]:
    """Check the private tmpfs for images, and the free memory."""
    with Scratch() as scratch:
        free = scratch.free_bytes()
        yield from scratch.findings()
    available = next(
        int(line.split()[1]) * 1024
        for line in read_raw("/proc/meminfo").splitlines()
        if line.startswith(b"MemAvailable:")
    )
    text = (
        f"plain images lie in a private tmpfs only ({free >> 20} MiB at most); {available >> 20} "
        "MiB of memory are available"
    )
    if min(free, available) < _LOW_MEMORY:
        yield Finding(
            "warning",
            "memory",
            text,
            "Restoring a tree needs about as much memory as it had, and room for its images.",
        )
    else:
        yield Finding("info", "memory", text)


def folders(config: Config) -> Iterator[Finding]:
    """Check that the folders of the configuration can be used, and are root's alone."""
    for key in ("state_dir", "cache_dir", "run_dir"):
        path = getattr(config, key)
        if not path:
            continue
        try:
            nearest = probe_folder(Path(path))
        except OSError as error:
            yield Finding(
                "error",
                "platform",
                f"{key} {path} cannot be written: {error.strerror}",
                f"Set {key} to a folder on a writable file system.",
            )
            continue
        try:
            check_own(path) if nearest == Path(path) else check_place(path)
        except UntrustedPath as error:
            yield Finding("error", "folder-mode", f"{key}: {error.message}", error.hint)


def probe_folder(path: Path) -> Path:
    """Write a probe where `path` is, or will be made at first use; return the existing folder.
    Raise `OSError`.
    """
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    with tempfile.TemporaryFile(dir=nearest):
        return nearest
