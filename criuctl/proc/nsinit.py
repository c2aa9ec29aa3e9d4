"""PID 1 of a private PID namespace: a program of its own, run as ``python -I -S nsinit.py FD LAST_PID [net]``.

A restored tree whose old PIDs are taken gets a PID and mount namespace of its own, with its own /proc.  A
namespace lives only while its PID 1 does, so this process is that PID 1: it reaps orphans and ends when the
last process of the namespace has, with the exit status of the first one (the tree's root).

CRIU is a guest of the namespace for a while and needs PIDs of its own there: numbering begins behind LAST_PID,
so that its numbers are none of the tree's.

It is not part of the dumped tree.  It imports nothing of criuctl and little of the standard library, because
one of it stays in memory per restored tree.

The protocol on FD, a socket whose other end is criuctl (`criuctl.proc.privatens`): the helper that made the
namespaces sends ``pid <N>`` (as criuctl sees it) and ends; PID 1 sends ``ready``, or ``error <text>``; when
criuctl answers ``go`` the namespace stands on its own.  Until then it ends with criuctl: the end of the
stream makes PID 1 exit, and the kernel kills whatever is in the namespace.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys

_NEWNS, _NEWPID, _NEWNET = 0x00020000, 0x20000000, 0x40000000
_MS_NOSUID_NODEV_NOEXEC, _MS_SLAVE_REC = 0x2 | 0x4 | 0x8, 0x80000 | 0x4000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_PR_SET_NAME = 15

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh22x", b"lo", 0)
        (flags,) = struct.unpack_from("16xh", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _IFF_UP))


def _prepare(last_pid: int, net: bool) -> None:
    """Inside the new namespaces: own /proc, host mounts still arrive but ours never leave."""
    _check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_SLAVE_REC), None), "making mounts private")
    _check(_libc.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(_MS_NOSUID_NODEV_NOEXEC), None), "mounting /proc")
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(str(last_pid))
    if net:
        _loopback_up()


def _close_all_but(kept: int) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != kept:
            try:
                os.close(int(name))
            except OSError:
                pass  # the listing's own descriptor
    os.set_inheritable(kept, False)


def _reap_all() -> int:
    """Reap until there is nobody left; the exit status of the first process that ended as our direct heir."""
    status = 0
    while True:
        try:
            _, ended = os.wait()
        except ChildProcessError:
            return status
        except InterruptedError:
            continue
        status = os.waitstatus_to_exitcode(ended)


def _init(channel: socket.socket, last_pid: int, net: bool) -> int:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _libc.prctl(_PR_SET_NAME, b"criuctl-init", 0, 0, 0)
    try:
        _prepare(last_pid, net)
        _close_all_but(channel.fileno())
        os.chdir("/")
    except OSError as error:
        channel.sendall(f"error {error}\n".encode())
        return 1
    channel.sendall(b"ready\n")
    if channel.recv(16) != b"go\n":
        return 1
    channel.close()
    status = _reap_all()
    return status if status >= 0 else 128 - status


def main() -> int:
    """Make the namespaces, fork PID 1, tell its PID, leave."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    last_pid, net = int(sys.argv[2]), "net" in sys.argv[3:]
    try:
        _check(_libc.unshare(_NEWPID | _NEWNS | (_NEWNET if net else 0)), "making namespaces")
    except OSError as error:
        channel.sendall(f"error {error}\n".encode())
        return 1
    child = os.fork()
    if child == 0:
        os._exit(_init(channel, last_pid, net))
    channel.sendall(f"pid {child}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
