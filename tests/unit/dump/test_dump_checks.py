"""What the checks find out about the environment of the tree: here, how the CRIU in use was
built.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from support import oracle
from support.keeper import wait_until
from support.obstacles import running

from criuctl.config import Config
from criuctl.dump.checks import connections, folders, memory, processes, scene, terminals, watches
from criuctl.dump.checks.files import _saves_bpf_maps, check_descriptors
from criuctl.dump.checks.open_paths import mount_of
from criuctl.dump.checks.processes import check_processes
from criuctl.errors import NoSuchProcess
from criuctl.proc.mappings import Mapping, mappings
from criuctl.proc.sockets import TreeSocket
from criuctl.proc.tree import children


@pytest.mark.parametrize(
    ("program", "saves"),
    [
        (b"\x7fELF...\0libnl-3.so.200\0libc.so.6\0bpfmap_file_entry\0", False),
        (b"\x7fELF...\0libnl-3.so.200\0libbpf.so.1\0libc.so.6\0", True),
        (b'#!/bin/sh\nexec /elsewhere/criu "$@"\n', True),  # who knows: CRIU answers itself
    ],
)
def test_bpf_maps_are_refused_when_criu_was_built_without_them(
    program: bytes, saves: bool, tmp_path: Path
) -> None:
    criu = tmp_path / "criu"
    criu.write_bytes(program)
    criu.chmod(stat.S_IRWXU)
    assert _saves_bpf_maps(Config(criu=str(criu))) == saves


def test_no_criu_is_another_finding(tmp_path: Path) -> None:
    assert _saves_bpf_maps(Config(criu=str(tmp_path / "none")))


def test_threads_of_a_process_that_is_just_ending_have_nothing_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a moment it has given up what they shared, and not yet its namespaces."""
    monkeypatch.setattr(processes, "_namespaces", lambda pid, tid: ("net:[1]",))
    end = "threading.Thread(target=sleep).start(); libc.syscall(60, 0)"
    with running(f"if os.fork() == 0:\n os.close(READY); {end}", tmp_path) as program:
        (child,) = children(program.pid)
        tasks = Path(f"/proc/{child}/task")
        wait_until(
            lambda: len(list(tasks.iterdir())) == 2 and oracle.stat_of(child)[0] == "Z",
            60,
            "its main thread has ended",
        )
        process = next(one for one in scene.collect(program.pid, Config()).tree if one.pid == child)
        assert list(processes._own(process, sorted(path.name for path in tasks.iterdir()))) == []


def test_a_process_that_is_just_ending_is_not_refused_for_threads_without_their_main_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has them for a moment: it is looked at until that is over."""
    end = "threading.Thread(target=sleep).start(); libc.syscall(60, 0)"
    with running(f"if os.fork() == 0:\n os.close(READY); {end}", tmp_path) as program:
        (child,) = children(program.pid)
        tasks = Path(f"/proc/{child}/task")
        wait_until(
            lambda: len(list(tasks.iterdir())) == 2 and oracle.stat_of(child)[0] == "Z",
            60,
            "its main thread has ended",
        )
        seen = scene.collect(program.pid, Config())
        assert [finding.code for finding in check_processes(seen)] == ["leader-gone"]

        def ends(_seconds: float) -> None:
            os.kill(child, signal.SIGKILL)
            wait_until(lambda: len(list(tasks.iterdir())) == 1, 60, "the other has, too")

        monkeypatch.setattr("criuctl.dump.checks.processes.time", SimpleNamespace(sleep=ends))
        assert list(check_processes(seen)) == []


def test_who_ends_while_it_is_looked_at_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wholly: what is known of it by then is of no use to a check that asks for the rest."""
    text = "if os.fork() == 0:\n os.close(READY)\n sleep()"
    with running(text, tmp_path) as program:
        (child,) = children(program.pid)

        def vanishing(pid: int) -> list[Mapping]:
            if pid == child:
                raise NoSuchProcess(f"there is no process with PID {pid}")
            return mappings(pid)

        monkeypatch.setattr(scene, "mappings", vanishing)
        seen = scene.collect(program.pid, Config())
    assert [process.pid for process in seen.tree] == [program.pid, child]
    assert [process.pid for process in seen.living] == [program.pid]
    assert seen.opened.keys() == seen.mapped.keys() == seen.namespaces.keys() == {program.pid}


