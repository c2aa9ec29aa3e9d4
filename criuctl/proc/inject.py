"""Run one system call inside another process, with ptrace.

Some state can only be set by the process itself: whether it adopts orphans, its POSIX file locks,
what it watches. CRIU loses a few of these. While a restored tree waits at a stage of CRIU's, each
of its threads sits in a system call (a futex wait), so the instruction just before its program
counter is a ``syscall``. That instruction is run again with our number and arguments, and
everything is put back. CRIU retries the interrupted wait. A thread that has been interrupted is out
of its wait for a moment, about to enter it again: then its program counter points to the
``syscall``. A thread that is anywhere else is resumed and stopped again later (`stopped`). Only its
tracer can set the registers of a thread: when CRIU is the tracer and waits for us in a system call,
CRIU is made to do it (`set_traced`).

A thread is taken from the entry of the call to its exit, never by single steps. A step ends with a
SIGTRAP that the kernel forces on the thread; where SIGTRAP is ignored, or blocked as all signals
are while CRIU restores, the thread would lose its handler. Other signals are blocked meanwhile, and
delivered afterwards. No other thread may poll a child of ours that is stopped so (`Child.poll`).

Only x86-64 is supported; elsewhere `call` raises `PlatformError` and the caller reports what is
lost.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..errors import PlatformError
from .child import InterruptsDeferred
from .procfs import read_memory

_SEIZE, _INTERRUPT, _DETACH, _CONT, TO_SYSCALL = 0x4206, 0x4207, 17, 7, 24
_TRACE_SYSGOOD, _TRACE_FORKS = 0x1, 0x2 | 0x4 | 0x8  # forks, vforks and clones
_EXIT_KILL = 0x100000
GETREGS, SETREGS = 12, 13
GETSIGMASK, SETSIGMASK = 0x420A, 0x420B
SYSCALL = _SYSCALL = b"\x0f\x05"
_MINUS_EINTR = (1 << 64) - errno.EINTR
_AGAIN = (1 << 64) - 514  # the kernel's own "enter the call again, unless a handler has run"
ENDED_BY_STOPS = frozenset(  # calls that a stop ends with EINTR, without having done anything
    # epoll_wait, epoll_pwait, epoll_pwait2, semop, semtimedop, rt_sigtimedwait, io_getevents;
    # reading, writing, accepting: on a socket with a time limit
    (232, 281, 441, 65, 220, 128, 208, 0, 1, 19, 20, 43, 44, 45, 46, 47, 288, 299, 307)
)
_WALL = WALL = 0x40000000
WNOTHREAD = 0x20000000  # only children that this very thread traces
SYSCALL_STOP = 5 | 0x80  # the stop signal at the entry and the exit of a system call
EVENT_STOP = 128  # the event of a stop that was requested

_PEEKSIGINFO, _OF_PROCESS = 0x4209, 1
_PEEK = struct.Struct("=QIi")  # struct ptrace_peeksiginfo_args: offset, flags, count
SIGINFO = 128  # bytes of a siginfo
_MOST = 1024  # signals of a queue that are read at most
_TRIES, _PAUSE = 100, 0.002  # to stop a process in the system call in which it waits for us

PTRACE, _BELOW_STACK = 101, 4096  # far below the red zone, well inside the stack's mapping
PRCTL, FCNTL, OPEN, CLOSE, IOCTL, EPOLL_CTL = 157, 72, 2, 3, 16, 233
CONNECT, BIND, LISTEN, CHDIR, FCHDIR = 42, 49, 50, 80, 81
SETGROUPS, SETFSUID, SETFSGID = 116, 122, 123
MMAP, MUNMAP, MADVISE, DUP3 = 9, 11, 28, 292
_READ_WRITE, _READ_EXECUTE, _PRIVATE_ANONYMOUS = 3, 5, 0x22
_WORD = 8
# Makes the request r14 of r12 threads, whose numbers are at rbx, with registers at r13; leaves the
# results in place of the numbers.
_OF_EACH = (
    b"\x4c\x89\xf7\x48\x8b\x33\x31\xd2\x4d\x89\xea"  # ptrace(r14, [rbx], 0, r13)
    b"\xb8\x65\x00\x00\x00\x0f\x05\x48\x89\x03"  # mov [rbx], rax
    b"\x48\x83\xc3\x08\x49\x81\xc5\xd8\x00\x00\x00"  # add rbx, 8; add r13, 216
    b"\x49\xff\xcc\x75\xdb\xcc"  # dec r12; jnz; int3
)
LSEEK, PIDFD_OPEN, PIDFD_GETFD, KEYCTL = 8, 434, 438, 250
F_DUPFD_CLOEXEC = 1030
_EXIT_GROUP = 231
TIOCSCTTY = 0x540E
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)


class Registers(ctypes.Structure):
    """struct user_regs_struct of x86-64."""

    _fields_ = [
        (name, ctypes.c_ulonglong)
        for name in (
            *(
                "r15",
                "r14",
                "r13",
                "r12",
                "rbp",
                "rbx",
                "r11",
                "r10",
                "r9",
                "r8",
                "rax",
                "rcx",
                "rdx",
                "rsi",
                "rdi",
            ),
            *(
                "orig_rax",
                "rip",
                "cs",
                "eflags",
                "rsp",
                "ss",
                "fs_base",
                "gs_base",
                "ds",
                "es",
                "fs",
                "gs",
            ),
        )
    ]


def ptrace(request: int, pid: int, address: int = 0, data: object = None) -> int:
    """Make a request of ptrace(2); `OSError` names it."""
    ctypes.set_errno(0)
    pointer = (
        ctypes.cast(ctypes.byref(data), ctypes.c_void_p)
        if isinstance(data, ctypes.Structure)
        else data
    )
    result = int(_libc.ptrace(request, pid, address, pointer))
    if result == -1 and ctypes.get_errno():
        code = ctypes.get_errno()
        raise OSError(code, f"ptrace {request:#x} of PID {pid}: {os.strerror(code)}")
    return result


class Mask(ctypes.Structure):
    """The kernel's sigset_t."""

    _fields_ = [("signals", ctypes.c_uint64)]


