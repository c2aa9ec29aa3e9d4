"""Terminals during a restore.

Each terminal that was held from outside the tree becomes a fresh pseudo-terminal.  Every
description of it is opened again with its own flags; CRIU sets modes, window size, controlling
terminal and foreground group from the images, after criuctl has put what it saw into those (see
`criuctl.criu.ttyimages`).  The same is done with one whose master is inside the tree and on which a
session has more than its leader (a shell in a tmux that runs something): a process that follows a
leader inherits its terminal when it is forked, so that has to exist before, and CRIU makes it after
(see `criuctl.restore.early_tasks`).

In post-restore what was typed and printed is put back, and a master whose slaves were all closed
hangs up again: CRIU makes it like one that has not been opened yet.  A tree whose session was led
from outside, a shell's job, becomes a session of its own, led by its root.
"""

from __future__ import annotations

import fcntl
import os
import stat
import termios
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from itertools import count
from typing import Any

from ..checkpoint.manifest import Manifest
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.terminal_records import TerminalRecord
from ..criu import ttyimages
from ..criu.images import ImageSet
from ..errors import RestoreFailed
from ..proc import linediscipline
from ..proc.linediscipline import Held, Printed
from ..proc.syscalls import borrowed
from ..proc.tty import pts_index
from ..report import Reporter
from ..session.terminal import Pty, making

_REACH = 16  # terminals that CRIU (which tries 32) is let make on the way to a number
_LEFT = 4  # the lowest free numbers are left to other programs, which may need one at this moment


