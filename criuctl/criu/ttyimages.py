"""Terminals held from outside the tree, in CRIU's images: their descriptors, and their sources.

CRIU restores every descriptor of an *external* terminal (type ``EXT_TTY``) as a duplicate of the
one that it inherits for the key ``tty[RDEV:DEV]``: one description for all, whatever flags each
had. The terminal's session is the one that the first process with it open saw, which sees none if
the terminal does not control *it*. So before a restore each such file gets a separate key (a device
number that no device has), and the session and foreground group that criuctl found at the dump.

Terminals whose master is in the tree are made by CRIU, under their old numbers. A number that is
taken here is changed in the images to a free one, unless it belongs to a devpts of the tree's own.
``/dev/tty`` CRIU can save only in some processes that have it open; so it is dumped as if it were
external. If it refers to a terminal inside the tree, or one that has hung up, it is made a
description of that terminal's slave.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import count
from typing import Any

from msgspec import Struct, field, structs

from .images import REGULAR, ImageSet, path_of, read, text, write

# TtyType: PTY, VT, EXT_TTY, SERIAL; a slave's info has the id N << 1 (criu/tty.c, tty_gen_id)
_PTY, _CONSOLE, _EXTERNAL, _SERIAL = 1, 3, 5, 6
_SLAVES = 136  # their major device number
_DEVPTS = 6  # of CRIU's file systems
_NO_DEVICE = 0xFFFFF  # the st_dev of the made-up keys
_IMAGE = "tty-info.img"
_MASTERS = ("/dev/ptmx", "/dev/pts/ptmx")
_PTS = re.compile(r"(/?dev/pts/)(\d+)( \(deleted\))?")


class TtyFile(Struct, frozen=True):
    """One open file description of an external terminal."""

    id: int
    info: int
    flags: int
    rdev: int
    dev: int
    hung_up: bool
    holders: list[tuple[int, int]] = field(default_factory=list)  # (PID, fd) in the tree's numbers
    # CRIU's fown_entry: the process that gets a signal for input (F_SETOWN), and the signal
    owner: Any = None
    mode: int | None = None  # of the node, if CRIU recorded it
    master: bool = False
    packets: bool = False  # a master that reads packets (TIOCPKT)

    @property
    def key(self) -> str:
        """The key under which `place` lets it be inherited."""
        return f"tty[{self.info:x}:{_NO_DEVICE:x}]"


def external_files(images: ImageSet) -> list[TtyFile]:
    """Return every open file description of an external terminal."""
    if _IMAGE not in images.names():
        return []
    infos = {e.id: e for e in read(images.folder, _IMAGE, "TTY_INFO") if e.type == _EXTERNAL}
    holders = images.holders()
    found = []
    for entry in images.files():
        info = infos.get(entry.tty.tty_info_id) if entry.HasField("tty") else None
        if info is not None:
            found.append(_tty_file(entry, info, holders))
    return found


def _tty_file(
    entry: Any, info: Any, holders: Mapping[int, list[tuple[int, int]]], mode: int | None = None
) -> TtyFile:
    return TtyFile(
        id=entry.id,
        info=info.id,
        flags=entry.tty.flags,
        rdev=info.rdev,
        dev=info.dev,
        hung_up=not info.HasField("termios"),
        holders=holders.get(entry.id, []),
        owner=entry.tty.fown,
        mode=mode,
        master=bool(info.HasField("pty") and info.id & 1),
        packets=info.packet_mode,
    )


def join(images: ImageSet, inside: Mapping[int, int], hung_up: Collection[int]) -> None:
    """Turn external files into descriptions of slaves that CRIU opens.

    `inside`: file id -> N; `hung_up`: files of terminals that are gone.
    """
    infos = {info.id: info for info in read(images.folder, _IMAGE, "TTY_INFO")}
    entries = images.files()
    taken = {info.pty.index for info in infos.values() if info.HasField("pty")}
    unused = (number for number in count() if number not in taken | set(inside.values()))
    gone = {
        number: next(unused) for number in {e.tty.tty_info_id for e in entries if e.id in hung_up}
    }
    last = max(entry.id for entry in entries)
    # the mount identifies the namespace
    mount = Counter(e.reg.mnt_id for e in entries if e.HasField("reg")).most_common(1)[0][0]
    for entry in [entry for entry in entries if entry.id in inside or entry.id in hung_up]:
        own = infos.pop(entry.tty.tty_info_id, None)
        number = inside.get(entry.id, gone.get(entry.tty.tty_info_id, -1))
        if number << 1 not in infos and own is not None:  # no process has it open by its own name
            own.id, own.type, own.pty.index, own.rdev = (
                number << 1,
                _PTY,
                number,
                os.makedev(_SLAVES, number),
            )
            infos[own.id] = own
        last += 1
        entry.tty.tty_info_id, entry.tty.regf_id = number << 1, last
        path = type(entry)(type=REGULAR, id=last)
        path.reg.id, path.reg.flags, path.reg.pos = last, entry.tty.flags, 0
        path.reg.fown.CopyFrom(entry.tty.fown)
        path.reg.name, path.reg.mnt_id = f"/dev/pts/{number}", mount
        entries.append(path)
    write(images.folder, "files.img", "FILES", entries)
    write(images.folder, _IMAGE, "TTY_INFO", list(infos.values()))


def release(images: ImageSet, numbers: Collection[int]) -> dict[int, list[TtyFile]]:
    """Let terminals inside the tree be inherited instead of made by CRIU.

    Returns number -> its files; numbers that cannot be inherited are left out.
    """
    infos = {info.id: info for info in read(images.folder, _IMAGE, "TTY_INFO")}
    entries = images.files()
    found: dict[int, list[Any]] = {}
    for entry in entries:
        info = infos.get(entry.tty.tty_info_id) if entry.HasField("tty") else None
        if info is not None and info.HasField("pty") and info.pty.index in numbers:
            found.setdefault(info.pty.index, []).append(entry)
    for number, opened in list(found.items()):
        kinds = [infos[entry.tty.tty_info_id] for entry in opened]
        odd = any(not info.HasField("termios") or info.locked for info in kinds)
        if odd or {info.id & 1 for info in kinds} != {0, 1}:
            del found[number]  # CRIU restores this only for terminals that it makes itself
    holders, paths = images.holders(), set()
    modes = {
        entry.id: entry.reg.mode
        for entry in entries
        if entry.HasField("reg") and entry.reg.HasField("mode")
    }
    # CRIU has no room for high ones
    unused = (number for number in count(1) if number not in infos)
    released: dict[int, list[TtyFile]] = {}
    for number, opened in found.items():
        for entry in opened:
            info = type(infos[entry.tty.tty_info_id])()
            info.CopyFrom(infos[entry.tty.tty_info_id])
            file = _tty_file(entry, info, holders, modes.get(entry.tty.regf_id))
            info.id, info.type, info.packet_mode = next(unused), _EXTERNAL, False
            info.ClearField("pty")
            infos[info.id] = info
            paths.add(entry.tty.regf_id)
            entry.tty.tty_info_id = info.id
            entry.tty.ClearField("regf_id")
            released.setdefault(number, []).append(structs.replace(file, info=info.id))
    if released:
        write(
            images.folder,
            "files.img",
            "FILES",
            [entry for entry in entries if entry.id not in paths],
        )
        kept = [
            info
            for info in infos.values()
            if not info.HasField("pty") or info.pty.index not in released
        ]
        write(images.folder, _IMAGE, "TTY_INFO", kept)
    return released


def exclusive(images: ImageSet) -> list[tuple[int, int]]:
    """Return (PID, descriptor) of terminals in exclusive mode (TIOCEXCL).

    CRIU saves the mode and does not restore it.
    """
    if _IMAGE not in images.names():
        return []
    infos = {info.id for info in read(images.folder, _IMAGE, "TTY_INFO") if info.exclusive}
    if not infos:
        return []
    opened = {
        entry.id
        for entry in images.files()
        if entry.HasField("tty") and entry.tty.tty_info_id in infos
    }
    return [held[0] for number, held in images.holders().items() if number in opened]


def place(images: ImageSet, sessions: dict[int, tuple[int, int]]) -> None:
    """Give each external file a separate key.

    `sessions`: info id -> (session leader or 0, foreground group).
    """
    entries = read(images.folder, _IMAGE, "TTY_INFO")
    for entry in entries:
        if entry.type == _EXTERNAL:
            entry.sid, entry.pgrp = sessions.get(entry.id, (0, 0))
            entry.rdev, entry.dev = entry.id, _NO_DEVICE
    write(images.folder, _IMAGE, "TTY_INFO", entries)


def numbers(images: ImageSet) -> set[int]:
    """Return the N of every /dev/pts/N whose master CRIU makes itself."""
    if _IMAGE not in images.names():
        return set()
    return {
        entry.pty.index
        for entry in read(images.folder, _IMAGE, "TTY_INFO")
        if entry.HasField("pty")
    }


def own_nodes(images: ImageSet) -> set[int]:
    """Return the regular files (ids) that only name terminals which CRIU makes itself.

    Such a name leads to no other file. By any other name CRIU would open the present file, and
    change its mode.
    """
    if _IMAGE not in images.names():
        return set()
    infos = {info.id: info for info in read(images.folder, _IMAGE, "TTY_INFO") if info.type == _PTY}
    entries = images.files()
    paths = {entry.id: path_of(entry.reg) for entry in entries if entry.HasField("reg")}
    own: dict[int, bool] = {}
    for entry in entries:
        if not entry.HasField("tty") or not entry.tty.HasField("regf_id"):
            continue
        info, number = infos.get(entry.tty.tty_info_id), entry.tty.regf_id
        node = f"/dev/pts/{info.pty.index}" if info is not None else ""
        fits = info is not None and paths.get(number) in (
            _MASTERS if info.id & 1 else (node, f"{node} (deleted)")
        )
        own[number] = fits and own.get(number, True)
    return {number for number, fits in own.items() if fits}


def forget_modes(images: ImageSet) -> None:
    """Keep CRIU from changing the mode of terminals that it opens and does not make.

    See criu/tty.c, do_open_tty_reg.
    """
    named = {
        e.tty.regf_id for e in images.files() if e.HasField("tty") and e.tty.HasField("regf_id")
    } - own_nodes(images)

    def edit(entry: Any) -> None:
        if entry.HasField("reg") and entry.id in named:
            entry.reg.ClearField("mode")

    if named:
        images.edit_files(edit)


def own_devices(images: ImageSet) -> set[int]:
    """Return the devices (st_dev) of the tree's own devpts mounts.

    CRIU makes them again, and every number is free there.
    """
    own = [m.root_dev for m in _devpts(images) if "newinstance" in m.options.split(",")]
    return {os.makedev(number >> 20, number & 0xFFFFF) for number in own}


def are_mounted(images: ImageSet) -> bool:
    """Return whether a terminal is bind mounted somewhere, as a container's console is."""
    return any(m.root[1:].isdigit() for m in _devpts(images))