def _wait_stop(pid: int) -> int:
    """Wait for the next stop; return its signal, and from bit 8 on the event."""
    _, status = os.waitpid(pid, _WALL)
    if not os.WIFSTOPPED(status):
        raise OSError(errno.ESRCH, f"PID {pid} ended while it was stopped")
    return status >> 8


def stopped_with(pid: int) -> int | None:
    """Return the present stop of a traced process as signal and event (from bit 8 on); None: it
    runs.
    """
    found, status = os.waitpid(pid, _WALL | os.WNOHANG)
    if not found:
        return None
    if not os.WIFSTOPPED(status):
        raise OSError(errno.ESRCH, f"PID {pid} ended while it was stopped")
    return status >> 8


def wait_stop(pid: int) -> None:
    """Wait for the first stop of a process that is traced from its first instruction on."""
    _wait_stop(pid)


@contextmanager
def stopped(tid: int, *, forks: bool = False) -> Iterator[None]:
    """Stop the thread `tid`, and no other of its process, under our trace inside the block; with
    `forks` trace new children.

    Only our thread that enters the block may use the trace. The thread is stopped in the system
    call in which it waits for us, if it can be found there. Our signals that raise are deferred: a
    process that is not stopped yet can neither be detached nor given its registers back, and would
    stay traced.
    """
    if platform.machine() != "x86_64":
        raise PlatformError("running a system call in another process is only supported on x86-64")
    for left in reversed(range(_TRIES)):
        with InterruptsDeferred():
            ptrace(_SEIZE, tid, 0, _TRACE_SYSGOOD | (_TRACE_FORKS if forks else 0))
            try:
                _stop(tid)
                if not left or _call_site(tid, registers_of(tid)) is not None:
                    yield
                    return
            finally:
                ptrace(_DETACH, tid)
        time.sleep(_PAUSE)  # it is about to enter its wait


