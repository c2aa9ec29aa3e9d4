"""Terminals during a dump; for a restore: `criuctl.terminals.restored`.

What was typed on a terminal inside the tree (tmux), and what was printed there and not read yet, is
taken out while CRIU reads the terminals, because CRIU would lose half of it; it is put back if the
tree goes on.  A terminal whose master is outside the tree (sshd, tmux, a window, criuctl's holder)
is an external resource to CRIU.  What was typed there and not yet read is taken as the last thing
before the manifest is written, because taking it means reading it: `criuctl.proc.linediscipline`
describes how that loses nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

from msgspec import Struct, field
from msgspec.structs import replace

from ..checkpoint.chunks import StreamRef
from ..checkpoint.terminal_records import TerminalRecord
from ..checkpoint.writer import CheckpointWriter
from ..errors import CommandFailed
from ..proc.descriptors import Descriptor
from ..proc.linediscipline import Held, Printed
from ..proc.procfs import read_text
from ..proc.tree import Process
from ..proc.tty import Terminal, alias_keys, master_index, terminals
from ..session.terminal import Guard, window_size


class DumpedTerminals:
    """The terminals of a tree that is to be dumped; opened, with their guard, while it still
    runs.
    """

    def __init__(
        self,
        root: int,
        tree: Sequence[Process],
        opened: Mapping[int, Sequence[Descriptor]],
        stack: ExitStack,
    ) -> None:
        """`tree`: all living processes; those that start later inherit their terminals from one of
        them.
        """
        self._outside: list[tuple[Terminal, int]] = []
        self._inside: list[tuple[Terminal, int]] = []
        found = terminals(tree, opened)
        # CRIU opens that of a console itself.
        self._external = (
            set() if any(t.aliases and t.kind != "pts" for t in found) else alias_keys(tree, opened)
        )
        for terminal in found:
            if terminal.kind != "pts" or terminal.hung_up:
                continue  # CRIU itself knows these
            slave = open_terminal(terminal)
            if slave is not None:
                stack.callback(os.close, slave)
                (self._inside if terminal.master_inside else self._outside).append(
                    (terminal, slave)
                )
                if terminal.holders and not terminal.master_inside:
                    self._external.add(terminal.external_key)
        self._held: dict[tuple[int, int], Held] = {}
        self._masters: list[_Master] = []
        self._guard: Guard | None = None
        slaves = [slave for _, slave in (*self._outside, *self._inside)]
        if slaves or _masters(opened):
            self._guard = stack.enter_context(Guard(root, slaves))

    def ready(self) -> None:
        """Wait until the guard has started: the tree is about to be frozen."""
        if self._guard is not None:
            self._guard.ready()

    @property
    def external(self) -> list[str]:
        """Return CRIU's keys of the terminals held from outside, and of /dev/tty."""
        return sorted(self._external)

    def hold(self, opened: Mapping[int, Sequence[Descriptor]], conversation: int) -> None:
        """Empty the terminals inside the tree: it is frozen, and CRIU is about to read them.

        If criuctl is killed, CRIU, which is controlled over `conversation`, lets the tree go on
        when they are not empty.
        """
        self._masters = _masters(opened)
        if self._guard is not None and (self._inside or self._masters):
            self._guard.attend(conversation)
            slaves = [slave for _, slave in self._inside]
            found, printed = self._guard.hold(
                slaves, [master.holders[0] for master in self._masters], _blocking(opened)
            )
            self._masters = [
                replace(master, printed=one)
                for master, one in zip(self._masters, printed, strict=True)
            ]
            self._held = {
                _key(terminal): held
                for (terminal, _), held in zip(self._inside, found, strict=True)
            }

    def take(
        self,
        tree: Sequence[Process],
        opened: Mapping[int, Sequence[Descriptor]],
        writer: CheckpointWriter,
    ) -> list[TerminalRecord]:
        """Return the records of the frozen tree's terminals; what was typed goes into the
        checkpoint and stays in place.
        """
        slaves = {_key(terminal): slave for terminal, slave in (*self._outside, *self._inside)}
        held = dict(self._held)
        if self._guard is not None and self._outside:
            found = self._guard.take([slave for _, slave in self._outside])
            held |= {
                _key(terminal): one for (terminal, _), one in zip(self._outside, found, strict=True)
            }
        records = []
        alone = list(self._masters)
        for terminal in terminals(tree, opened):
            if terminal.kind != "pts":
                continue
            master = next((one for one in alone if set(one.holders) & set(terminal.masters)), None)
            if master is not None:
                alone.remove(master)
            key = _key(terminal)
            typed = held.get(key, Held())
            stream = None
            if typed.queued or typed.raw:
                name = ("terminal", *key)
                writer.add_bytes(name, typed.queued + typed.raw)
                stream = writer.stream(name)
            record = _record(terminal, tree, typed, slaves.get(key), stream)
            records.append(
                _with_master(record, tree, master, writer, gone=not terminal.holders)
                if master
                else record
            )
        # The process that had the slave open when the tree was first read may have closed it since:
        # criuctl's descriptor alone has kept it open.
        known = {terminal.number for terminal, _ in self._inside}
        for master in alone:
            gone = master.printed.hung_up or master.index in known
            if gone or master.printed.data:
                records.append(
                    _with_master(
                        TerminalRecord(path=f"/dev/pts/{master.index}"),
                        tree,
                        master,
                        writer,
                        gone=gone,
                    )
                )
        return records

    def close_input_again(self) -> None:
        """CRIU has read the terminals: let their ends block again, so that no input gets in."""
        if self._guard is not None:
            self._guard.block()

    def back(self) -> None:
        """Note that the tree goes on; if the guard does not get this, it finds that out itself."""
        if self._guard is not None:
            with suppress(CommandFailed):
                self._guard.back()

    def drop(self) -> None:
        """Note that the checkpoint exists, and the tree is about to be ended; should it go on all
        the same, the guard restores the terminals.
        """
        if self._guard is not None:
            self._guard.drop()


