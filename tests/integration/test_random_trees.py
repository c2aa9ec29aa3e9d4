"""Trees of random steps: dumped and restored, they find what an undisturbed twin finds.

After each dump chance says how it comes back: as it is; after a simulated reboot
(`support.rebooted`); as a copy next to the original, which must not notice; or from the checkpoint
of an original that ran on and was killed.  Every run tries the same few.
``CRIUCTL_TEST_TREES=500:40`` tries forty others from seed 500 on, ``CRIUCTL_TEST_STEPS=pipe,pair``
makes them of these steps only (tests/integration/programs/steps), ``CRIUCTL_TEST_WAYS=copy`` brings
them back in this way only.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command import Criuctl, Home
from support.rebooted import Rebooted
from support.trip import Trip
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration

FIRST, _, COUNT = os.environ.get("CRIUCTL_TEST_TREES", "1:6").partition(":")
STEPS = [steps] if (steps := os.environ.get("CRIUCTL_TEST_STEPS")) else []
WAYS = os.environ.get("CRIUCTL_TEST_WAYS", "same,reboot,copy,killed").split(",")
IGNORED = ["*/namespaces/ipc", "*/unsent"]  # what is not acknowledged yet
# Of a file that both write to, that has grown, or that is no longer one with its other names, the
# plan tells.
SHARED = {"file-shared", "file-grown", "deleted-grown", "deleted-apart", "deleted-moved-on"}
_OWN = re.compile(r"\.(older|newer)-[0-9a-f]+-\d+T\d+")
FLEETING = ("/dev/shm", "/tmp", "/run")
TAKEN = {"socket-taken", "file-leased"}  # of a copy: what one process of a host has


@pytest.fixture
def emptied(home: Home, zoo: Zoo) -> Iterator[None]:
    """What trees leave in folders that a reboot empties goes with them."""
    yield
    zoo.close()
    for folder in FLEETING:
        for path in Path(folder).glob(f"*-{home.token}*"):
            path.unlink()


class Ways:
    """Brings a tree there and back, and asks it, and all that lives of it elsewhere, what it
    finds.
    """

    def __init__(self, seed: int, twin: Animal, trip: Trip, criuctl: Criuctl) -> None:
        self.random = random.Random(f"{seed}/ways")
        self.twin, self.trip, self.criuctl = twin, trip, criuctl
        self.booted: Rebooted | None = None
        self.boots: list[Rebooted] = []
        self.taken: list[str] = []  # ways, one for each trip
        self.wanted: dict[str, Any] = {}  # what the twin has found last
        self.named: set[str] = set()  # paths of files that plans have named

    def there_and_back(self, tree: Animal) -> Animal:
        """Return the tree that goes on; it, and what lived next to it, have found what the twin has
        found.
        """
        self.taken.append(self.random.choice(WAYS))
        back: Animal = getattr(self, self.taken[-1])(tree)
        return back

    def compare(self, name: str, tree: Animal, *, again: bool = False) -> None:
        """It finds what the twin finds, or, `again`, has found last, from the contents that files
        had at the dump.
        """
        if not again:
            self.wanted = dict(_leaves(self.twin.ask()["found"]))
        found = dict(_leaves(tree.ask()["found"]))
        different = [
            f"{at}: {found.get(at)!r}, not {self.wanted.get(at)!r}"
            for at in found | self.wanted
            if not _alike(found.get(at), self.wanted.get(at)) and not self._is_excused(at)
        ]
        assert not different, "\n".join([f"ways {self.taken}, {name}:", *different])

    def _is_excused(self, at: str) -> bool:
        """Whether the step that has found what is at that place is about a file that a plan has
        named, or cannot know.

        What a file is expected to live is its inode's; of a copy's folder the original watches the
        same one.
        """
        label, _, rest = at.partition(" ")
        kind = rest.split(" ")[0]
        if kind == "write_hint" and {"copy", "killed"} & {way.split(" ")[0] for way in self.taken}:
            return True
        prefix = f"/{label.replace('/', '-')}-{kind}-"
        return (kind == "watcher" and self.taken[-1] == "copy") or any(
            prefix in path for path in self.named
        )

    def _plan(self, report: dict[str, Any], *options: str) -> set[str]:
        """What would be refused, by its code; notes the files that more than the tree writes to."""
        plan = self.criuctl("restore", report["checkpoint"], *options, "--dry-run", check=False)
        findings = plan["error"]["findings"] if "error" in plan else plan["findings"]
        texts = [f["text"].replace(":", " ").split() for f in findings if f["code"] in SHARED]
        self.named |= {word for words in texts for word in words if word.startswith("/")}
        return {f["code"] for f in findings if f["level"] == "error"}

    def same(self, tree: Animal) -> Animal:
        """At once, on the same host."""
        report = self.trip.dump(tree) if self.booted is None else self._dump(tree)
        tree = self._restore(report, tree)
        self.compare("restored", tree)
        return tree

    def reboot(self, tree: Animal) -> Animal:
        """As after a reboot of the host; perhaps others have its PIDs by now."""
        number = self._number(tree)
        report = self._dump(tree)
        self._tidy(tree)
        taken = [number] if self.random.random() < 0.5 else []
        self.booted = Rebooted(
            self.criuctl.keeper, self.criuctl.home, taken, self.random.choice([10**6, 0])
        )
        self.boots.append(self.booted)
        self.criuctl.prefix = self.booted.prefix
        tree = self._restore(report, tree)
        self.compare("restored", tree)
        return tree

    def copy(self, tree: Animal) -> Animal:
        """Next to the original, which has gone on; where names can be had only once, when that has
        ended.
        """
        report = self._dump(tree, "--leave-running")
        self.compare("the original before", tree)
        as_another = ("--as", f"copy-{len(self.taken)}")
        errors = self._plan(report, *as_another)
        assert errors <= TAKEN, errors
        if errors:
            self.taken[-1] += f" ({', '.join(sorted(errors))})"
            return self._again(report, tree)
        copy = self._restore(report, tree, *as_another)
        self.compare("the copy", copy, again=True)
        self.compare("the original", tree)
        copy.end()
        return tree

    def killed(self, tree: Animal) -> Animal:
        """It goes on after the dump, ends, and its files are removed as it would have done
        itself.
        """
        report = self._dump(tree, "--leave-running")
        self.compare("the original before", tree)
        return self._again(report, tree)

    def _again(self, report: dict[str, Any], tree: Animal) -> Animal:
        tree.end()
        self._tidy(tree)
        assert self._plan(report) == set()
        tree = self._restore(report, tree)
        self.compare("restored", tree, again=True)
        return tree

    def _tidy(self, tree: Animal) -> None:
        for path in tree.folder.rglob("*-tidy"):
            if self.random.random() < 0.5:
                path.unlink()

    def _number(self, tree: Animal) -> int:
        return self.booted.inner(tree.pid) if self.booted is not None else tree.pid

    def _dump(self, tree: Animal, *options: str) -> dict[str, Any]:
        tree.remember()
        report: dict[str, Any] = self.criuctl("dump", self._number(tree), *options)
        return report

    def _restore(self, report: dict[str, Any], tree: Animal, *options: str) -> Animal:
        if self.taken[-1] == "same" and self.booted is None:
            return self.trip.restore(report, tree)
        answer = self.criuctl("restore", report["checkpoint"], *options)
        pid = self.booted.outer(answer["pid"]) if self.booted is not None else answer["pid"]
        return self.trip.zoo.adopt(pid, tree)


@pytest.mark.parametrize("seed", range(int(FIRST), int(FIRST) + int(COUNT or 1)))
def test_a_random_tree(seed: int, zoo: Zoo, trip: Trip, criuctl: Criuctl, emptied: None) -> None:
    own_ipc = ["unshare", "--ipc", "--"]
    tree, twin = (
        zoo.launch("random_tree.py", str(seed), *STEPS, name=name, prefix=own_ipc, ignore=IGNORED)
        for name in ("tree", "twin")
    )
    ways = Ways(seed, twin, trip, criuctl)
    try:
        for _ in range(2):
            tree = ways.there_and_back(tree)
    finally:
        for booted in ways.boots:
            booted.close()


def _alike(found: Any, wanted: Any) -> bool:
    """Whether they are the same, but for the name of a copy's own file."""
    return found == wanted or (isinstance(found, str) and _OWN.sub("", found) == wanted)


def _leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """What is in lists and dictionaries, by its place."""
    if isinstance(value, (dict, list)) and value:
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, f"{at} {name}".lstrip())
    else:
        yield at, value