def _stop(pid: int, *, standing: bool = False) -> None:
    """Stop the process for us; `standing`: it is stopped already, elsewhere.

    A signal that arrives first is delivered, and the stop is requested again.
    """
    number = 0
    while True:
        ptrace(_INTERRUPT, pid)
        if standing:
            ptrace(_CONT, pid, 0, number)
        stop = _wait_stop(pid)
        if stop >> 8 == EVENT_STOP:
            return
        standing, number = True, stop & 0xFF


def seize(pid: int, *, forks: bool = False, exit_kill: bool = False) -> None:
    """Trace `pid` from this thread on, without stopping it.

    With `forks` also its new children, from their first instruction on. With `exit_kill` the kernel
    kills it when this thread ends without having detached from it.
    """
    if platform.machine() != "x86_64":
        raise PlatformError("running a system call in another process is only supported on x86-64")
    options = (_TRACE_FORKS if forks else 0) | (_EXIT_KILL if exit_kill else 0)
    ptrace(_SEIZE, pid, 0, _TRACE_SYSGOOD | options)


def interrupt(pid: int) -> None:
    """Request a stop of a traced process."""
    ptrace(_INTERRUPT, pid)


def go_on(pid: int, number: int = 0, *, to_syscall: bool = False) -> None:
    """Resume a stopped process with this signal; `to_syscall`: only to the next system call."""
    ptrace(TO_SYSCALL if to_syscall else _CONT, pid, 0, number)


def let_go(pid: int, number: int = 0) -> None:
    """Detach from a stopped process, which runs on with this signal."""
    ptrace(_DETACH, pid, 0, number)


def result(pid: int) -> int:
    """Return the stopped process's result register: -ENOSYS at the entry of a system call."""
    return ctypes.c_longlong(registers_of(pid).rax).value


def end_with(pid: int, code: int) -> bool:
    """Replace the exit code of a process that is stopped at the entry of exit_group.

    Returns whether it is stopped there.
    """
    registers = registers_of(pid)
    entered = ctypes.c_longlong(registers.rax).value == -errno.ENOSYS
    if not entered or registers.orig_rax != _EXIT_GROUP:
        return False
    registers.rdi = code
    ptrace(SETREGS, pid, 0, registers)
    return True


def call(pid: int, number: int, *arguments: int) -> int:
    """Run one system call in the stopped process and return its result (negative: an errno)."""
    with calling(pid) as run:
        return run(number, *arguments)


@contextmanager
def calling(pid: int, *, site: int = 0, restart: bool = False) -> Iterator[Callable[..., int]]:
    """Yield a function that runs system calls in the stopped process, as `call` does.

    The registers are put back at the end. `BlockingIOError` if the process is in no system call,
    unless the address of a ``syscall`` instruction is given (`site`). With `restart`, a call that
    the stop has ended with EINTR is entered again afterwards.
    """
    saved, mask = registers_of(pid), Mask()
    place = site or _call_site(pid, saved)
    if place is None:
        raise OSError(errno.EAGAIN, f"PID {pid} is not in a system call")
    if restart and saved.rax == _MINUS_EINTR and saved.orig_rax in ENDED_BY_STOPS:
        saved.rax = _AGAIN
    registers = Registers.from_buffer_copy(saved)

    def run(number: int, *arguments: int) -> int:
        load_call(registers, place, number, arguments)
        ptrace(SETREGS, pid, 0, registers)
        _to_syscall(pid)
        _to_syscall(pid)
        ptrace(GETREGS, pid, 0, registers)
        return ctypes.c_longlong(registers.rax).value

    ptrace(GETSIGMASK, pid, ctypes.sizeof(mask), mask)
    ptrace(SETSIGMASK, pid, ctypes.sizeof(mask), Mask(ctypes.c_uint64(-1).value))
    try:
        yield run
    finally:
        # from this stop, and not from the exit of a call, the kernel restarts an interrupted call
        _stop(pid, standing=True)
        ptrace(SETREGS, pid, 0, saved)
        ptrace(SETSIGMASK, pid, ctypes.sizeof(mask), mask)