def _devpts(images: ImageSet) -> Iterator[Any]:
    for name in images.names():
        if name.startswith("mountpoints-"):
            yield from (
                mount for mount in read(images.folder, name, "MNTS") if mount.fstype == _DEVPTS
            )


def mount_others(images: ImageSet, changed: Mapping[int, int]) -> None:
    """Redirect mounts of terminals that this host makes: number in the images -> number here."""
    for name in (name for name in images.names() if name.startswith("mountpoints-")):
        mounts = read(images.folder, name, "MNTS")
        for mount in mounts:
            number = mount.root[1:]
            # The source is the one that CRIU binds for a mount that it has found itself (ext_key).
            if (
                mount.fstype == _DEVPTS
                and mount.ext_key
                and number.isdigit()
                and int(number) in changed
            ):
                mount.root = f"/{changed[int(number)]}"
                mount.source = f"{os.path.dirname(mount.source)}{mount.root}"
        write(images.folder, name, "MNTS", mounts)


def renumber(images: ImageSet, changed: Mapping[int, int]) -> None:
    """Restore terminals under other numbers: old -> new."""
    entries = read(images.folder, _IMAGE, "TTY_INFO")
    for entry in entries:
        if entry.HasField("pty"):
            entry.pty.index = changed.get(entry.pty.index, entry.pty.index)
    write(images.folder, _IMAGE, "TTY_INFO", entries)

    def edit(entry: Any) -> None:
        found = _PTS.fullmatch(text(entry.reg.name)) if entry.HasField("reg") else None
        if found and int(found[2]) in changed:
            entry.reg.name = f"{found[1]}{changed[int(found[2])]}{found[3] or ''}"

    images.edit_files(edit)


