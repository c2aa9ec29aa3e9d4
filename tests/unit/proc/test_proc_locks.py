"""Locks between processes: one holder at a time in any namespace, none after its death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from criuctl.proc import command, locks

HEAD = """
import os, signal, socket, sys, time
from pathlib import Path
from criuctl.proc import locks, syscalls
path = Path(sys.argv[1])
"""
HOLD = """
with locks.held(path):
    print("held", flush=True)
    sys.stdin.read()
"""
FORK = """
with locks.held(path):
    if os.fork():
        print("held", flush=True)
        signal.pause()
    sys.stdin.read()
"""
TRY = """
try:
    with locks.held(path):
        print("free")
except OSError as error:
    print(type(error).__name__)
"""
MANY = """
mark, done = path.parent.parent / "mark", 0
print("ready", flush=True)
sys.stdin.readline()
while done < 40:
    try:
        with locks.held(path):
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
            os.unlink(mark)
            done += 1
    except BlockingIOError:
        pass
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "locks" / "one"


@contextmanager
def other(script: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which has said its first word."""
    argv = [sys.executable, "-c", HEAD + script, str(path)]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def output_of(script: str, path: Path) -> str:
    """What another process says."""
    argv = [sys.executable, "-c", HEAD + script, str(path)]
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


def is_free(path: Path) -> bool:
    try:
        with locks.held(path):
            return True
    except BlockingIOError:
        return False


def test_one_holds_it_and_nothing_is_left(path: Path) -> None:
    before = os.umask(0o077)
    try:
        with locks.held(path):
            assert not is_free(path)
            assert output_of(TRY, path) == "BlockingIOError"
            assert locks.holder(path) == os.getpid()
            assert is_free(path.with_name("two"))
            locks.sweep(path.parent)
            assert os.listdir(path.parent) == ["one"]
    finally:
        os.umask(before)
    assert is_free(path)
    assert os.listdir(path.parent) == []
    assert [folder.stat().st_mode & 0o777 for folder in (path.parent, path.parent.parent)] == [
        0o700,
        0o755,
    ]


def test_a_file_that_was_left_is_no_hindrance(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.touch()
    assert locks.holder(path) == 0
    with locks.held(path):
        assert not is_free(path)
    assert os.listdir(path.parent) == []


def test_who_is_killed_holds_nothing_any_more(path: Path) -> None:
    with other(HOLD, path) as process:
        assert not is_free(path)
        assert locks.holder(path) == process.pid
        process.kill()
        process.wait()
        assert os.listdir(path.parent) == ["one"]
        locks.sweep(path.parent)
        assert os.listdir(path.parent) == []
        assert is_free(path)


def test_who_was_forked_off_holds_it_too(path: Path) -> None:
    with other(FORK, path) as process:
        process.kill()
        process.wait()
        assert not is_free(path)
        assert process.stdin is not None
        process.stdin.close()
        until = time.monotonic() + 30
        while not is_free(path) and time.monotonic() < until:
            time.sleep(0.01)
        assert is_free(path)


def test_letting_go_of_it_while_one_that_was_forked_off_has_it(path: Path) -> None:
    ends, lives = os.pipe()
    with ExitStack() as stack:
        stack.callback(os.close, ends)
        with locks.held(path):
            child = os.fork()
            if child == 0:
                try:
                    os.close(lives)
                    os.read(ends, 1)
                finally:
                    os._exit(0)
        try:
            assert not is_free(path)
        finally:
            os.close(lives)
            os.waitpid(child, 0)
    assert is_free(path)
    assert os.listdir(path.parent) == []


def test_a_program_that_was_started_does_not_hold_it(path: Path) -> None:
    with ExitStack() as stack:
        with locks.held(path):
            stack.enter_context(command.spawn(["sleep", "600"]))
        assert is_free(path)


def test_another_net_namespace_sees_the_same(path: Path) -> None:
    with locks.held(path):
        assert (
            output_of("syscalls.unshare(syscalls.CLONE_NEWNET)\n" + TRY, path) == "BlockingIOError"
        )
    with other("syscalls.unshare(syscalls.CLONE_NEWNET)\n" + HOLD, path):
        assert not is_free(path)


def test_another_user_cannot_come_near_it() -> None:
    with tempfile.TemporaryDirectory(prefix="criuctl-test-") as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "locks" / "one"
        assert is_free(path)  # the folder is there
        path.touch(0o666)
        assert output_of("os.setresuid(65534, 65534, 65534)\n" + TRY, path) == "PermissionError"
        assert is_free(path)


def test_many_at_once_and_a_sweeper(path: Path) -> None:
    """Never two at a time: each makes a file that must not be there yet, and removes it."""
    with ExitStack() as stack:
        processes = [stack.enter_context(other(MANY, path)) for _ in range(3)]
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        until = time.monotonic() + 60
        while any(process.poll() is None for process in processes) and time.monotonic() < until:
            locks.sweep(path.parent)
            time.sleep(0.001)
        assert [process.poll() for process in processes] == [0, 0, 0]
    assert os.listdir(path.parent) == []


def test_a_sweeper_does_not_block_a_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweeper has the file locked for a moment: a process that locks it then still gets the
    lock.
    """
    path.parent.mkdir(parents=True)
    path.touch()
    looking = locks._open(path)
    assert locks._locks(looking, path)

    def done(seconds: float) -> None:
        path.unlink(missing_ok=True)
        looking.close()
        time.sleep(seconds)

    monkeypatch.setattr("criuctl.proc.locks.time", SimpleNamespace(sleep=done))
    assert is_free(path)


@pytest.mark.parametrize("what", ["link", "folder"])
def test_something_else_of_its_name(path: Path, tmp_path: Path, what: str) -> None:
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "elsewhere") if what == "link" else path.mkdir()
    with pytest.raises(OSError, match="one"), locks.held(path):
        pass
    locks.sweep(path.parent)
    assert os.listdir(path.parent) == ["one"]
    assert not (tmp_path / "elsewhere").exists()


def test_a_signal_while_it_is_held(path: Path) -> None:
    with suppress(KeyboardInterrupt), locks.held(path):
        signal.raise_signal(signal.SIGINT)
    assert os.listdir(path.parent) == []
