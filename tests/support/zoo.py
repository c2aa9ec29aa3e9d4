"""Starting the animals of the zoo and talking to them.

A program of ``tests/integration/programs`` is given a folder, writes ``ready`` there when its state
is built, and then, for each SIGUSR1, checks its own state from inside and writes
``report-<n>.json``: ``{"ok": bool, "failures": [...], ...}``.  A file and a signal are all that
passes between test and program, so nothing of the test's hangs on the tree that is dumped.

`Animal` is one live tree: the original, or what a restore made of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import oracle
from .keeper import Keeper, Launched, start_time, wait_until

PROGRAMS = Path(__file__).parent.parent / "integration" / "programs"
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    # The kernel writes the CPU's number into a thread's rseq area: memory would never compare
    # equal.
    "GLIBC_TUNABLES": "glibc.pthread.rseq=0",
}


class Animal:
    """A live tree that a test may dump: its root, its folder, and whether its memory keeps
    still.
    """

    def __init__(
        self, pid: int, folder: Path, *, quiet: bool = True, ignore: Sequence[str] = ()
    ) -> None:
        self.pid = pid
        self.start_time = start_time(pid)
        self.folder = folder
        self.quiet = quiet
        self.ignore = tuple(ignore)
        self.launched: Launched | None = None
        self.pid_namespace = os.stat(f"/proc/{pid}/ns/pid").st_ino
        self.before: oracle.Snapshot = {}
        self.listing: set[str] = set()  # the names in its folder when it was remembered
        self.answer: dict[str, Any] = {}  # what `restore` said, for a restored one

    # -- state

    def alive(self) -> bool:
        """Whether the root of this very tree exists, and is neither a zombie nor about to be
        one.
        """
        return start_time(self.pid) == self.start_time and not oracle.dying(self.pid)

    def identities(self) -> list[tuple[int, int | None]]:
        """PID and start time of every process of the tree, now."""
        return [(pid, start_time(pid)) for pid in oracle.tree(self.pid)] if self.alive() else []

    def remember(self) -> oracle.Snapshot:
        """Take the snapshot that `differences` compares with; a quiet tree must not change between
        two looks.

        A program says that it is ready before it waits, and its threads and children may be on
        their way to where they wait.
        """
        if self.quiet:
            self.rest()
        self.before = oracle.snapshot(self.pid, memory=self.quiet)
        return self.before

    def rest(self, timeout: float = 30) -> None:
        """Wait until no task of the tree has run between two looks, or for `timeout`: one without
        rest is compared as it is.
        """
        deadline = time.monotonic() + timeout
        before: set[tuple[str, ...]] = set()
        while time.monotonic() < deadline:
            now = {task for pid in oracle.tree(self.pid) for task in oracle.turns(pid)}
            if now == before and not any(state in "RD" for state, *_ in now):
                return
            before = now
            time.sleep(0.01)

    def differences(self, other: Animal, *ignore: str, settle: float = 30) -> list[str]:
        """How `other`, restored from this tree, differs from what was remembered of it.

        A system call that the freeze interrupted is entered again in the first moments of the new
        life, and until then a signal mask or a page of a stack may differ: what still differs after
        `settle` seconds counts, long ones for a busy machine.
        """
        skipped = (*self.ignore, *ignore, *(() if self.quiet else oracle.RESTLESS))
        deadline = time.monotonic() + settle
        while True:
            found = oracle.diff(self.before, oracle.snapshot(other.pid, memory=self.quiet), skipped)
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    # -- talking

    def ask(self, timeout: float = 60) -> dict[str, Any]:
        """Have the program check itself; its report, which says ``ok``.  Raises AssertionError with
        its failures.
        """
        for old in self.folder.glob("report-*.json"):
            old.unlink()
        os.kill(self.pid, signal.SIGUSR1)
        path = wait_until(
            lambda: next(self.folder.glob("report-*.json"), None), timeout, f"report of {self!r}"
        )
        report: dict[str, Any] = json.loads(path.read_text())
        path.unlink()
        assert report["ok"], f"{self!r} says: {report['failures']}"
        return report

    def output(self) -> str:
        """What the program has written to its standard output and error."""
        return (self.folder / "output").read_text(errors="replace")

    # -- ending

    def end(self, timeout: float = 60) -> None:
        """Kill the whole tree, however it forks, and wait until it is gone."""
        deadline = time.monotonic() + timeout
        known = self._held_still(min(timeout, 5))
        while known:
            for pid, started in list(known.items()):
                known |= _below(pid) if start_time(pid) == started else {}
            for pid, started in list(known.items()):
                if start_time(pid) != started:
                    del known[pid]
                elif oracle.stat_of(pid)[:1] != ["Z"]:
                    _signal(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self!r} does not end: {known}")
            time.sleep(0.005)

    def _held_still(self, patience: float) -> dict[int, int | None]:
        """Stop every process of the tree, and then those that were forked meanwhile. Return PID and
        start time of each.

        Processes that are killed one by one can fork in between, and a new child would be left
        without a parent. A process that cannot be stopped (it sleeps where no signal wakes it, or
        is frozen) cannot fork either, and is waited for briefly.
        """
        began = time.monotonic()
        known: dict[int, int | None] = {}
        while True:
            roots = known or dict.fromkeys([self.pid] if self.alive() else [], self.start_time)
            found = {
                p: t
                for pid, started in roots.items()
                if start_time(pid) == started
                for p, t in _below(pid).items()
            }
            for pid in found.keys() - known.keys():
                _signal(pid, signal.SIGSTOP)
            states = {state for pid in found for state, *_ in oracle.turns(pid)} - set("TtZX")
            enough = time.monotonic() - began > (patience if "R" in states else 0.3)
            if (not states and found.items() <= known.items()) or enough:
                return known | found
            known |= found
            time.sleep(0.001)

    def __repr__(self) -> str:
        return f"<{self.folder.name} {self.pid}>"


def _below(pid: int) -> dict[int, int | None]:
    """PID and start time of a process and of all under it."""
    return {p: started for p in oracle.tree(pid) if (started := start_time(p)) is not None}


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(pid, number)


class Zoo:
    """Starts animals for one test and ends them all when the test is over."""

    def __init__(self, keeper: Keeper, home: Path, token: str) -> None:
        self.keeper = keeper
        self.home = home
        self.token = token
        self.animals: list[Animal] = []

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """What the programs of this test see."""
        return ENVIRONMENT | {"CZOO_TOKEN": self.token, "HOME": str(self.home)} | dict(extra or {})

    def launch(
        self,
        program: str | Sequence[str],
        *arguments: str,
        name: str | None = None,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        quiet: bool = True,
        ignore: Sequence[str] = (),
        new_session: bool = True,
        ready: bool = True,
        timeout: float = 60,
    ) -> Animal:
        """Start a program (a file of the programs folder, or an argv) in a folder of its own and
        wait until it says it is ready.

        The folder is its working directory and its first argument when it is one of ours.  stdin is
        /dev/null; stdout and stderr append to the file ``output``.  `prefix` is put before the
        command (unshare, ip netns, nice, ...); the process that said
        ``ready`` is then the root of the tree, whatever the prefix forked.
        """
        own = isinstance(program, str)
        folder = self.home / (
            name or (Path(program).stem if isinstance(program, str) else Path(program[0]).name)
        )
        folder.mkdir(exist_ok=True)
        command = (
            [sys.executable, "-S", str(PROGRAMS / program), str(folder)]
            if isinstance(program, str)
            else [*program]
        )
        with (folder / "output").open("ab") as output:
            launched = self.keeper.spawn(
                [*prefix, *command, *arguments],
                env=self.environment(env),
                cwd=folder,
                stdout=output,
                stderr=output,
                new_session=new_session,
            )
        pid = launched.pid
        if own and ready:
            said = wait_until(lambda: self._ready(folder, launched), timeout, f"{program} ready")
            pid = self.host_pid(launched.pid, int(said)) if prefix else pid
        animal = Animal(pid, folder, quiet=quiet, ignore=ignore)
        animal.launched = launched
        self.animals.append(animal)
        return animal

    def _ready(self, folder: Path, launched: Launched) -> str | None:
        if (folder / "ready").exists():
            return (folder / "ready").read_text()
        if launched.poll() is not None:
            raise AssertionError(
                f"{folder.name} ended with {launched.poll()}: "
                f"{(folder / 'output').read_text(errors='replace')}"
            )
        return None

    def host_pid(self, launched: int, inner: int) -> int:
        """The PID, here, of the process under `launched` that knows itself as `inner`."""
        for pid in reversed(oracle.tree(launched)):
            # none when it has ended meanwhile
            numbers = oracle.status_of(f"/proc/{pid}/status").get("NSpid", "").split()
            if numbers[-1:] == [str(inner)]:
                return pid
        raise AssertionError(f"no process under {launched} has the PID {inner} of its own")

    def adopt(self, pid: int, original: Animal) -> Animal:
        """Take over what a restore made of `original`."""
        animal = Animal(pid, original.folder, quiet=original.quiet, ignore=original.ignore)
        self.animals.append(animal)
        return animal

    def find(self, original: Animal) -> list[Animal]:
        """Living trees of this animal's program and folder that were not adopted yet, by their
        topmost processes.

        Used after a crash, so it looks until two looks agree, and no process is left that was
        killed and is about to end.
        """
        found, before = self._look(original), None
        deadline = time.monotonic() + 60
        while found != before or any(map(oracle.dying, found)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"of {original!r} there are {found}, which do not come to rest")
            time.sleep(0.3)
            found, before = self._look(original), found
        return [self.adopt(pid, original) for pid in sorted(found)]

    def _look(self, original: Animal) -> set[int]:
        wanted = (str(original.folder), str(PROGRAMS))
        known = {(animal.pid, animal.start_time) for animal in self.animals}
        found = set()
        for name in os.listdir("/proc"):
            if name.isdigit() and (int(name), start_time(int(name))) not in known:
                command = oracle.read(f"/proc/{name}/cmdline")
                if all(part in command for part in wanted) and oracle.stat_of(int(name))[:1] != [
                    "Z"
                ]:
                    found.add(int(name))
        return {
            pid
            for pid in found
            if (oracle.stat_of(pid) or ["", "0"])[1] not in {str(other) for other in found}
        }

    def close(self) -> None:
        """End every animal that still lives."""
        for animal in self.animals:
            animal.end()
