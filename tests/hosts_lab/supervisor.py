"""The program that makes the hosts and the wire between them: ``python -m hosts_lab.supervisor
FD``.

It lives in the network namespace of the bridge and is the parent of every host's PID 1.  Requests
come over a SOCK_SEQPACKET socket from the tests, one JSON object each:

- ``{"make": plan}`` with the socket over which PID 1 will serve; answered with its PID
- ``{"end": name}``: that host is gone when the answer comes

When the socket closes, for whatever reason, every host is ended and its control groups are removed.
Should the supervisor itself be killed, the lifelines of the hosts close and they end; empty control
groups are then removed by the next supervisor.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import init, kernel, root

PREFIX = "hosts-lab-"
BRIDGE = "wire"
HOST_FLAGS = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWCGROUP
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
)


@dataclass
class Made:
    """A host that runs."""

    pid: int  # of its PID 1, as seen here
    lifeline: int  # writing end; closing it ends the host
    groups: list[Path]


class Supervisor:
    """See the module's docstring."""

    def __init__(self, requests: socket.socket) -> None:
        self.requests = requests
        self.hosts: dict[str, Made] = {}

    def serve(self) -> None:
        """Until the tests are gone."""
        kernel.adopt_orphans()
        kernel.unshare(kernel.CLONE_NEWNET)
        _ip("link set lo up", f"link add name {BRIDGE} type bridge", f"link set {BRIDGE} up")
        _sweep()
        try:
            while True:
                data, fds, _, _ = socket.recv_fds(self.requests, init.MAX_REQUEST, 1)
                if not data:
                    return
                try:
                    answer = self._answer(json.loads(data), fds)
                except (OSError, subprocess.SubprocessError) as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                self.requests.send(json.dumps(answer).encode())
        finally:
            for name in list(self.hosts):
                self.end(name)

    def _answer(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        if "make" in request:
            with socket.socket(fileno=fds[0]) as theirs:
                return {"pid": self.make(request["make"], theirs)}
        self.end(request["end"])
        return {}

    def make(self, plan: dict[str, Any], theirs: socket.socket) -> int:
        """Start a host's PID 1 and plug it into the bridge."""
        name = plan["name"]
        groups = _make_groups(f"{PREFIX}{os.getpid()}-{name}")
        reading, writing = os.pipe2(os.O_CLOEXEC)
        told_read, told_write = os.pipe2(os.O_CLOEXEC)
        first = os.fork()
        if first == 0:
            _become(plan, theirs, reading, told_write, groups)
        os.close(reading)
        os.close(told_write)
        os.waitpid(first, 0)
        with os.fdopen(told_read) as pipe:
            pid = int(pipe.read() or 0)
        self.hosts[name] = Made(pid, writing, groups)
        if not pid:
            self.end(name)
            raise OSError(f"{name} could not be made; see the standard error of the tests")
        port = f"port-{name}"
        _ip(
            f"link add name {port} type veth peer name eth0 address {plan['mac']} netns {pid}",
            f"link set {port} master {BRIDGE}",
            f"link set {port} up",
        )
        os.write(writing, b"g")
        return pid

    def end(self, name: str) -> None:
        """Everything of the host is gone afterwards."""
        made = self.hosts.pop(name)
        os.close(made.lifeline)
        if made.pid:
            os.kill(made.pid, signal.SIGKILL)  # our child, not reaped: the PID is still its own
            os.waitpid(made.pid, 0)
        _unplug(f"port-{name}")
        for group in made.groups:
            _remove_group(group)


def _become(
    plan: dict[str, Any], theirs: socket.socket, lifeline: int, pid_write: int, groups: list[Path]
) -> None:
    """In a child: make the namespaces, and in them PID 1.  Never returns.

    The other hosts' lifelines and the supervisor's own socket must not live on in it.
    """
    try:
        kept = {0, 1, 2, theirs.fileno(), lifeline, pid_write}
        for fd in set(map(int, os.listdir("/proc/self/fd"))) - kept:
            _try_close(fd)
        for group in groups:
            (group / "cgroup.procs").write_text("0")
        kernel.unshare(HOST_FLAGS)
        pid = os.fork()
        if pid:
            os.write(pid_write, str(pid).encode())
            os._exit(0)
        os.close(pid_write)
        init.main(plan, theirs, lifeline)
    except BaseException as error:
        print(f"{plan['name']}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def _try_close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        pass  # the one that listed the descriptors


def _ip(*lines: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines).encode(), check=True, timeout=60)


def _unplug(port: str) -> None:
    """Remove a port: the kernel does so too, but some time after the host's end, and the next one
    needs the name.
    """
    try:
        if port in _ports():
            _ip(f"link delete {port}")
    except subprocess.CalledProcessError:
        if port in _ports():
            raise  # it was not the kernel that had come first


def _ports() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _make_groups(name: str) -> list[Path]:
    made = [Path(hierarchy.path, name) for hierarchy in root.hierarchies()]
    for group in made:
        group.mkdir()
    return made


def _remove_group(group: Path) -> None:
    """Remove a group with those below it; who was in it has been killed and may take a moment to
    leave.
    """
    deadline = time.monotonic() + 20
    while group.exists():
        for folder in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
            _try_remove(folder)
        _try_remove(group)
        if time.monotonic() > deadline:
            print(f"{group} cannot be removed", file=sys.stderr, flush=True)
            return
        time.sleep(0.005)


def _try_remove(group: Path) -> None:
    try:
        group.rmdir()
    except OSError:
        pass  # a process is still in it: asked again


def _sweep() -> None:
    """Remove the groups of supervisors that were killed."""
    for hierarchy in root.hierarchies():
        for group in Path(hierarchy.path).glob(f"{PREFIX}*"):
            maker = group.name.removeprefix(PREFIX).partition("-")[0]
            if not os.path.exists(f"/proc/{maker}") and not (group / "cgroup.procs").read_text():
                _remove_group(group)


def main() -> None:
    """The program."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # the tests decide when it ends; SIG_IGN would be inherited
        signal.signal(number, lambda number, frame: None)
    missing = [
        program for program in ("ip", "nft", "tc", "ssh-keygen") if shutil.which(program) is None
    ]
    if missing:
        raise SystemExit(
            f"missing for the hosts: {', '.join(missing)}; scripts/setup --dev installs them"
        )
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        requests.set_inheritable(False)
        Supervisor(requests).serve()


if __name__ == "__main__":
    main()
