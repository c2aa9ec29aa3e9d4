"""Becomes a session's command: a program of its own, ``python sessionchild.py TTY REPORT CWD RINGS COMMAND...``.

It is started by the session's init (tini), which has put it into a process group of its own.  It leaves that
group, leads a new session with the terminal TTY, and executes COMMAND there.  TTY is opened here, inside the
session's mount namespace.  REPORT is the name of an abstract unix socket; whoever listens there sends one byte when the command
may begin, then reads an error number if it could not be executed, and the end of the stream if it was.  (A pipe would
not do: the init keeps what it inherits.)  RINGS is "no" when the command is to find a kernel without io_uring.

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

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_MODE_FILTER = 2
_LOAD_WORD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06  # BPF_LD|W|ABS, BPF_ALU|AND|K, BPF_JMP|JEQ|K, BPF_RET|K
_RET_ERRNO, _RET_ALLOW = 0x00050000, 0x7FFF0000
_SYS_IO_URING_SETUP = 425
_X32 = 0x40000000


def _environment() -> dict[bytes, bytes]:
    with open("/proc/self/environ", "rb") as file:
        pairs = (entry.partition(b"=") for entry in file.read().split(b"\0") if entry)
        return {name: value for name, _, value in pairs}


def refuse_io_uring() -> None:
    """Let io_uring_setup(2) fail from now on as in a kernel that has none (ENOSYS), here and in all that this process starts.

    By a seccomp filter (seccomp(2)), which CRIU saves and restores.  The number is the same on every architecture but for
    x32's mark.  Who may not set a filter just so gives up gaining privileges by execve first, as the kernel demands.
    """
    import ctypes  # which takes as long as all else here

    instructions = [
        (_LOAD_WORD, 0, 0, 0),  # the number of the system call
        (_AND, 0, 0, ~_X32 & 0xFFFFFFFF),
        (_EQUAL, 0, 1, _SYS_IO_URING_SETUP),
        (_RETURN, 0, 0, _RET_ERRNO | errno.ENOSYS),
        (_RETURN, 0, 0, _RET_ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in instructions))
    program = ctypes.create_string_buffer(struct.pack("HP", len(instructions), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for _ in range(2):
        if not libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, program, 0, 0):
            return
        if (number := ctypes.get_errno()) != errno.EACCES or libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            break
    raise OSError(number, os.strerror(number))


def main() -> int:
    """Never returns if all goes well."""
    tty, report, cwd, rings, *argv = sys.argv[1:]
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    channel.connect(f"\0{report}")
    try:
        # A group's leader may not lead a session; its own group is that of the init for a moment.
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
        if rings == "no":
            refuse_io_uring()
        if not channel.recv(1):
            return 127  # nobody is there who would hold the session
        os.execvpe(argv[0], argv, _environment())
    except OSError as error:
        channel.sendall(struct.pack("i", error.errno or 1))
    return 127


if __name__ == "__main__":
    sys.exit(main())
