"""Namespaces: identified, entered, and named."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
from support.obstacles import running

from criuctl.errors import NoSuchProcess
from criuctl.proc import command, syscalls
from criuctl.proc.namespaces import (
    KINDS,
    entry_prefix,
    for_children,
    foreign,
    in_mount_namespace,
    is_namespace_init,
    named_netns,
    namespaces,
    nested_pid_namespaces,
    ns_pids,
    pid_level,
)
from criuctl.proc.tree import read_tree

UTS, IPC, NET, MNT, PID = 0x04000000, 0x08000000, 0x40000000, 0x00020000, 0x20000000


def test_own_namespaces() -> None:
    mine = namespaces("self")
    assert mine.keys() <= KINDS.keys()
    assert {"pid", "mnt", "net", "ipc", "uts", "user"} <= mine.keys()
    assert mine["net"] == os.stat("/proc/self/ns/net").st_ino
    assert foreign(os.getpid()) == set()
    assert pid_level(os.getpid()) == 0


def test_foreign_namespaces_are_reported(tmp_path: Path) -> None:
    with running(f"again({UTS | IPC | NET | MNT})", tmp_path) as program:
        assert foreign(program.pid) == {"uts", "ipc", "net", "mnt"}


def test_no_namespaces_of_a_missing_process() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
        with pytest.raises(NoSuchProcess):
            namespaces(process.pid)


def test_command_runs_inside(tmp_path: Path) -> None:
    with running(f"again({UTS | NET}); socket.sethostname('inside-it')", tmp_path) as program:
        done = command.run(
            [
                *entry_prefix(program.pid, {"uts", "net"}),
                "sh",
                "-c",
                "uname -n; readlink /proc/self/ns/net; exit 0",
            ],
            timeout=60,
        )
        host, net = done.text.split()
        assert host == "inside-it"
        assert net == f"net:[{namespaces(program.pid)['net']}]"
        assert foreign(os.getpid()) == set()
        code = command.run(
            [*entry_prefix(program.pid, {"net"}), "sh", "-c", "exit 7"], timeout=60, check=False
        ).returncode
        assert code == 7


def test_system_calls_in_a_mount_namespace(tmp_path: Path) -> None:
    """What is mounted there is not here, and only the thread that did it was there."""
    own, known, here = tmp_path / "own", tmp_path / "known", tmp_path / "folder"
    own.write_text("own")
    known.write_text("known")
    here.mkdir()
    before = os.getcwd()
    os.chdir(here)
    try:
        with running("again(0x20000)", tmp_path) as program:
            in_mount_namespace(program.pid, lambda: syscalls.bind_mount(str(own), str(known)))
            assert (known.read_text(), Path(f"/proc/{program.pid}/root{known}").read_text()) == (
                "known",
                "own",
            )
            assert in_mount_namespace(program.pid, known.read_text) == "own"
            with pytest.raises(FileNotFoundError, match=r"nothing.*known"):
                in_mount_namespace(
                    program.pid, lambda: syscalls.bind_mount(str(tmp_path / "nothing"), str(known))
                )
        assert os.getcwd() == str(here)
    finally:
        os.chdir(before)


def test_prefix_for_nothing_and_for_nonsense() -> None:
    assert entry_prefix(1, set()) == []
    with pytest.raises(ValueError, match="nonsense"):
        entry_prefix(1, {"nonsense"})


PID_NAMESPACE = (
    f"pid = os.fork()\nif pid:\n os.close(READY); sleep()\nassert libc.unshare({PID}) == "
    "0\nchild(lambda: child(lambda: None))"
)


def test_pids_in_a_pid_namespace(tmp_path: Path) -> None:
    with running(PID_NAMESPACE, tmp_path) as program:
        outer, init, inner = read_tree(program.pid)
        assert outer.ns_pids == (outer.pid,)
        assert init.ns_pids == (init.pid, 1)
        assert inner.ns_pid == ns_pids(inner.pid)[-1] > 1
        assert is_namespace_init(init.pid)
        assert not is_namespace_init(inner.pid)
        assert (pid_level(outer.pid), pid_level(inner.pid)) == (0, 1)
        assert for_children(outer.pid, "pid") == namespaces(init.pid)["pid"]
        assert nested_pid_namespaces(outer.pid, [p.pid for p in (outer, init, inner)]).keys() == {
            init.pid,
            inner.pid,
        }
        entered = command.run(
            [*entry_prefix(init.pid, {"pid"}), "sh", "-c", "echo $$; exit 5"],
            timeout=60,
            check=False,
        )
        assert int(entered.stdout) > 1
        assert entered.returncode == 5


def test_named_net_namespace(tmp_path: Path) -> None:
    name = f"criuctl-test-{os.getpid()}"
    assert named_netns(namespaces("self")["net"]) is None
    command.run(["ip", "netns", "add", name], timeout=60)
    try:
        inode = Path(f"/run/netns/{name}").stat().st_ino
        assert named_netns(inode) == name
    finally:
        command.run(["ip", "netns", "delete", name], timeout=60)
    assert named_netns(inode) is None


def test_borrowed_descriptors() -> None:
    theirs, ours = socket.socketpair()
    with subprocess.Popen(
        ["sleep", "1000"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL
    ) as process:
        theirs.close()
        pidfd = os.pidfd_open(process.pid)
        try:
            with syscalls.borrow_socket(pidfd, 0) as borrowed:
                assert not os.get_inheritable(borrowed.fileno())
                borrowed.send(b"from outside")
            assert ours.recv(100) == b"from outside"
            with pytest.raises(OSError, match="Bad file descriptor"):
                syscalls.pidfd_getfd(pidfd, 99)
            before = set(os.listdir("/proc/self/fd"))
            with pytest.raises(OSError, match="non-socket"):
                syscalls.borrow_socket(pidfd, 1)
            assert set(os.listdir("/proc/self/fd")) <= before
        finally:
            os.close(pidfd)
            ours.close()
            process.kill()


def test_subreaper() -> None:
    assert not syscalls.is_child_subreaper()
    syscalls.set_child_subreaper(True)
    try:
        assert syscalls.is_child_subreaper()
    finally:
        syscalls.set_child_subreaper(False)
    assert not syscalls.is_child_subreaper()
