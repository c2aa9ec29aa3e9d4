"""System calls that Python 3.11 lacks, by ctypes.

Each wrapper raises `OSError` with the kernel's errno, like the functions of `os`; nothing is
retried.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_SYS_PIDFD_GETFD = 438  # the same on every architecture, as for all new system calls
_SYS_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_SYS_KCMP = {"x86_64": 312, "aarch64": 272}
_SYS_IOPRIO_SET, _SYS_IOPRIO_GET = {"x86_64": 251, "aarch64": 30}, {"x86_64": 252, "aarch64": 31}
_IOPRIO_WHO_PROCESS = 1
USER_MODE_ONLY = 1  # a userfaultfd that needs no privilege: faults of the kernel are not handled
_IPC_RMID = 0
_SEM_GETPID = 11
_SPLICE_F_NONBLOCK = 2
_MREMAP_MAYMOVE, _MREMAP_DONTUNMAP = 1, 4
_MS_BIND = 0x1000
_AT_EMPTY_PATH = 0x1000
_MAX_HANDLE = 128  # bytes
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

KCMP_VM, KCMP_FILES, KCMP_FS, KCMP_SIGHAND = 1, 2, 3, 4
_KCMP_FILE, _KCMP_EPOLL_TFD = 0, 7

CLONE_NEWTIME = 0x00000080
CLONE_FS = 0x00000200
_CLONE_FILES = 0x00000400
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

Readable = bytes | bytearray | memoryview

_libc: ctypes.CDLL | None = None


def _c() -> ctypes.CDLL:
    global _libc
    if _libc is None:
        if not sys.platform.startswith("linux"):
            raise OSError("criuctl needs Linux")
        _libc = ctypes.CDLL(None, use_errno=True)
    return _libc


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def pidfd_getfd(pidfd: int, fd: int) -> int:
    """Return a duplicate, close-on-exec, of descriptor `fd` of the process behind `pidfd`.

    Needs the right to ptrace that process. EBADF: it has no such descriptor.
    """
    return _checked(_c().syscall(_SYS_PIDFD_GETFD, pidfd, fd, 0))


class _Piece(ctypes.Structure):
    """struct iovec."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def read_process(pid: int, address: int, length: int) -> bytes:
    """Return memory of another process; less if a part of it is not mapped.

    Other than ``/proc/PID/mem``, this waits for pages that a userfaultfd has to bring.
    """
    buffer = ctypes.create_string_buffer(length)
    here, there = _Piece(ctypes.addressof(buffer), length), _Piece(address, length)
    pieces = ctypes.byref(here), 1, ctypes.byref(there), 1
    count = _checked(_c().process_vm_readv(pid, *pieces, ctypes.c_ulong(0)))
    return buffer.raw[:count]


def io_priority(tid: int) -> int:
    """Return the I/O priority of a thread: its class, shifted by 13 bits, and the level.

    0 for none.
    """
    return _checked(_c().syscall(_known(_SYS_IOPRIO_GET), _IOPRIO_WHO_PROCESS, tid))


def set_io_priority(tid: int, priority: int) -> None:
    """Set the I/O priority of a thread; the real-time class needs CAP_SYS_ADMIN or CAP_SYS_NICE."""
    _checked(_c().syscall(_known(_SYS_IOPRIO_SET), _IOPRIO_WHO_PROCESS, tid, priority))


def _known(numbers: Mapping[str, int]) -> int:
    """Return the number of a system call on this machine; ENOSYS if it is unknown."""
    number = numbers.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return number


def userfaultfd_number() -> int:
    """Return the number of userfaultfd(2); ENOSYS if it is unknown."""
    return _known(_SYS_USERFAULTFD)


def userfaultfd(flags: int) -> int:
    """Return a new userfaultfd of this process."""
    return _checked(_c().syscall(userfaultfd_number(), flags))


def has_userfaultfd() -> bool:
    """Return whether the kernel lets us handle page faults of other processes."""
    try:
        os.close(userfaultfd(os.O_CLOEXEC))
    except OSError:
        return False
    return True


