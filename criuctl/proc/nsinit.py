"""PID 1 of a private PID namespace.

A separate program: ``python nsinit.py FD LAST_PID [net] [ipc] [layers FD] [bind FROM TO]``.

A session, and a restored tree whose old PIDs are taken, get a new PID and mount namespace, with its
own /proc. A namespace lives only while its PID 1 does, so this process is that PID 1: it reaps
orphans, and ends with the exit status of the tree's root. A session ends with its root: the kernel
kills what is left in the namespace. Any other restored tree ends when its last process has ended.

CRIU runs in the namespace for a while and needs PIDs there: numbering begins after LAST_PID, so
that its numbers differ from the tree's.

PID 1 is not part of the dumped tree. It imports nothing of criuctl and little of the standard
library, because one of it stays in memory per restored tree.

The protocol on FD, a socket whose other end is criuctl (`criuctl.proc.privatens`): the helper that
made the namespaces sends ``pid <N>`` (as criuctl sees it) and ends; PID 1 sends ``ready``, or
``error <text>``. When criuctl answers, the namespace no longer depends on it:

- ``go <ROOT>``: the tree's root has this PID inside, and is about to run; end with it.
- ``wait <ROOT>``: end with the last process.
- ``run <JSON>``, {argv, env, groups, umask}: start the root as the leader of a new session, in the
  control groups with these ``cgroup.procs`` files; PID 1 answers ``root <PID>``, and ends with it.

Until then it ends with criuctl: at the end of the stream PID 1 exits with the status of a killed
process, and the kernel kills all processes in the namespace. ``bind`` shows the folder FROM at TO
inside. ``layers`` is a detached tmpfs; its file ``list``, JSON, says which of its files are shown
over which files here (``binds``), and which of its folders are laid over which folders here
(``covers``), each with the device and inode that must be there. The path may be in another user's
folder, so it is walked without links, and nothing is mounted over another inode. Without
``set_uid`` no mount of the namespace has set-uid programs, and none arrives from the host later.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import time

_NEWNS, _NEWIPC, _NEWPID, _NEWNET = 0x00020000, 0x08000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MNT_DETACH = 0x1, 0x2, 0x4, 0x1000, 0x4000, 2
_SYS_MOUNT_SETATTR, _AT_RECURSIVE, _MOUNT_ATTR_NOSUID, _MS_PRIVATE = 442, 0x8000, 0x2, 0x40000
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_SYS_MOVE_MOUNT, _MOVE_MOUNT_F_EMPTY_PATH, _AT_FDCWD = 429, 4, -100
_STAGE = "/dev"  # exists everywhere, and holds no program of a tree
_MS_NOSUID_NODEV_NOEXEC, _MS_SLAVE_REC = 0x2 | 0x4 | 0x8, 0x80000 | 0x4000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_PR_SET_NAME = 15
_KILLED = 128 + signal.SIGKILL

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


def _ping_sockets_allowed() -> None:
    """Allow ping sockets (ICMP datagrams), which a new net namespace allows to no group.

    A tree that has one could not get it again.
    """
    try:
        with open("/proc/sys/net/ipv4/ping_group_range", "w") as file:
            file.write("0 2147483647")  # all groups, as systemd sets it
    except OSError:
        pass  # a kernel without IPv4


def _mount(
    source: str, target: str, kind: str = "", flags: int = _MS_BIND, options: str = ""
) -> None:
    words = (word.encode("utf-8", "surrogateescape") for word in (source, target, kind))
    _check(_libc.mount(*words, ctypes.c_ulong(flags), options.encode()), f"mounting {target}")


def _lay(fd: int) -> None:
    """Show the contents of the tmpfs `fd` where its list says.

    It then exists in those mounts alone.
    """
    moved = _libc.syscall(
        ctypes.c_long(_SYS_MOVE_MOUNT),
        fd,
        b"",
        _AT_FDCWD,
        _STAGE.encode(),
        ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH),
    )
    _check(moved, "attaching the carried files")
    with open(f"{_STAGE}/list") as file:
        wanted = json.load(file)
    for name, target, there in wanted["binds"]:
        place = _expected(target, there)
        _mount(f"{_STAGE}/{name}", f"/proc/self/fd/{place}")
        os.close(place)
    flags = _MS_RDONLY | _MS_NODEV | (0 if wanted["set_uid"] else _MS_NOSUID)
    for name, folder, there in wanted["covers"]:
        _cover(f"{_STAGE}/{name}", folder, there, wanted["source"], flags)
    _check(_libc.umount2(_STAGE.encode(), ctypes.c_int(_MNT_DETACH)), "detaching the carried files")
    os.close(fd)
    if not wanted["set_uid"]:
        _no_set_uid()


def _no_set_uid() -> None:
    """Make every mount of the namespace nosuid, and let no more come from the host."""
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_NOSUID, 0, _MS_PRIVATE, 0)
    call = (
        _SYS_MOUNT_SETATTR,
        _AT_FDCWD,
        b"/",
        ctypes.c_uint(_AT_RECURSIVE),
        attributes,
        ctypes.c_size_t(len(attributes)),
    )
    _check(
        _libc.syscall(ctypes.c_long(call[0]), *call[1:]),
        "disabling set-uid programs (Linux 5.12)",
    )


def _place(path: str) -> int:
    """Return a descriptor of the file at `path`, without following any link."""
    fd = os.open("/", _PLACE)
    for part in path.split("/"):
        if part:
            inner = os.open(part, _PLACE, dir_fd=fd)
            os.close(fd)
            fd = inner
    return fd


def _expected(path: str, there: list[int]) -> int:
    """Return a descriptor of the file at `path` if it has this device and inode."""
    fd = _place(path)
    status = os.fstat(fd)
    if [status.st_dev, status.st_ino] != there:
        os.close(fd)
        raise OSError(errno.ESTALE, f"{path}: something else is in its place by now")
    return fd


def _cover(layer: str, folder: str, there: list[int], source: str, flags: int) -> None:
    """Lay one folder over another, read-only; its sub-folders stay as they were."""
    place = _expected(folder, there)
    below = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with os.scandir(below) as entries:
        names = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
    inside = {name: os.open(name, _PLACE | os.O_DIRECTORY, dir_fd=below) for name in names}
    _mount(
        source,
        f"/proc/self/fd/{place}",
        "overlay",
        flags,
        f"lowerdir={layer}:/proc/self/fd/{below}",
    )
    top = _place(folder)
    # the overlay's now, unless the folder has been moved away
    if os.fstat(top).st_dev == there[0]:
        raise OSError(errno.ESTALE, f"{folder}: something else is in its place by now")
    for name, fd in inside.items():
        _mount(f"/proc/self/fd/{fd}", f"/proc/self/fd/{top}/{name}", flags=_MS_BIND | _MS_REC)
        os.close(fd)
    for fd in (place, below, top):
        os.close(fd)


def _prepare(last_pid: int, net: bool, bind: list[str], layers: int | None) -> None:
    """Set up the new namespaces: a new /proc; host mounts still arrive but ours never leave."""
    _check(
        _libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_SLAVE_REC), None),
        "making mounts private",
    )
    _check(
        _libc.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(_MS_NOSUID_NODEV_NOEXEC), None),
        "mounting /proc",
    )
    if bind:
        source, target = (os.fsencode(path) for path in bind)
        _check(
            _libc.mount(source, target, None, ctypes.c_ulong(_MS_BIND), None), f"mounting {bind[1]}"
        )
    if layers is not None:
        _lay(layers)
    if last_pid > 1:
        with open("/proc/sys/kernel/ns_last_pid", "w") as file:
            file.write(str(last_pid))
    if net:
        _loopback_up()
        _ping_sockets_allowed()


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


def _await(root: int) -> None:
    """Wait until a restored root is our child: it is CRIU's child until CRIU has ended."""
    while True:
        try:
            with open(f"/proc/{root}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
            if parent <= 1:
                return
        except (FileNotFoundError, ProcessLookupError):
            return  # the root has ended
        except OSError:
            pass  # the host has no free descriptors at the moment
        time.sleep(0.002)


def _reap(root: int, *, with_root: bool) -> int:
    """Reap until no child is left, or only until the root ends; return the root's exit status."""
    status = 0
    while True:
        try:
            pid, ended = os.wait()
        except ChildProcessError:
            return status
        except InterruptedError:
            continue
        if pid == root:
            status = os.waitstatus_to_exitcode(ended)
            if with_root:
                return status


def _start(order: bytes) -> int:
    """Start the tree's root; return its PID."""
    request = json.loads(order)
    pid = os.fork()
    if pid:
        return pid
    try:
        for path in request["groups"]:
            with open(path, "w") as file:
                file.write("0")
        os.setsid()
        for number in signal.valid_signals():
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
        os.umask(request["umask"])
        os.execve(request["argv"][0], request["argv"], request["env"])
    finally:
        os._exit(127)


def _line(channel: socket.socket) -> bytes:
    """Read one line, without its end; empty when criuctl is gone."""
    received = b""
    while not received.endswith(b"\n"):
        piece = channel.recv(1 << 16)
        if not piece:
            return b""
        received += piece
    return received[:-1]


def _init(
    channel: socket.socket, last_pid: int, net: bool, bind: list[str], layers: int | None
) -> int:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _libc.prctl(_PR_SET_NAME, b"criuctl-init", 0, 0, 0)
    try:
        _prepare(last_pid, net, bind, layers)
        _close_all_but(channel.fileno())
        os.chdir("/")
    except OSError as error:
        channel.sendall(f"error {error}\n".encode())
        return 1
    channel.sendall(b"ready\n")
    word, _, rest = _line(channel).partition(b" ")
    if word == b"run":
        root = _start(rest)
        channel.sendall(f"root {root}\n".encode())
    elif word in (b"go", b"wait"):
        root = int(rest)
        _await(root)
    else:
        return _KILLED
    channel.close()
    status = _reap(root, with_root=word != b"wait")
    return status if status >= 0 else 128 - status


def main() -> int:
    """Make the namespaces, fork PID 1, send its PID, exit."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    last_pid, words = int(sys.argv[2]), sys.argv[3:]
    bind: list[str] = []
    if "bind" in words:
        at = words.index("bind")
        words, bind = words[:at], words[at + 1 : at + 3]
    layers = int(words[words.index("layers") + 1]) if "layers" in words else None
    kinds = (
        _NEWPID | _NEWNS | (_NEWNET if "net" in words else 0) | (_NEWIPC if "ipc" in words else 0)
    )
    try:
        _check(_libc.unshare(kinds), "making namespaces")
    except OSError as error:
        channel.sendall(f"error {error}\n".encode())
        return 1
    child = os.fork()
    if child == 0:
        os._exit(_init(channel, last_pid, "net" in words, bind, layers))
    channel.sendall(f"pid {child}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
