"""Child processes: what children see, how their ends are reported, and that none is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from criuctl.errors import CommandFailed, PlatformError, TimedOut
from criuctl.proc import command
from criuctl.proc.child import STDERR_TAIL
from criuctl.proc.tree import children


def _own_children() -> set[int]:
    return set(children(os.getpid()))


def test_output_and_exit_code() -> None:
    done = command.run(
        ["sh", "-c", "cat; echo told >&2; exit 3"], timeout=60, input=b"x" * 300_000, check=False
    )
    assert (done.returncode, len(done.stdout), done.error_text) == (3, 300_000, "told")


def test_failure_tells_the_end_of_stderr() -> None:
    with pytest.raises(CommandFailed, match=r"exit code 3: the end$") as caught:
        command.run(["sh", "-c", "echo the end >&2; exit 3"], timeout=60)
    assert caught.value.details["returncode"] == 3


def test_death_by_signal_is_reported() -> None:
    with pytest.raises(CommandFailed, match="ended by signal 9"):
        command.run(["sh", "-c", "kill -9 $$"], timeout=60)


def test_only_the_tail_of_stderr_is_kept() -> None:
    done = command.run(["sh", "-c", "seq 100000 >&2; echo last >&2"], timeout=60)
    assert len(done.stderr) == STDERR_TAIL
    assert done.stderr.endswith(b"last\n")


def test_endless_output_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MAX_STDOUT", 1 << 20)
    before = _own_children()
    with pytest.raises(CommandFailed, match="more than"):
        command.run(["cat", "/dev/zero"], timeout=60)
    assert _own_children() <= before


def test_missing_program_has_a_hint() -> None:
    with pytest.raises(PlatformError, match="nonesuch") as caught:
        command.run(["nonesuch-program"], timeout=60)
    assert "PATH" in caught.value.hint


def test_time_out_ends_the_whole_group(tmp_path: Path) -> None:
    before = _own_children()
    began = time.monotonic()
    with pytest.raises(TimedOut, match=r"2\.5 s"):
        command.run(["sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid; wait"], timeout=2.5)
    assert time.monotonic() - began < 30
    assert _own_children() <= before
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while _runs(pid) and time.monotonic() < deadline:
        pass
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_helper_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "GRACE", 0.2)
    with pytest.raises(TimedOut):
        command.run(["sh", "-c", "trap '' TERM; while :; do :; done"], timeout=0.2)


def test_grandchild_with_the_pipes_is_not_waited_for() -> None:
    began = time.monotonic()
    done = command.run(["sh", "-c", "sleep 20 & echo out"], timeout=60)
    assert done.stdout == b"out\n"
    assert time.monotonic() - began < 15


def test_interrupt_ends_and_reaps_the_helper() -> None:
    before = _own_children()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while not _own_children() - before:
            pass
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        command.run(["sleep", "1000"], timeout=60)
    assert _own_children() <= before


def test_interrupt_at_any_moment_of_a_start_loses_no_child() -> None:
    """The signal comes a little later each time, so that all of `spawn` is swept."""
    before = _own_children()
    main = threading.main_thread().ident
    assert main is not None
    for step in range(60):
        interrupter = threading.Thread(target=_interrupt_after, args=(main, step * 50e-6))
        try:
            interrupter.start()
            with command.spawn(["sleep", "1000"]):
                interrupter.join()
                time.sleep(1)  # the interrupt ends it, if it came no earlier
        except KeyboardInterrupt:
            pass
        interrupter.join()
        assert _own_children() <= before


def _interrupt_after(thread: int, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    signal.pthread_kill(thread, signal.SIGINT)


def test_environment_is_an_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("CRIUCTL_PASSPHRASE", "secret")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setenv("PATH", "/opt/mine:/usr/bin:/bin")
    seen = command.run(["env"], timeout=60, env={"EXTRA": "1"}).text
    assert "secret" not in seen
    assert {"LC_ALL=C.UTF-8", "EXTRA=1"} <= set(seen.splitlines())
    path = (
        next(line for line in seen.splitlines() if line.startswith("PATH="))
        .removeprefix("PATH=")
        .split(":")
    )
    assert path[0] == "/opt/mine"
    assert "/usr/sbin" in path


def test_stdin_is_closed_and_no_descriptor_leaks() -> None:
    r, w = os.pipe()
    os.set_inheritable(w, True)
    try:
        listed = command.run(
            ["sh", "-c", "cat; readlink /proc/self/fd/0; ls /proc/self/fd"], timeout=60
        ).text.split()
        assert listed[0] == "/dev/null"
        assert str(w) not in listed[1:]
        passed = command.run(
            ["sh", "-c", f"echo through >/proc/self/fd/{w}"], timeout=60, pass_fds=[w]
        )
        assert passed.returncode == 0
        assert os.read(r, 100) == b"through\n"
    finally:
        os.close(r)
        os.close(w)


def test_no_descriptor_of_ours_is_left() -> None:
    before = set(os.listdir("/proc/self/fd"))
    command.run(["true"], timeout=60)
    with command.spawn(["true"]) as child:
        child.wait(60)
    with pytest.raises(PlatformError):
        command.spawn(["nonesuch-program"])
    with pytest.raises(CommandFailed):
        command.run(["false"], timeout=60)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_child_is_followed_and_reaped() -> None:
    child = command.spawn(["sh", "-c", "echo noted >&2; exit 4"])
    assert child.wait(60) == 4
    assert child.poll() == 4
    assert child.stderr_tail() == "noted\n"
    assert child.pid not in _own_children()
    child.signal(signal.SIGTERM)  # of a reaped child: nothing happens
    child.close()


def test_wait_times_out_and_leaves_the_child_alone() -> None:
    child = command.spawn(["sleep", "1000"])
    try:
        with pytest.raises(TimedOut):
            child.wait(0.05)
        assert child.poll() is None
    finally:
        assert child.end() == -signal.SIGTERM
        child.close()


def test_with_block_ends_the_child() -> None:
    with pytest.raises(KeyError), command.spawn(["sleep", "1000"]) as child:
        raise KeyError
    assert child.returncode == -signal.SIGTERM


def test_lost_child_is_not_killed() -> None:
    child = command.spawn(["sleep", "1000"])
    pid = child.pid
    del child
    try:
        assert _runs(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            pass  # subprocess still reaps a process that it should forget


def test_child_that_was_reaped_elsewhere_has_no_exit_code() -> None:
    child = command.spawn(["sh", "-c", "exit 5"])
    os.waitpid(child.pid, 0)
    with pytest.raises(CommandFailed, match="lost"):
        child.wait(60)
    child.close()


def test_new_session_is_out_of_reach_of_the_terminal() -> None:
    with command.spawn(["sleep", "1000"], new_session=True) as child:
        assert os.getsid(child.pid) == child.pid != os.getsid(0)