def fork_sharing_descriptors() -> int:
    """Fork; both processes use one table of descriptors.  Return the child's PID, 0 in the child.

    What either opens or closes is open or closed in the other one, and what is open stays so until
    both have ended.  To be called in a process of one thread.
    """
    # With the interpreter's lock held: the child has it then, and no other thread to wait for.
    call = ctypes.PyDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    flags = ctypes.c_long(_CLONE_FILES | signal.SIGCHLD)
    nothing = ctypes.c_long(0)
    return _checked(call(ctypes.c_long(_known(_SYS_CLONE)), flags, *[nothing] * 4))


def shares(one: int, other: int, what: int, *, unknown: bool = True) -> bool:
    """Return whether two tasks share a resource.

    `unknown` if the kernel does not say or one has ended. `what`: memory (`KCMP_VM`), the table of
    descriptors (`KCMP_FILES`), working folder, root and umask (`KCMP_FS`), or signal handlers
    (`KCMP_SIGHAND`).
    """
    number = _SYS_KCMP.get(os.uname().machine)
    answer = -1 if number is None else int(_c().syscall(number, one, other, what, 0, 0))
    return unknown if answer < 0 else not answer


def same_file(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether two descriptors, each (PID, number), refer to one open file.

    False where the kernel does not say.
    """
    number = _SYS_KCMP.get(os.uname().machine)
    return (
        number is not None
        and _c().syscall(
            number, one[0], other[0], _KCMP_FILE, *map(ctypes.c_ulong, (one[1], other[1]))
        )
        == 0
    )


def is_watched(pid: int, epoll: int, number: int, nth: int, fd: int) -> bool:
    """Return whether the `nth` entry (from 0) for `number` in the descriptor `epoll` watches `fd`.

    All are descriptors of the process `pid`. `OSError`: it has no such descriptor, there is no such
    entry, or the kernel does not say.
    """
    kcmp = _SYS_KCMP.get(os.uname().machine)
    if kcmp is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    slot = struct.pack("=III", epoll, number, nth)
    return _checked(_c().syscall(kcmp, pid, pid, _KCMP_EPOLL_TFD, ctypes.c_ulong(fd), slot)) == 0


def handle_of(fd: int) -> tuple[int, bytes]:
    """Return (kind, handle) of an open file, by which `open_by_handle` finds it under any name.

    EOPNOTSUPP: it has none.
    """
    mount = ctypes.c_int()
    packed = ctypes.create_string_buffer(struct.pack("=Ii", _MAX_HANDLE, 0), 8 + _MAX_HANDLE)
    _checked(_c().name_to_handle_at(fd, b"", packed, ctypes.byref(mount), _AT_EMPTY_PATH))
    size, kind = struct.unpack_from("=Ii", packed)
    return kind, packed.raw[8 : 8 + size]


def open_by_handle(mount: int, kind: int, handle: bytes) -> int:
    """Return an O_PATH descriptor of the file with this handle, on a folder's mount.

    By name_to_handle_at(2), and ``/proc``.
    """
    packed = struct.pack("=Ii", len(handle), kind) + handle
    return _checked(_c().open_by_handle_at(mount, packed, os.O_PATH | os.O_CLOEXEC))


def setns(fd: int, nstype: int = 0) -> None:
    """Move the calling *thread* into the namespace of `fd` (or those of a pidfd, by flags)."""
    _checked(_c().setns(fd, nstype))


def unshare(flags: int) -> None:
    """Give the calling thread new namespaces (CLONE_NEW... flags)."""
    _checked(_c().unshare(flags))


def semaphore_user(number: int, place: int) -> int:
    """Return the PID of the last process that used this semaphore of the System V set `number`.

    0 if it is not in this PID namespace.
    """
    return _checked(_c().semctl(number, place, _SEM_GETPID))


def remove_shared_memory(*numbers: int) -> None:
    """Let System V shared memory segments end with their last user, in this thread's IPC
    namespace.
    """
    for number in numbers:
        _checked(_c().shmctl(number, _IPC_RMID, None))


def bind_mount(source: str, target: str) -> None:
    """Show the file or folder `source` at `target`, in the mount namespace of the calling
    thread.
    """
    try:
        _checked(
            _c().mount(
                os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(_MS_BIND), None
            )
        )
    except OSError as error:
        raise OSError(error.errno, error.strerror, source, None, target) from None


def set_child_subreaper(on: bool) -> None:
    """Set whether orphans below this process become its children instead of init's."""
    _checked(_c().prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0))


