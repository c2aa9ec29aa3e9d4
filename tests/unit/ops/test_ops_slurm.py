"""Jobs of Slurm: what its commands print, names of sessions, and the protocol.  The service itself
runs in integration/test_slurm.py and attack/test_slurm.py.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from criuctl.errors import CriuctlError, DataError
from criuctl.ops.slurm import checkpoints, jobs, protocol
from criuctl.ops.slurm.protocol import BadMessage
from criuctl.session.names import check_name

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def test_processes_of_a_node() -> None:
    text = (
        "PID      JOBID    STEPID   LOCALID GLOBALID\n"
        "22       7        batch    0       0       \n"
        "28       7        batch    -       -       \n"
        "-1       8        0        0       0       \n"
    )
    assert jobs.parse_processes(text) == {22: 7, 28: 7}
    assert jobs.parse_processes("No job steps exist on this node.\n") == {}


def test_a_job_among_those_of_its_array() -> None:
    text = "7  2001  3  RUNNING\n8  2001  0  RUNNING\n7  2001  0  PENDING\n"
    assert jobs.parse_job(text, 7) == (2001, 3)


@pytest.mark.parametrize("text", ["", "7  2001  0  PENDING\n", "7 1 0 RUNNING\n7 2 0 RUNNING\n"])
def test_a_job_that_is_not_known_for_certain(text: str) -> None:
    with pytest.raises(jobs.NotAJob):
        jobs.parse_job(text, 7)


def test_names_are_apart_by_cluster_job_and_user() -> None:
    clusters = ("lab", "a-1", "a", "x" * 30, "x" * 31, "lab/../x", "lab x")
    made = [
        jobs.Job(cluster, number, uid, 0).name
        for cluster in clusters
        for number in (1, 11, 67_108_863)
        for uid in (1, 1001, 4_294_967_294)
    ]
    assert len({*made}) == len(made)
    assert [check_name(name) for name in made] == made


def test_a_message_with_descriptors(pair: Pair) -> None:
    reading, writing = os.pipe()
    protocol.send(pair[0], {"op": "x"}, [writing])
    os.close(writing)
    message = protocol.receive(pair[1])
    assert message is not None
    body, (fd,) = message
    assert body == {"op": "x"}
    assert not os.get_inheritable(fd)
    os.close(fd)
    assert os.read(reading, 1) == b""  # ours was the last
    os.close(reading)


@pytest.mark.parametrize(
    "data", [b"[1]", b"\xff", b"[" * protocol.LONGEST, b" " * (protocol.LONGEST + 1), b"1" * 9999]
)
def test_what_is_no_message(pair: Pair, data: bytes) -> None:
    reading, writing = os.pipe()
    socket.send_fds(pair[0], [data], [writing])
    os.close(writing)
    with pytest.raises(BadMessage):
        protocol.receive(pair[1])
    assert os.read(reading, 1) == b""  # what came along is closed
    os.close(reading)


def test_too_many_descriptors(pair: Pair) -> None:
    reading, writing = os.pipe()
    socket.send_fds(pair[0], [b"{}"], [writing] * 20)
    os.close(writing)
    with pytest.raises(BadMessage):
        protocol.receive(pair[1])
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_the_end(pair: Pair) -> None:
    pair[0].close()
    assert protocol.receive(pair[1]) is None


def test_an_error_fits_into_a_message(pair: Pair) -> None:
    long = CriuctlError("\x00" * 100_000, hint="é" * 100_000)
    protocol.send(pair[0], protocol.failure(long) | {"w": protocol.texts(["\x00" * 5000] * 100)})
    message = protocol.receive(pair[1])
    assert message is not None and message[0]["exit_code"] == 1


def test_only_the_writing_end_of_a_nameless_pipe() -> None:
    reading, writing = os.pipe()
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        assert checkpoints.key_of_pipe(writing) == f"pipe:[{os.fstat(writing).st_ino}]"
        for fd in (reading, null):
            with pytest.raises(DataError):
                checkpoints.key_of_pipe(fd)
    finally:
        for fd in (reading, writing, null):
            os.close(fd)


def test_a_pidfd_of_a_process_that_has_ended() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    fd = os.pidfd_open(pid)
    assert jobs.pid_behind(fd) == pid
    os.waitpid(pid, 0)
    assert jobs.pid_behind(fd) == -1
    os.close(fd)


def test_memfds_and_deleted_files_count_as_memory(tmp_path: Path) -> None:
    """Neither is mapped; each inode counts once, however many descriptors lead to it."""
    before = sum(checkpoints._nameless_files(os.getpid()).values())
    memfd = os.memfd_create("hidden")
    deleted = os.open(tmp_path / "deleted", os.O_RDWR | os.O_CREAT)
    (tmp_path / "deleted").unlink()
    fds = [memfd, deleted, os.dup(memfd)]
    try:
        for fd in fds[:2]:
            os.write(fd, b"x" * (3 << 20))
            os.fsync(fd)
        assert sum(checkpoints._nameless_files(os.getpid()).values()) - before >= 6 << 20
        assert sum(checkpoints._nameless_files(os.getpid()).values()) - before < 7 << 20
    finally:
        for fd in fds:
            os.close(fd)