def load_call(registers: Registers, site: int, number: int, arguments: Iterable[int]) -> None:
    """Make the registers run this system call at the ``syscall`` instruction `site`."""
    registers.rip, registers.rax = site, number
    registers.orig_rax = ctypes.c_ulonglong(-1).value
    for name, value in zip(("rdi", "rsi", "rdx", "r10", "r8", "r9"), arguments, strict=False):
        setattr(registers, name, value & 0xFFFFFFFFFFFFFFFF)


def last_call(pid: int, number: int, *arguments: int) -> int:
    """Run execve(2) in the stopped process, from which there is no way back; return its result."""
    registers = registers_of(pid)
    site = _call_site(pid, registers)
    if site is None:
        raise OSError(errno.EAGAIN, f"PID {pid} is not in a system call")
    registers.rip, registers.rax, registers.orig_rax = site, number, ctypes.c_ulonglong(-1).value
    registers.rdi, registers.rsi, registers.rdx = arguments
    ptrace(SETREGS, pid, 0, registers)
    _to_syscall(pid)
    _to_syscall(pid)
    return ctypes.c_longlong(registers_of(pid).rax).value


def registers_of(pid: int) -> Registers:
    """Return the registers of a stopped thread."""
    registers = Registers()
    ptrace(GETREGS, pid, 0, registers)
    return registers


def _call_site(pid: int, registers: Registers) -> int | None:
    """Return the address of the ``syscall`` that the stopped process has just left or will enter.

    None if there is no such instruction.
    """
    before = registers.rip - len(_SYSCALL)
    for place in (int(before), int(registers.rip)):
        if read_memory(pid, place, len(_SYSCALL)) == _SYSCALL:
            return place
    return None


def _to_syscall(pid: int) -> None:
    """Resume the stopped process to the entry of its next system call, or from there to its
    exit.
    """
    number = 0
    while True:
        ptrace(TO_SYSCALL, pid, 0, number)
        stop = _wait_stop(pid)
        if stop == SYSCALL_STOP:
            return
        number = 0 if stop >> 8 else stop  # SIGSTOP, which cannot be blocked


def set_traced(tracer: int, threads: Mapping[int, Any]) -> None:
    """Make the stopped `tracer` put threads that it traces back to where their calls were
    interrupted.

    `threads`: by their numbers in the tracer's PID namespace, with ``ip, sp, ax, orig_ax, di, dx,
    r10`` as attributes. A thread that is neither just after its call, which ended with EINTR, nor
    just before it is left alone. `BlockingIOError` if the tracer itself is in no system call.
    """
    size = len(threads) * (_WORD + ctypes.sizeof(Registers))
    with calling(tracer) as run:
        data = _mapped(run, size, _READ_WRITE)
        code = _mapped(run, len(_OF_EACH), _READ_EXECUTE)
        try:
            write_memory(tracer, code, _OF_EACH)
            now = _of_each(tracer, code, data, GETREGS, dict.fromkeys(threads, Registers()))
            changed = {
                tid: registers for tid, registers in now.items() if _back(registers, threads[tid])
            }
            _of_each(tracer, code, data, SETREGS, changed)
        finally:
            run(MUNMAP, code, len(_OF_EACH))
            run(MUNMAP, data, size)


def _mapped(run: Callable[..., int], size: int, access: int) -> int:
    """Map new memory in the process of `run`; return its address."""
    address = run(MMAP, 0, size, access, _PRIVATE_ANONYMOUS, -1, 0)
    if address < 0:
        raise OSError(-address, os.strerror(-address))
    return address


