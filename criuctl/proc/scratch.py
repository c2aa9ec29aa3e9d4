"""A folder in memory that has no path and that nothing can leave behind.

Plain images hold everything that a process has in memory, so they must never lie on a disk and must
be gone on every path out, ``kill -9`` included. A *detached* tmpfs does both by construction:
``fsopen`` and ``fsmount`` give a descriptor of a mount that is attached to no mount namespace. A
process that inherits the descriptor (CRIU) reaches it as ``/proc/self/fd/N``, from any namespace.
When the last descriptor is closed, however its process ends, the kernel frees the memory.

The pages of a tmpfs may be swapped out, to a disk, where they outlive it. Kernels since 6.4 know
the option ``noswap``, for root of the first user namespace. Where it is not available,
`Scratch.findings` says whether that matters.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from types import TracebackType

from ..errors import PlatformError
from ..report import Finding
from .procfs import swaps

# The same numbers on every architecture: system calls newer than 5.0 share one table.
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
_FSOPEN_CLOEXEC = _FSMOUNT_CLOEXEC = 1
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
_NOSUID, _NODEV, _NOEXEC = 0x2, 0x4, 0x8
_MOUNT_ATTR = _NOSUID | _NODEV | _NOEXEC

_libc = ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise PlatformError(
            f"a private mount cannot be made: {os.strerror(code)}",
            hint="criuctl needs root (CAP_SYS_ADMIN) and Linux 5.2 or newer.",
        )
    return result


def detached_mount(
    kind: str, settings: Iterable[tuple[str, str | None]], attributes: int = _MOUNT_ATTR
) -> int:
    """Return a descriptor of the root of a new, detached mount of the file system `kind`.

    A setting of None is a flag.
    """
    context = _call(_SYS_FSOPEN, ctypes.c_char_p(kind.encode()), ctypes.c_uint(_FSOPEN_CLOEXEC))
    try:
        for key, value in settings:
            command = (
                (_FSCONFIG_SET_FLAG, None)
                if value is None
                else (_FSCONFIG_SET_STRING, ctypes.c_char_p(value.encode()))
            )
            _call(
                _SYS_FSCONFIG,
                ctypes.c_int(context),
                ctypes.c_uint(command[0]),
                ctypes.c_char_p(key.encode()),
                command[1],
                ctypes.c_int(0),
            )
        _call(
            _SYS_FSCONFIG,
            ctypes.c_int(context),
            ctypes.c_uint(_FSCONFIG_CMD_CREATE),
            None,
            None,
            ctypes.c_int(0),
        )
        return _call(
            _SYS_FSMOUNT,
            ctypes.c_int(context),
            ctypes.c_uint(_FSMOUNT_CLOEXEC),
            ctypes.c_uint(attributes),
        )
    finally:
        os.close(context)


class Scratch:
    """A detached tmpfs; `fd` is its root folder, mode 0700, and ``close`` (or a ``with``) frees it.

    `source`: its name in mountinfo once it is attached. `executable`: programs in it can be run
    then, with `set_uid` also with the rights of their owners.
    """

    def __init__(
        self,
        size: str = "90%",
        *,
        source: str = "none",
        executable: bool = False,
        set_uid: bool = False,
    ) -> None:
        settings = (("source", source), ("mode", "0700"), ("size", size))
        attributes = _NODEV | (0 if set_uid else _NOSUID) | (0 if executable else _NOEXEC)
        self.may_swap = executable  # files of a running tree, not memory
        if not executable:
            try:
                self.fd = detached_mount("tmpfs", (*settings, ("noswap", None)), attributes)
                return
            except PlatformError:  # if that was not the reason, it is raised again
                self.may_swap = True
        self.fd = detached_mount("tmpfs", settings, attributes)

    @property
    def path(self) -> str:
        """The path of the folder in a process that inherited `fd` under the same number."""
        return f"/proc/self/fd/{self.fd}"

    def findings(self) -> Iterator[Finding]:
        """Yield a finding if its contents may reach a disk.

        That is when the kernel cannot keep it in memory, and there is a swap area.
        """
        if self.may_swap and (areas := swaps()):
            yield Finding(
                "warning",
                "swap",
                f"plain images may be swapped out, to {', '.join(areas)}: here the kernel cannot "
                "keep a tmpfs in memory",
                "Linux 6.4 and newer can (noswap). Until then encrypt the swap area, or turn it "
                "off (`swapoff -a`).",
            )

    def free_bytes(self) -> int:
        """Return how many more bytes fit."""
        status = os.fstatvfs(self.fd)
        return status.f_bavail * status.f_frsize

    def folder(self, name: str) -> int:
        """Make a folder in it and return a descriptor of that."""
        os.mkdir(name, 0o700, dir_fd=self.fd)
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)

    def close(self) -> None:
        """Free everything, once CRIU has closed its descriptor too."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Scratch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
