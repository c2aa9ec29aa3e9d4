"""Processes that end while criuctl reads them: one error, `NoSuchProcess`, never a bug."""

from __future__ import annotations

import ast
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from criuctl.config import Config
from criuctl.dump import preflight
from criuctl.errors import NoSuchProcess
from criuctl.host.target import Target
from criuctl.namespaces.plan import mount_tops, plan_entry
from criuctl.proc import foreground, mappings, namespaces, procfs
from criuctl.proc.credentials import credentials_of
from criuctl.proc.descriptors import descriptors
from criuctl.proc.mounts import read_mounts
from criuctl.proc.tree import ProcessIdentity, ends_reported, read_process, read_tree
from criuctl.repairs.call_time_limits import Waits
from criuctl.repairs.processor_affinity import bound
from criuctl.repairs.thread_attributes import unusual

PACKAGE = Path(procfs.__file__).parents[1]
STORM = """
import ctypes, os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
usleep = ctypes.CDLL(None).usleep  # a nanosleep whose time is read from memory
while True:
    children = [os.fork() for _ in range(4)]
    if 0 in children:
        usleep(500000)
        os._exit(0)
    time.sleep(0.002)
    for child in children:
        os.kill(child, signal.SIGKILL)
"""
LEADERLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).syscall(60, 0)  # exit(2) of this thread alone
"""
READERS: dict[str, Callable[[int], object]] = {
    "environ": lambda pid: procfs.read_bytes(pid, "environ"),
    "memory": lambda pid: procfs.read_memory(pid, 0x1000, 16),
    "status": procfs.read_status,
    "anonymous memory": procfs.anonymous_memory,
    "mounts": read_mounts,
    "mappings": mappings.mappings,
    "descriptors": descriptors,
    "namespaces": namespaces.namespaces,
    "mount tops": mount_tops,
    "entry": plan_entry,
    "process": read_process,
    "tree": read_tree,
    "credentials": credentials_of,
    "program": foreground.program,
    "call limits": lambda pid: Waits().look(pid),
    "affinity": lambda pid: bound(pid, 2, {0}),
    "attributes": lambda pid: unusual(pid, 2),
}


@contextmanager
def started(text: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", text]) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def zombie() -> Iterator[int]:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        yield process.pid


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_of_what_has_ended(reader: str) -> None:
    """A zombie, a process that is gone, and one whose main thread alone has ended."""
    with zombie() as pid, suppress(NoSuchProcess):
        READERS[reader](pid)
    with suppress(NoSuchProcess):
        READERS[reader](pid)
    with started(LEADERLESS) as process:
        while ProcessIdentity.of(process.pid).alive():
            time.sleep(0.01)
        with suppress(NoSuchProcess):
            READERS[reader](process.pid)


def test_memory_that_is_gone() -> None:
    with zombie() as pid, pytest.raises(NoSuchProcess):
        procfs.read_memory(pid, 0x1000, 16)
    with pytest.raises(OSError, match=r"read|error"):
        procfs.read_memory(os.getpid(), 0x10, 16)


def test_what_cannot_be_parsed_is_the_end_only_of_a_process_that_ends() -> None:
    for error in (struct.error("16 bytes"), IndexError(), KeyError("x"), OSError(22, "EINVAL")):
        with zombie() as pid, pytest.raises(NoSuchProcess), procfs.reading(pid):
            raise error
        with pytest.raises(type(error)), procfs.reading(os.getpid()):
            raise error


def test_readers_in_a_fork_storm() -> None:
    """What a dump reads just before the freeze, and every check of it, two seconds each."""
    with started(STORM) as storm:
        time.sleep(0.2)
        target = Target(root=ProcessIdentity.of(storm.pid))
        until = time.monotonic() + 2
        while time.monotonic() < until:
            Waits().look(storm.pid)
        while time.monotonic() < until + 2:
            for process in read_tree(storm.pid):
                for reader in READERS.values():
                    with suppress(NoSuchProcess, OSError):
                        reader(process.pid)
            preflight.look_at(target, Config())


def test_a_reader_that_forgets_is_reported_as_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only if the tree has changed: else it is the bug that it is."""

    def forgetful(scene: Any) -> Iterator[Any]:
        child.kill()
        child.wait()
        raise struct.error("unpack requires a buffer of 16 bytes")
        yield

    child = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(preflight, "CHECKS", (forgetful,))
    root = Target(root=ProcessIdentity.of(os.getpid()))
    findings, _scene = preflight.look_at(root, Config())
    assert [finding.code for finding in findings] == ["check-incomplete"]
    assert f"tree of PID {os.getpid()} has ended" in findings[0].text
    with pytest.raises(struct.error), ends_reported(read_tree(os.getpid())):
        raise struct.error


# -- what reads /proc/PID past `procfs` ------------------------------------------------------------

_CALLS = {"open", "listdir", "readlink", "read_raw", "stat", "lstat", "scandir", "read_bytes"}
# Why the process cannot end, or: OSError is what it promises, and its callers expect it.
_PROMISE_OSERROR = {
    "inside.py": "has the standard library alone, and reads its own ancestors",
    "proc/connecting.py": "promises OSError",
    "proc/joined_process.py": "its own child, which waits for it",
    "proc/inject.py": "the process is stopped by the caller",
    "criu/scan_hook.py": "an error fails CRIU's scan, and the dump with it",
    "restore/mount_views.py": "a restored tree that CRIU holds",
    "terminals/restored.py": "a restored tree that CRIU holds",
    "repairs/thread_attributes.py": "promises OSError",
    "repairs/late_signals.py": "promises OSError",
}


def _unguarded(node: ast.AST, guarded: bool = False) -> Iterator[ast.Call]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        guarded = False
    if isinstance(node, ast.Call) and not guarded:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = node.func.id if isinstance(node.func, ast.Name) else name
        first = ast.unparse(node.args[0]) if node.args else ast.unparse(node.func)
        if name in _CALLS and "/proc/{" in first:
            yield node
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _unguarded(child, guarded or (field == "body" and _guards(node)))


def _guards(node: ast.AST) -> bool:
    if isinstance(node, ast.With):
        text = " ".join(ast.unparse(item.context_expr) for item in node.items)
        return "reading(" in text or "suppress(" in text
    return isinstance(node, ast.Try) and any(
        handler.type is None or "Error" in ast.unparse(handler.type) for handler in node.handlers
    )


def test_each_look_at_a_process_expects_its_end() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{call.lineno}: {ast.unparse(call)}"
        for path in PACKAGE.rglob("*.py")
        if str(path.relative_to(PACKAGE)) not in _PROMISE_OSERROR
        for call in _unguarded(ast.parse(path.read_text()))
    }
    assert found == set()


def test_the_search_finds_what_it_looks_for() -> None:
    text = "def f(pid):\n    return open(f'/proc/{pid}/mem')"
    assert list(_unguarded(ast.parse(text)))
    assert not list(_unguarded(ast.parse(text.replace("return", "with reading(pid): return"))))
