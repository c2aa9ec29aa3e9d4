"""What a TARGET means, and which are refused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.obstacles import running

from criuctl.errors import (
    CriuctlError,
    InvalidName,
    NoSuchProcess,
    NotFound,
    PreflightRefused,
    UsageError,
)
from criuctl.host.target import Target, resolve_target
from criuctl.proc.tree import ProcessIdentity


def _nobody(_name: str) -> ProcessIdentity | None:
    return None


def _nameless(_identity: ProcessIdentity) -> str | None:
    return None


def _resolve(text: str) -> Target:
    return resolve_target(text, _nobody, _nameless)


def test_pid(tmp_path: Path) -> None:
    with running("", tmp_path) as program:
        identity = ProcessIdentity.of(program.pid)
        assert _resolve(str(program.pid)) == Target(identity)
        named = resolve_target(
            str(program.pid), _nobody, lambda asked: "known" if asked == identity else None
        )
        assert named.session == "known"


def test_session(tmp_path: Path) -> None:
    with running("", tmp_path) as program:
        identity = ProcessIdentity.of(program.pid)
        found = resolve_target(
            "web.1", lambda name: identity if name == "web.1" else None, _nameless
        )
        assert found == Target(identity, "web.1")
    with pytest.raises(NoSuchProcess, match=r"web\.1"):
        resolve_target("web.1", lambda _name: identity, _nameless)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("4194305", NoSuchProcess, "no process"),
        ("99999999999999999999", NoSuchProcess, "no process"),
        ("0", NoSuchProcess, "no process"),
        ("nobody", NotFound, "no session 'nobody'"),
        ("-1", InvalidName, "name"),
        ("a b", InvalidName, "name"),
        ("../x", InvalidName, "name"),
        ("x" * 65, InvalidName, "name"),
        ("", InvalidName, "name"),
        ("docker:x", UsageError, "no target"),
        ("unit:", UsageError, "unit"),
        ("unit:../../x", UsageError, "unit"),
        ("unit:no-such-unit", NotFound, "no-such-unit.service"),
        ("cgroup:", UsageError, "control group"),
        ("cgroup:/../x", UsageError, "control group"),
        ("cgroup:/no/such/group", NotFound, "/no/such/group"),
        ("1", PreflightRefused, "PID 1"),
        ("2", PreflightRefused, "kernel thread"),
    ],
)
def test_refused(text: str, error: type[CriuctlError], words: str) -> None:
    with pytest.raises(error, match=words):
        _resolve(text)


def test_criuctl_and_its_ancestors_are_refused() -> None:
    with pytest.raises(PreflightRefused, match="itself"):
        _resolve(str(os.getpid()))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # whose parent is a process like any other, which ours may not be
        try:
            _resolve(str(os.getppid()))
        except PreflightRefused as error:
            os.write(writing, f"{error.message} {error.hint}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        message = said.read()
    os.waitpid(child, 0)
    assert "inside the tree" in message and "setsid" in message, message


def test_thread_is_distinguished_from_process() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(UsageError, match=f"thread of process {os.getpid()}"):
            _resolve(str(thread.native_id))
    finally:
        done.set()
        thread.join()


def test_zombie_is_gone() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(NoSuchProcess, match=f"parent, PID {os.getpid()}"):
            _resolve(str(process.pid))


@pytest.fixture
def hierarchy() -> Path:
    """The control group hierarchy that systemd would use here."""
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _source, path, kind, options = line.split()[:4]
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(",")):
            found.append(Path(path))
    if not found:
        pytest.skip("no control group hierarchy is mounted on this machine")
    return found[0]


def _move(pid: int, group: Path) -> None:
    (group / "cgroup.procs").write_text(str(pid))


def test_control_group_and_unit(hierarchy: Path, tmp_path: Path) -> None:
    unit = hierarchy / f"criuctl-test-{os.getpid()}.service"
    below = unit / "worker"
    below.mkdir(parents=True)
    try:
        with pytest.raises(NoSuchProcess, match="no processes"):
            _resolve(f"cgroup:{unit}")
        with running(
            "pid = child(lambda: None); open(TMP + '/pid', 'w').write(str(pid))", tmp_path
        ) as program:
            worker = int((tmp_path / "pid").read_text())
            _move(worker, below)
            assert _resolve(f"cgroup:{unit}").root.pid == worker
            _move(program.pid, unit)
            root = ProcessIdentity.of(program.pid)
            assert _resolve(f"cgroup:{unit}").root == root
            assert _resolve(f"cgroup:/{unit.name}").root == root
            assert _resolve(f"cgroup:{unit.name}/").root == root
            assert _resolve(f"unit:{unit.stem}").root == root
            assert _resolve(f"unit:{unit.name}").root == root
            with subprocess.Popen(
                [sys.executable, "-c", "import signal; signal.pause()"]
            ) as second:
                try:
                    _move(second.pid, below)
                    with pytest.raises(UsageError, match="several roots") as caught:
                        _resolve(f"unit:{unit.stem}")
                    assert {str(program.pid), str(second.pid)} <= set(
                        caught.value.message.replace(",", " ").split()
                    )
                finally:
                    second.kill()
    finally:
        below.rmdir()
        unit.rmdir()
