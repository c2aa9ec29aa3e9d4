"""What repairs change in the images of a dump and of a restore: on small images, without CRIU."""

from __future__ import annotations

import importlib
import os
import pkgutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest

import criuctl.repairs
from criuctl.criu import schema
from criuctl.criu.images import REGULAR, ImageSet, read, write
from criuctl.proc.descriptors import descriptors
from criuctl.proc.tree import read_tree
from criuctl.repairs import registry
from criuctl.repairs.base import FrozenTree, Repair, RestoreImages
from criuctl.repairs.descriptor_flags import DescriptorFlags
from criuctl.repairs.descriptor_owners import DescriptorOwners
from criuctl.repairs.epoll_watches import EpollWatches
from criuctl.repairs.eventfd_semaphores import EventfdSemaphores, represents_semaphore
from criuctl.repairs.large_mappings import LargeMappings
from criuctl.repairs.parent_death_signal import ParentDeathSignal
from criuctl.repairs.registry import ALL
from criuctl.repairs.socket_pairs import SocketPairs
from criuctl.repairs.timerfds import TimerDescriptors
from criuctl.report import Reporter

PARENT, CHILD = 10, 5  # the child has the lower PID
ABSOLUTE = 1  # TFD_TIMER_ABSTIME


class Tree:
    """Images of a parent and its child, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self.images = ImageSet(self.fd)
        make = schema.message("PSTREE")
        both = [(PARENT, 0), (CHILD, PARENT)]
        entries = [
            make(pid=pid, ppid=ppid, pgid=pid, sid=PARENT, threads=[pid]) for pid, ppid in both
        ]
        write(self.fd, "pstree.img", "PSTREE", entries)

    def files(self, entries: Sequence[Any], held: Mapping[int, Mapping[int, int]]) -> None:
        """`held`: PID -> descriptor -> file id."""
        write(self.fd, "files.img", "FILES", entries)
        for pid, numbers in held.items():
            make = schema.message("FDINFO")
            write(self.fd, f"ids-{pid}.img", "IDS", [_filled("IDS", files_id=pid)])
            infos = [
                make(id=number, fd=fd, flags=0, type=REGULAR) for fd, number in numbers.items()
            ]
            write(self.fd, f"fdinfo-{pid}.img", "FDINFO", infos)

    def core(self, pid: int, **values: int) -> None:
        """Write the image of a process's first thread, with these values of its `thread_core`."""
        core = _filled("CORE")
        _fill(core.thread_core)
        for name, value in values.items():
            setattr(core.thread_core, name, value)
        write(self.fd, f"core-{pid}.img", "CORE", [core])

    def amend_dump(self, repair: Repair, frozen: FrozenTree) -> None:
        """Have the repair do its work when CRIU has written the images."""
        repair.record(frozen)
        repair.amend_dump(self.images, frozen)

    def amend_restore(self, repair: Repair, **facts: Any) -> RestoreImages:
        """Have the repair do its work before CRIU reads the images."""
        with ExitStack() as stack:
            asked = RestoreImages(self.images, Reporter(), stack, **facts)
            repair.amend_restore(asked)
        return asked


def _filled(kind: str, **values: int) -> Any:
    """A message whose required fields have their defaults unless they are given."""
    message = schema.message(kind)()
    _fill(message)
    for name, value in values.items():
        setattr(message, name, value)
    return message


def entry(number: int, kind: int, **parts: Any) -> Any:
    """An entry of files.img."""
    made = schema.message("FILES")(id=number, type=kind)
    for name, values in parts.items():
        part = getattr(made, name)
        part.SetInParent()
        _fill(part)
        for key, value in values.items():
            setattr(part, key, value)
    return made


def _fill(message: Any) -> None:
    """Give every required field a value, in messages below as well."""
    for one in message.DESCRIPTOR.fields:
        if not one.is_required:
            continue
        if one.message_type is not None:
            _fill(getattr(message, one.name))
        elif not message.HasField(one.name):
            # its default, which counts as set from now on
            setattr(message, one.name, getattr(message, one.name))


