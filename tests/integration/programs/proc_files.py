"""Files of /proc that are about processes and threads. Arguments: which, and the PID of a process
outside.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading

from animal import Check, serve

WHICH = sys.argv[2]
OUTSIDE = int(sys.argv[3]) if len(sys.argv) > 3 and sys.argv[3].isdigit() else 0
ME = os.getpid()
# descriptor -> what it reads from the beginning on; b"" where it reads that there is none
opened: dict[int, bytes] = {}
stop = threading.Event()


def thread() -> int:
    """Another thread, which waits; its TID."""
    one = threading.Thread(target=stop.wait, daemon=True)
    one.start()
    assert one.native_id is not None
    return one.native_id


def look(name: str, begins: bytes, flags: int = os.O_RDONLY) -> int:
    """Open a file of /proc."""
    fd = os.open(name, flags)
    opened[fd] = begins
    return fd


match WHICH:
    case "thread":
        tid = thread()
        fd = look(f"/proc/{ME}/task/{tid}/stat", b"%d (" % tid)
        opened[os.dup(fd)] = b"%d (" % tid
        os.lseek(fd, 3, os.SEEK_SET)
        look(f"/proc/self/task/{tid}/status", b"Name:")
    case "thread-as-process":
        tid = thread()
        look(f"/proc/{tid}/stat", b"%d (" % tid)
        look(f"/proc/{tid}/task/{tid}/stat", b"%d (" % tid)
    case "thread-name":
        tid = thread()
        look(f"/proc/{ME}/task/{tid}/comm", b"python", os.O_RDWR)
    case "thread-folder":
        tid = thread()
        folder = os.open(f"/proc/{ME}/task/{tid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        place = os.open(f"/proc/{tid}", os.O_PATH)
    case "thread-working-folder":
        os.chdir(f"/proc/{ME}/task/{thread()}")
    case "shared":
        tid = thread()
        fd = look(f"/proc/{ME}/task/{tid}/stat", b"%d (" % tid)
        ask, answer = socket.socketpair()
        if os.fork() == 0:
            ask.close()
            while answer.recv(1):
                answer.send(b"%d" % os.lseek(fd, 0, os.SEEK_CUR))
            os._exit(0)
        answer.close()
    case "ended-thread":
        tid = thread()
        fd = look(f"/proc/{ME}/task/{tid}/stat", b"")
        stop.set()
        while os.path.exists(f"/proc/{ME}/task/{tid}"):
            pass
    case "itself":
        look("/proc/self/stat", b"%d (" % ME)
        look("/proc/thread-self/stat", b"%d (" % ME)
        look("/proc/self/mounts", b"")
        opened.popitem()
        look("/proc/self/fdinfo/0", b"pos:")
        look("/proc/net/unix", b"Num ")
        os.open("/proc/self/fd", os.O_RDONLY)
    case "child":
        child = subprocess.Popen(["sleep", "infinity"])
        look(f"/proc/{child.pid}/stat", b"%d (" % child.pid)
        look(f"/proc/{child.pid}/fdinfo/0", b"pos:")
    case "ended":
        child = subprocess.Popen(["sleep", "infinity"])
        look(f"/proc/{child.pid}/stat", b"")
        look(f"/proc/{child.pid}/task/{child.pid}/fdinfo/0", b"")
        child.kill()
        child.wait()
    case "kernel":
        look(sys.argv[3], b"")
        opened.popitem()
    case "outside":
        look(f"/proc/{OUTSIDE}/stat", b"%d (" % OUTSIDE)
    case "outside-net":
        look(f"/proc/{OUTSIDE}/net/unix", b"Num ")
        look(f"/proc/{OUTSIDE}/mountinfo", b"")
        opened.popitem()


def check(found: Check) -> None:
    reads: list[str] = []
    found.facts["reads"] = reads
    for fd, begins in opened.items():
        was = os.lseek(fd, 0, os.SEEK_CUR)
        try:
            text = os.pread(fd, 4096, 0)
        except OSError as error:
            text = b""
            reads.append(errno.errorcode[error.errno or 0])
        if (begins and not reads) or WHICH in ("ended", "ended-thread"):
            name = os.readlink(f"/proc/self/fd/{fd}")
            found.equal(f"beginning of {name}", text[: len(begins) or None], begins)
        os.lseek(fd, was, os.SEEK_SET)
    if WHICH == "thread":
        first = next(iter(opened))
        found.equal("where it stands", os.lseek(first, 0, os.SEEK_CUR), 3)
        os.lseek(first, 5, os.SEEK_SET)
        found.equal("its duplicate", os.lseek(first + 1, 0, os.SEEK_CUR), 5)
        os.lseek(first, 3, os.SEEK_SET)
    if WHICH == "thread-name":
        fd = next(iter(opened))
        os.write(fd, b"python renamed")
        os.lseek(fd, 0, os.SEEK_SET)
        with open(f"/proc/{ME}/task/{tid}/comm") as file:
            found.equal("the thread's name", file.read(), "python renamed\n")
    if WHICH == "thread-folder":
        found.true(
            "a folder",
            not reads and "stat" in os.listdir(folder) and os.path.samefile(place, f"/proc/{tid}"),
        )
        found.true("close on exec", not os.get_inheritable(folder))
    if WHICH == "shared":
        os.lseek(fd, 7, os.SEEK_SET)
        ask.send(b"?")
        found.equal("where the child is", ask.recv(10), b"7")
        os.lseek(fd, 0, os.SEEK_SET)


serve(check)
