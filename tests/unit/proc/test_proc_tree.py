"""Process trees, descriptors and mappings, read from real processes."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.keeper import wait_until
from support.obstacles import running

from criuctl.errors import NoSuchProcess
from criuctl.proc import tree as tree_module
from criuctl.proc.descriptors import Descriptor
from criuctl.proc.mappings import vm_flags
from criuctl.proc.tree import (
    ProcessIdentity,
    children,
    descriptors,
    mappings,
    read_process,
    read_tree,
    wait_gone,
)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A child of ours that sleeps."""
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def _by_target(opened: list[Descriptor], part: str) -> Descriptor:
    return next(d for d in opened if part in d.target)


def test_own_process() -> None:
    me = read_process(os.getpid())
    assert (me.pid, me.ppid, me.pgid, me.sid) == (
        os.getpid(),
        os.getppid(),
        os.getpgid(0),
        os.getsid(0),
    )
    assert me.exe == os.readlink("/proc/self/exe")
    assert me.cwd == os.getcwd()
    assert (me.uid, me.gid) == (os.geteuid(), os.getegid())
    assert me.argv[0] == Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode()
    assert me.ns_pids[0] == me.pid
    assert me.state == "R"
    assert not me.kernel_thread
    assert not me.zombie
    assert me.rss > 1 << 20


def test_who_is_killed_is_doomed_before_it_is_gone(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = ProcessIdentity.of(child.pid)
    assert not identity.doomed()
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: identity.state() == "T", 60, "it is stopped")
    assert not identity.doomed()
    with monkeypatch.context() as stuck:  # in the kernel, which shows the signal that waits
        stuck.setattr(
            tree_module,
            "read_text",
            lambda _pid, _name: "SigPnd:\t0000000000000100\nShdPnd:\t0000000000000000\n",
        )
        assert identity.doomed()
    child.kill()
    wait_until(lambda: identity.state() == "Z", 60, "it is a zombie")
    assert identity.doomed()
    child.wait()
    assert identity.doomed()


def test_identity_is_more_than_a_pid(child: subprocess.Popen[bytes]) -> None:
    identity = ProcessIdentity.of(child.pid)
    assert identity.alive()
    assert not ProcessIdentity(child.pid, identity.start_time + 1).exists()
    child.kill()
    deadline = time.monotonic() + 60
    while identity.state() != "Z" and time.monotonic() < deadline:
        pass
    assert identity.exists()
    assert not identity.alive()
    child.wait()
    assert not identity.exists()
    with pytest.raises(NoSuchProcess):
        ProcessIdentity.of(child.pid)
    with pytest.raises(NoSuchProcess):
        identity.open_pidfd()


def test_who_is_gone_while_a_group_has_its_number(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = ProcessIdentity.of(child.pid)

    def refused(_pid: int) -> int:  # as Linux 6.12 says it
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "pidfd_open", refused)
    with pytest.raises(NoSuchProcess):
        identity.open_pidfd()


def test_strange_names_of_processes(tmp_path: Path) -> None:
    strange = ") R 1 (\n x"
    program = tmp_path / strange
    program.write_bytes(Path("/bin/sleep").read_bytes())
    program.chmod(0o700)
    with subprocess.Popen([str(program), "1000"], env={}) as process:
        try:
            # `Popen` returns as soon as the exec closes its pipe; the kernel sets the name a moment
            # later.
            ours = read_process(os.getpid()).command
            wait_until(lambda: read_process(process.pid).command != ours, 60, "it has its own name")
            found = read_process(process.pid)
            assert found.command == strange[:15]
            assert found.ppid == os.getpid()
        finally:
            process.kill()


def test_tree_has_parents_before_children_and_zombies(tmp_path: Path) -> None:
    text = (
        "child(lambda: child(lambda: child(lambda: None))); child(lambda: child(lambda: None))\n"
        "os.fork() or os._exit(0)\n"
        "while 'Z' not in [open(f'/proc/{p}/stat').read().rpartition(')')[2].split()[0]"
        " for p in open('/proc/self/task/%d/children' % os.getpid()).read().split()]: pass"
    )
    with running(text, tmp_path) as program:
        found = read_tree(program.pid)
        assert found[0].pid == program.pid
        assert len(found) == 7, [(p.pid, p.ppid) for p in found]
        seen: set[int] = {found[0].ppid}
        for process in found:
            assert process.ppid in seen
            seen.add(process.pid)
        assert sum(process.zombie for process in found) == 1
        assert descriptors(next(p.pid for p in found if p.zombie)) == []
        assert mappings(next(p.pid for p in found if p.zombie)) == []