def test_who_is_forked_after_the_look_at_the_tree_is_not_left_behind(tmp_path: Path) -> None:
    with running("if os.fork() == 0:\n os.close(READY)\n sleep()", tmp_path) as program:
        seen = scene.collect(program.pid, Config())
        before = replace(seen, tree=seen.tree[:1])
        assert len(seen.tree) == 2
        assert not [finding for finding in check_processes(before) if finding.code == "left-behind"]


@pytest.mark.parametrize("held", ["os.pidfd_open(child)", "os.close(w)"])
def test_ends_held_by_children_forked_later_are_not_outside(held: str, tmp_path: Path) -> None:
    text = (
        "r, w = os.pipe()\nchild = os.fork()\nif child == 0:\n os.close(READY)\n os.close(r)\n "
        f"sleep()\n{held}"
    )
    with running(text, tmp_path) as program:
        seen = scene.collect(program.pid, Config())
        (_root, child) = (process.pid for process in seen.tree)
        opened = {pid: held for pid, held in seen.opened.items() if pid != child}
        before = replace(seen, tree=seen.tree[:1], opened=opened)
        assert not before.outside(child)
        assert before.outside(0)
        assert before.outside(os.getpid())
        assert [finding.code for finding in check_descriptors(before)] == []


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (b"", 0),
        (b"\1" + bytes(7), 1),
        (bytes(8), 1),
        (bytes(4) + b"\1" + bytes(3), 2),
        (b"\1" + bytes(15), 3),
    ],
)
def test_netlink_groups_as_criu_counts_them(groups: bytes, words: int) -> None:
    """It leaves out the last word of 32 if that is empty, and no other: where there are groups
    above 64, no socket is saved.
    """
    assert connections._words(groups) == words


def test_a_file_that_is_called_like_shared_memory_is_none(tmp_path: Path) -> None:
    """The kernel's name of a System V segment is that of a deleted file."""
    with running("", tmp_path) as program:
        seen = scene.collect(program.pid, Config())
    for deleted in (False, True):
        seen.mapped[program.pid] = [
            Mapping(0x1000, 0x2000, "rw-s", 0, 0, 1, 7, "/SYSV0000002a", deleted)
        ]
        assert [finding.code for finding in memory.check_mappings(seen)] == ["sysv-shm"] * deleted


def test_shared_memory_that_many_have_attached_is_reported_once(tmp_path: Path) -> None:
    with running("child(lambda: None)", tmp_path) as program:
        seen = scene.collect(program.pid, Config())
        assert len(seen.tree) == 2
    for process in seen.tree:
        seen.mapped[process.pid] = [
            Mapping(n << 12, n + 1 << 12, "rw-s", 0, 0, 1, n, "/SYSV00000000", True) for n in (7, 8)
        ]
    assert [f.text.partition("shmid ")[2][0] for f in memory.check_mappings(seen)] == ["7", "8"]


def test_who_goes_to_another_folder_meanwhile_has_not_lost_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running("os.chdir(TMP)", tmp_path) as program:
        seen = scene.collect(program.pid, Config())
        # it was still in the first when that was asked
        links = {"cwd": ["/", str(tmp_path)], "root": ["/", "/"]}
        monkeypatch.setattr(folders, "read_link", lambda _pid, name: links[name].pop(0))
        assert list(folders.check_folders(seen)) == []


def test_who_ends_while_its_folders_are_looked_at_has_lost_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running("", tmp_path) as program:
        seen = scene.collect(program.pid, Config())
        monkeypatch.setattr(
            folders,
            "mount_of",
            lambda path: None if path.endswith(("/cwd", "/root")) else mount_of(path),
        )
        assert list(folders.check_folders(seen)) == []