class RestoredTerminals:
    """Fresh terminals for a tree that is restored, and the changes that its images need."""

    def __init__(self, manifest: Manifest, images: ImageSet) -> None:
        """Put the session's leader into the images; before the numbers that must be free are read
        from them.
        """
        self._images = images
        self.records = [t for t in manifest.terminals if t.master == "outside"]
        self._inside = [t for t in manifest.terminals if t.master == "inside"]
        self.ptys: list[tuple[TerminalRecord, Pty]] = []
        self._files = ttyimages.external_files(images)
        self._join()
        self._making = ExitStack()  # until CRIU has made its own
        ttyimages.lead_session(images)
        self._released = self._release(manifest)
        self._led: list[tuple[TerminalRecord, Pty]] = []  # criuctl's, of those released
        self._packets: list[Pty] = []  # of these, whose masters read packets
        self._inherited = ExitStack()  # descriptors of criuctl that CRIU inherits
        self._renumbered: dict[int, int] = {}  # those inside that get another number

    def _join(self) -> None:
        """Match what was opened as /dev/tty with a terminal that is inside the tree or has hung
        up.
        """
        numbers = {
            holder: number
            for r in self._inside
            for holder in r.holders
            if (number := pts_index(r.rdev)) is not None
        }
        inside = {
            file.id: numbers[holder]
            for file in self._files
            for holder in file.holders
            if holder in numbers
        }
        hung_up = {file.id for file in self._files if file.hung_up}
        if inside or hung_up:
            ttyimages.join(self._images, inside, hung_up)
            self._files = [
                file for file in self._files if file.id not in inside and file.id not in hung_up
            ]

    def _release(self, manifest: Manifest) -> dict[int, list[ttyimages.TtyFile]]:
        """Release those inside that control a session: the leader's followers can have its terminal
        only if it exists first.
        """
        if manifest.namespaces.get("mnt", {}).get("mode") == "dumped":
            return {}  # it is of another /dev/pts
        sessions = ttyimages.sessions(self._images)
        followed = {
            pts_index(r.rdev): r
            for r in self._inside
            if r.leader and sessions.get(r.leader, 0) > 1 and not r.slave_gone
        }
        return (
            ttyimages.release(self._images, {number for number in followed if number is not None})
            if followed
            else {}
        )

    def _make_released(
        self, reserved: set[int], root: str, stack: ExitStack
    ) -> tuple[dict[str, int], dict[int, tuple[int, int]]]:
        """Return what CRIU inherits of them, and the session that each controls."""
        inherited: dict[str, int] = {}
        sessions: dict[int, tuple[int, int]] = {}
        groups = ttyimages.groups(self._images)
        for number, files in sorted(self._released.items()):
            record = next(r for r in self._inside if r.leader and pts_index(r.rdev) == number)
            pty = _fresh(record, reserved | (set(self._released) - {number}), number, root)
            stack.callback(pty.close)
            self._led.append((record, pty))
            if pty.number != number:
                self._renumbered[number] = pty.number
            foreground = (
                record.foreground
                if groups.get(record.foreground) == record.leader
                else record.leader
            )
            for file in files:
                if file.master:
                    fd = pty.share_master(file.flags)
                    self._packets += [pty] if file.packets else []
                else:
                    fd = pty.open_slave(file.flags)
                    sessions[file.info] = (record.leader, foreground)
                    if file.mode is not None:
                        os.fchmod(fd, stat.S_IMODE(file.mode))
                inherited[file.key] = fd
                self._inherited.callback(os.close, fd)
        return inherited, sessions

    def open(self, stack: ExitStack, root: str = "") -> dict[str, int]:
        """Make the terminals; return what CRIU inherits: key -> descriptor, closed by `replant` or
        with `stack`.

        `root`: ``/proc/PID/root`` of the mount namespace that the tree gets, if that is not
        criuctl's.  When CRIU has made those inside the tree, call `made`.
        """
        # CRIU makes the terminals inside the tree under the numbers that they had: criuctl's must
        # be others.
        reserved = ttyimages.numbers(self._images)
        stack.callback(self.made)
        stack.callback(self._inherited.close)
        if reserved or self._files or self._released:
            self._making.enter_context(making())
        devices = ttyimages.own_devices(self._images)
        apart = {pts_index(r.rdev) for r in self._inside if r.dev in devices}
        renumbered = _free_numbers(reserved - apart, set(self._released))
        if renumbered:
            ttyimages.renumber(self._images, renumbered)
            self._renumbered |= renumbered
        if not self._files and not self._released:
            return {}
        reserved |= set(renumbered.values())
        inherited, sessions = self._make_released(reserved, root, stack)
        for record in self.records:
            if record.holders:
                pty = _fresh(record, reserved)
                stack.callback(pty.close)
                self.ptys.append((record, pty))
        made = ((pts_index(r.rdev), p.number) for r, p in self.ptys if r.dev not in devices)
        if moved := {old: new for old, new in made if old is not None and old != new}:
            ttyimages.mount_others(self._images, moved)
        groups = ttyimages.groups(self._images)
        first = self._images.pids()[0]
        for file in self._files:
            found = next(((r, p) for r, p in self.ptys if set(file.holders) & set(r.holders)), None)
            if found is None:
                raise RestoreFailed(
                    f"the checkpoint does not show which terminal descriptor {file.holders[:1]} is "
                    "of",
                    hint="It was made by another version of criuctl, or is damaged.",
                )
            record, pty = found
            leader = first if record.led_outside else record.leader
            foreground = record.foreground if groups.get(record.foreground) == leader else leader
            sessions[file.info] = (leader, foreground) if leader else (0, 0)
            inherited[file.key] = fd = pty.open_slave(file.flags)
            self._inherited.callback(os.close, fd)
        ttyimages.place(self._images, sessions)
        if not reserved:
            self.made()
        return inherited

    def made(self) -> None:
        """Note that all terminals of the tree exist: other restores may make theirs."""
        self._making.close()

    def controlling(self) -> dict[int, str]:
        """Return session leader -> path of the terminal that its session has to inherit, if there
        are processes to do so.
        """
        sessions = ttyimages.sessions(self._images)
        root = self._images.pids()[0]
        found = {}
        for record, pty in self.ptys:
            leader = root if record.led_outside else record.leader
            if leader and (sessions.get(leader, 0) > 1 or not record.holders):
                found[leader] = pty.path
        return found | {record.leader: pty.path for record, pty in self._led}

    def replant(
        self, reader: CheckpointReader, pids: Mapping[int, int], reporter: Reporter
    ) -> None:
        """Put back what was typed and printed; the tree is in place and has not run.  `pids`: PID
        in the tree -> PID on this host.
        """
        for record, pty in self.ptys:
            _plant(record, reader, pty.slave, pty.master)
            pty.close_slave()
        for record in self._inside:
            if record.printed is not None or record.slave_gone:
                pid, number = record.master_holders[0]
                printed = Printed(
                    reader.read(record.printed) if record.printed is not None else b""
                )
                try:
                    if left := _print(pids[pid], number, printed):
                        reporter.warning(
                            f"PID {pid}: terminal {number} had no room for the last {left} bytes "
                            "printed, which are lost"
                        )
                except OSError as error:
                    reporter.warning(
                        f"PID {pid}: {len(printed.data)} bytes printed on terminal {number} are "
                        f"lost: {error}"
                    )
            # On one that no process has open, and which only controls a session, what was typed is
            # lost with that: no process could read it.
            if not record.holders or (record.input is None and not record.stopped):
                continue
            pid, number = record.holders[0]
            slave = os.open(
                f"/proc/{pids[pid]}/fd/{number}",
                os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC,
            )
            try:
                _plant(record, reader, slave, None)
            finally:
                os.close(slave)
        for pid, number in ttyimages.exclusive(self._images):
            with borrowed(pids[pid], number) as terminal:
                fcntl.ioctl(terminal, termios.TIOCEXCL)
        for pty in self._packets:  # not before its modes are all set: it would be notified of each
            pty.read_packets()
        for _, pty in self._led:
            pty.close()
        # the tree has all of them, and is to be notified when it closes them
        self._inherited.close()
        self._warn_renumbered(reporter)

    @property
    def owners(self) -> dict[tuple[int, int], Any]:
        """Return (PID, descriptor) in the tree's numbers -> CRIU's fown_entry, for inherited ones,
        which CRIU does not restore.
        """
        files = [*self._files, *(file for files in self._released.values() for file in files)]
        return {
            file.holders[0]: file.owner
            for file in files
            if file.holders and (file.owner.signum or file.owner.pid)
        }

    def _warn_renumbered(self, reporter: Reporter) -> None:
        """Warn that what programs have noted of a terminal's name, for example a link to it, may
        lead to another one now.
        """
        named = {pts_index(record.rdev) for record in self._inside if not record.slave_gone}
        changed = [
            f"/dev/pts/{old} is /dev/pts/{new}"
            for old, new in sorted(self._renumbered.items())
            if old in named
        ]
        if changed:
            reporter.warning(
                f"terminals inside the tree could not have their numbers: {', '.join(changed)} "
                "now; what programs have noted by name (links, $SSH_TTY, $GPG_TTY) leads "
                "elsewhere",
                "Use the new names, or end the processes that have the old ones (`fuser`), and "
                "restore then.",
            )


