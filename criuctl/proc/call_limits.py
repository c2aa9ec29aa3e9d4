"""Whether a system call may be run in a stopped thread: what it is in, and what restricts it."""

from __future__ import annotations

import ctypes
import errno

from .inject import ptrace, registers_of
from .procfs import read_memory

_RSEQ_CONFIGURATION, _SECCOMP_GET_FILTER = 0x420F, 0x420C
_INSTRUCTION = 8  # bytes of a BPF instruction
_LONGEST = 4096  # instructions of a filter
_NATIVE_CODE = 0x33  # the code segment of 64-bit programs


class _Rseq(ctypes.Structure):
    """struct ptrace_rseq_configuration."""

    _fields_ = [
        ("area", ctypes.c_uint64),
        ("size", ctypes.c_uint32),
        ("signature", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    ]


def may_call(tid: int) -> bool:
    """Return whether the stopped thread may be used at a place of its program where it is in no
    system call.

    Not in a restartable sequence (rseq), which would have to be aborted, nor in 32-bit code.
    """
    if registers_of(tid).cs != _NATIVE_CODE:
        raise OSError(errno.ENOEXEC, "it runs 32-bit code")
    configuration = _Rseq()
    try:
        ptrace(_RSEQ_CONFIGURATION, tid, ctypes.sizeof(configuration), configuration)
    except OSError:
        return True  # the kernel has no restartable sequences
    area = configuration.area
    return not area or read_memory(tid, area + 8, 8) == bytes(8)


def seccomp_filters(tid: int) -> set[bytes]:
    """Return the seccomp filters of the stopped thread, as they were set; `OSError` if they cannot
    be read.
    """
    found: set[bytes] = set()
    for number in range(_LONGEST):
        place = ctypes.create_string_buffer(_LONGEST * _INSTRUCTION)
        try:
            count = ptrace(_SECCOMP_GET_FILTER, tid, number, ctypes.cast(place, ctypes.c_void_p))
        except OSError as error:
            # none at all, or no more
            if error.errno in (errno.EINVAL, errno.ENOENT):
                return found
            raise
        found.add(place.raw[: count * _INSTRUCTION])
    raise OSError(errno.E2BIG, "too many seccomp filters")