def test_children_of_threads_are_found(tmp_path: Path) -> None:
    with running(
        "t = threading.Thread(target=lambda: (child(lambda: None), sleep()), "
        "daemon=True); t.start()",
        tmp_path,
    ) as program:
        deadline = time.monotonic() + 60
        while not children(program.pid) and time.monotonic() < deadline:
            pass
        assert len(read_tree(program.pid)) == 2


def test_tree_by_scan_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running("child(lambda: child(lambda: None)); child(lambda: None)", tmp_path) as program:
        expected = [p.identity for p in read_tree(program.pid)]
        # as on a kernel without CONFIG_PROC_CHILDREN
        monkeypatch.setattr(tree_module, "_CHILDREN", "no-such-file")
        assert sorted(p.identity for p in read_tree(program.pid)) == sorted(expected)


def test_tree_that_changes_while_it_is_read() -> None:
    churn = "import os\nwhile True:\n p = os.fork()\n if p == 0: os._exit(0)\n os.waitpid(p, 0)"
    with subprocess.Popen([sys.executable, "-c", churn]) as process:
        try:
            for _ in range(120):
                found = read_tree(process.pid)
                assert found[0].pid == process.pid
                assert all(p.ppid == process.pid for p in found[1:])
        finally:
            process.kill()
    with pytest.raises(NoSuchProcess):
        read_tree(process.pid)


def test_kinds_of_descriptors(tmp_path: Path) -> None:
    text = (
        "import select\n"
        "f = open(TMP + '/file', 'w+'); f.write('hello'); f.flush(); "
        "os.set_inheritable(f.fileno(), True)\n"
        "d = os.open(TMP, os.O_RDONLY); p = os.pipe(); os.mkfifo(TMP + '/fifo'); q = os.open(TMP "
        "+ '/fifo', os.O_RDWR)\n"
        "s = socket.socket(); m = os.memfd_create('name'); e = select.epoll(); i = "
        "libc.inotify_init()\n"
        "z = os.open('/dev/zero', 0); t = os.openpty(); v = call(290, 1, 0); c = call(283, 1, 0)\n"
        "g = call(289, -1, b'\\0' * 8, 8, 0)\n"
        "h = os.pidfd_open(os.getpid()); n = os.open('/proc/self/ns/net', 0); a = call(300, 0, 0)\n"
        "x = open(TMP + '/gone', 'w'); os.unlink(x.name); y = open(TMP + '/kept (deleted)', 'w')\n"
        "os.symlink('x', TMP + '/link'); l = os.open(TMP + '/link', os.O_PATH | os.O_NOFOLLOW)"
    )
    with running(text, tmp_path) as program:
        opened = descriptors(program.pid)
    kinds = {d.kind for d in opened}
    assert kinds == {
        "file", "dir", "symlink", "pipe", "socket", "tty", "memfd", "namespace", "eventfd",
        "epoll", "timerfd", "signalfd", "inotify", "fanotify", "pidfd", "device",
    }  # fmt: skip
    plain = _by_target(opened, f"{tmp_path}/file")
    status = (tmp_path / "file").stat()
    assert (plain.kind, plain.size, plain.offset, plain.inode, plain.device) == (
        "file",
        5,
        5,
        status.st_ino,
        status.st_dev,
    )
    assert plain.writable
    assert not plain.cloexec
    assert not plain.deleted
    gone = _by_target(opened, "/gone")
    assert gone.target == f"{tmp_path}/gone"
    assert (gone.deleted, gone.nlink, gone.cloexec) == (True, 0, True)
    kept = _by_target(opened, "/kept")
    assert kept.target.endswith("(deleted)")
    assert not kept.deleted
    assert _by_target(opened, "/fifo").kind == "pipe"
    assert _by_target(opened, "/memfd:name").kind == "memfd"
    assert os.major(_by_target(opened, "/dev/zero").rdev) == 1
    assert [d.fd for d in opened] == sorted(d.fd for d in opened)
    assert not _by_target(opened, "link").writable