def _free_numbers(wanted: set[int], others: Collection[int] = ()) -> dict[int, int]:
    """Return free numbers for those of `wanted` that CRIU cannot have on this host, and that no
    `others` want either.

    The kernel gives the lowest free number; CRIU makes terminals until it has the one that it
    wants, but not many.
    """
    taken = {int(name) for name in os.listdir("/dev/pts") if name.isdigit()}
    lowest = next(number for number in count() if number not in taken)
    lost = {number for number in wanted if number in taken or number - lowest >= _REACH}
    left = _LEFT if len(wanted) + _LEFT <= _REACH else 0
    unfree = taken.union(others, wanted - lost)
    free = (number for number in count(lowest + left) if number not in unfree)
    return {number: next(free) for number in sorted(lost)}


def _fresh(
    record: TerminalRecord, reserved: set[int], wanted: int | None = None, root: str = ""
) -> Pty:
    """Make a new terminal of that size, not under a reserved number, and under the `wanted` one if
    that is free.
    """
    unwanted: list[Pty] = []
    if wanted is not None and (wanted in reserved or wanted in _free_numbers({wanted})):
        wanted = None
    try:
        while True:
            pty = Pty(record.rows, record.columns, record.xpixel, record.ypixel, root=root)
            number = pty.number
            if number == wanted or (
                number not in reserved and (wanted is None or len(unwanted) > _REACH)
            ):
                return pty
            unwanted.append(pty)
    finally:
        for one in unwanted:
            one.close()


def _print(pid: int, number: int, printed: Printed) -> int:
    with borrowed(pid, number) as master:
        return linediscipline.give_printed(master, printed)


def _plant(
    record: TerminalRecord, reader: CheckpointReader, slave: int, master: int | None
) -> None:
    data = reader.read(record.input) if record.input is not None else b""
    if data or record.stopped:
        linediscipline.give(
            slave, Held(data[: record.queued], data[record.queued :], record.stopped), master
        )