class FrozenChild:
    """A child that is stopped, as a tree that stands still: it has an eventfd that is a semaphore
    and one that is none.
    """

    def __enter__(self) -> Self:
        self.semaphore = os.eventfd(3, os.EFD_SEMAPHORE)
        self.plain = os.eventfd(3)
        self.pid = os.fork()
        if self.pid == 0:
            signal.pause()
        for fd in (self.semaphore, self.plain):
            os.close(fd)
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)
        processes = read_tree(self.pid)
        opened = {p.pid: descriptors(p.pid) for p in processes}
        self.tree = FrozenTree(processes, opened, Reporter())
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def entry(self) -> Any:
        """Its entry of pstree.img."""
        make = schema.message("PSTREE")
        return make(pid=self.pid, ppid=0, pgid=self.pid, sid=self.pid, threads=[self.pid])


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    made = Tree(tmp_path)
    yield made
    os.close(made.fd)


def test_every_repair_is_registered_and_says_what_is_lost() -> None:
    found = set()
    for module in pkgutil.iter_modules(criuctl.repairs.__path__):
        loaded = importlib.import_module(f"criuctl.repairs.{module.name}")
        found |= {
            one
            for one in vars(loaded).values()
            if isinstance(one, type) and issubclass(one, Repair)
        }
    assert found - {Repair} == set(ALL)
    assert len(set(ALL)) == len(ALL)
    for repair in ALL:
        assert repair.loses.endswith(".") and "CRIU" in repair.loses, repair


def test_a_release_method_is_called() -> None:
    """Only the repairs in `_RELEASE` are asked."""
    assert {kind for kind in ALL if kind.release is not Repair.release} == set(registry._RELEASE)


@pytest.mark.parametrize("kind", ALL)
def test_a_freeze_that_is_tried_again_leaves_nothing_of_the_first_try(kind: type[Repair]) -> None:
    with FrozenChild() as first, FrozenChild() as second:
        again, once = kind(), kind()
        again.record(first.tree)
        again.record(second.tree)
        once.record(second.tree)
        assert vars(again) == vars(once)


def test_the_semaphores_of_a_frozen_tree_are_marked(tree: Tree) -> None:
    with FrozenChild() as frozen:
        pid, held = frozen.pid, {frozen.semaphore: 1, frozen.plain: 2}
        write(tree.fd, "pstree.img", "PSTREE", [frozen.entry()])
        tree.files([entry(n, 5, efd={"id": n, "counter": 3}) for n in (1, 2)], {pid: held})
        tree.amend_dump(EventfdSemaphores(), frozen.tree)
    marked, other = tree.images.files()
    assert marked.efd.flags & os.EFD_SEMAPHORE
    assert not other.efd.flags & os.EFD_SEMAPHORE


def test_a_periodic_timer_with_an_unread_expiry_is_armed_and_a_disarmed_one_is_not(
    tree: Tree,
) -> None:
    overdue = entry(1, 17, tfd={"ticks": 2, "isec": 3})
    disarmed = entry(2, 17, tfd={"settime_flags": ABSOLUTE})
    running = entry(3, 17, tfd={"vsec": 5, "settime_flags": ABSOLUTE})
    tree.files([overdue, disarmed, running], {PARENT: {3: 1, 4: 2, 5: 3}})
    tree.amend_restore(TimerDescriptors())
    first, second, third = (e.tfd for e in tree.images.files())
    assert (first.vsec, first.vnsec) == (0, 1)
    assert (second.vnsec, second.settime_flags) == (0, 0)
    assert (third.vsec, third.settime_flags) == (5, ABSOLUTE)


def test_a_semaphore_is_made_and_inherited_as_a_file(tree: Tree) -> None:
    semaphore = entry(1, 5, efd={"id": 1, "flags": os.EFD_SEMAPHORE, "counter": 3})
    plain = entry(2, 5, efd={"id": 2, "counter": 3})
    tree.files([semaphore, plain], {PARENT: {3: 1, 4: 2}})
    with ExitStack() as stack:
        asked = RestoreImages(tree.images, Reporter(), stack)
        EventfdSemaphores().amend_restore(asked)
        (fd,) = asked.inherit.values()
        assert [os.eventfd_read(fd) for _ in range(3)] == [1, 1, 1]
    made, other = tree.images.files()
    assert represents_semaphore(made.reg.name) and not made.HasField("efd")
    assert other.HasField("efd")