def led_by_device(images: ImageSet) -> bool:
    """Return whether a virtual console or a serial line controls a session.

    With ``--shell-job`` CRIU would take it for an inherited one, and leave that session without a
    terminal (criu/tty.c, tty_setup_slavery).
    """
    infos = read(images.folder, _IMAGE, "TTY_INFO") if _IMAGE in images.names() else ()
    return any(info.sid and info.type in (_CONSOLE, _SERIAL) for info in infos)


def groups(images: ImageSet) -> dict[int, int]:
    """Return process group -> session, of every process of the tree."""
    return {entry.pgid: entry.sid for entry in read(images.folder, "pstree.img", "PSTREE")}


def sessions(images: ImageSet) -> dict[int, int]:
    """Return session -> how many processes of the tree are in it."""
    return Counter(entry.sid for entry in read(images.folder, "pstree.img", "PSTREE"))


def lead_session(images: ImageSet) -> None:
    """Make the root the leader of its session if that was led from outside the tree.

    Also of its process group. Otherwise it would come back into criuctl's own session, which has no
    number in the tree's PID namespace, and could not be dumped again from there.
    """
    entries = read(images.folder, "pstree.img", "PSTREE")
    root = entries[0]
    session, group = root.sid, root.pgid
    if any(entry.pid == session for entry in entries):
        return
    for entry in entries:
        if entry.sid == session:
            entry.sid = root.pid
            if entry.pgid == group:
                entry.pgid = root.pid
    write(images.folder, "pstree.img", "PSTREE", entries)
