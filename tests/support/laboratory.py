"""A laboratory for attacks: a program of an ordinary user is dumped, the user changes files, and
root restores.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .command import Criuctl, Home
from .identity import Identity, call_as, inner_pid
from .keeper import Launched, start_time, wait_until
from .zoo import ENVIRONMENT

USER = 1001
# At each SIGUSR1 it evaluates the Python in the file `ask` of its folder; the file `answer` has the
# result then.
PROGRAM = """
import os, signal, sys, traceback
folder = sys.argv[1]
wanted = [argument.split(":", 1) for argument in sys.argv[2:]]
known = {"os": os, "opened": [os.open(path, int(flags)) for flags, path in wanted]}
asked, asking = os.pipe()
os.set_blocking(asking, False)
signal.signal(signal.SIGUSR1, lambda number, frame: None)
signal.set_wakeup_fd(asking)

def leave(name, text):
    with open(f"{folder}/.{name}", "w") as file:
        file.write(text)
    os.rename(f"{folder}/.{name}", f"{folder}/{name}")

leave("ready", str(os.getpid()))
while os.read(asked, 1):
    with open(f"{folder}/ask") as file:
        question = file.read()
    try:
        answer = repr(eval(question, known))
    except BaseException:
        answer = traceback.format_exc()
    leave("answer", answer)
"""


class Laboratory:
    """A user of the host, the folder of that user, and the programs that run there."""

    def __init__(self, criuctl: Criuctl, home: Home, identity: Identity) -> None:
        self.criuctl = criuctl
        self.identity = identity
        self.token = home.token
        self.uid = USER
        home.path.chmod(0o711)  # the user's own folder is in it
        self.folder = home.path / "user"
        self.folder.mkdir()
        os.chown(self.folder, USER, USER)
        self.started: list[Launched] = []
        self.inside: set[int] = set()  # PIDs of programs in the namespaces

    # -- before the dump

    def start(
        self,
        *opens: tuple[Path | str, int],
        uid: int = USER,
        argv: Sequence[str] | None = None,
        inside: bool | None = None,
    ) -> int:
        """Start the program as `uid`, with these files opened with these flags; its PID here.

        Root's run outside of the namespaces, or root could not restore their capabilities here;
        `inside` True is for those that become another user's.
        `argv`: another program, which writes its own PID to `ready` in the folder.
        """
        inside = bool(uid) if inside is None else inside
        (self.folder / "ready").unlink(missing_ok=True)
        # CRIU wants the leader of the session in the same PID namespace.
        prefix = [*self.identity.as_user(uid), "setsid"]
        command = argv or [
            os.path.realpath(sys.executable),
            "-I",
            "-S",
            "-c",
            PROGRAM,
            str(self.folder),
        ]
        with (self.folder / "output").open("ab") as output:
            self.started.append(
                self.criuctl.keeper.spawn(
                    [
                        *(prefix if inside else ()),
                        *command,
                        *(f"{flags}:{path}" for path, flags in opens),
                    ],
                    env=ENVIRONMENT | {"CZOO_TOKEN": self.token},
                    cwd="/",
                    stdout=output,
                    stderr=output,
                )
            )
        ready = wait_until(lambda: self._ready(self.started[-1]), 60, "the program is ready")
        pid = self.identity.host_pid(int(ready)) if inside else int(ready)
        if inside:
            self.inside.add(pid)
        return pid

    def _ready(self, launched: Launched) -> str | None:
        said = self.folder / "ready"
        if said.exists():
            return said.read_text()
        assert launched.poll() is None, (self.folder / "output").read_text(errors="replace")
        return None

    def dump(self, pid: int, *options: str | int | Path, check: bool = True) -> Any:
        """Dump as the root inside and, where that went well, end what is left inside."""
        self.criuctl.prefix = self.identity.prefix if pid in self.inside else []
        try:
            report = self.criuctl("dump", inner_pid(pid), *options, check=check)
        finally:
            self.criuctl.prefix = []
        self.identity.close()
        return report

    # -- the attack

    def as_user(self, script: str) -> None:
        """Run a shell script as the user, in the user's folder."""
        call_as(self.uid, ["sh", "-euc", f"cd '{self.folder}'\n{script}"])

    # -- after the dump

    def restore(self, *arguments: str | Path, check: bool = True) -> Any:
        """Restore as the host's root."""
        return self.criuctl("restore", *arguments, check=check)

    def ask(self, pid: int, question: str) -> str:
        """Have the program evaluate Python in its own process: the ``repr`` of what it says."""
        answer = self.folder / "answer"
        answer.unlink(missing_ok=True)
        (self.folder / "ask").write_text(question)
        os.kill(pid, signal.SIGUSR1)
        wait_until(answer.exists, 60, f"answer of {pid}")
        return answer.read_text()

    @staticmethod
    def descriptors(pid: int) -> dict[int, str]:
        """What each descriptor of a process is open on, as the kernel names it."""
        folder = f"/proc/{pid}/fd"
        return {int(name): os.readlink(f"{folder}/{name}") for name in os.listdir(folder)}

    def processes(self) -> list[int]:
        """Living processes of the user that the test started or restored."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                ours = self.token.encode() in Path(f"/proc/{name}/environ").read_bytes()
                if ours and os.stat(f"/proc/{name}").st_uid == self.uid:
                    found.append(int(name))
            except OSError:  # it ended meanwhile
                continue
        return found

    def end(self, pid: int) -> None:
        """Kill a restored process and wait until it is gone."""
        started = start_time(pid)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: start_time(pid) != started, 60, f"{pid} is gone")
