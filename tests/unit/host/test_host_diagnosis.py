"""CRIU's log in words: the first real error, its process and descriptor, a remedy."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from criuctl.checkpoint.manifest import Manifest, SessionRef
from criuctl.config import Config
from criuctl.criu.driver import CriuFailed
from criuctl.dump import criu_failures
from criuctl.host.failures.diagnosis import diagnose, keep_log
from criuctl.host.failures.remedies import REMEDIES
from criuctl.restore import outcome

HEAD = """\
(00.000021) Version: 4.2.1 (gitid 0)
(00.000031) Error (criu/cr-dump.c:11): Can't setup RLIMIT_NOFILE for self
(00.010000) Dumping task (pid: 16590 comm: python)
(00.020000) 16590 fdinfo 0: pos:                0 flags:           100000/0
(00.020010) 16590 fdinfo 3: pos:                0 flags:           100002/0x1
"""

TAIL = """\
(00.026249) Error (criu/cr-dump.c:1545): Dump files (pid: 16590) failed with -1
Error: Could not process rule: No such file or directory
(00.040512) Error (criu/cr-dump.c:1975): Dumping FAILED.
"""


@pytest.mark.parametrize(
    ("line", "code", "pid", "fd"),
    [
        (
            "(00.02) Error (criu/files-ext.c:94): Can't dump file 3 of that type [600] (anon "
            "anon_inode:[userfaultfd])",
            "descriptor-kind",
            16590,
            3,
        ),
        (
            (
                "(00.02) Error (criu/files-ext.c:94): Can't dump file 7 of that type [20600] (chr "
                "10:229)"
            ),
            "device",
            16590,
            7,
        ),
        (
            "(00.02) Error (criu/files-ext.c:94): Can't dump file 3 of that type [60600] "
            "(unknown /dev/loop0)",
            "descriptor-kind",
            16590,
            3,
        ),
        (
            "(00.04) Error (criu/image.c:592): Unable to open pages-984.img: Too many open files",
            "shared-mappings",
            16590,
            None,
        ),
        (
            "pie: 16590: Error (criu/pie/parasite.c:588): send_fds failed (-22)",
            "io-uring",
            16590,
            3,
        ),
        (
            (
                "(00.03) Error (criu/sockets.c:767): sockets: BUG! Unknown socket collected "
                "(family "
                "40)"
            ),
            "socket-family",
            16590,
            3,
        ),
        (
            "(00.04) Error (criu/sk-inet.c:137): inet: Unsupported proto 262 for socket bd74",
            "socket-protocol",
            16590,
            3,
        ),
        (
            "(00.04) Error (criu/sk-inet.c:185): inet: In-flight connection (l) for c9af",
            "tcp-not-accepted",
            16590,
            3,
        ),
        (
            "(00.03) Error (criu/sk-unix.c:881): unix: Can't dump half of stream unix "
            "connection. name: (null); peer name: /x/s",
            "unix-peer-outside",
            16590,
            None,
        ),
        (
            "(00.03) Error (criu/cr-dump.c:478): Task 16803 with SysVIPC shmem map @7fc61043f000 "
            "doesn't live in IPC ns",
            "sysv-shm",
            16803,
            None,
        ),
        (
            "(00.03) Error (criu/pipes.c:490): The packetized mode for pipes is not supported yet",
            "packet-pipe",
            16590,
            3,
        ),
        (
            "(00.02) Error (criu/files-reg.c:1790): Can't lookup mount=21 for fd=3 path=/q17061 "
            "(deleted)",
            "mount-namespace",
            16590,
            3,
        ),
        (
            "(00.02) Error (criu/files-reg.c:1790): Can't lookup mount=27 for fd=-3 "
            "path=/usr/bin/python3.11",
            "mount-namespace",
            16590,
            None,
        ),
        (
            "(00.02) Error (criu/namespaces.c:460): Can't dump nested uts namespace for 16946",
            "nested-namespace",
            16946,
            None,
        ),
        (
            "(00.03) Error (criu/cr-dump.c:389): Can't get rlimit 0: Operation not permitted",
            "foreign-user",
            16590,
            None,
        ),
        (
            "(00.04) Error (compel/src/lib/infect.c:323): Can't dump the 17482 thread with a "
            "pending SIGTRAP.",
            "pending-sigtrap",
            17482,
            None,
        ),
        (
            "(00.03) Error (criu/proc_parse.c:502): Unknown shit 600 (anon_inode:[io_uring])",
            "io-uring",
            16590,
            3,
        ),
        (
            "(00.03) Error (criu/files-reg.c:1031): Can't dump ghost file /x (deleted) of "
            "5242880 size, increase limit",
            "ghost-files",
            16590,
            None,
        ),
        (
            (
                "(00.01) Error (criu/kerndat.c:732): Unable to connect a socket: Network is "
                "unreachable"
            ),
            "lo-down",
            16590,
            None,
        ),
        (
            "(00.05) Error (criu/sk-netlink.c:138): netlink: The netlink socket 0x1afc15f is "
            "bound to groups but not to portid",
            "netlink-groups",
            16590,
            3,
        ),
        (
            "(00.05) Error (criu/sk-netlink.c:133): netlink: 8 1\n"
            "(00.05) Error (criu/sk-netlink.c:134): netlink: The netlink socket 0x1afc305 has "
            "more than 32 groups",
            "netlink-groups",
            16590,
            3,
        ),
        (
            "(00.07) Error (criu/cr-dump.c:1550): Dump eventpoll (pid: 18290) failed with -1",
            "epoll-target",
            18290,
            None,
        ),
        (
            "(00.06) Error (criu/fsnotify.c:284): fsnotify: \tCan't dump that handle",
            "watch-without-path",
            16590,
            3,
        ),
        (
            "(00.03) Error (criu/namespaces.c:532): No NS ID with kid 4026532180",
            "namespace-file",
            16590,
            3,
        ),
        (
            "(00.11) Error (criu/tty.c:182): tty: Index 1001 on ptmx is too big",
            "terminal-number",
            16590,
            3,
        ),
        (
            "(00.06) Error (criu/tty.c:201): tty: Too many external terminals",
            "many-terminals",
            16590,
            None,
        ),
        (
            "(00.2) Error (compel/src/lib/infect.c:608): Unexpected 2980 task interruption, "
            "aborting\n"
            "(00.2) Error (compel/src/lib/infect.c:972): remote_mprotect failed",
            "signal",
            2980,
            None,
        ),
        (
            "(00.1) Error (compel/src/lib/infect.c:690): remote mmap() failed: Cannot allocate "
            "memory",
            "address-space-used-up",
            16590,
            None,
        ),
        (
            "(00.1) Error (compel/src/lib/infect.c:972): remote_mprotect failed",
            "mappings-used-up",
            16590,
            None,
        ),
        (
            "(00.1) Error (compel/src/lib/infect.c:847): Can't create memfd in victim: Too many "
            "open files",
            "descriptors-used-up",
            16590,
            None,
        ),
        (
            "(00.1) Error (criu/pipes.c:406): Unable to set a pipe size: Operation not permitted",
            "pipes-used-up",
            16590,
            None,
        ),
        (
            "(00.2) Error (criu/cr-dump.c:669): Can't make VM id for 2980",
            "shared-with-parent",
            2980,
            None,
        ),
        (
            "(00.04) Error (criu/sockets.c:371): sockets: Can't get socket filter len: "
            "Permission denied",
            "socket-filter",
            16590,
            3,
        ),
        (
            "(00.06) Error (criu/sk-queue.c:243): skqueue: sys_recvmsg failed: truncated",
            "unix-datagram-long",
            16590,
            3,
        ),
        (
            "(00.04) Error (criu/tty.c:410): tty: Found slave peer index 0 without correspond "
            "master peer",
            "terminals",
            16590,
            None,
        ),
        (
            "(00.04) Warn  (compel/src/lib/infect.c:129): Unable to interrupt task: 16562 "
            "(Operation not permitted)",
            "traced",
            16562,
            None,
        ),
    ],
)
def test_dump_failures(line: str, code: str, pid: int, fd: int | None) -> None:
    found = diagnose(f"{HEAD}{line}\n{TAIL}")
    assert (found.code, found.pid, found.fd) == (code, pid, fd)
    assert found.hint
    assert found.line in line
    assert found.line in found.text


@pytest.mark.parametrize(
    "survived",
    [
        "Error (compel/src/lib/infect.c:238): Unseizable non-zombie 77 found, state X, err 77/0",
        "Error (compel/src/lib/infect.c:238): Unseizable non-zombie 77 found, state S, err -1/10",
        "Error (compel/src/lib/infect.c:247): Task pid reused while suspending (9: 3 -> 1)",
        "Error (compel/src/lib/infect.c:255): SEIZE 7: task not stopped after seize",
    ],
)
def test_what_criu_gets_over_does_not_hide_the_cause(survived: str) -> None:
    """It logs as an error of a child or thread what it then does without."""
    cause = (
        "(00.07) Error (criu/files-ext.c:98): Can't dump file 3 of that type [20666] (chr 10:200 "
        "/dev/net/tun)"
    )
    found = diagnose(f"{HEAD}(00.06) {survived}\n{cause}\n{TAIL}")
    assert "Can't dump file 3" in found.line and not found.passes


@pytest.mark.parametrize(
    ("lines", "code", "words"),
    [
        # Of trees of processes that soon end; the last are of one that ends while its threads are
        # looked for.
        (
            "(00.03) Error (criu/cr-dump.c:669): Can't make VM id for 12183",
            "shared-with-parent",
            "12183 shares memory",
        ),
        (
            (
                "(00.03) Error (criu/kcmp-ids.c:113): kcmp failed: pid (2 7) type 1 idx (0 0): No "
                "such process"
            ),
            "ended",
            "ending",
        ),
        (
            (
                "(00.06) Error (compel/src/lib/infect.c:238): Unseizable non-zombie 8128 found, "
                "state "
                "X, err 8128/0"
            ),
            "ended",
            "ending",
        ),
        (
            (
                "(00.06) Error (compel/src/lib/infect.c:238): Unseizable non-zombie 8128 found, "
                "state "
                "R, err 8128/0"
            ),
            "ended",
            "ending",
        ),
        (
            (
                "(00.06) Error (compel/src/lib/infect.c:238): Unseizable non-zombie 8128 found, "
                "state "
                "S, err -1/10"
            ),
            "traced",
            "traces",
        ),
        (
            "(00.06) Error (criu/seize.c:915): Zombies with threads are not supported",
            "leader-gone",
            "ending",
        ),
        (
            "(00.06) Error (criu/seize.c:976): Individually stopped threads not supported",
            "stopping",
            "stopped",
        ),
        (
            (
                "(00.06) Error (compel/src/lib/infect.c:247): Task pid reused while suspending "
                "(9: 3 "
                "-> 1)"
            ),
            "freeze",
            "came and went",
        ),
        (
            (
                "(00.06) Collected (3 attempts, 0 in_progress)\n(00.07) Collected (-1 attempts, 1 "
                "in_progress)"
            ),
            "freeze",
            "faster",
        ),
        (
            "(00.06) Warn  (compel/src/lib/infect.c:132): Unable to interrupt task: 8131 (No such "
            "process)\n"
            "(00.06) Collected (-1 attempts, 2 in_progress)",
            "ended",
            "ending",
        ),
        (
            "(00.06) Error (criu/util.c:412): Can't open 8129: No such file or directory\n"
            "(00.06) Error (criu/proc_parse.c:1097): Can't open 8129/status on procfs: No such "
            "file or directory\n"
            "(00.06) Error (compel/src/lib/infect.c:366): Unable to detach from 8129: No such "
            "process",
            "ended",
            "ending",
        ),
        (
            "(00.06) Error (criu/proc_parse.c:1097): Can't open 8129/status on procfs: No such "
            "file or directory\n"
            "(00.06) Add net ns 10 pid 8128\n"
            "(00.06) Error (criu/namespaces.c:460): Can't dump nested ipc namespace for 8128\n"
            "(00.06) Error (criu/namespaces.c:714): Can't make ipcns id",
            "nested-namespace",
            "8128 was just ending",
        ),
    ],
)
def test_what_passes(lines: str, code: str, words: str) -> None:
    """The cause is not made to be one that stays, and a dump may be tried again."""
    found = diagnose(f"{HEAD}{lines}\n{TAIL}")
    assert (found.code, found.passes) == (code, True)
    assert words in found.text
    assert "ry again" in found.hint or "try again" in found.hint


def test_what_stays() -> None:
    """An unknown error is reported in CRIU's words, not as the end of a process that CRIU
    handled.
    """
    ended = "(00.06) Error (criu/util.c:412): Can't open 8129: No such file or directory\n"
    unknown = diagnose(
        f"{HEAD}{ended}(00.07) Error (criu/new.c:1): new: A thing nobody has seen\n{TAIL}"
    )
    assert (unknown.text, unknown.passes) == ("A thing nobody has seen", True)
    assert not diagnose(
        f"{HEAD}(00.07) Error (criu/new.c:1): new: A thing nobody has seen\n{TAIL}"
    ).passes
    assert not diagnose(
        f"{HEAD}{ended}pie: 16590: Error (criu/pie/parasite.c:588): send_fds failed (-22)\n{TAIL}"
    ).passes
    assert not diagnose(
        f"{HEAD}(00.2) Error (criu/namespaces.c:460): Can't dump nested user namespace for "
        f"7\n{TAIL}"
    ).passes


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (
            "(00.02) Error (criu/cr-restore.c:1230): Can't fork for 15047: File exists",
            "pid-taken",
            "PID",
        ),
        (
            (
                "(00.1)  1234: Error (criu/files-reg.c:2175): File var/log/x has bad size 12 "
                "(expect "
                "10)"
            ),
            "file-changed",
            "var/log/x",
        ),
        (
            "(00.1)  1234: Error (criu/files-reg.c:2153): File usr/lib/libc.so.6 has bad build-ID",
            "file-changed",
            "build-ID",
        ),
        (
            "(00.1)  1234: Error (criu/files-reg.c:2267): Can't open file tmp/x: No such file or "
            "directory",
            "file-missing",
            "tmp/x",
        ),
        (
            "(00.1)  1234: Error (criu/sk-inet.c:1059): inet: Can't bind inet socket (id 5): "
            "Address already in use",
            "port-taken",
            "port",
        ),
        (
            "(00.1)  1234: Error (criu/sk-inet.c:1030): inet: couldn't find ifindex for v0",
            "interface-missing",
            "interface",
        ),
        (
            "(00.1)  1234: Error (criu/sockets.c:656): Can't set 1:25 (len 2): No such device",
            "interface-missing",
            "interface",
        ),
        (
            "(00.1)  1234: Error (criu/sk-unix.c:1651): unix: Can't bind id 0x5 ino 77 addr "
            "/run/x: Address already in use",
            "unix-path-taken",
            "/run/x",
        ),
        (
            "(00.03)  29944: Error (criu/sk-unix.c:1406): unix: Can't connect 234651 socket: "
            "Connection refused",
            "unix-peer-missing",
            "datagrams",
        ),
        (
            "(00.03)  29944: Error (criu/tty.c:1010): tty: Don't have tty to inherit session "
            "from, aborting",
            "terminals",
            "terminal",
        ),
        (
            "(00.10) Error (criu/cr-restore.c:1924): Unable to detach 4575: No such process",
            "ended",
            "just ending",
        ),
    ],
)
def test_restore_failures(line: str, code: str, words: str) -> None:
    echoes = (
        "(00.1) Error (a.c:1): 1234 exited, status=1\n(00.2) Error (a.c:2): Restoring FAILED.\n"
    )
    found = diagnose(f"{line}\n{echoes}")
    assert found.code == code
    assert words in found.text


def test_unknown_error_is_reported_as_it_is() -> None:
    found = diagnose(f"{HEAD}(00.02) Error (criu/new.c:1): new: A thing nobody has seen\n{TAIL}")
    assert (found.text, found.code, found.pid, found.fd) == (
        "A thing nobody has seen",
        "criu",
        16590,
        3,
    )
    assert "log" in found.hint


def test_cause_is_reported_rather_than_its_echo() -> None:
    found = diagnose(
        f"{HEAD}(00.02) Error (criu/parasite-syscall.c:280): Can't retrieve FDs from socket\n{TAIL}"
    )
    assert found.line == "Can't retrieve FDs from socket", (
        "the first echo, when there is nothing else"
    )


def test_log_that_says_nothing() -> None:
    assert diagnose("", "criu ended").text == "criu ended"
    assert diagnose("").text
    assert diagnose("\0\xff garbage\n" * 10).code == "criu"


def test_all_remedies_can_be_formatted() -> None:
    for remedy in REMEDIES:
        named = dict.fromkeys(remedy.pattern.groupindex, "1")
        assert remedy.text.format_map(named)
        assert remedy.hint.format_map(named).endswith((".", "`."))


def test_kept_log_is_private(tmp_path: Path) -> None:
    config = Config(state_dir=str(tmp_path / "state"))
    path = keep_log(config, "secret \udcff\n", "dump-../../web 1")
    assert path.parent == tmp_path / "state" / "logs"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert "web-1" in path.name
    assert path.read_bytes().startswith(b"secret ")
    assert keep_log(config, "again", "dump-../../web 1") != path


def test_a_log_that_cannot_be_kept(tmp_path: Path) -> None:
    """The failure is reported as it is, with the fate of the tree, though the state folder cannot
    be written.
    """
    (tmp_path / "state").write_text("a file")
    config = Config(state_dir=str(tmp_path / "state"))
    failed = CriuFailed("CRIU failed", HEAD + TAIL)
    for failure, code in (
        (criu_failures.explain(config, failed, "web", os.getpid(), ()), 5),
        (
            outcome.explain(
                config, failed, Manifest(id="0" * 32, session=SessionRef("web", "1" * 32))
            ),
            6,
        ),
    ):
        assert (failure.exit_code, failure.message.startswith("CRIU could not ")) == (code, True)
        assert failure.details["log_lost"]


def test_old_logs_go(tmp_path: Path) -> None:
    config = Config(state_dir=str(tmp_path))
    (tmp_path / "logs").mkdir()
    for number in range(60):
        (tmp_path / "logs" / f"20200101T0000{number:02}Z-x.log").touch()
    newest = keep_log(config, "new", "x")
    assert len(os.listdir(tmp_path / "logs")) == 50
    assert newest.exists()
    assert not (tmp_path / "logs" / "20200101T000000Z-x.log").exists()
