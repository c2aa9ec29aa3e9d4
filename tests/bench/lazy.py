"""How long a lazy restore takes until all memory is there, compared with one that waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .cases import size_name, subject_of
from .report import SUBJECT, Bound, Section
from .ways import Criuctl

if TYPE_CHECKING:
    from .cases import Bench

EAGER = "eager"
ALL = Bound(2.0, EAGER)


def lazy(bench: Bench, size: int) -> Iterator[Section]:
    """A tree of one process with `size` bytes, restored lazily and eagerly in turn."""
    place = bench.places[0]
    title = f"lazy restore, {size_name(size)} in 1 process, {place.name}"
    section = Section(title, {"case": "lazy", "size": size, "store": place.name})
    ways = [
        Criuctl(
            bench.commands,
            bench.disk / place.name,
            place,
            bench.program,
            restore_options=options,
            name=name,
        )
        for name, options in ((SUBJECT, ["--lazy"]), (EAGER, []))
    ]
    with subject_of(bench, size, 1) as subject:
        try:
            for number in range(bench.runs):
                bench.say(f"lazy restore, round {number + 1} of {bench.runs}")
                for way in ways:
                    if not subject.plays(way):
                        continue
                    with subject.turn(way, section) as tree:
                        way.clean()
                        way.dump(tree)
                        tree.gone()
                        restored = way.restore(tree)
                        tree.verify()
                        # the command ends when every page has arrived
                        section.row("until all memory is there", bound=ALL).add(
                            way.name, restored.ended
                        )
                        section.row("until it runs").add(way.name, restored.seconds)
        finally:
            for way in ways:
                way.clean()
    yield section