def _of_each(
    tracer: int, code: int, data: int, request: int, threads: Mapping[int, Registers]
) -> dict[int, Registers]:
    """Have the stopped `tracer` make this request of ptrace(2) of all these threads at once; return
    the registers of those that still exist.

    `code`: where `_OF_EACH` is in its memory; `data`: room for the numbers and the registers. It
    ends with a SIGTRAP, which CRIU has no handler for.
    """
    if not threads:
        return {}
    numbers = struct.Struct(f"={len(threads)}q")
    content = numbers.pack(*threads) + b"".join(map(bytes, threads.values()))
    write_memory(tracer, data, content)
    registers = registers_of(tracer)
    registers.rip, registers.orig_rax = code, ctypes.c_ulonglong(-1).value
    registers.rbx, registers.r12, registers.r13 = data, len(threads), data + numbers.size
    registers.r14 = request
    ptrace(SETREGS, tracer, 0, registers)
    number = 0
    while number != signal.SIGTRAP:
        ptrace(_CONT, tracer, 0, number)
        stop = _wait_stop(tracer)
        number = 0 if stop >> 8 else stop
    content = read_memory(tracer, data, len(content))
    return {
        tid: Registers.from_buffer_copy(content, numbers.size + at * ctypes.sizeof(Registers))
        for at, (tid, result) in enumerate(zip(threads, numbers.unpack_from(content), strict=True))
        if _exists(result, tid)
    }


def _back(registers: Registers, wanted: Any) -> bool:
    """Put the registers of a thread back to where its call was interrupted, if it is there."""
    expected = (
        (wanted.ip, _MINUS_EINTR),
        (wanted.ip - len(_SYSCALL), wanted.orig_ax),
    )
    if registers.rsp != wanted.sp or (registers.rip, registers.rax) not in expected:
        return False
    registers.rip, registers.rax, registers.orig_rax = wanted.ip, wanted.ax, wanted.orig_ax
    registers.rdi, registers.rdx, registers.r10 = wanted.di, wanted.dx, wanted.r10
    return True


def queued_signals(tracer: int, tid: int, *, shared: bool) -> list[bytes]:
    """Return the siginfo of each pending signal of a thread that the stopped `tracer` traces.

    With `shared`, those pending for its process. `tid`: its number in the tracer's PID namespace.
    At most `_MOST` are returned. `BlockingIOError` if the tracer itself is in no system call.
    """
    address = (stack_pointer(tracer) - _BELOW_STACK) & ~0xF
    memory = os.open(f"/proc/{tracer}/mem", os.O_RDWR | os.O_CLOEXEC)
    found: list[bytes] = []
    try:
        saved = os.pread(memory, _PEEK.size + SIGINFO, address)
        try:
            with calling(tracer) as run:
                while len(found) < _MOST:
                    os.pwrite(
                        memory, _PEEK.pack(len(found), _OF_PROCESS if shared else 0, 1), address
                    )
                    count = run(PTRACE, _PEEKSIGINFO, tid, address, address + _PEEK.size)
                    if not _exists(count, tid) or not count:
                        break
                    found.append(os.pread(memory, SIGINFO, address + _PEEK.size))
        finally:
            os.pwrite(memory, saved, address)
    finally:
        os.close(memory)
    return found


def _exists(result: int, tid: int) -> bool:
    """Return whether the thread still exists: it may have been killed."""
    if result < 0 and result != -errno.ESRCH:
        raise OSError(-result, f"thread {tid}: {os.strerror(-result)}")
    return result >= 0


def write_memory(pid: int, address: int, data: bytes) -> None:
    """Overwrite memory of a stopped process."""
    fd = os.open(f"/proc/{pid}/mem", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, data, address)
    finally:
        os.close(fd)


def stack_pointer(pid: int) -> int:
    """Return the stack pointer of a stopped process; below it and its red zone is free memory."""
    return int(registers_of(pid).rsp)


@contextmanager
def placed(pid: int, data: bytes) -> Iterator[int]:
    """Yield the address of `data` in the stopped process, written below its stack inside the
    block.
    """
    address = (stack_pointer(pid) - _BELOW_STACK) & ~0xF
    saved = read_memory(pid, address, len(data))
    try:
        write_memory(pid, address, data)
        yield address
    finally:
        write_memory(pid, address, saved)
