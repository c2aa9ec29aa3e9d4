"""Round trips: dump an animal of the zoo with criuctl, bring it back, and have the oracle say
whether it is the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from . import oracle
from .keeper import start_time, wait_until
from .zoo import Animal, Zoo

RECORDED = {"CRIUCTL_FILES_SMALL_MIB": "0"}
"""The environment of a dump that takes no contents of files along by itself."""


class Runs(Protocol):
    """The part of the `criuctl` fixture that round trips use."""

    def __call__(
        self,
        *arguments: str | int | Path,
        check: bool = True,
        timeout: float = 120,
        env: Mapping[str, str] | None = None,
    ) -> Any:
        """Run a command to its end: its JSON."""


class Trip:
    """Dumps and restores of one test."""

    def __init__(self, criuctl: Runs, zoo: Zoo) -> None:
        self.criuctl = criuctl
        self.zoo = zoo

    def dump(
        self, animal: Animal, *options: str | Path, env: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Dump and end the tree: every process of it is gone afterwards, and nothing is added to
        its folder.
        """
        identities = animal.identities()
        animal.remember()
        animal.listing = _listing(animal.folder)
        report: dict[str, Any] = self.criuctl("dump", animal.pid, *options, env=env)
        assert report["processes"] == len(identities)
        # Nothing outlives the dump; that its parent, who is not criuctl, reaps it is waited for:
        # PIDs are free then.
        assert [
            i
            for i in identities
            if start_time(i[0]) == i[1] and oracle.stat_of(i[0])[:1] not in ([], ["Z"], ["X"])
        ] == []
        wait_until(
            lambda: not [i for i in identities if start_time(i[0]) == i[1]],
            60,
            "what was dumped is reaped",
        )
        # Files that exist only in the checkpoint now may have had a name that CRIU gave them; it
        # must not stay.
        assert _listing(animal.folder) == animal.listing
        return report

    def snapshot(self, animal: Animal, *options: str | Path) -> dict[str, Any]:
        """Dump and leave the tree running: it is the same afterwards, and not stopped."""
        animal.remember()
        animal.listing = _listing(animal.folder)
        report: dict[str, Any] = self.criuctl("dump", animal.pid, "--leave-running", *options)
        assert animal.differences(animal) == []
        assert _listing(animal.folder) == animal.listing
        return report

    def restore(
        self,
        report: dict[str, Any],
        original: Animal,
        *options: str,
        ignore: tuple[str, ...] = (),
        equal: bool = True,
    ) -> Animal:
        """Restore that checkpoint: the oracle finds no difference to what the original was."""
        answer = self.criuctl("restore", report["checkpoint"], *options)
        animal = self.zoo.adopt(answer["pid"], original)
        assert answer["inner_pid"] == oracle.inner_pid(answer["pid"])
        here = os.stat("/proc/self/ns/pid").st_ino
        if {here} != {os.stat(f"/proc/{answer['pid']}/ns/pid").st_ino, original.pid_namespace}:
            ignore = (*ignore, *oracle.NEW_NAMESPACE)
        if equal:
            assert original.differences(animal, *ignore) == [], answer["warnings"]
            assert _listing(original.folder) == original.listing
        animal.before, animal.listing = original.before, original.listing
        animal.answer = answer
        return animal

    def round(self, animal: Animal, *options: str, ignore: tuple[str, ...] = ()) -> Animal:
        """There and back: dump with `options`, restore, compare, and have the program check itself
        twice.
        """
        restored = self.restore(self.dump(animal, *options), animal, ignore=ignore)
        restored.ask()
        restored.ask()
        return restored


def _listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