def set_parent_death_signal(number: int) -> None:
    """Set the signal that this process gets when the thread that forked it ends; 0 for none."""
    _checked(_c().prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0))


def is_child_subreaper() -> bool:
    """Return whether this process is a child subreaper."""
    value = ctypes.c_int()
    _checked(_c().prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0))
    return bool(value.value)


def address_of(buffer: bytearray | memoryview | mmap.mmap) -> int:
    """Return the address of this writable memory of ours."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class _Buffer(ctypes.Structure):
    """CPython's Py_buffer."""

    _fields_ = [
        ("address", ctypes.c_void_p),
        ("owner", ctypes.c_void_p),
        ("rest", ctypes.c_ssize_t * 10),
    ]


@contextmanager
def pinned(buffer: Readable) -> Iterator[int]:
    """Yield the address of this memory of ours, which may be read-only, and keep it there."""
    view = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(view), 0)
    try:
        yield view.address or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))


@contextmanager
def moved(start: int, size: int) -> Iterator[int]:
    """Move pages of ours to another address (mremap), and yield that; at their old place are new
    ones of zeros. They are given back at the end of the block.
    """
    library = _c()
    library.mremap.restype = ctypes.c_void_p
    flags = _MREMAP_MAYMOVE | _MREMAP_DONTUNMAP
    place = library.mremap(*map(ctypes.c_size_t, (start, size, size, flags, 0)))
    if place in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mremap")
    try:
        yield int(place)
    finally:
        library.munmap(ctypes.c_void_p(place), ctypes.c_size_t(size))


@contextmanager
def borrowed(pid: int, fd: int) -> Iterator[int]:
    """Yield a duplicate of descriptor `fd` of process `pid`, closed at the end of the block."""
    pidfd = os.pidfd_open(pid)
    try:
        own = pidfd_getfd(pidfd, fd)
    finally:
        os.close(pidfd)
    try:
        yield own
    finally:
        os.close(own)


def tee(source: int, target: int, size: int) -> int:
    """Copy at most `size` bytes from one pipe to another without removing them; return how many.

    Does not wait (EAGAIN).
    """
    return _checked(_c().tee(source, target, ctypes.c_size_t(size), _SPLICE_F_NONBLOCK))


def timerfd_settime(fd: int, flags: int, value: int, interval: int) -> None:
    """Arm a timer descriptor (nanoseconds; TFD_TIMER_... flags, absolute times on this process's
    clocks).
    """
    new = struct.pack("qqqq", *divmod(interval, 10**9), *divmod(value, 10**9))
    _checked(_c().timerfd_settime(fd, flags, new, None))


def timerfd_gettime(fd: int) -> None:
    """Make the kernel count the expiries of a periodic timer descriptor up to now.

    Nothing is read.
    """
    _checked(_c().timerfd_gettime(fd, ctypes.create_string_buffer(32)))


def getsockopt_of(fd: int, level: int, option: int, value: bytearray) -> None:
    """Call getsockopt(2); `value` holds the option's argument and size, and receives the answer."""
    size = ctypes.c_uint32(len(value))
    place = ctypes.c_void_p(address_of(value)) if value else None
    _checked(_c().getsockopt(fd, level, option, place, ctypes.byref(size)))


def disconnect(fd: int) -> None:
    """Dissolve a socket's association (connect to AF_UNSPEC), so that it can be connected again."""
    address = (0).to_bytes(16, sys.byteorder)  # struct sockaddr whose family is AF_UNSPEC
    _checked(_c().connect(fd, address, len(address)))


def borrow_socket(pidfd: int, fd: int) -> socket.socket:
    """Return `pidfd_getfd` of a socket, as a Python socket; closing it leaves the process's open.

    The caller must close it soon: while it is open, a close by the process does not end the
    connection.
    """
    borrowed = pidfd_getfd(pidfd, fd)
    try:
        return socket.socket(fileno=borrowed)
    except OSError as error:
        # a family without names (AF_XDP): Python reads a name to learn the family
        if error.errno == errno.EOPNOTSUPP:
            return socket.socket(socket.AF_UNIX, socket.SOCK_RAW, 0, fileno=borrowed)
        os.close(borrowed)
        raise
