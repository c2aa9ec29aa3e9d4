"""The driver's checkpoint calls by hand, as a program without criuctl would make them."""

from __future__ import annotations

import ctypes
import time


class CallFailed(Exception):
    """A driver call answered an error."""


class _LockArgs(ctypes.Structure):
    _fields_ = (
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    )


class Driver:
    """libcuda, started in this process; PIDs are those that this process sees."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: object) -> float:
        begun = time.monotonic()
        answer = getattr(self._cuda, name)(*arguments)
        if answer:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(answer, ctypes.byref(text))
            raise CallFailed(f"{name}: {(text.value or b'?').decode()}")
        return time.monotonic() - begun

    def lock(self, pid: int) -> float:
        """Wait for the process's work on the device to end; seconds."""
        return self._call("cuCheckpointProcessLock", pid, ctypes.byref(_LockArgs(30_000)))

    def checkpoint(self, pid: int) -> float:
        """Copy its device memory to its own; seconds."""
        return self._call("cuCheckpointProcessCheckpoint", pid, None)

    def restore(self, pid: int) -> float:
        """Copy it back; seconds."""
        return self._call("cuCheckpointProcessRestore", pid, None)

    def unlock(self, pid: int) -> float:
        """Let it use the device again; seconds."""
        return self._call("cuCheckpointProcessUnlock", pid, None)
