"""The subjects of an operation on several things: sessions and configured trees, by name, by label,
or all of them.

`order` follows the numbers of init scripts (S20, K80): things with a low number are needed by the
others. They are begun first and ended last; things with the same number are independent and are
processed at the same time. A session has it as a label (``criuctl run --label order=10``), a
configured tree as a key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...config import Config
from ...errors import Conflict, CriuctlError, NotFound
from ...host import configured_trees
from ...host.registry import Registry
from ...proc.tree import ProcessIdentity
from ..sessions import sessions


@dataclass(frozen=True, slots=True)
class Subject:
    """One session or tree, as a TARGET."""

    name: str  # of a session or a tree, or the user's TARGET
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    order: int = configured_trees.ORDER
    root: ProcessIdentity | None = None  # if it was looked for
    tree: bool = False  # of the configuration
    # why it could not be identified
    error: CriuctlError | None = field(default=None, hash=False, compare=False)


def chosen(
    config: Config,
    targets: Sequence[str] = (),
    *,
    every: bool = False,
    labels: Mapping[str, str] | None = None,
) -> list[Subject]:
    """Return these targets, or `every` session that runs here and every configured tree, or those
    of them that have all of `labels`.

    A configured tree that does not run is left out of the latter two; an ambiguous one is included,
    with its error.
    """
    if targets:
        return [_named(config, target) for target in dict.fromkeys(targets)]
    found = running(config)
    return (
        found
        if every
        else [s for s in found if all(s.labels.get(k) == v for k, v in (labels or {}).items())]
    )


def _named(config: Config, target: str) -> Subject:
    tree = configured_trees.parse(target, config.trees[target]) if target in config.trees else None
    return (
        Subject(target, tree.labels, tree.order, tree=True) if tree is not None else Subject(target)
    )


def running(config: Config) -> list[Subject]:
    """Return every running session and configured tree; a tree that is both is returned once.

    One that was dumped under several names has that of its holder, of the configuration, or the
    last one it was given. A second name of a tree with a holder or another configured name has an
    error, because it would be unclear which labels and order apply.
    """
    states = sessions(config)
    known = {state["session"]: state["labels"] for state in states}
    held = {state["session"] for state in states if state["holder"]}
    configured = configured_trees.trees(config)
    found: dict[str, Subject] = {}
    alive = [record for record in Registry(config).all() if record.alive()]
    alive.sort(key=lambda record: (record.name in held, record.name in configured, record.updated))
    for record in {record.identity: record for record in alive}.values():
        tree = configured.pop(record.name, None)
        labels = {**(tree.labels if tree else {}), **known.get(record.name, {})}
        order = order_of(labels, tree.order if tree else configured_trees.ORDER)
        found[record.name] = Subject(
            record.name, labels, order, record.identity, tree=tree is not None
        )
    for name, tree in configured.items():
        try:
            root = configured_trees.root_of(tree)
        except NotFound:
            continue
        except CriuctlError as error:
            found[name] = Subject(name, tree.labels, tree.order, tree=True, error=error)
            continue
        same = [other for other in found.values() if other.root == root]
        if twice := [other for other in same if other.tree or other.name in held]:
            found[name] = Subject(
                name, tree.labels, tree.order, tree=True, error=_twice(name, twice[0], root.pid)
            )
            continue
        for other in same:
            del found[other.name]  # it was dumped once by its PID
        found[name] = Subject(name, tree.labels, tree.order, root, tree=True)
    return sorted(found.values(), key=lambda subject: subject.name)


def _twice(name: str, other: Subject, pid: int) -> Conflict:
    what = "tree" if other.tree else "session"
    return Conflict(
        f"tree {name!r} is {what} {other.name!r}, too: PID {pid}",
        hint="Take it out of `trees` in the configuration, or let it say more.",
    )


def order_of(labels: Mapping[str, str], default: int = configured_trees.ORDER) -> int:
    """Return the label ``order`` as a number; an invalid one is ignored."""
    try:
        return int(labels.get("order", default))
    except ValueError:
        return default


def ranks(subjects: Sequence[Subject], *, ending: bool) -> list[list[Subject]]:
    """Return groups of subjects that may be processed at the same time, in order; with `ending` by
    falling order.
    """
    orders = sorted({subject.order for subject in subjects}, reverse=ending)
    return [[subject for subject in subjects if subject.order == order] for order in orders]