class _Master(Struct, frozen=True):
    """One master in the tree."""

    index: int
    holders: tuple[tuple[int, int], ...]
    printed: Printed = field(default_factory=Printed)


def _blocking(opened: Mapping[int, Sequence[Descriptor]]) -> list[tuple[int, int, int]]:
    """Return the terminals' descriptors that CRIU may leave non-blocking: PID, descriptor,
    flags.
    """
    every = ((pid, d) for pid, held in opened.items() for d in held if d.kind == "tty")
    return [(pid, d.fd, d.flags) for pid, d in every if not d.flags & os.O_NONBLOCK]


def _masters(opened: Mapping[int, Sequence[Descriptor]]) -> list[_Master]:
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for pid, held in opened.items():
        for descriptor in held:
            if (index := master_index(descriptor)) is not None:
                found.setdefault((index, descriptor.device), []).append((pid, descriptor.fd))
    return [_Master(index, tuple(holders)) for (index, _), holders in found.items()]


def _with_master(
    record: TerminalRecord,
    tree: Sequence[Process],
    master: _Master,
    writer: CheckpointWriter,
    *,
    gone: bool,
) -> TerminalRecord:
    inner = {process.pid: process.ns_pid for process in tree}
    holders = tuple((inner.get(pid, pid), fd) for pid, fd in master.holders)
    stream = None
    if master.printed.data:
        name = ("printed", *master.holders[0])
        writer.add_bytes(name, master.printed.data)
        stream = writer.stream(name)
    return record.with_use(master_holders=holders, printed=stream, slave_gone=gone)


def _key(terminal: Terminal) -> tuple[int, int]:
    return terminal.rdev, terminal.dev


def open_terminal(terminal: Terminal) -> int | None:
    """Open the slave, without blocking and not as controlling terminal; None if it has hung up or
    cannot be reached.
    """
    flags = os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
    # The link of a descriptor leads to the very node, in any mount namespace.
    paths = [f"/proc/{pid}/fd/{fd}" for pid, fd in terminal.holders]
    paths += [f"/proc/{pid}/root/dev/pts/{terminal.number}" for pid in terminal.controls]
    for path in paths:
        try:
            fd = os.open(path, flags)
        except OSError:
            continue
        if os.fstat(fd).st_rdev == terminal.rdev:
            return fd
        os.close(fd)
    return None


def _record(
    terminal: Terminal,
    tree: Sequence[Process],
    typed: Held,
    slave: int | None,
    stream: StreamRef | None,
) -> TerminalRecord:
    inner = {process.pid: process.ns_pid for process in tree}
    holders = [*terminal.holders, *((pid, fd) for pid, fd, _ in terminal.aliases)]
    root = tree[0]
    size = (0, 0, 0, 0)
    if slave is not None:
        with suppress(OSError):
            size = window_size(slave)
    return TerminalRecord(
        path=terminal.path,
        rdev=terminal.rdev,
        dev=terminal.dev,
        master="gone" if terminal.hung_up else "inside" if terminal.master_inside else "outside",
        holders=tuple((inner.get(pid, pid), fd) for pid, fd in holders),
        leader=inner.get(terminal.session_leader or 0, 0),
        led_outside=root.pid in terminal.controls
        and all(process.pid != root.sid for process in tree),
        foreground=_foreground(terminal, tree),
        rows=size[0],
        columns=size[1],
        xpixel=size[2],
        ypixel=size[3],
        canonical=typed.canonical,
        echo=typed.echo,
        stopped=typed.stopped,
        queued=len(typed.queued),
        input=stream,
    )


def _foreground(terminal: Terminal, tree: Sequence[Process]) -> int:
    """Return the terminal's foreground group in the tree's own numbers; 0 if no process of the tree
    is in it.
    """
    for pid in terminal.controls:
        group = int(read_text(pid, "stat").rpartition(")")[2].split()[5])
        for process in tree:
            if process.pgid == group and not process.zombie:
                for line in read_text(process.pid, "status").split("\n"):
                    if line.startswith("NSpgid:"):
                        return int(line.split()[-1])
        return 0
    return 0