def test_descriptors_match_our_own() -> None:
    with socket.socket() as mine, open(__file__, "rb") as file:
        file.seek(7)
        opened = {d.fd: d for d in descriptors(os.getpid())}
        assert opened[mine.fileno()].inode == os.fstat(mine.fileno()).st_ino
        assert opened[file.fileno()].offset == os.lseek(file.fileno(), 0, os.SEEK_CUR)
        mounts = {
            int(line.split()[0]) for line in Path("/proc/self/mountinfo").read_text().splitlines()
        }
        assert opened[file.fileno()].mnt_id in mounts


def test_mappings(tmp_path: Path) -> None:
    text = (
        "f = open(TMP + '/mapped file', 'w+b'); f.truncate(8192); address = map_fd(f.fileno(), "
        "8192); os.unlink(f.name)\n"
        "a = map_fd(-1, 65536, 3, 0x22); libc.mlock(ctypes.c_void_p(a), 65536); open(TMP + '/at', "
        "'w').write(f'{address} {a}')"
    )
    with running(text, tmp_path) as program:
        found = {m.start: m for m in mappings(program.pid)}
        flags = vm_flags(program.pid)
        address, anonymous = map(int, (tmp_path / "at").read_text().split())
    shared = found[address]
    assert (shared.size, shared.shared, shared.deleted, shared.path) == (
        8192,
        True,
        True,
        f"{tmp_path}/mapped file",
    )
    assert shared.device == tmp_path.stat().st_dev
    assert any(m.path == "[stack]" for m in found.values())
    assert "lo" in flags[next(start for start, m in found.items() if start <= anonymous < m.end)]
    assert flags.keys() == found.keys()


def test_gone_means_reaped(child: subprocess.Popen[bytes]) -> None:
    identity = ProcessIdentity.of(child.pid)
    stranger = ProcessIdentity(child.pid, identity.start_time - 1)
    assert wait_gone([identity, stranger], 0.05) == [identity]
    child.kill()
    began = time.monotonic()
    assert wait_gone([identity], 0.2) == [identity], "a zombie holds its PID"
    assert 0.15 < time.monotonic() - began < 15
    threading.Timer(0.1, child.wait).start()
    began = time.monotonic()
    assert wait_gone([identity], 60) == []
    assert time.monotonic() - began < 30


def test_waiting_for_more_than_there_are_descriptors_for(tmp_path: Path) -> None:
    """Those of a large tree that its parent has not reaped yet, say."""
    with running(
        "for _ in range(120):\n if os.fork() == 0:\n  os.close(READY)\n  sleep()", tmp_path
    ) as program:
        tree = [process.identity for process in read_tree(program.pid)]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = [os.dup(0) for _ in range(80)]
        for fd in free:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, hard))
        try:
            assert wait_gone(tree, 0.1) == tree
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_waiting_for_the_gone_leaks_nothing(child: subprocess.Popen[bytes]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    wait_gone([ProcessIdentity.of(child.pid)], 0.01)
    os.kill(child.pid, signal.SIGKILL)
    wait_gone([ProcessIdentity.of(child.pid)], 0.01)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_speed(tmp_path: Path) -> None:
    """A tree of 100 processes with 20 descriptors each; the best of ten counts."""
    text = (
        "for _ in range(99):\n if os.fork() == 0:\n  os.close(READY)\n  f = [os.open('/etc', 0) "
        "for _ in 'x' * 17]\n  sleep()"
    )
    with running(text, tmp_path) as program:
        wait_until(
            lambda: sum(len(descriptors(p.pid)) for p in read_tree(program.pid)) >= 1900,
            60,
            "all have opened theirs",
        )
        best = 60.0
        for _ in range(10):
            began = time.perf_counter()
            found = read_tree(program.pid)
            opened = sum(len(descriptors(p.pid)) for p in found)
            best = min(best, time.perf_counter() - began)
        assert len(found) == 100
        assert opened >= 1900
        assert best < 3  # a hundredth of that where nothing else runs
