"""What every crash test asks afterwards: is the tree alive, or is there a checkpoint; and is what
is listed whole?
"""

from __future__ import annotations

from .command import Criuctl
from .keeper import start_time, wait_until
from .oracle import stat_of, tree
from .trip import Trip
from .zoo import Animal, Zoo


class Aftermath:
    """Judges what a crash left."""

    def __init__(self, criuctl: Criuctl, zoo: Zoo, trip: Trip) -> None:
        self.criuctl = criuctl
        self.zoo = zoo
        self.trip = trip

    def of_dump(self, animal: Animal, *, again: bool = True) -> str:
        """The tree runs on, equal and not stopped, or a complete checkpoint exists; what is listed
        can be restored.

        The dump that crashed was one with ``--name`` of the animal's folder.

        With `again` the very same tree (or what was restored) is dumped and restored once more:
        nothing is wedged.  Returns ``alive`` or ``dumped``.
        """
        listed = [row for row in self.criuctl("list") if row["session"] == animal.folder.name]
        for row in listed:
            self.criuctl("verify", row["id"])
        wait_until(
            lambda: animal.alive() or start_time(animal.pid) != animal.start_time,
            60,
            f"{animal!r} is alive or reaped",
        )
        alive = animal.alive()
        assert alive or listed, "the tree is gone and there is no checkpoint"
        if alive:
            wait_until(lambda: not stopped(animal), 60, f"{animal!r} runs and is not stopped")
            assert animal.differences(animal) == []
        for row in listed:
            copy = self.zoo.adopt(
                self.criuctl(
                    "restore", row["id"], "--as", f"copy-{animal.folder.name}", "--share-files"
                )["pid"],
                animal,
            )
            assert animal.differences(copy, "*/namespaces/pid", "*/namespaces/mnt") == []
            copy.end()
        if not alive:
            animal = self.zoo.adopt(self.criuctl("restore", listed[-1]["id"])["pid"], animal)
        animal.ask()
        if again:
            self.trip.restore(self.trip.dump(animal), animal).ask()
        return "alive" if alive else "dumped"

    def of_restore(self, animal: Animal, checkpoint: str) -> str:
        """Nothing of the restore runs (or all of it does); the checkpoint is whole and comes back
        at the next attempt.
        """
        running = self.zoo.find(animal)
        assert not any(stopped(one) for one in running)
        assert len(running) <= 1
        for one in running:
            one.ask()
            one.end()
        self.criuctl("verify", checkpoint)
        again = self.zoo.adopt(self.criuctl("restore", checkpoint)["pid"], animal)
        # Its log may have grown: what was found running has been asked.
        assert animal.differences(again, "*/namespaces/pid", "*/namespaces/mnt", "*/size") == []
        again.ask()
        return "running" if running else "nothing"


def stopped(animal: Animal) -> list[int]:
    """PIDs of the tree that are stopped or traced."""
    return [pid for pid in tree(animal.pid) if stat_of(pid)[:1] in (["T"], ["t"])]
