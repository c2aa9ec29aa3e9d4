"""One host, as the tests see it: running commands and programs there, its files, its processes, its
sockets.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.keeper import Launched, wait_until

from . import init, kernel

PROJECT = Path(__file__).parent.parent.parent
# Variables for every criuctl command of a host, whatever starts it (``receive`` is started by ssh,
# with no environment of ours).
COMMAND_ENVIRONMENT = "/run/lab-env"
WRAPPER = f"""\
#!/bin/sh
export PYTHONPATH={PROJECT}
if [ -r {COMMAND_ENVIRONMENT}/"$1" ]; then . {COMMAND_ENVIRONMENT}/"$1"; fi
exec {sys.executable} -m criuctl "$@"
"""
ENVIRONMENT = {
    "PATH": init.PATH,
    "HOME": "/root",
    "USER": "root",
    "LANG": "C.UTF-8",
    "TERM": "xterm",
}


class HostCommand:
    """A command that runs on a host: its process, and the files there that it writes to."""

    def __init__(self, process: Launched, out: Path, err: Path) -> None:
        self.process, self.out, self.err = process, out, err

    def json(self) -> Any:
        """The one JSON value on stdout."""
        try:
            return json.loads(self.out.read_text())
        except ValueError as error:
            raise AssertionError(
                f"stdout is not one JSON value ({error})\n{self.output()}"
            ) from error

    def output(self) -> str:
        """All that it wrote to stdout and stderr."""
        return (
            f"stdout: {self.out.read_text(errors='replace')}\nstderr: "
            f"{self.err.read_text(errors='replace')}"
        )


class Host:
    """A host that runs."""

    def __init__(self, name: str, address: str, pid: int, requests: socket.socket) -> None:
        self.name, self.address = name, address
        self.init_pid = pid  # of its PID 1, as seen here
        self.sshd: Launched | None = None
        self.env = dict(ENVIRONMENT)  # of whatever is started without another
        self._requests = requests
        self._lock = threading.Lock()
        self._count = 0
        requests.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    @property
    def ssh_url(self) -> str:
        """The URL for ``criuctl migrate``."""
        return f"ssh://root@{self.address}"

    def path(self, path: str) -> Path:
        """A file of the host, as it is found from here (an absolute symlink there would lead out:
        name its target).
        """
        return Path(f"/proc/{self.init_pid}/root{path}")

    def alive(self) -> bool:
        """Whether it has not been lost."""
        return self.path("/").exists()

    # -- processes

    def spawn(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        stdin: int | None = None,
        stdout: int | str | None = None,
        stderr: int | str | None = None,
    ) -> Launched:
        """Start a program, as a child of PID 1; a stream is a descriptor, a file of the host to
        append to, or /dev/null.
        """
        streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        given = {name: stream for name, stream in streams.items() if isinstance(stream, int)}
        words = [str(word) for word in argv]
        request = {
            "argv": words,
            "env": self.env | dict(env or {}),
            "cwd": cwd,
            "given": list(given),
            "files": {name: stream for name, stream in streams.items() if isinstance(stream, str)},
        }
        read_end, write_end = os.pipe()
        try:
            with self._lock:
                socket.send_fds(
                    self._requests, [json.dumps(request).encode()], [write_end, *given.values()]
                )
                data, ancillary, _, _ = self._requests.recvmsg(
                    init.MAX_REQUEST, socket.CMSG_SPACE(12)
                )
        finally:
            os.close(write_end)
        answer = json.loads(data) if data else {"error": "the host is gone"}
        if "error" in answer:
            os.close(read_end)
            raise OSError(f"{self.name}: {answer['error']}")
        credentials = next(
            bytes(array.array("B", body))
            for _, kind, body in ancillary
            if kind == socket.SCM_CREDENTIALS
        )
        return Launched(struct.unpack("iII", credentials)[0], read_end, words)

    def start(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/root",
    ) -> HostCommand:
        """Start a command whose output the test reads later."""
        self._count += 1
        out, err = f"/tmp/command-{self._count}.out", f"/tmp/command-{self._count}.err"
        for path in (out, err):
            self.path(path).touch()
        return HostCommand(
            self.spawn(argv, env=env, cwd=cwd, stdout=out, stderr=err),
            self.path(out),
            self.path(err),
        )

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        check: bool = True,
        timeout: float = 60,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        command = self.start(argv, env=env)
        try:
            code = command.process.wait(timeout)
        except TimeoutError:
            command.process.kill()
            raise
        assert code == 0 or not check, (
            f"on {self.name}: {' '.join(map(str, argv))} ended with {code}\n{command.output()}"
        )
        return subprocess.CompletedProcess(
            command.process.argv, code, command.out.read_text(), command.err.read_text()
        )

    def sh(self, script: str, **options: Any) -> str:
        """Run a shell script to its end: what it printed."""
        return self.run(["sh", "-euc", script], **options).stdout

    def criuctl(
        self,
        *arguments: str | int | Path,
        check: bool = True,
        timeout: float = 120,
        env: Mapping[str, str] | None = None,
    ) -> Any:
        """Run criuctl to its end: its JSON.  With `check` False the answer has ``exit_code`` and,
        in it, ``error``.
        """
        command = self.start_criuctl(*arguments, env=env)
        code = command.process.wait(timeout)
        if check:
            assert code == 0, (
                f"on {self.name}: criuctl {' '.join(map(str, arguments))} ended with "
                f"{code}\n{command.output()}"
            )
            return command.json()
        answer = command.json() if command.out.stat().st_size else {}
        return {"exit_code": code, "stderr": command.err.read_text()} | (
            answer if isinstance(answer, dict) else {"list": answer}
        )

    def start_criuctl(
        self, *arguments: str | int | Path, env: Mapping[str, str] | None = None
    ) -> HostCommand:
        """Start criuctl and return at once."""
        words = [str(word) for word in arguments]
        words.insert(words.index("--") if "--" in words else len(words), "--json")
        return self.start(["criuctl", *words], env=env)

    def set_command_environment(self, command: str, variables: Mapping[str, str]) -> None:
        """Give every ``criuctl COMMAND`` of this host these variables from now on; none: as it
        was.
        """
        path = self.path(f"{COMMAND_ENVIRONMENT}/{command}")
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"export {name}='{value}'\n" for name, value in variables.items()))

    def processes(self, *words: str) -> list[int]:
        """PIDs, as seen here, of the host's living processes whose command line has all these words
        in it.
        """
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                line = (
                    Path(f"/proc/{name}/cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                )
                if line and all(word in line for word in words) and self._below(int(name)):
                    found.append(int(name))
            except (FileNotFoundError, ProcessLookupError):
                continue
        return found

    def kill(self, *words: str) -> None:
        """kill -9 whatever `processes` finds; some of it may end with another of it."""
        for pid in self.processes(*words):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _below(self, pid: int) -> bool:
        """Whether a process descends from the host's PID 1, as all do that live there."""
        above = pid
        while above > 1 and above != self.init_pid:
            try:
                with open(f"/proc/{above}/stat", errors="replace") as file:
                    above = int(file.read().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                if above == pid:
                    raise
                above = pid  # a parent has ended meanwhile, and there is another one
        return above == self.init_pid

    def inner_pid(self, pid: int) -> int:
        """What the host calls the process that is `pid` here."""
        return self._numbers(pid)[1]

    def outer_pid(self, inner: int) -> int:
        """The PID, here, of the process that the host calls `inner`; one that is just being
        executed has no command line yet.
        """

        def found() -> int:
            for pid in self.processes():
                with suppress(FileNotFoundError, ProcessLookupError):
                    if self._numbers(pid)[1] == inner:
                        return pid
            return 0

        return int(wait_until(found, 60, f"{self.name} has a process {inner}"))

    def _numbers(self, pid: int) -> list[int]:
        """A process's PIDs, from this machine's to the innermost namespace's."""
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("NSpid:"):
                numbers = [int(number) for number in line.split()[1:]]
                return numbers if len(numbers) > 1 else [*numbers, 0]
        raise ProcessLookupError(f"no process {pid}")

    # -- the network

    def open_socket(self, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """A socket of this host, held by the test."""
        made: list[socket.socket] = []

        def make() -> None:
            with open(f"/proc/{self.init_pid}/ns/net") as namespace:
                kernel.setns(namespace.fileno(), kernel.CLONE_NEWNET)
            made.append(socket.socket(socket.AF_INET, kind))

        thread = threading.Thread(target=make)  # a thread of its own: this one stays where it is
        thread.start()
        thread.join()
        return made[0]

    def connect(self, address: str, port: int, timeout: float = 30) -> socket.socket:
        """A connection from this host; one that is refused is tried again until `timeout` is
        over.
        """
        deadline = time.monotonic() + timeout
        while True:
            sock = self.open_socket()
            sock.settimeout(timeout)
            try:
                sock.connect((address, port))
                return sock
            except ConnectionRefusedError:
                sock.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def wait_listening(self, port: int, timeout: float = 60) -> None:
        """Wait until a process on this host listens on that TCP port."""
        wait_until(lambda: self.listening(port), timeout, f"{self.name} listens on port {port}")

    def listening(self, port: int) -> bool:
        """Whether a process on this host listens on that TCP port."""
        for family in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.init_pid}/net/{family}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    return True
        return False
