"""Run work in a shadow of this host: it sees the same files, changes none, and leaves nothing.

`run` forks, and the work goes on in new PID, mount, IPC and UTS namespaces. There `enter` covers
every file system with an overlay whose upper layer is in memory: files are written, removed,
renamed and bound to names only inside. Sockets and FIFOs of this host are different ones inside: no
process of this host is at their other end, and the host's terminals are missing. A file system that
no overlay can cover is bound read-only and reported. The network is this host's, because the work
may need a store; processes that it starts should get another one.

Not isolated are devices, the kernel's own settings and the clock.

Lifetime: the caller holds a pipe. At its end, however the caller ends, PID 1 of the shadow ends,
and the kernel kills everything inside; the last process frees the mounts and the memory. Nothing
has a name outside.

The caller must have no threads that hold locks: only the forking thread exists in the shadow.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import stat
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import CommandFailed, PlatformError, TimedOut
from .mounts import read_mounts
from .syscalls import unshare

Work = Callable[[], dict[str, Any]]

_NEWNS, _NEWUTS, _NEWIPC, _NEWPID = 0x00020000, 0x04000000, 0x08000000, 0x20000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    0x1000,
    0x4000,
    1 << 18,
)
_MNT_DETACH = 2
_FLAGS = {"ro": _RDONLY, "nosuid": _NOSUID, "nodev": _NODEV, "noexec": _NOEXEC}
# The kernel's own file systems: an overlay of one would behave differently, or is refused.
_KERNEL = frozenset(
    (
        *(
            "sysfs",
            "cgroup",
            "cgroup2",
            "mqueue",
            "bpf",
            "tracefs",
            "debugfs",
            "securityfs",
            "pstore",
            "configfs",
        ),
        *(
            "fusectl",
            "efivarfs",
            "binfmt_misc",
            "hugetlbfs",
            "nsfs",
            "rpc_pipefs",
            "selinuxfs",
            "smackfs",
            "resctrl",
            "nfsd",
        ),
    )
)
_STAGE = "/dev"  # exists everywhere
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LARGEST_FILE = 64 << 20  # bytes of a bind-mounted file, to be copied

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class _Mount:
    """A visible mount of this host."""

    point: str
    kind: str
    flags: int
    fd: int  # O_PATH of its root

    @property
    def source(self) -> str:
        """A path to it, even if other mounts cover it."""
        return f"/proc/self/fd/{self.fd}"


# -- the process -----------------------------------------------------------------------------------


def run(work: Work, *, timeout: float) -> dict[str, Any]:
    """Run `work` in a shadow of this host; return its answer, or ``{"bug": traceback}``.

    When this returns or raises, everything that ran inside is gone. `PlatformError` when a shadow
    is not possible, `CommandFailed` when it was killed, `TimedOut` after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    answer = os.memfd_create("answer", os.MFD_CLOEXEC)
    ends, lives = os.pipe2(os.O_CLOEXEC)
    helper = 0
    try:
        try:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
            try:
                helper = os.fork()
                if helper == 0:
                    _helper(work, ends, answer, lives)
            finally:
                # from here on: a signal that comes now finds the helper's PID known
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            pidfd = os.pidfd_open(helper)
            try:
                poller = select.poll()
                poller.register(pidfd, select.POLLIN)
                while not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    if time.monotonic() >= deadline:
                        raise TimedOut(f"it was not done after {timeout:g} s, and was killed")
            finally:
                os.close(pidfd)
        finally:
            os.close(lives)
            if helper:
                # it ends after PID 1, and so after all processes inside
                os.waitpid(helper, 0)
        size = os.fstat(answer).st_size
        if not size:
            raise CommandFailed(
                "the process in private namespaces was killed",
                hint="See the kernel's log: `dmesg`.",
            )
        result: dict[str, Any] = json.loads(os.pread(answer, size, 0))
        if "cannot" in result:
            raise PlatformError(result["cannot"], hint="It needs root (CAP_SYS_ADMIN).")
        return result
    finally:
        os.close(answer)
        os.close(ends)


def _helper(work: Work, ends: int, answer: int, lives: int) -> NoReturn:
    """Make the namespaces, fork PID 1, end after it."""
    try:
        os.close(lives)
        os.setsid()
        for number in _STOPS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        try:
            unshare(_NEWNS | _NEWPID | _NEWIPC | _NEWUTS)
        except OSError as error:
            _say(answer, {"cannot": f"namespaces cannot be made: {error.strerror}"})
            os._exit(1)
        init = os.fork()
        if init == 0:
            _init(work, ends, answer)
        os.waitpid(init, 0)
    finally:
        os._exit(0)


def _init(work: Work, ends: int, answer: int) -> NoReturn:
    """Run as PID 1: end with the caller and with the worker, and reap orphans."""
    try:
        worker = os.fork()
        if worker == 0:
            _worker(work, answer)
        threading.Thread(target=_end_with, args=(ends,), daemon=True).start()
        while os.wait()[0] != worker:
            pass
    finally:
        os._exit(0)


def _end_with(ends: int) -> None:
    with suppress(OSError):
        os.read(ends, 1)
    os._exit(1)


def _worker(work: Work, answer: int) -> NoReturn:
    try:
        for number in _STOPS:
            signal.signal(number, signal.SIG_DFL)
        try:
            result = work()
        except BaseException:
            result = {"bug": traceback.format_exc()}
        _say(answer, result)
    finally:
        os._exit(0)


