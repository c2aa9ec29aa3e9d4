"""Run system calls in a thread that another process traces and holds stopped.

Just before CRIU lets a restored tree run, every process has its own credentials, and CRIU is the
tracer of all threads.  Only a thread's tracer can set its registers, and CRIU waits for criuctl in
a system call: so CRIU is made to call ptrace(2) and wait4(2) (`inject.calling`), and the thread
makes its calls at a ``syscall`` instruction of its vDSO.  Afterwards its registers and its signal
mask are what they were, and it stands at the exit of a call again, as CRIU had left it.

Only x86-64 is supported, as in `criuctl.proc.inject`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec import Struct

from . import inject
from .inject import Mask, Registers
from .mappings import each_mapping
from .procfs import read_memory, read_status

_WAIT4 = 61
_BELOW_STACK = 8192  # below the red zone, well inside the stack's mapping


class Tracee(Struct):
    """A held thread that can run system calls."""

    pid: int
    stack: int  # an address below its stack that it does not use
    run: Callable[..., int]

    @contextmanager
    def placed(self, data: bytes) -> Iterator[int]:
        """Yield the address of `data` in its memory, written there inside the block."""
        address = (self.stack - len(data)) & ~0xF
        saved = read_memory(self.pid, address, len(data))
        inject.write_memory(self.pid, address, data)
        try:
            yield address
        finally:
            inject.write_memory(self.pid, address, saved)


def tracer_of(pid: int) -> int:
    """Return the PID of the process that traces `pid`, 0 if none does; `NoSuchProcess`."""
    return int(read_status(pid)["TracerPid"])


def syscall_site(pid: int) -> int:
    """Return the address of a ``syscall`` instruction in the vDSO of a stopped process."""
    for mapping in each_mapping(pid):
        if mapping.path == "[vdso]":
            at = read_memory(pid, mapping.start, mapping.size).find(inject.SYSCALL)
            if at >= 0:
                return mapping.start + at
    raise OSError(errno.ENOEXEC, "it has no vDSO")


@contextmanager
def calling(tracer: int, pid: int) -> Iterator[Tracee]:
    """Yield the main thread of `pid`, which `tracer` holds; `OSError`.

    We have stopped the tracer (`inject.stopped`), in a system call.
    """
    depth = len(read_status(tracer)["NSpid"].split())  # how many PID namespaces see the tracer
    number = int(read_status(pid)["NSpid"].split()[depth - 1])
    site = syscall_site(pid)
    space = ctypes.sizeof(Registers)
    with inject.placed(tracer, bytes(space)) as address, inject.calling(tracer) as run:
        remote = _Remote(tracer, number, address, run)
        saved, mask = remote.registers(), remote.mask()
        remote.set_mask(Mask(ctypes.c_uint64(-1).value))
        try:
            yield Tracee(pid, saved.rsp - _BELOW_STACK, _caller(remote, saved, site))
        finally:
            remote.set_registers(saved)
            remote.set_mask(mask)


def _caller(remote: _Remote, saved: Registers, site: int) -> Callable[..., int]:
    """Return a function that runs one system call and returns its result, negative for an errno."""

    def run(number: int, *arguments: int) -> int:
        registers = Registers.from_buffer_copy(saved)
        inject.load_call(registers, site, number, arguments)
        remote.set_registers(registers)
        remote.to_syscall()
        remote.to_syscall()
        return ctypes.c_longlong(remote.registers().rax).value

    return run


class _Remote(Struct):
    """Requests of ptrace(2) that the tracer is made to make."""

    tracer: int
    number: int  # of the thread, as the tracer's PID namespace has it
    address: int  # free memory of the tracer
    run: Callable[..., int]  # runs a system call in the tracer

    def _ask(self, request: int, address: int = 0, data: int = 0) -> None:
        result = self.run(inject.PTRACE, request, self.number, address, data)
        if result < 0:
            raise OSError(-result, f"thread {self.number}: {os.strerror(-result)}")

    def registers(self) -> Registers:
        self._ask(inject.GETREGS, 0, self.address)
        data = read_memory(self.tracer, self.address, ctypes.sizeof(Registers))
        return Registers.from_buffer_copy(data)

    def set_registers(self, registers: Registers) -> None:
        inject.write_memory(self.tracer, self.address, bytes(registers))
        self._ask(inject.SETREGS, 0, self.address)

    def mask(self) -> Mask:
        self._ask(inject.GETSIGMASK, ctypes.sizeof(Mask), self.address)
        return Mask.from_buffer_copy(read_memory(self.tracer, self.address, ctypes.sizeof(Mask)))

    def set_mask(self, mask: Mask) -> None:
        inject.write_memory(self.tracer, self.address, bytes(mask))
        self._ask(inject.SETSIGMASK, ctypes.sizeof(Mask), self.address)

    def to_syscall(self) -> None:
        """Resume the thread to the entry of its next system call, or from there to its exit."""
        number = 0
        while True:
            self._ask(inject.TO_SYSCALL, 0, number)
            stop = self._wait()
            if stop == inject.SYSCALL_STOP:
                return
            number = 0 if stop >> 8 else stop  # SIGSTOP, which cannot be blocked

    def _wait(self) -> int:
        if self.run(_WAIT4, self.number, self.address, inject.WALL, 0) != self.number:
            raise OSError(errno.ESRCH, f"thread {self.number} cannot be waited for")
        (status,) = struct.unpack("=i", read_memory(self.tracer, self.address, 4))
        if not os.WIFSTOPPED(status):
            raise OSError(errno.ESRCH, f"thread {self.number} ended while it was stopped")
        return int(status >> 8)
