"""Start a session's command.

A separate program: ``python sessionchild.py TTY REPORT CWD REFUSED COMMAND...``.

The session's init (tini) starts it, in a new process group. It leaves that group, leads a new
session with the terminal TTY, and executes COMMAND there. TTY is opened here, inside the session's
mount namespace. REPORT is the name of an abstract unix socket; its listener sends one byte when the
command may begin, then reads an error number if it could not be executed, and the end of the stream
if it was. (A pipe would not do: the init keeps what it inherits.) REFUSED lists what the kernel
refuses the command: "io_uring", "mptcp", both with a comma between, or "-".

The environment is passed on as it was given, not as Python may have changed it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import struct
import sys
import termios
from collections.abc import Container, Mapping

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_MODE_FILTER = 2
# BPF_LD|W|ABS, BPF_ALU|AND|K, BPF_JMP|JEQ|K, BPF_RET|K
_LOAD_WORD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_RET_ERRNO, _RET_ALLOW = 0x00050000, 0x7FFF0000
_SYS_IO_URING_SETUP = 425
_X32 = 0x40000000
_NUMBER, _ARCHITECTURE, _THIRD_ARGUMENT = 0, 4, 32  # offsets in struct seccomp_data
_IPPROTO_MPTCP = 262
_SOCKET_CALLS = {0xC000003E: 41, 0xC00000B7: 198}  # x86-64 (and x32), aarch64


def _environment() -> dict[bytes, bytes]:
    with open("/proc/self/environ", "rb") as file:
        pairs = (entry.partition(b"=") for entry in file.read().split(b"\0") if entry)
        return {name: value for name, _, value in pairs}


def filter_of(
    refused: Container[str], socket_calls: Mapping[int, int]
) -> list[tuple[int, int, int, int]]:
    """Return the BPF program that refuses these.

    `socket_calls`: architecture -> number of socket(2). Architectures are AUDIT_ARCH_* numbers.
    io_uring_setup(2) fails as in a kernel without io_uring (ENOSYS); its number is the same on
    every architecture but for x32's mark. socket(2) with IPPROTO_MPTCP fails as in a kernel without
    Multipath TCP (EPROTONOSUPPORT): programs then use TCP.
    """
    program = []
    if "io_uring" in refused:
        program += [
            (_LOAD_WORD, 0, 0, _NUMBER),
            (_AND, 0, 0, ~_X32 & 0xFFFFFFFF),
            (_EQUAL, 0, 1, _SYS_IO_URING_SETUP),
            (_RETURN, 0, 0, _RET_ERRNO | errno.ENOSYS),
        ]
    if "mptcp" in refused:
        for architecture, number in socket_calls.items():
            program += [
                (_LOAD_WORD, 0, 0, _ARCHITECTURE),
                (_EQUAL, 0, 6, architecture),
                (_LOAD_WORD, 0, 0, _NUMBER),
                (_AND, 0, 0, ~_X32 & 0xFFFFFFFF),
                (_EQUAL, 0, 3, number),
                # The kernel uses the lower half of the argument; it comes first, as every
                # architecture here is little-endian.
                (_LOAD_WORD, 0, 0, _THIRD_ARGUMENT),
                (_EQUAL, 0, 1, _IPPROTO_MPTCP),
                (_RETURN, 0, 0, _RET_ERRNO | errno.EPROTONOSUPPORT),
            ]
    return [*program, (_RETURN, 0, 0, _RET_ALLOW)]


def packed(refused: Container[str]) -> bytes:
    """Return that program as the kernel takes it, for the architectures known here."""
    program = filter_of(refused, _SOCKET_CALLS)
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def refuse(refused: Container[str]) -> None:
    """Set a seccomp filter (seccomp(2)) that refuses these to this process and all that it starts.

    CRIU saves and restores the filter. A process without CAP_SYS_ADMIN has to give up gaining
    privileges by execve(2) before it may set one: it does for io_uring, which was requested, and
    not for Multipath TCP, which is refused by default.
    """
    import ctypes  # takes as long to import as all other modules here

    instructions = packed(refused)
    code = ctypes.create_string_buffer(instructions, len(instructions))
    program = ctypes.create_string_buffer(
        struct.pack("HP", len(instructions) // 8, ctypes.addressof(code))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    for _ in range(2):
        if not libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, program, 0, 0):
            return
        number = ctypes.get_errno()
        if "io_uring" not in refused:
            return
        if number != errno.EACCES or libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            break
    raise OSError(number, os.strerror(number))


def main() -> int:
    """Run the program; never returns on success."""
    tty, report, cwd, refused, *argv = sys.argv[1:]
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    channel.connect(f"\0{report}")
    try:
        # A group's leader may not lead a session: join the group of the init for a moment.
        os.setpgid(0, os.getpgid(os.getppid()))
        os.setsid()
        slave = os.open(tty, os.O_RDWR)
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        for fd in range(3):
            os.dup2(slave, fd)
        if slave > 2:
            os.close(slave)
        for number in signal.valid_signals():
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.chdir(cwd)
        if refused != "-":
            refuse(refused.split(","))
        if not channel.recv(1):
            return 127  # no process is left that would hold the session
        os.execvpe(argv[0], argv, _environment())
    except OSError as error:
        channel.sendall(struct.pack("i", error.errno or 1))
    return 127


if __name__ == "__main__":
    sys.exit(main())
