"""Check terminals that have only one side in the tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...proc.namespaces import is_namespace_init
from ...proc.syscalls import same_file
from ...proc.tty import master_index, path_holders
from ...report import Finding
from .scene import Scene

_HIGHEST, _DESCRIPTIONS = 1000, 64  # CRIU: criu/tty.c, MAX_PTY_INDEX and ETTY_INDEX_MAX


def check_terminals(scene: Scene) -> Iterator[Finding]:
    """Check every pseudo-terminal whose master is not in the tree, and every master whose slave is
    not.
    """
    outside = [
        t for t in scene.terminals if t.kind == "pts" and not t.master_inside and not t.hung_up
    ]
    for terminal in outside:
        name = terminal.path or f"/dev/pts/{terminal.number}"
        if terminal.holders or terminal.aliases:
            yield Finding(
                "info",
                "terminal-outside",
                f"the terminal {name} is held from outside the tree (by sshd, tmux, a window, a "
                "holder); a restore gives the tree a new one",
                pid=(terminal.holders[0] if terminal.holders else terminal.aliases[0])[0],
            )
        else:
            yield Finding(
                "info",
                "terminal-controls",
                f"the terminal {name} controls the tree, though no descriptor of it is open; a "
                "restore comes without",
                pid=scene.root.pid,
            )
    yield from _several_meanings(scene)
    yield from _numbers(scene)
    aliases = [(pid, fd) for t in scene.terminals for pid, fd, _dev in t.aliases]
    yield from _many_outside([holder for t in outside for holder in t.holders] + aliases)
    yield from _followers(scene)
    yield from _masters_alone(scene)


def _several_meanings(scene: Scene) -> Iterator[Finding]:
    """Check that /dev/tty has one meaning, as CRIU needs it.

    Either CRIU opens it itself, as for a console, or criuctl gives CRIU the terminal of each.
    """
    consoles = [t for t in scene.terminals if t.aliases and t.kind != "pts"]
    if consoles and any(t.kind == "pts" for t in scene.terminals):
        pid, fd, _dev = consoles[0].aliases[0]
        yield Finding(
            "error",
            "terminal-names",
            f"/dev/tty is open for {consoles[0].path or 'a console'}, and there are "
            "pseudo-terminals too; CRIU cannot distinguish "
            "them",
            "Have the program open its terminal by its own name, or run it on a terminal of "
            "criuctl's (`criuctl run`).",
            pid=pid,
            fd=fd,
        )


def _numbers(scene: Scene) -> Iterator[Finding]:
    """Report terminals inside the tree whose number is too high for CRIU."""
    masters = (
        (index, process.pid, d.fd)
        for process, d in scene.descriptors()
        if (index := master_index(d)) is not None
    )
    slaves = (
        (t.number, *t.holders[0])
        for t in scene.terminals
        if t.number is not None and t.holders and t.master_inside
    )
    found = {index: (pid, fd) for index, pid, fd in (*masters, *slaves) if index > _HIGHEST}
    for index, (pid, fd) in found.items():
        yield Finding(
            "error",
            "terminal-number",
            f"the terminal /dev/pts/{index} is inside the tree; CRIU saves those up to number "
            f"{_HIGHEST}",
            "End what holds the many others, and have the program open its terminal again; or "
            "give it a /dev/pts of its own (mount namespace, devpts).",
            pid=pid,
            fd=fd,
        )


def _many_outside(held: Sequence[tuple[int, int]]) -> Iterator[Finding]:
    """Count how often terminals held from outside, and /dev/tty, are opened in the whole tree;
    inherited descriptors do not count.
    """
    opened: list[tuple[int, int]] = []
    for pid, fd in held if len(held) > _DESCRIPTIONS else ():
        if not same_file((pid, fd), (pid, fd)) or any(
            same_file((pid, fd), other) for other in opened
        ):
            continue  # it is gone meanwhile, or inherited
        opened.append((pid, fd))
        if len(opened) > _DESCRIPTIONS:
            yield Finding(
                "error",
                "many-terminals",
                "terminals held from outside the tree, or /dev/tty, are opened more than "
                f"{_DESCRIPTIONS} times; CRIU cannot save that",
                "Have programs use the descriptors that they inherit, instead of opening "
                "/dev/tty, or end some of them.",
                pid=pid,
                fd=fd,
            )
            return


def _followers(scene: Scene) -> Iterator[Finding]:
    """Report processes in a session on a terminal of the tree's own /dev/pts that do not lead the
    session.

    CRIU makes the terminal when they exist already.
    """
    if (
        not scene.foreign("mnt")
        or not scene.foreign("pid")
        or not is_namespace_init(scene.root.pid)
    ):
        return
    for terminal in scene.terminals:
        others = [pid for pid in terminal.controls if pid != terminal.session_leader]
        if terminal.master_inside and not terminal.hung_up and others:
            yield Finding(
                "info",
                "terminal-followers",
                f"{len(others)} process(es) on {terminal.path or f'/dev/pts/{terminal.number}'}, "
                "a terminal inside the tree, come back without it as controlling terminal: "
                "descriptors and ^C work, /dev/tty does not; what the leader starts later has it",
                pid=others[0],
            )


def _masters_alone(scene: Scene) -> Iterator[Finding]:
    """Report masters in the tree whose slaves are held by others: until they close them, the
    terminal's number is taken.
    """
    inside = {terminal.number for terminal in scene.terminals if terminal.holders}
    alone = {
        index: (process.pid, descriptor.fd)
        for process, descriptor in scene.descriptors()
        if (index := master_index(descriptor)) is not None and index not in inside
    }
    if not alone:
        return
    for index, holder in path_holders(
        {f"/dev/pts/{index}": index for index in alone}, scene.by_pid
    ).items():
        pid, fd = alone[index]
        yield Finding(
            "warning",
            "terminal-slave-outside",
            f"the terminal /dev/pts/{index}, whose master is here, is open in process "
            f"{scene.command_of(holder)}, outside the tree; while it is, a restore cannot have "
            "its number",
            "End that process after the dump, or dump a tree that holds both.",
            pid=pid,
            fd=fd,
        )
