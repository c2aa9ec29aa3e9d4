"""Start child processes: the only place in criuctl that does.

Nothing else in criuctl imports `subprocess`. Every child that is started here

- gets an argument list, never a shell line,
- sees an allow-listed environment (criuctl's secrets, ``AWS_*`` and ``CRIUCTL_*``, stay here),
- has ``/dev/null`` as stdin unless it is given input, and no descriptor of criuctl's but those
  passed,
- is followed by its pidfd, so that no signal can hit a recycled PID,
- is reaped, on every path out.

`run` is for helpers that end by themselves soon. They run in a process group of their own, so a
``^C`` on the terminal reaches only criuctl. If an exception leaves `run` (time-out,
``KeyboardInterrupt``), that group has been ended and reaped first. `run` returns when the child
ends, even if a grandchild keeps its pipes open.

`spawn` is for children that live as long as an operation, CRIU above all. It returns a `Child`,
which is ended only on request.
"""

from __future__ import annotations

import os
import select
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..errors import CommandFailed, PlatformError, TimedOut
from .child import GRACE, STDERR_TAIL, Child, InterruptsDeferred

ENVIRONMENT = (
    "HOME",
    "LANG",
    "LANGUAGE",
    "LOGNAME",
    "PATH",
    "TERM",
    "TMPDIR",
    "TZ",
    "USER",
    "XDG_RUNTIME_DIR",
)
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MAX_STDOUT = 256 << 20  # a helper that prints more than this is broken

Argv = Sequence[str | os.PathLike[str]]

Starter = Callable[[Sequence[str], Sequence[int]], int]
"""Starts a program, with descriptors of ours under the same numbers, as the child of another
process; its PID.
"""


class Completed(NamedTuple):
    """A helper that has ended: its exit code (negative: ended by that signal) and its output."""

    argv: tuple[str, ...]
    returncode: int
    stdout: bytes
    stderr: bytes  # the last `STDERR_TAIL` bytes

    @property
    def text(self) -> str:
        """stdout as text, undecodable bytes replaced."""
        return self.stdout.decode(errors="replace")

    @property
    def error_text(self) -> str:
        """The end of stderr as text."""
        return self.stderr.decode(errors="replace").strip()


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child: the allow-listed part of criuctl's, ``LC_*``, then
    `extra`.

    The system's sbin folders are always on the PATH: criuctl needs ``criu``, ``nft`` and ``ip``
    from there even when it is started from a bare cron environment.
    """
    env = {k: v for k, v in os.environ.items() if k in ENVIRONMENT or k.startswith("LC_")}
    have = env.get("PATH", "").split(":")
    env["PATH"] = ":".join(
        [p for p in have if p] + [p for p in SYSTEM_PATH.split(":") if p not in have]
    )
    env.update(extra or {})
    return env


class TooMuchOutput(CommandFailed):
    """A helper printed more than it was allowed to, and was ended."""


def _start(
    argv: Argv,
    *,
    stdin: int,
    stdout: int,
    stderr: int,
    pass_fds: Sequence[int],
    env: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
    new_session: bool = False,
    new_group: bool = False,
) -> tuple[subprocess.Popen[bytes], tuple[str, ...]]:
    words = tuple(os.fspath(word) for word in argv)
    if not words:
        raise ValueError("an empty argument list")
    child_env = environment(env)
    try:
        process = subprocess.Popen(
            words,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=tuple(pass_fds),
            env=child_env,
            cwd=cwd,
            start_new_session=new_session,
            process_group=0 if new_group else None,
        )
    except FileNotFoundError as error:
        if cwd is not None and not os.path.isdir(cwd):
            raise CommandFailed(
                f"{words[0]}: cannot start in {os.fspath(cwd)}: no such folder"
            ) from error
        raise PlatformError(
            f"{words[0]}: no such program", hint=f"Install it; the PATH is {child_env['PATH']}"
        ) from error
    except OSError as error:
        raise CommandFailed(f"{words[0]}: cannot be started: {error.strerror}") from error
    return process, words


def spawn(
    argv: Argv,
    *,
    pass_fds: Sequence[int] = (),
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    new_session: bool = False,
) -> Child:
    """Start a long-lived child.

    `pass_fds` keep their numbers; stdin and stdout default to ``/dev/null``. `stderr` None keeps it
    for `Child.stderr_tail`. `new_session` takes the child off criuctl's terminal and process group:
    a child that a ``^C`` must not end needs it. `env` adds to the allow-listed environment. Raises
    `PlatformError` if the program does not exist, `CommandFailed` if it cannot be started.
    """
    tail: int | None = None
    child: Child | None = None
    try:
        if stderr is None:
            tail = wanted_stderr = os.memfd_create("stderr", os.MFD_CLOEXEC)
        else:
            wanted_stderr = stderr
        with InterruptsDeferred():
            process, words = _start(
                argv,
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=subprocess.DEVNULL if stdout is None else stdout,
                stderr=wanted_stderr,
                pass_fds=pass_fds,
                env=env,
                cwd=cwd,
                new_session=new_session,
            )
            child = Child(process, words, tail)
            tail = None
    except BaseException:
        if child is not None:
            child.end()  # an interrupt: the caller never received the child
            child.close()
        if tail is not None:
            os.close(tail)
        raise
    return child


def run(
    argv: Argv,
    *,
    timeout: float,
    input: bytes | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    pass_fds: Sequence[int] = (),
    cwd: str | os.PathLike[str] | None = None,
    max_stdout: int | None = None,
) -> Completed:
    """Run a helper to its end and return its exit code and output.

    With `check`, an exit code other than 0 raises `CommandFailed`, with the end of stderr in the
    message. A helper that prints more than `max_stdout` bytes (default: `MAX_STDOUT`) is ended:
    `TooMuchOutput`. After `timeout` seconds the helper's process group is ended and reaped:
    `TimedOut`.
    """
    process: subprocess.Popen[bytes] | None = None
    child: Child | None = None
    try:
        with InterruptsDeferred():
            process, words = _start(
                argv,
                stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=pass_fds,
                env=env,
                cwd=cwd,
                new_group=True,
            )
            child = Child(process, words, None)
        stdout, stderr = _talk(
            process, child, input or b"", time.monotonic() + timeout, max_stdout or MAX_STDOUT
        )
    except BaseException as error:
        if child is not None:
            _end_group(child)
            if isinstance(error, TimedOut):
                raise TimedOut(f"{shlex.join(child.argv)}: not done after {timeout:g} s") from None
        raise
    finally:
        if child is not None:
            child.close()
        if process is not None:
            _close_pipes(process)
    assert child.returncode is not None
    done = Completed(words, child.returncode, stdout, stderr)
    if check and done.returncode != 0:
        raise failure(done)
    return done


def waiter(pid: int) -> Callable[[float | None], object]:
    """Return a function that waits for the end of a process that is not our child.

    The function takes a time-out in seconds and raises `TimedOut` after it.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return lambda _timeout: None

    def wait(timeout: float | None) -> None:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        if not poller.poll(None if timeout is None else timeout * 1000):
            raise TimedOut(f"PID {pid} is still running after {timeout:g} s")
        os.close(pidfd)

    return wait


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:
                pass  # the child ended without reading all of its input


