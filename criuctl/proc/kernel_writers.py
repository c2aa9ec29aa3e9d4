"""What may still write to memory whose pages have just been protected, without the kernel's mark.

The mark of a write (`written_pages`) is made when a page is looked up for writing, which is before
it is written to. There are two kinds of writes:

- Through the page tables: all stores of programs, and all copies of the kernel to an address
  (copy_to_user: read(2) of a pipe, a socket or a cached file, futex(2), signals, ...). A protected
  page makes them fault, and the store happens after the mark. PAGEMAP_SCAN flushes the TLB before
  it returns, so a store either came before the protection or faults. These are always seen.
- Through a reference to the page (get_user_pages with FOLL_WRITE): direct I/O, also of FUSE, NFS,
  9p, ... without O_DIRECT; AIO; io_uring; AF_ALG; RDMA, VFIO, GPUs and AF_XDP, which pin pages;
  process_vm_writev(2), ptrace(2) and /proc/PID/mem from any process. The lookup needs a writable
  page (can_follow_write_pte and gup_fast refuse a protected one), so it marks a page that was
  protected before. But a reference from before the protection can be written through after it,
  without a mark; PAGEMAP_SCAN protects such pages like others, and no interface reports the
  reference (/proc/kpagecount counts mappings; only clear_refs for soft-dirty bits looks at pins).

So exactly the references that are older than a protection, and written through after the page was
read, are missed. A caller that protects pages, then asks here, and then reads them, misses none:

- References that outlive a call belong to something that can be seen: an AIO ring, io_uring, a
  device, memory that is accounted as pinned (VmPin). `pins` reports these, and direct I/O.
- All others end with the call that has made them. `unfinished` looks at each thread until it has
  been seen once, after the protection, where it can hold none: gone, stopped, outside of calls,
  asleep in a call that only copies, or after it has used more processor time than a call needs
  between the lookup of its pages and their release. What a thread begins later is marked. A thread
  that is asleep in read(2) or pread(2) says in which range the call writes.

A write through a reference does not sleep in ptrace(2) and /proc/PID/mem; in process_vm_writev(2)
it may, for a page of its source. Other processes are therefore looked at for that call only.

Not seen are: what io_uring still reads into memory after its last descriptor was closed, and AIO
whose ring was unmapped, both without other traces; processes outside of this PID namespace, and
sleeping ones that criuctl has no right to trace. Sockets of AF_ALG, RDS and kTLS are left out here
because CRIU dumps none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress

from msgspec import Struct, field

from ..errors import CriuctlError, NoSuchProcess, PreflightRefused
from .descriptors import Descriptor, descriptors
from .mappings import each_mapping
from .procfs import all_pids, all_tids, read_bytes, read_link, read_raw, read_status
from .syscalls import KCMP_FILES, shares

PATIENCE = 2.0  # seconds for calls to end; more than enough, if the machine is not overloaded
_PAUSES = (0.0005, 0.005)  # seconds between looks: first and longest
_ENOUGH = 0.01  # seconds of processor time; at most 4 MiB are copied between lookup and release
_RUNS = "the running thread"
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_KERNEL_THREAD = 0x200000
_CAP_SYS_PTRACE = 19

# System calls of x86-64 that wait, or that have written to nothing through a page reference when
# they sleep. Not here: numbers by which 32-bit programs read (3, 145, 180, 333).
_COPYING = frozenset(
    (
        *(1, 18, 20, 296, 328, 40, 275, 276, 278),  # write, pwrite, writev, sendfile, splice, tee
        *(2, 257, 72, 73, 74, 75, 162, 277, 285),  # open, fcntl, flock, fsync, sync, fallocate
        *(7, 23, 270, 271, 232, 281, 441, 208),  # poll, select, epoll_wait, io_getevents
        *(34, 35, 230, 219, 128, 130, 61, 247),  # pause, nanosleep, sigsuspend, sigwait, wait
        *(42, 43, 288, 44, 45, 46, 47, 299, 307),  # connect, accept, send and receive
        *(65, 220, 69, 70, 242, 243, 202, 449),  # semop, message queues, futex
        *(217, 78),  # getdents
    )
)
_READS = (0, 17)  # read, pread64: descriptor, address, size
_VECTORS = (19, 295, 327)  # readv, preadv, preadv2
_TO_OTHERS = frozenset((311, 348, 0x40000000 + 540))  # process_vm_writev: x86-64, i386, x32
_COPIED = ("pipe:[", "socket:[", "anon_inode:")  # no file's path begins so

_O_DIRECT = 0o40000
# null, zero, full, random, urandom, kmsg, tun
_COPYING_DEVICES = frozenset(
    (*(os.makedev(1, minor) for minor in (3, 5, 7, 8, 9, 11)), os.makedev(10, 200))
)

Range = tuple[int, int]


def pins(pid: int) -> str:
    """Return what this process has that may write to its memory through page references for longer
    than a call lasts; "" for nothing.
    """
    if any(mapping.path == "/[aio]" for mapping in each_mapping(pid)):
        return "asynchronous I/O"
    if read_status(pid).get("VmPin", "0").split()[0] != "0":
        return "pinned memory"
    for d in _descriptors(pid):
        if d.kind == "io_uring":
            return "io_uring"
        if d.kind == "device" and d.rdev not in _COPYING_DEVICES:
            return d.target
        if d.flags & _O_DIRECT and d.kind in ("file", "device"):
            return f"direct I/O (descriptor {d.fd})"
        if d.target == "anon_inode:[userfaultfd]":
            return f"a userfaultfd of its own (descriptor {d.fd})"
    return ""


def _descriptors(pid: int) -> Iterator[Descriptor]:
    """Yield the descriptors of a process, also those of threads with a table of their own."""
    yield from descriptors(pid)
    for tid in all_tids(pid):
        if tid != pid and not shares(pid, tid, KCMP_FILES):
            with suppress(CriuctlError):  # it has ended
                yield from descriptors(tid)


class Unfinished(Struct, frozen=True):
    """What calls may still write to that were in the kernel before the look."""

    ranges: dict[int, list[Range]]  # by PID
    processes: dict[int, str]  # whose memory may be written to anywhere, and why


def unfinished(pids: Collection[int], patience: float = PATIENCE) -> Unfinished:
    """Wait until no call that began before now can write to the memory of these processes, at most
    `patience` seconds; return what is left.
    """
    suspects = _Suspects(frozenset(pids))
    until = time.monotonic() + patience
    pause, longest = _PAUSES
    while suspects.look() and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return Unfinished(suspects.ranges, suspects.left())


class _Reach(Struct, frozen=True):
    """What decides which processes a process may trace."""

    depth: int  # of its PID namespace
    namespace: str
    user: str
    traces: bool  # CAP_SYS_PTRACE

    @classmethod
    def of(cls, pid: int) -> _Reach:
        """Return that of this process."""
        status = read_status(pid)
        namespace = ""
        with suppress(CriuctlError):  # hidden from us
            namespace = read_link(pid, "ns/pid")
        return cls(
            len(status["NSpid"].split()),
            namespace,
            status["Uid"].split()[0],
            bool(int(status["CapEff"], 16) >> _CAP_SYS_PTRACE & 1),
        )

    def covers(self, target: _Reach) -> bool:
        """Return whether it may write to the memory of that process."""
        hidden = self.depth == target.depth and self.namespace not in ("", target.namespace)
        return (
            self.depth <= target.depth and not hidden and (self.traces or self.user == target.user)
        )


class _Suspects(Struct):
    """The threads that may be in such a call."""

    pids: frozenset[int]
    ranges: dict[int, list[Range]] = field(default_factory=dict)
    threads: dict[tuple[int, int], str] = field(default_factory=dict)  # and why
    used: dict[tuple[int, int], float] = field(default_factory=dict)  # when first seen to run
    able: dict[int, bool] = field(default_factory=dict)  # other processes: may it write?
    targets: list[_Reach] = field(default_factory=list)

    def __post_init__(self) -> None:
        ours = os.getpid()
        everything = (pid for pid in {*all_pids(), *self.pids} if pid != ours)
        self.threads = {(pid, tid): "" for pid in everything for tid in all_tids(pid)}

    def look(self) -> bool:
        """Look at those that are left; return whether there are any."""
        for pid, tid in list(self.threads):
            try:
                why = self._judge(pid, tid)
            except (FileNotFoundError, ProcessLookupError, NoSuchProcess, IndexError):  # it ends
                why = ""
            except (PermissionError, PreflightRefused) as error:
                why = f"its calls are hidden: {error}" if pid in self.pids else ""
            if why:
                self.threads[pid, tid] = why
            else:
                del self.threads[pid, tid]
        return bool(self.threads)

    def left(self) -> dict[int, str]:
        """Return the processes that those that are left may write to."""
        reasons: dict[int, str] = {}
        # What is known for certain comes before what merely runs.
        threads = sorted(self.threads.items(), key=lambda thread: thread[1].startswith(_RUNS))
        for (pid, _tid), why in threads:
            for target in (pid,) if why.startswith("its ") else self.pids:
                reasons.setdefault(target, why)
        return reasons

    def _judge(self, pid: int, tid: int) -> str:
        """Return why this thread may be in such a call; "" if it cannot be, any more."""
        task = f"/proc/{pid}/task/{tid}"
        words = read_raw(f"{task}/syscall").split()
        if words == [b"running"]:
            return self._running(pid, tid)
        number = int(words[0])
        if pid not in self.pids:
            return f"PID {pid} writes to other processes" if number in _TO_OTHERS else ""
        if number < 0 or number in _COPYING:
            return ""
        fd, address, size = (int(word, 16) for word in words[1:4])
        if not int(words[-2], 16):  # without a stack: a thread of the kernel's
            return "its io_uring or vhost is at work"
        if number in (*_READS, *_VECTORS) and _copies(f"{task}/fd/{fd}"):
            return ""
        if number in _READS:
            self.ranges.setdefault(pid, []).append((address, address + size))
            return ""
        if _stat(pid, tid)[0] in (b"T", b"t", b"Z", b"X"):  # it has left the call
            return ""
        if number in _TO_OTHERS:
            return f"PID {pid} writes to other processes"
        return f"its thread {tid} is in system call {number}, which may write to memory"

    def _running(self, pid: int, tid: int) -> str:
        """Judge a thread that runs, or waits for a processor."""
        fields = _stat(pid, tid)
        if int(fields[6]) & _KERNEL_THREAD or not self._able(pid):
            return ""
        used, error = _processor_time(pid, tid, fields)
        if used - self.used.setdefault((pid, tid), used) >= _ENOUGH + error:
            return ""
        return f"{_RUNS} {tid} of PID {pid}, which may be in a call that writes to memory"

    def _able(self, pid: int) -> bool:
        """Return whether a process may write to the memory of those that are looked at: it sees
        them, and has their user or the right to trace.
        """
        if pid in self.pids:
            return True
        if not self.targets:
            for target in self.pids:
                with suppress(NoSuchProcess, IndexError, KeyError):  # it ends
                    self.targets.append(_Reach.of(target))
        if pid not in self.able:
            reach = _Reach.of(pid)
            self.able[pid] = any(reach.covers(target) for target in self.targets)
        return self.able[pid]


def _processor_time(pid: int, tid: int, stat: list[bytes]) -> tuple[float, float]:
    """Return the seconds that a thread has run, and by how much a difference of two may be off."""
    with suppress(FileNotFoundError):  # the kernel may have been built without
        exact = int(read_raw(f"/proc/{pid}/task/{tid}/schedstat").split()[0])
        if exact:
            return exact / 1e9, 0.0
    # In the program and in the kernel, each rounded down.
    return (int(stat[11]) + int(stat[12])) * _TICK, 2 * _TICK


def _copies(link: str) -> bool:
    """Return whether reads of this descriptor copy: False for a file, and if it was closed."""
    try:
        return os.readlink(link).startswith(_COPIED)
    except OSError:
        return False


def _stat(pid: int, tid: int) -> list[bytes]:
    """Return the fields of a thread's stat after its name."""
    return read_bytes(pid, f"task/{tid}/stat").rpartition(b")")[2].split()