def _say(answer: int, result: dict[str, Any]) -> None:
    os.pwrite(answer, json.dumps(result).encode(), 0)


# -- the file systems ------------------------------------------------------------------------------


def enter() -> list[str]:
    """Switch to the overlays, in a shadow; return the mount points that are read-only.

    `PlatformError`.
    """
    try:
        return _enter()
    except OSError as error:
        raise PlatformError(
            f"this host's files cannot be covered: {error.filename or error}",
            hint="It needs root (CAP_SYS_ADMIN) and a kernel with overlayfs.",
        ) from error


def empty(folder: str) -> None:
    """Make an empty folder, in a shadow, under its overlays."""
    try:
        os.makedirs(folder, 0o755, exist_ok=True)
        _mount(
            "criuctl-shadow",
            folder,
            "tmpfs",
            _NOSUID | _NODEV,
            f"mode={stat.S_IMODE(os.stat(folder).st_mode):o}",
        )
    except OSError as error:
        raise PlatformError(f"{folder} cannot be covered: {error.strerror}") from error


def _enter() -> list[str]:
    _mount("none", "/", flags=_REC | _PRIVATE)
    mounts = list(_visible())
    _mount("criuctl-shadow", _STAGE, "tmpfs", options="mode=0700,size=90%")
    new, read_only = f"{_STAGE}/root", []
    os.mkdir(new)
    for number, mount in enumerate(mounts):
        target = new + (mount.point if mount.point != "/" else "")
        if mount.kind == "proc":
            _mount("proc", target, "proc", flags=_NOSUID | _NODEV | _NOEXEC)
        elif mount.kind == "devpts":
            _mount(
                "devpts",
                target,
                "devpts",
                flags=_NOSUID | _NOEXEC,
                options="newinstance,ptmxmode=0666,mode=0620,gid=5",
            )
        elif mount.kind == "autofs":
            continue  # the file mounted there is removed by itself
        elif mount.kind in _KERNEL:
            _bind(mount, target)
        elif not _covered(mount, target, f"{_STAGE}/{number}"):
            # a user's FUSE that we may not enter: then it is empty inside
            with suppress(OSError):
                _bind(mount, target)
            read_only.append(mount.point)
    for mount in mounts:
        os.close(mount.fd)
    os.chdir(new)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", ctypes.c_int(_MNT_DETACH)), "umount")
    os.chdir("/")
    return read_only


def _visible() -> list[_Mount]:
    """Return the mounts that a path leads to, parents first; the caller closes the descriptors."""
    found = []
    for mount in read_mounts():
        try:
            fd = os.open(mount.point, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # under another mount
        if _mount_id(fd) != mount.id:
            os.close(fd)
            continue
        options = {*mount.options, *mount.settings}
        found.append(
            _Mount(
                mount.point,
                mount.kind,
                sum(flag for word, flag in _FLAGS.items() if word in options),
                fd,
            )
        )
    return sorted(found, key=lambda mount: 0 if mount.point == "/" else 1 + mount.point.count("/"))


def _mount_id(fd: int) -> int:
    with open(f"/proc/self/fdinfo/{fd}") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("mnt_id:")), -1)


def _covered(mount: _Mount, target: str, layers: str) -> bool:
    """Lay an overlay over a mount; return False where that is not possible."""
    try:
        status = os.stat(mount.source)
    except OSError:
        return False
    if not stat.S_ISDIR(status.st_mode):
        return (
            stat.S_ISREG(status.st_mode)
            and status.st_size <= _LARGEST_FILE
            and _copied(mount, status, target, layers)
        )
    os.mkdir(layers)
    os.mkdir(f"{layers}/upper")
    os.mkdir(f"{layers}/work")
    # the overlay's root takes the attributes of its uppermost layer
    os.chown(f"{layers}/upper", status.st_uid, status.st_gid)
    os.chmod(f"{layers}/upper", stat.S_IMODE(status.st_mode))
    options = f"lowerdir={mount.source},upperdir={layers}/upper,workdir={layers}/work"
    # with index=on a file stays one under all of its names, but not every file system allows it
    for more in (",index=on", ""):
        with suppress(OSError):
            _mount("criuctl-shadow", target, "overlay", mount.flags, options + more)
            return True
    return False


def _copied(mount: _Mount, status: os.stat_result, target: str, copy: str) -> bool:
    """Replace a bind-mounted file by a copy."""
    with open(mount.source, "rb") as source, open(copy, "wb") as file:
        while piece := source.read(1 << 20):
            file.write(piece)
    os.chown(copy, status.st_uid, status.st_gid)
    os.chmod(copy, stat.S_IMODE(status.st_mode))
    _mount(copy, target, flags=_BIND)
    return True


def _bind(mount: _Mount, target: str) -> None:
    _mount(mount.source, target, flags=_BIND)
    _mount("none", target, flags=_BIND | _REMOUNT | _RDONLY | mount.flags)


def _mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    words = [os.fsencode(word) if word else None for word in (source, target, kind)]
    _check(
        _libc.mount(*words, ctypes.c_ulong(flags), os.fsencode(options) or None),
        f"mounting {target}",
    )


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"{what}: {os.strerror(code)}")
