"""One virtual machine: QEMU with two network cards, one to this machine (ssh, and whatever it may
reach), one to the other.

Without a word to the contrary the processor is emulated (TCG): that works everywhere, ``/dev/kvm``
or not.  The wire between two machines is a pair of datagram sockets, so either may vanish and come
back at any time, as with a switch between them.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

BOOT = 300.0  # seconds until ssh answers, on a busy machine without KVM
COMMAND = 180.0
_PAUSE = 0.2  # between two questions to a machine that cannot call us


class VmError(Exception):
    """A machine, or a command on one, did not do what was asked; the message says all that is
    known.
    """


class Failed(VmError):
    """A command ended with another code than 0."""

    def __init__(self, what: str, code: int, out: str, err: str) -> None:
        super().__init__(f"{what}: exit {code}\n{out[-1500:]}{err[-3000:]}")
        self.code, self.out, self.err = code, out, err


class Machine:
    """See the module's docstring."""

    def __init__(self, name: str, number: int, folder: Path, disk: Path, key: Path) -> None:
        self.name, self.number = name, number
        self.address = f"10.77.0.{number}"
        self.url = f"ssh://root@{name}"  # as the other machine calls it
        self._folder, self._disk, self._key = folder, disk, key
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._qemu: subprocess.Popen[bytes] | None = None
        self._master: subprocess.Popen[bytes] | None = None

    # -- power and cable
    # -----------------------------------------------------------------------------------

    def power_on(self, peer: str, *, memory: int = 1024, kvm: bool = False) -> None:
        """Start it; `wait_up` waits until it can be worked on."""
        self._path("wire").unlink(missing_ok=True)
        wire = [
            f"local.type=unix,local.path={self._path('wire')}",
            f"remote.type=unix,remote.path={self._folder / peer}.wire",
        ]
        accelerator = (
            ["-accel", "kvm", "-cpu", "host"]
            if kvm
            else ["-accel", "tcg,thread=multi", "-cpu", "Nehalem"]
        )
        argv = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "qemu-system-x86_64",
            "-name",
            self.name,
            "-machine",
            "q35",
            *accelerator,
        ]
        argv += ["-smp", "1", "-m", str(memory), "-nodefaults", "-no-reboot", "-display", "none"]
        # what the guest has flushed outlives it
        argv += ["-drive", f"file={self._disk},if=virtio,cache=writeback"]
        argv += ["-netdev", f"user,id=outside,hostfwd=tcp:127.0.0.1:{self._port}-:22"]
        argv += [
            "-device",
            f"virtio-net-pci,netdev=outside,mac=52:54:00:77:01:0{self.number},romfile=",
        ]
        argv += ["-netdev", f"dgram,id=line,{','.join(wire)}"]
        argv += [
            "-device",
            f"virtio-net-pci,id=cable,netdev=line,mac=52:54:00:77:02:0{self.number},romfile=",
        ]
        argv += ["-device", "virtio-rng-pci", "-serial", f"file:{self._path('console')}"]
        argv += ["-qmp", f"unix:{self._path('qmp')},server=on,wait=off"]
        with self._path("log").open("ab") as log:
            self._qemu = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def wait_up(self) -> float:
        """Wait until commands can be run; the seconds that it took."""
        began = time.monotonic()
        while not self._answers():
            if self._qemu is None or self._qemu.poll() is not None:
                raise VmError(
                    f"{self.name} did not start: "
                    f"{self._path('log').read_text(errors='replace')[-2000:]}"
                )
            if time.monotonic() - began > BOOT:
                raise VmError(
                    f"{self.name} did not boot in {BOOT:.0f} s; its console: {self._console()}"
                )
            time.sleep(_PAUSE)
        # One connection carries all commands: each one of its own would cost a second of an
        # emulated processor.
        with self._path("log").open("ab") as log:
            self._master = subprocess.Popen(
                [*self._ssh(), "-N", "-M"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while not self._path("ssh").exists():
            if self._master.poll() is not None or time.monotonic() - began > BOOT:
                raise VmError(
                    f"{self.name} does not accept ssh: "
                    f"{self._path('log').read_text(errors='replace')[-2000:]}"
                )
            time.sleep(_PAUSE)
        return time.monotonic() - began

    def pull_plug(self) -> None:
        """The power goes, now: nothing is written any more that was not written."""
        if self._qemu is not None and self._qemu.poll() is None:
            with suppress(OSError, ValueError):  # it closes the connection instead of an answer
                self._monitor("quit")
            try:
                self._qemu.wait(20)
            except subprocess.TimeoutExpired:
                self._qemu.kill()
                self._qemu.wait()
        if self._master is not None:
            self._master.terminate()
            self._master.wait()
        self._path("ssh").unlink(missing_ok=True)

    def reboot(self) -> float:
        """As `systemctl reboot` does it, until the machine is off; `power_on` goes on from there.
        The seconds that it took.
        """
        assert self._qemu is not None
        began = time.monotonic()
        self.start("systemctl reboot").communicate(timeout=COMMAND)
        try:
            self._qemu.wait(BOOT)
        except subprocess.TimeoutExpired:
            raise VmError(
                f"{self.name} did not shut down in {BOOT:.0f} s; its console: {self._console()}"
            ) from None
        self.pull_plug()
        return time.monotonic() - began

    def cable(self, *, plugged: bool) -> None:
        """Of the card to the other machine."""
        self._monitor("set_link", {"name": "cable", "up": plugged})

    def powered(self) -> bool:
        """Whether it runs at all."""
        return self._qemu is not None and self._qemu.poll() is None

    # -- commands
    # ------------------------------------------------------------------------------------------

    def start(
        self, command: str, *, options: Sequence[str] = (), **pipes: Any
    ) -> subprocess.Popen[str]:
        """Begin a shell command on it; `options` of ssh come before the usual ones."""
        wanted: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        } | pipes
        return subprocess.Popen(
            [*self._ssh(options), command],
            text=True,
            errors="replace",
            start_new_session=True,
            **wanted,
        )

    def sh(self, command: str, *, timeout: float = COMMAND, check: bool = True) -> str:
        """What a shell command prints; `Failed` if it ends with another code than 0."""
        process = self.start(command)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise VmError(
                f"{self.name}: {command!r} did not end in {timeout:.0f} s: "
                f"{out[-1000:]}{err[-2000:]}"
            ) from None
        if check and process.returncode != 0:
            raise Failed(f"{self.name}: {command}", process.returncode, out, err)
        return out

    def criuctl(self, *words: str, timeout: float = COMMAND) -> Any:
        """What ``criuctl WORDS --json`` answers."""
        at = words.index("--") if "--" in words else len(words)
        command = shlex.join(["criuctl", *words[:at], "--json", *words[at:]])
        out = self.sh(command, timeout=timeout)
        return json.loads(out) if out.strip() else {}

    def login(self, command: str, *, terminal: bool = False) -> subprocess.Popen[str]:
        """Begin a shell command in a login of its own, with a terminal or not; it is over when the
        command is.
        """
        options = ["-o", "ControlPath=none", *(["-tt"] if terminal else [])]
        return self.start(command, options=options)

    def feed(self, command: str, data: bytes) -> None:
        """Run a shell command that reads this."""
        done = subprocess.run(
            [*self._ssh(), command], input=data, capture_output=True, timeout=COMMAND, check=False
        )
        if done.returncode != 0:
            raise Failed(
                f"{self.name}: {command}",
                done.returncode,
                done.stdout.decode(),
                done.stderr.decode(),
            )

    def write(self, path: str, text: str, mode: str = "644") -> None:
        """Put a file there."""
        self.feed(
            f"umask 77; cat >{shlex.quote(path)} && chmod {mode} {shlex.quote(path)}", text.encode()
        )

    def _ssh(self, more: Sequence[str] = ()) -> list[str]:
        return [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "ssh",
            *more,
            *self._ssh_options(),
            "-p",
            str(self._port),
            "root@127.0.0.1",
        ]

    def _ssh_options(self) -> list[str]:
        options = {
            "ControlPath": str(self._path("ssh")),
            "IdentityFile": str(self._key),
            "IdentitiesOnly": "yes",
            "BatchMode": "yes",
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": os.devnull,
            "LogLevel": "ERROR",
            "ConnectTimeout": "60",
            "ServerAliveInterval": "30",
        }
        return [
            "-F",
            os.devnull,
            *(word for key, value in options.items() for word in ("-o", f"{key}={value}")),
        ]

    def _answers(self) -> bool:
        """Whether an ssh server says hello."""
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", self._port), 2) as connection,
        ):
            return connection.recv(4) == b"SSH-"
        return False

    def _monitor(self, command: str, arguments: dict[str, Any] | None = None) -> None:
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.settimeout(30)
            monitor.connect(str(self._path("qmp")))
            with monitor.makefile("rw") as lines:
                lines.readline()  # the greeting
                for asked in (
                    {"execute": "qmp_capabilities"},
                    {"execute": command, "arguments": arguments or {}},
                ):
                    lines.write(json.dumps(asked) + "\n")
                    lines.flush()
                    while "return" not in (answer := json.loads(lines.readline())):
                        if "error" in answer:
                            raise VmError(f"{self.name}: {command}: {answer['error']}")

    def _console(self) -> str:
        with suppress(OSError):
            return self._path("console").read_text(errors="replace")[-2000:]
        return ""

    def _path(self, kind: str) -> Path:
        return self._folder / f"{self.name}.{kind}"


def wait_for(condition: Any, seconds: float, what: str) -> Any:
    """Ask until it says yes."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise VmError(f"waited {seconds:.0f} s in vain until {what}")
        time.sleep(_PAUSE)
    return answer


def tree_of(project: Path) -> Sequence[str]:
    """The files of a checkout that belong to it, ignored ones not."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=project,
        capture_output=True,
        check=True,
        text=True,
    )
    return [name for name in listed.stdout.split("\0") if name and (project / name).is_file()]
