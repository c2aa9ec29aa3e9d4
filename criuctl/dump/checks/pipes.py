"""Check the pipes and FIFOs of a tree as a whole: their number, collisions in CRIU, and other ends
outside.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import termios
from collections.abc import Iterator

from ...criu.fifoimages import taken_for_one
from ...proc.descriptors import Descriptor
from ...proc.procfs import all_pids, reading
from ...proc.syscalls import borrowed
from ...proc.tree import Process
from ...report import Finding
from .scene import Scene

_PIPES = 1024  # CRIU's NR_PIPES_WITH_DATA
# the part of an inode number in CRIU's pipe_id; each file system gives such numbers by itself
_PIPE_ID = (1 << 32) - 1


def check_pipes(scene: Scene) -> Iterator[Finding]:
    """Check what no single descriptor shows."""
    yield from _many_pipes(scene)
    yield from _taken_for_one(scene)
    yield from _half_pipes(scene)


def _half_pipes(scene: Scene) -> Iterator[Finding]:
    """Report pipes whose other end is held by a process outside.

    A restored pipe without a name is a new one, to which that process is not connected.  It is
    connected to a FIFO again, but not while the tree is away.
    """
    ends: dict[str, dict[int, tuple[Process, Descriptor]]] = {}
    for process, d in scene.descriptors():
        if d.kind == "pipe" and not d.deleted and d.target not in scene.streams:
            mode = d.flags & os.O_ACCMODE
            for end in (os.O_RDONLY, os.O_WRONLY) if mode == os.O_RDWR else (mode,):
                ends.setdefault(d.target, {}).setdefault(end, (process, d))
    halves = {
        target: next(iter(found.items())) for target, found in ends.items() if len(found) == 1
    }
    for target, pid in _other_ends(
        {target: end for target, (end, _held) in halves.items()}, scene
    ).items():
        end, (process, d) = halves[target]
        does = "reads" if end == os.O_WRONLY else "writes to"
        if target.startswith("pipe:"):
            code = "pipe-outside"
            then = (
                "writing to it ends the program (SIGPIPE), or fails"
                if end == os.O_WRONLY
                else "it reads the end"
            )
            text = f"{does} the pipe; after a restore {then}"
            hint = (
                "Dump a tree that holds both ends, or start the program with a file instead, or "
                "as a session (`criuctl run`)."
            )
        else:
            code = "fifo-outside"
            then = "reads the end" if end == os.O_WRONLY else "is ended by SIGPIPE, or fails,"
            text = f"{does} the named pipe {target}; it {then} while the tree is away"
            hint = "Dump a tree that holds both ends, or use `--leave-running`."
        yield Finding(
            "warning",
            code,
            f"{scene.command_of(pid)}, outside the tree, {text}",
            hint,
            pid=process.pid,
            fd=d.fd,
        )


def _other_ends(halves: dict[str, int], scene: Scene) -> dict[str, int]:
    """Return which of these pipes have their other end open in a process outside, and in which.

    It looks at the whole host, if there is anything to look for.
    """
    found: dict[str, int] = {}
    for pid in all_pids() if halves else ():
        if pid in scene.by_pid:
            continue
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                link = f"/proc/{pid}/fd/{name}"
                end = halves.get(target := os.readlink(link))
                mode = stat.S_IWUSR if end == os.O_RDONLY else stat.S_IRUSR
                if end is not None and os.lstat(link).st_mode & mode and scene.outside(pid):
                    found.setdefault(target, pid)
        except OSError:
            continue  # gone meanwhile, or not accessible
    return found


def _many_pipes(scene: Scene) -> Iterator[Finding]:
    """Report too many pipes: CRIU keeps records of a limited number of readable pipes, and of as
    many FIFOs.
    """
    pipes: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}
    for _process, d in scene.descriptors():
        if d.kind == "pipe" and d.flags & os.O_ACCMODE != os.O_WRONLY:
            pipes[d.target.startswith("pipe:")].add((d.device, d.inode))
    for unnamed, found in pipes.items():
        if len(found) > _PIPES:
            yield Finding(
                "error",
                "many-pipes",
                f"the tree has {len(found)} {'pipes' if unnamed else 'FIFOs'} open for reading; "
                f"CRIU can save {_PIPES}",
                "Have the program use fewer (sockets are not limited), or end some of its "
                "workers before the dump.",
                pid=scene.root.pid,
            )


def _taken_for_one(scene: Scene) -> Iterator[Finding]:
    """Report FIFOs that CRIU takes for one, if that matters: they have unread data."""
    fifos: dict[int, dict[tuple[int, int], list[tuple[Process, Descriptor]]]] = {}
    for process, d in scene.descriptors():
        if d.kind == "pipe" and not d.target.startswith("pipe:") and not d.flags & os.O_PATH:
            fifos.setdefault(d.inode & _PIPE_ID, {}).setdefault((d.device, d.inode), []).append(
                (process, d)
            )
    for number, same in sorted(fifos.items()):
        if len(same) > 1 and any(
            _unread(process, d) for held in same.values() for process, d in held
        ):
            (_, one), *others = (held[0] for held in same.values())
            for process, d in others:
                text, hint = taken_for_one(one.target, d.target, number)
                yield Finding("error", "fifo-number", text, hint, pid=process.pid, fd=d.fd)


def _unread(process: Process, d: Descriptor) -> bool:
    try:
        with reading(process.pid), borrowed(process.pid, d.fd) as fifo:
            return bool(struct.unpack("i", fcntl.ioctl(fifo, termios.FIONREAD, bytes(4)))[0])
    except OSError:
        return True  # not known
