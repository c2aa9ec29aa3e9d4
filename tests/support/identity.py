"""Another user's processes, dumped on a machine whose root lacks CAP_SYS_RESOURCE.

CRIU needs every capability to dump a process of another user.  Root of a user namespace that maps
every id to itself has them all over the processes inside, and what is dumped there is what the
host's root would dump: the same users, the same files.  So the tests that attack start a program as
an ordinary user in such a namespace, dump it with criuctl in there, end everything, change files as
that user, and restore with the host's ordinary root.

`Identity` is one such set of namespaces (user, PID, mount, network, IPC, UTS); this file is also
the program that makes it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
MS_REC, MS_PRIVATE = 0x4000, 0x40000
IDS = 65536


_PIPES = Path("/proc/sys/fs/pipe-user-pages-soft")
_ROOM = 1 << 20  # pages


def _make_room_for_pipes() -> None:
    """Raise the limit on the pipes of a user, up to the end of the test run.

    The kernel counts the pipes of root in every namespace together, and only root of the first one
    may exceed the limit: pipes of tests, and of CRIU, that run at the same time would use it up.
    """
    before = _PIPES.read_text()
    if 0 < int(before) < _ROOM:
        _PIPES.write_text(str(_ROOM))
        atexit.register(_PIPES.write_text, before)


class Identity:
    """Namespaces whose root is the host's root in name, with every capability inside."""

    def __init__(self, token: str) -> None:
        """`token`: what marks the processes as the test's own."""
        _make_room_for_pipes()
        ready, ready_write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-S", __file__, str(ready_write)],
                env=os.environ | {"CZOO_TOKEN": token},
                pass_fds=[ready_write],
                start_new_session=True,
            )
        finally:
            os.close(ready_write)
        with os.fdopen(ready) as file:
            said = file.read()
        if said != "ready":
            raise OSError(f"no namespaces of identity: {said}")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        self.init = int(children.split()[0])

    @property
    def prefix(self) -> list[str]:
        """The program that runs a command as root inside, in the foreground."""
        kinds = ("user", "mount", "pid", "net", "ipc", "uts")
        return ["nsenter", f"--target={self.init}", *(f"--{kind}" for kind in kinds), "--"]

    def as_user(self, uid: int, groups: Sequence[int] = ()) -> list[str]:
        """The same, as an ordinary user."""
        supplementary = f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"
        return [*self.prefix, "setpriv", f"--reuid={uid}", f"--regid={uid}", supplementary, "--"]

    def host_pid(self, inner: int) -> int:
        """The PID, on the host, of the process that is `inner` inside."""
        namespace = os.readlink(f"/proc/{self.init}/ns/pid")
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                inside = os.readlink(f"/proc/{name}/ns/pid") == namespace
                if inside and inner_pid(int(name)) == inner:
                    return int(name)
            except OSError:  # it ended meanwhile, or may not be looked at
                continue
        raise AssertionError(f"no process is {inner} inside")

    def close(self) -> None:
        """End everything inside."""
        if self._process.poll() is None:
            os.kill(self.init, signal.SIGKILL)  # the kernel ends the rest of the PID namespace
        self._process.wait(60)


def inner_pid(pid: int) -> int:
    """What a process is called in its own PID namespace."""
    status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    return int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1])


def call_as(uid: int, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
    """Run a command as an ordinary user of the host, who changes files of their own."""
    subprocess.run(argv, user=uid, group=uid, extra_groups=[], env=env, check=True, timeout=60)


# -- the program --------------------------------------------------------------------------------


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _make(ready_write: int) -> None:
    """Make the namespaces, say so on `ready_write`, and wait for the end of their init."""
    libc = ctypes.CDLL(None, use_errno=True)
    unshared, mapped = os.pipe(), os.pipe()
    maker = os.getpid()
    mapper = os.fork()
    if mapper == 0:  # only a process of the host's own namespace may map every id
        os.read(unshared[0], 1)
        for kind in ("uid", "gid"):
            Path(f"/proc/{maker}/{kind}_map").write_text(f"0 0 {IDS}\n")
        os.write(mapped[1], b"x")
        os._exit(0)
    os.close(mapped[1])
    _checked(libc.unshare(NAMESPACES), "unshare")
    os.write(unshared[1], b"x")
    if os.read(mapped[0], 1) != b"x":
        raise OSError("the ids were not mapped")
    os.waitpid(mapper, 0)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    init = os.fork()
    if init == 0:
        try:
            _checked(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "private mounts")
            _checked(libc.mount(b"proc", b"/proc", b"proc", 0, None), "/proc")
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            os.write(ready_write, b"ready")
        except (OSError, subprocess.SubprocessError) as error:
            os.write(ready_write, str(error).encode())
            os._exit(1)
        os.close(ready_write)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps its other children
        while True:
            signal.pause()
    os.close(ready_write)
    os.waitpid(init, 0)


if __name__ == "__main__":
    _make(int(sys.argv[1]))
