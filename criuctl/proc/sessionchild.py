"""Becomes a session's command: a program of its own, ``python sessionchild.py TTY REPORT CWD COMMAND...``.

It is started by the session's init (tini), which has put it into a process group of its own.  It leaves that
group, leads a new session with the terminal TTY, and executes COMMAND there.  TTY is opened here, inside the
session's mount namespace.  REPORT is the name of an abstract unix socket; whoever listens there sends one byte when the command
may begin, then reads an error number if it could not be executed, and the end of the stream if it was.  (A pipe would
not do: the init keeps what it inherits.)

The environment is passed on as it was given, not as Python may have changed it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import sys
import termios


def _environment() -> dict[bytes, bytes]:
    with open("/proc/self/environ", "rb") as file:
        pairs = (entry.partition(b"=") for entry in file.read().split(b"\0") if entry)
        return {name: value for name, _, value in pairs}


def main() -> int:
    """Never returns if all goes well."""
    tty, report, cwd, *argv = sys.argv[1:]
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
        if not channel.recv(1):
            return 127  # nobody is there who would hold the session
        os.execvpe(argv[0], argv, _environment())
    except OSError as error:
        channel.sendall(struct.pack("i", error.errno or 1))
    return 127


if __name__ == "__main__":
    sys.exit(main())