def test_what_an_epoll_watches_no_more_is_no_obstacle(tmp_path: Path) -> None:
    """A server closes connections all the time: between the look at its epoll and that at its
    descriptors, too.
    """
    text = "import select\ne = select.epoll(); a, b = socket.socketpair(); e.register(a)"
    with running(text, tmp_path) as program:
        seen = scene.collect(program.pid, Config())
        opened = seen.opened[program.pid]
        (epoll,) = [d for d in opened if d.kind == "epoll"]
        (mark,) = [line for line in epoll.extra if line.startswith("tfd:")]
        number = watches._fields(mark)["tfd"]
        gone = re.sub(r"ino:\s*\w+", "ino:7", mark.replace(number, "999", 1))
        before = epoll._replace(extra=(*epoll.extra, gone))
        seen.opened[program.pid] = [before if d is epoll else d for d in opened]
        assert list(watches.check_watches(seen)) == []


def test_processes_that_are_gone_have_no_terminal_open() -> None:
    """A build has hundreds that end meanwhile."""
    holders = tuple((2**22 + number, 0) for number in range(100))  # no PID is as large
    assert list(terminals._many_outside(holders)) == []


REWRITES = """
kept, closed = open(TMP + '/kept', 'w'), open(TMP + '/closed', 'w')
def rewrite(*_):
    for file in kept, closed:
        os.unlink(file.name); open(file.name, 'w').close()
    closed.close(); open(TMP + '/done', 'w').close()
signal.signal(signal.SIGUSR1, rewrite)
"""


def test_a_tree_that_rewrites_a_file_meanwhile_is_not_refused(tmp_path: Path) -> None:
    """The one that it has still is a deleted file by then, not one that something hides."""
    with running(REWRITES, tmp_path) as program:
        seen = scene.collect(program.pid, Config())
        os.kill(program.pid, signal.SIGUSR1)
        wait_until((tmp_path / "done").exists, 60, "the files are others")
        assert list(check_descriptors(seen)) == []


WATCHES = """
i = libc.inotify_init(); path = TMP + '/watched'
open(path, 'w').close(); assert libc.inotify_add_watch(i, path.encode(), 2) > 0
def rewrite(*_):
    os.unlink(path); open(path, 'w').close(); assert libc.inotify_add_watch(i, path.encode(), 2) > 0
    os.read(i, 4096); open(TMP + '/done', 'w').close()
signal.signal(signal.SIGUSR1, rewrite)
"""


def test_a_tree_that_watches_a_file_rewritten_meanwhile_is_not_refused(tmp_path: Path) -> None:
    """The watch of the one that was there before has gone with it."""
    with running(WATCHES, tmp_path) as program:
        seen = scene.collect(program.pid, Config())
        os.kill(program.pid, signal.SIGUSR1)
        wait_until((tmp_path / "done").exists, 60, "it watches another file")
        assert list(watches.check_watches(seen)) == []


@pytest.mark.parametrize("layer", ["tls", ""])
def test_a_socket_on_which_the_kernel_speaks_tls_is_refused(
    layer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many kernels lack the module, so the socket's own answer is replaced where it has to be."""
    code = (
        "import contextlib, socket\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname())\n"
        "accepted = server.accept()[0]\n"
        "with contextlib.suppress(OSError):\n"
        f"    client.setsockopt(socket.IPPROTO_TCP, 31, b'{layer}' or b'none')"
    )
    borrowed = connections.borrowed

    @contextmanager
    def asked(s: TreeSocket) -> Iterator[Any]:
        with borrowed(s) as duplicate:
            name = duplicate.getsockopt(socket.IPPROTO_TCP, 31, 16)
            first = s.socket.state == "established" and s.fd == min(fds)
            answer = name or (layer.encode() + b"\0" * 13 if layer and first else b"")
            yield SimpleNamespace(
                proto=duplicate.proto,
                fileno=duplicate.fileno,
                getsockopt=lambda _level, _name, _size=0: answer,
            )

    with running(code, tmp_path) as program:
        found = scene.collect(program.pid, Config())
        fds = [s.fd for s in found.sockets if s.socket.state == "established"]
        assert len(fds) == 2
        monkeypatch.setattr(connections, "borrowed", asked)
        findings = [f for f in connections.check_sockets(found) if f.level == "error"]
    assert [(f.code, f.fd) for f in findings] == ([("kernel-tls", min(fds))] if layer else [])
    assert all("tls-relay" in f.hint for f in findings)