def test_watches_that_the_makers_process_cannot_add_are_taken_out(tree: Tree) -> None:
    """The child, whose PID is lower, makes the epoll, and has another file as descriptor 7."""
    watching = entry(1, 6, epfd={"id": 1})
    for number in (6, 7):
        watch = watching.epfd.tfd.add()
        _fill(watch)
        watch.tfd = number
    others = [entry(n, REGULAR, reg={"id": n, "name": f"/{n}"}) for n in (2, 3, 4)]
    tree.files([watching, *others], {PARENT: {5: 1, 6: 2, 7: 3}, CHILD: {5: 1, 6: 2, 7: 4}})
    repair = EpollWatches()
    tree.amend_restore(repair)
    assert [w.tfd for w in tree.images.files()[0].epfd.tfd] == [6]
    assert {key: [w.tfd for w in watches] for key, watches in repair._watches.items()} == {
        (PARENT, 5): [7]
    }


def test_flags_that_only_an_open_descriptor_can_have_are_taken_out(tree: Tree) -> None:
    flags = os.O_RDWR | os.O_ASYNC | os.O_NONBLOCK
    tree.files([entry(1, REGULAR, reg={"id": 1, "name": "/a", "flags": flags})], {PARENT: {3: 1}})
    repair = DescriptorFlags()
    tree.amend_restore(repair)
    assert tree.images.files()[0].reg.flags == flags & ~os.O_ASYNC
    assert repair._flags == {(PARENT, 3): flags}


def test_an_owner_outside_that_has_ended_is_reported_once(tree: Tree) -> None:
    entries = [entry(n, REGULAR, reg={"id": n, "name": f"/{n}"}) for n in (1, 2, 3)]
    entries[0].reg.fown.pid = entries[1].reg.fown.pid = 4321
    entries[2].reg.fown.pid = CHILD
    tree.files(entries, {PARENT: {3: 1, 4: 2, 5: 3}})
    asked = tree.amend_restore(DescriptorOwners())
    assert [e.reg.fown.pid for e in tree.images.files()] == [0, 0, CHILD]
    (warning,) = asked.reporter.warnings
    assert "PID 4321, outside" in warning and "descriptor 3 and 1 more" in warning


def test_a_pair_begins_with_the_end_that_the_lowest_pid_has(tree: Tree) -> None:
    ends = [entry(n, 2, usk={"id": n, "ino": n, "peer": 3 - n}) for n in (1, 2)]
    tree.files(ends, {PARENT: {3: 1, 4: 2}, CHILD: {3: 1}})
    tree.amend_restore(SocketPairs())
    assert [e.id for e in tree.images.files()] == [2, 1]


@pytest.mark.parametrize("in_session", [True, False])
def test_the_signal_of_a_parents_end_is_cleared_unless_the_parent_stays(
    in_session: bool, tree: Tree
) -> None:
    tree.core(PARENT, pdeath_sig=signal.SIGKILL)
    asked = tree.amend_restore(ParentDeathSignal(), in_session=in_session)
    left = read(tree.fd, f"core-{PARENT}.img", "CORE")[0].thread_core
    assert left.HasField("pdeath_sig") == in_session
    assert ["SIGKILL" in text for text in asked.reporter.warnings] == ([] if in_session else [True])


def test_a_mapping_larger_than_memory_is_made_without_a_reservation(tree: Tree) -> None:
    memory = schema.message("MM")()
    _fill(memory)
    for size in (1 << 20, 1 << 46):
        area = memory.vmas.add()
        _fill(area)
        # MAP_PRIVATE | MAP_ANONYMOUS
        area.start, area.end, area.flags = 1 << 30, (1 << 30) + size, 0x22
    write(tree.fd, f"mm-{PARENT}.img", "MM", [memory])
    tree.amend_restore(LargeMappings())
    small, large = read(tree.fd, f"mm-{PARENT}.img", "MM")[0].vmas
    assert (small.flags, large.flags) == (0x22, 0x22 | 0x4000)