def failure(done: Completed) -> CommandFailed:
    """Return the error that says how a helper ended, with the end of its stderr."""
    how = (
        f"exit code {done.returncode}"
        if done.returncode >= 0
        else f"ended by signal {-done.returncode}"
    )
    said = done.error_text or done.text.strip()[-500:]
    return CommandFailed(
        f"{shlex.join(done.argv)}: {how}" + (f": {said}" if said else ""),
        returncode=done.returncode,
    )


def _end_group(child: Child) -> None:
    """End the helper and all processes of its process group, and reap it."""
    if child.poll() is None:
        # The unreaped child keeps its PID, and so the group's number, from being used again.
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(child.pid, number)
            except (ProcessLookupError, PermissionError):
                child.signal(number)
            try:
                child.wait(GRACE if number == signal.SIGTERM else None)
                break
            except TimedOut:
                continue


def _talk(
    process: subprocess.Popen[bytes], child: Child, data: bytes, deadline: float, max_stdout: int
) -> tuple[bytes, bytes]:
    """Feed stdin and collect stdout and the end of stderr until the child ends."""
    assert process.stdout is not None and process.stderr is not None
    out, err = process.stdout.fileno(), process.stderr.fileno()
    collected: dict[int, bytearray] = {out: bytearray(), err: bytearray()}
    pending = memoryview(data)
    with selectors.DefaultSelector() as selector:
        selector.register(child.pidfd, selectors.EVENT_READ)
        for fd in (out, err):
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin.fileno(), selectors.EVENT_WRITE)
        ended = False
        while not ended:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimedOut("")
            for key, _events in selector.select(left):
                if key.fd == child.pidfd:
                    ended = child.poll() is not None
                elif key.fd in collected:
                    if not _drain(key.fd, collected[key.fd], err, max_stdout):
                        selector.unregister(key.fd)
                else:
                    try:
                        pending = pending[os.write(key.fd, pending[:65536]) :]
                    except BlockingIOError:
                        continue
                    except BrokenPipeError:
                        pending = memoryview(b"")
                    if not pending:
                        selector.unregister(key.fd)
                        assert process.stdin is not None
                        process.stdin.close()
    for fd, into in collected.items():
        # what is still in the pipes; do not wait for a grandchild that holds them
        _drain(fd, into, err, max_stdout)
    return bytes(collected[out]), bytes(collected[err])


def _drain(fd: int, into: bytearray, stderr_fd: int, max_stdout: int) -> bool:
    """Read all available data; return False at the end of the stream."""
    while True:
        try:
            piece = os.read(fd, 65536)
        except BlockingIOError:
            return True
        if not piece:
            return False
        into += piece
        if fd == stderr_fd:
            del into[:-STDERR_TAIL]
        elif len(into) > max_stdout:
            raise TooMuchOutput(f"a helper printed more than {max_stdout} bytes")
