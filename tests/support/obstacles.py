"""Small programs, each with one thing about it that CRIU refuses, or one that only looks like it.

A program is Python text, run in a session of its own with stdio on /dev/null.  It has
`outside(make)` to have something made by a process outside the tree, and the rest of `PRELUDE`;
when its text ends it says that it is ready and sleeps.  `errors` are the codes of the error
findings that preflight must have (and no other errors); `criu` is what raw CRIU, given the options
of a knowing user, answers to the same process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from criuctl.errors import NoSuchProcess
from criuctl.proc.tree import Process, read_tree, wait_gone

HUGE = "/sys/kernel/mm/hugepages/hugepages-2048kB"
PRELUDE = r"""
import ctypes, fcntl, mmap, os, signal, socket, struct, sys, threading, time
READY, TMP = int(sys.argv[1]), sys.argv[2]
PROGRAM = open('/proc/self/cmdline').read().split('\0')[2]
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.mmap.restype = libc.shmat.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"syscall {number}")
    return result

def map_fd(fd, size=4096, prot=3, flags=1):
    address = libc.mmap(None, size, prot, flags, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return address

def ready():
    global READY
    if READY >= 0:
        os.write(READY, str(os.getpid()).encode())
        os.close(READY)
        READY = -1

def sleep():
    while True:
        signal.pause()

def outside(prepare):
    "Run prepare() outside the tree; the tree inherits what it returns, and goes on with that."
    kept = prepare()
    pid = os.fork()
    if pid:
        os.close(READY)
        sleep()
    os.setsid()
    return kept

def again(flags):
    "Start the program again in namespaces of its own, so that its program file is of them too."
    if os.environ.get("AGAIN"):
        return
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")
    if flags & 0x20000:
        libc.mount(b"none", b"/", None, 0x44000, None)
    os.set_inheritable(READY, True)
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, [sys.executable, "-c", PROGRAM, str(READY), TMP])

def loopback_up():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    fcntl.ioctl(s, 0x8914, struct.pack("16sH14x", b"lo", 1))
    s.close()

def unaccepted():
    "A listening unix socket and a client that it has not accepted."
    s, c = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    s.bind("\0" + TMP)
    s.listen()
    c.connect("\0" + TMP)
    return s, c

def child(run):
    "Start run() in a child and wait until it says that it is done."
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        global READY
        os.close(r)
        if READY >= 0:
            os.close(READY)
            READY = -1
        run()
        os.write(w, b"x")
        os.close(w)
        sleep()
    os.close(w)
    os.read(r, 1)
    os.close(r)
    return pid
"""

USED_UP = """
have = lambda: sum("vsyscall" not in line for line in open("/proc/self/maps"))
want = int(open("/proc/sys/vm/max_map_count").read()) - {left}
at = first = map_fd(-1, 8192 * (want + 9), 1, 0x22)
while (missing := want - have()) > 1:
    for _ in range(missing // 2):
        at += 8192
        assert libc.mprotect(ctypes.c_void_p(at), 4096, 3) == 0
if missing:
    assert libc.mprotect(ctypes.c_void_p(first), 4096, 3) == 0
"""

EPILOGUE = "\nready()\nsleep()\n"


@dataclass(frozen=True)
class Running:
    """A program that has said that it is ready."""

    pid: int  # the root of the tree that is meant
    # the process that was started; the same, unless something outside of the tree was asked for
    outer: int


@contextmanager
def running(program: str, folder: Path) -> Iterator[Running]:
    """Run `program` (see the module's text) with its TMP in `folder`; everything it started is
    ended afterwards.
    """
    r, w = os.pipe()
    errors = folder / "stderr"
    with open(errors, "wb") as stderr:
        outer = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + program + EPILOGUE, str(w), str(folder)],
            pass_fds=[w],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
    os.close(w)
    root = 0
    try:
        with open(r, "rb") as pipe:
            said = pipe.read(20)  # until the last copy is closed, or it is said
        if not said:
            raise RuntimeError(f"the program did not start: {errors.read_text()[-1000:]}")
        root = int(said)
        yield Running(root, outer.pid)
    finally:
        _end(outer, root)


def _end(outer: subprocess.Popen[bytes], root: int) -> None:
    """Kill both trees, children first, and wait until nothing is left of them."""
    left: list[Process] = []
    for pid in {outer.pid, root} - {0}:
        try:
            left += read_tree(pid)
        except NoSuchProcess:
            continue
    for process in reversed(left):
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    outer.wait(timeout=60)
    remain = wait_gone([process.identity for process in left], 60)
    assert not remain, f"still there: {remain}"


@dataclass(frozen=True)
class Case:
    """One program and what is expected."""

    name: str
    program: str
    errors: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()  # codes of warnings and infos that must be there
    # raw CRIU dumps it; None: not asked, it would take long or prove nothing
    criu: bool | None = True
    needs: str = ""  # a path that must be there, else this kernel has not got it


def case(
    name: str,
    program: str,
    *errors: str,
    also: tuple[str, ...] = (),
    criu: bool | str | None = "",
    needs: str = "",
) -> Case:
    """A case whose CRIU verdict is 'no' if an error is expected, else 'yes', unless `criu` says."""
    verdict = not errors if isinstance(criu, str) else criu
    return Case(name, program, frozenset(errors), frozenset(also), verdict, needs)


DUMPABLE = [
    case("plain", ""),
    case("threads", "threading.Thread(target=sleep, daemon=True).start()"),
    case("nearly-all-mappings", USED_UP.format(left=2)),
    *(
        case(
            f"thread-with-its-own-{name}",
            f"done = threading.Event()\ndef work():\n call(272, {flag:#x}); {more}; done.set(); "
            "time.sleep(1000)\n"
            "threading.Thread(target=work, daemon=True).start(); done.wait()",
            also=("thread-apart",),
        )
        for name, flag, more in (
            ("descriptors", 0x400, "os.close(READY); os.open('/etc/passwd', 0)"),
            ("folder", 0x200, "os.chdir('/etc')"),
            ("network", 0x40000000, "pass"),
        )
    ),
    case("pipes", "r, w = os.pipe(); os.write(w, b'x')"),
    case("named-pipe", "os.mkfifo(TMP + '/f'); f = os.open(TMP + '/f', os.O_RDWR)"),
    case("socketpair", "a, b = socket.socketpair(); a.send(b'x')"),
    case("semaphore-eventfd", "f = call(290, 1, 1)"),
    case("memfd", "m = os.memfd_create('m'); os.write(m, b'x')"),
    case("memfd-mapped", "m = os.memfd_create('m'); os.ftruncate(m, 8192); map_fd(m, 8192)"),
    case(
        "polling",
        "import select\ne = select.epoll(); v = call(290, 1, 0); t = call(283, 1, 0); s = "
        "call(289, -1, b'\\0' * 8, 8, 0)\n"
        "e.register(v, 1); e.register(t, 1)",
    ),
    case(
        "inotify", "i = libc.inotify_init(); assert libc.inotify_add_watch(i, TMP.encode(), 2) > 0"
    ),
    case(
        "inotify-unread",
        "i = libc.inotify_init(); libc.inotify_add_watch(i, TMP.encode(), 0x100); open(TMP + "
        "'/f', 'w').close()",
        also=("events-lost",),
    ),
    case(
        "dnotify",
        "os.mkdir(TMP + '/d'); f = os.open(TMP + '/d', 0); fcntl.fcntl(f, fcntl.F_NOTIFY, "
        "fcntl.DN_CREATE)",
        also=("dnotify",),
    ),
    case(
        "zombie",
        (
            "os.fork() or os._exit(0)\nwhile open('/proc/self/task/%d/children' % "
            "os.getpid()).read() "
            "== '': pass"
        ),
    ),
    case(
        "descriptors-shared-with-a-child",
        "if call(56, 0x400 | 17, None, None, None, None) == 0:\n sleep()",
    ),
    case(
        "stopped-child",
        "pid = child(lambda: None); os.kill(pid, signal.SIGSTOP); os.waitpid(pid, os.WUNTRACED)",
    ),
    case("seccomp", "libc.prctl(38, 1, 0, 0, 0)"),
    case(
        "devices",
        (
            "f = [os.open('/dev/' + n, os.O_RDWR) for n in ('null', 'zero', 'full', 'random', "
            "'urandom')]"
        ),
    ),
    case("kernel-log", "f = os.open('/dev/kmsg', os.O_RDONLY)"),
    case("zero-mapped", "map_fd(os.open('/dev/zero', os.O_RDWR), 4096, 3, 2)"),
    case(
        "deleted-file",
        "f = open(TMP + '/f', 'w+b'); f.write(b'x' * 5000); f.flush(); os.unlink(f.name)",
    ),
    case(
        "deleted-big",
        "f = open(TMP + '/f', 'w+b'); f.write(b'x' * 5000000); f.flush(); os.unlink(f.name)",
        also=("ghost-files",),
    ),
    case(
        "deleted-other-name",
        "f = open(TMP + '/f', 'w+b'); os.link(f.name, TMP + '/g'); os.unlink(f.name)",
    ),
    case(
        "deleted-folder",
        "os.mkdir(TMP + '/d'); f = os.open(TMP + '/d', os.O_RDONLY); os.rmdir(TMP + '/d')",
    ),
    case("deleted-cwd", "os.mkdir(TMP + '/d'); os.chdir(TMP + '/d'); os.rmdir(TMP + '/d')"),
    case(
        "deleted-mapping",
        (
            "f = open(TMP + '/f', 'w+b'); f.truncate(8192); map_fd(f.fileno(), 8192); "
            "os.unlink(f.name); f.close()"
        ),
    ),
    case("strange-name", "f = open(TMP + '/f (deleted)', 'w')"),
    case(
        "path-descriptor",
        "f = [os.open(path, os.O_PATH) for path in (TMP, '/dev/null', '/etc/passwd')]",
    ),
    case("listening", "s = socket.create_server(('127.0.0.1', 0))"),
    case(
        "loopback",
        (
            "s = socket.create_server(('127.0.0.1', 0)); c = "
            "socket.create_connection(s.getsockname()); a = s.accept()"
        ),
    ),
    case(
        "fresh-sockets",
        "s = [socket.socket(f, t) for f in (socket.AF_INET, socket.AF_INET6) for t in "
        "(socket.SOCK_STREAM, socket.SOCK_DGRAM)]",
    ),
    case("raw-socket", "s = socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"),
    case("packet-socket", "s = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)"),
    case(
        "filtered-classically",
        # take all
        "code = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 65535)); s = "
        "socket.socket(2, 2)\n"
        "s.setsockopt(1, 26, struct.pack('HxxxxxxQ', 1, ctypes.addressof(code)))",
    ),
    case(
        "netlink-groups-left",
        "s = socket.socket(16, 3, 0); s.bind((0, 0)); s.setsockopt(270, 1, 33); "
        "s.setsockopt(270, 2, 33)",
    ),
    case("netlink-unbound", "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)"),
    case("netlink", "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.bind((0, 0))"),
    case(
        "unix-in-flight",
        "s, c = unaccepted()",
    ),
    case(  # criuctl dumps our half of these; raw CRIU would need the inode as an option
        "unix-stream-outside",
        "def make():\n s = socket.socket(socket.AF_UNIX); s.bind(TMP + '/s'); s.listen(); c = "
        "socket.socket(socket.AF_UNIX)\n"
        " c.connect(TMP + '/s'); return s, c, s.accept()[0]\n"
        "s, c, a = outside(make); s.close(); a.close()",
        also=("unix-peer-outside",),
        criu=False,
    ),
    case(
        "unix-pair-outside",
        "a, b = outside(socket.socketpair); b.close()",
        also=("unix-peer-outside",),
        criu=False,
    ),
    case(
        "unix-datagram-pair-outside",
        "a, b = outside(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)); b.close()",
        also=("unix-peer-outside",),
        criu=False,
    ),
    case(
        "unix-waiting-outside",
        "def make():\n s = socket.socket(socket.AF_UNIX); s.bind(TMP + '/s'); s.listen(); return "
        "s\n"
        "s = outside(make); s.close(); c = socket.socket(socket.AF_UNIX); c.connect(TMP + '/s')",
        also=("unix-peer-outside",),
    ),
    case(
        "unix-datagram-outside",
        "def make():\n s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.bind(TMP + "
        "'/log'); return s\n"
        "s = outside(make); s.close(); c = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); "
        "c.connect(TMP + '/log')",
    ),
    case(
        "queued-descriptor",
        "a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [os.open('/dev/null', os.O_RDWR)])",
    ),
    case(
        "file-locks",
        "f = open(TMP + '/f', 'w'); fcntl.flock(f, 2); g = open(TMP + '/g', 'w'); fcntl.lockf(g, "
        "2)\n"
        "h = open(TMP + '/h', 'w'); fcntl.fcntl(h, 37, struct.pack('hhqqi4x', 1, 0, 0, 0, 0))",
    ),
    case(
        "lease-that-is-being-broken",
        "signal.signal(signal.SIGIO, lambda *_: None); f = open(TMP + '/f', 'w'); fcntl.fcntl(f, "
        "1024, 1)\n"
        "def other():\n try:\n  os.open(TMP + '/f', os.O_RDONLY | os.O_NONBLOCK)\n except "
        "BlockingIOError:\n  pass\n"
        "child(other)",
        also=("lease-breaking",),
    ),
    case("lease", "f = open(TMP + '/f', 'w'); fcntl.fcntl(f, 1024, 1)"),
    case(
        "mlocked",
        "a = map_fd(-1, 65536, 3, 0x22); assert libc.mlock(ctypes.c_void_p(a), 65536) == 0",
    ),
    case("aio-ring", "c = ctypes.c_ulong(); call(206, 8, ctypes.byref(c))"),
    case("pidfd-inside", "p = os.pidfd_open(child(lambda: None))"),
    case(
        "own-namespace-file",
        "f = [os.open('/proc/self/ns/' + n, os.O_RDONLY) for n in os.listdir('/proc/self/ns')]",
    ),
    case("posix-timer", "t = ctypes.c_int(); call(222, 0, None, ctypes.byref(t))"),
    case(
        "deleted-program",
        "import shutil\n"
        "shutil.copy('/bin/sleep', TMP + '/prog')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n os.close(READY); os.execv(TMP + '/prog', ['prog', '1000'])\n"
        "while os.readlink(f'/proc/{pid}/exe') != TMP + '/prog': pass\n"
        "os.unlink(TMP + '/prog')",
        also=("deleted-program",),
    ),
    case("pseudo-terminal-inside", "m, s = os.openpty()"),
    case(
        "terminal-inside-as-dev-tty",  # screen with a `sh` in it
        "m, s = os.openpty(); r, w = os.pipe(); pid = os.fork()\n"
        "if pid == 0:\n os.close(READY); os.close(m); os.setsid(); fcntl.ioctl(s, 0x540E, 0); "
        "os.close(s)\n"
        " s = os.open('/dev/tty', os.O_RDWR); os.close(w); sleep()\n"
        "os.close(s); os.close(w); os.read(r, 1); os.close(r)",
    ),
    case(
        "terminal-names-of-several",
        "m, s = outside(os.openpty); os.close(m); m2, s2 = os.openpty(); r, w = os.pipe()\n"
        "fcntl.ioctl(s, 0x540E, 0); f = os.open('/dev/tty', os.O_RDWR); pid = os.fork()\n"
        "if pid == 0:\n os.close(READY); os.close(f); os.setsid(); fcntl.ioctl(s2, 0x540E, 0)\n"
        " f = os.open('/dev/tty', os.O_RDWR); os.close(w); sleep()\n"
        "os.close(w); os.read(r, 1); os.close(r)",
        also=("terminal-outside",),
    ),
    case(
        "pseudo-terminal-inside-with-followers",
        "m, s = os.openpty(); r, w = os.pipe(); pid = os.fork()\n"
        "if pid == 0:\n os.close(READY); os.setsid(); fcntl.ioctl(s, 0x540E, 0); os.fork(); "
        "os.close(w); sleep()\n"
        "os.close(w); os.read(r, 1)",
    ),
    case(
        "pseudo-terminal-master",
        "m, s = outside(os.openpty); os.close(s)",
        also=("terminal-slave-outside",),
    ),
    case(
        "terminal-controls",
        "m, s = outside(os.openpty); os.close(m); fcntl.ioctl(s, 0x540E, 0); os.close(s)",
        also=("terminal-controls",),
    ),
    case(
        "terminal-opened-64-times",
        "m, s = outside(os.openpty); os.close(m); f = [os.open(os.ttyname(s), os.O_RDWR | "
        "os.O_NOCTTY) for _ in range(63)]\n"
        "g = [os.dup(s) for _ in range(9)]",
        also=("terminal-outside",),
    ),
    case(
        "tcp-not-accepted",
        "def pair():\n s = socket.create_server(('127.0.0.1', 0)); return s, "
        "socket.create_connection(s.getsockname())\n"
        "s, c = outside(pair); c.close()",
        also=("tcp-not-accepted",),
    ),
    case(
        "tcp-not-accepted-inside",
        "s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname())",
    ),
    case(
        "system-console",
        "f = os.open('/dev/console', os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)",
        needs="/dev/console",
    ),
    case(
        "hard-link-remains",
        "f = open(TMP + '/f', 'w'); os.link(f.name, TMP + '/g'); os.unlink(f.name); open(TMP + "
        "'/f', 'w').close()",
    ),
    case("unnamed-file", "f = os.open(TMP, os.O_TMPFILE | os.O_RDWR, 0o600)"),
    case(
        "deleted-symlink",
        "os.symlink('x', TMP + '/l'); f = os.open(TMP + '/l', os.O_PATH | os.O_NOFOLLOW); "
        "os.unlink(TMP + '/l')",
    ),
    case(
        "symlink", "os.symlink('x', TMP + '/l'); f = os.open(TMP + '/l', os.O_PATH | os.O_NOFOLLOW)"
    ),
    case(
        "deleted-device-node",
        "os.mknod(TMP + '/n', 0o20600, os.makedev(1, 3)); f = os.open(TMP + '/n', 2); "
        "os.unlink(TMP + '/n')",
    ),
    case(
        "deleted-named-pipe",
        "os.mkfifo(TMP + '/f'); f = os.open(TMP + '/f', os.O_RDWR); os.unlink(TMP + '/f')",
    ),
    case(
        "deleted-unix-socket",
        "s = socket.socket(socket.AF_UNIX); s.bind(TMP + '/s'); s.listen(); os.unlink(TMP + '/s')",
    ),
    case(
        "unix-relative-name",
        "os.mkdir(TMP + '/d'); os.chdir(TMP + '/d'); s = [socket.socket(socket.AF_UNIX) for _ in "
        "range(3)]\n"
        "s[0].bind('a'); s[1].bind('./b'); s[2].bind('e'); os.unlink('e'); os.chdir('/')\n"
        "os.rename(TMP + '/d', TMP + '/f')",
    ),
    case(
        "unix-renamed",
        "s = socket.socket(socket.AF_UNIX); s.bind(TMP + '/s.tmp'); s.listen(); os.rename(TMP + "
        "'/s.tmp', TMP + '/s')",
    ),
    case(
        "proc-of-a-dead",
        (
            "pid = child(lambda: None); f = os.open(f'/proc/{pid}', 0); os.kill(pid, 9); "
            "os.waitpid(pid, 0)"
        ),
    ),
    case("proc-of-another", "f = os.open('/proc/1/stat', 0)"),
    case(
        "watch-of-deleted",
        "os.mkdir(TMP + '/d'); i = libc.inotify_init(); libc.inotify_add_watch(i, (TMP + "
        "'/d').encode(), 2)\n"
        "os.rmdir(TMP + '/d')",
    ),
    case(
        "watch-of-deleted-and-open",
        "open(TMP + '/f', 'w').close(); open(TMP + '/g', 'w').write('g' * 4096); i = "
        "libc.inotify_init()\n"
        "assert all(libc.inotify_add_watch(i, (TMP + n).encode(), 2) > 0 for n in ('/f', '/g'))\n"
        "f = os.open(TMP + '/f', 2); g = os.open(TMP + '/g', 2); map_fd(g); os.close(g)\n"
        "os.unlink(TMP + '/f'); os.unlink(TMP + '/g')",
    ),
    case(
        "fanotify",
        (
            "f = call(300, 0, 0); assert libc.fanotify_mark(f, 1, ctypes.c_ulong(2), -100, "
            "TMP.encode()) == 0"
        ),
    ),
    case(
        "epoll-of-closed",
        (
            "import select\ne = select.epoll(); r, w = os.pipe(); d = os.dup(r); e.register(r, 1); "
            "os.close(r)"
        ),
    ),
    case(
        "epoll-of-closed-in-a-child",
        "import select\nr, w = os.pipe(); e = select.epoll(); e.register(r, 1); pid = "
        "child(lambda: os.close(r))",
    ),
    case("half-closed-pair", "a, b = socket.socketpair(); b.close()"),
    case(
        "seqpacket-pair",
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); a.send(b'x')",
    ),
    case(
        "passed-credentials-read",
        "a, b = socket.socketpair(); b.setsockopt(1, 16, 1); a.send(b'x'); b.recv(1)",
    ),
    case("pipe-outside", "r, w = outside(os.pipe); os.close(r)", also=("pipe-outside",)),
    case("pipe-outside-to-read", "r, w = outside(os.pipe); os.close(w)", also=("pipe-outside",)),
    *(
        case(
            f"fifo-outside-{mode.lower()}",
            "F = TMP + '/f'; os.mkfifo(F); o = outside(lambda: os.open(F, os.O_RDWR)); f = "
            f"os.open(F, os.{mode}); os.close(o)",
            also=("fifo-outside",),
        )
        for mode in ("O_RDONLY", "O_WRONLY")
    ),
    case(
        "fifo-inside",
        "F = TMP + '/f'; os.mkfifo(F); f = os.open(F, os.O_RDWR); r = os.open(F, os.O_RDONLY)",
    ),
    case(
        "tcp-outside",
        "def make():\n s = socket.create_server(('127.0.0.1', 0)); c = "
        "socket.create_connection(s.getsockname())\n"
        " return s, c, s.accept()[0]\n"
        "s, c, a = outside(make); s.close(); a.close()",
    ),
    case(
        "packet-ring",
        "s = socket.socket(17, 3, 0); s.setsockopt(263, 10, 1); s.setsockopt(263, 5, "
        "struct.pack('IIII', 4096, 1, 2048, 2))\n"
        "map_fd(s.fileno())",
    ),
    case(
        "posix-shared-memory",
        "n = f'/dev/shm/criuctl-{os.getpid()}'; f = os.open(n, 0o102); os.ftruncate(f, 4096); "
        "map_fd(f); os.unlink(n)",
    ),
    case("chroot", "os.mkdir(TMP + '/root'); os.chroot(TMP + '/root'); os.chdir('/')"),
    case(
        "not-a-leader",
        "pid = os.fork()\nif pid:\n os.close(READY); sleep()",
        also=("session-outside",),
    ),
    case(
        "orphan-session",
        "libc.prctl(36, 1, 0, 0, 0); pid = os.fork()\n"
        "if pid == 0:\n os.close(READY); os.setsid(); os.fork() and os._exit(0); "
        "sleep()\nos.waitpid(pid, 0)",
    ),
    case(
        "udp-queue",
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('127.0.0.1', 0)); "
        "s.sendto(b'x', s.getsockname())",
        also=("datagrams-lost",),
    ),
    case(
        "net-namespace-of-its-own",
        "again(0x40000000); loopback_up(); s = socket.create_server(('127.0.0.1', 0))",
    ),
    case("loopback-down", "again(0x40000000)"),
    case(
        "mount-namespace-of-its-own",
        "again(0x20000); f = open(TMP + '/f', 'w')",
        also=("foreign-mount",),
    ),
    case(
        "shared-memory-in-a-namespace",
        "again(0x08000000); i = libc.shmget(0, 4096, 0o600); a = libc.shmat(i, None, 0); "
        "libc.shmctl(i, 0, None)",
    ),
    case(
        "mount-of-its-own",
        "again(0x20000); os.mkdir(TMP + '/d'); assert libc.mount(b'x', (TMP + '/d').encode(), "
        "b'tmpfs', 0, None) == 0\n"
        "f = open(TMP + '/d/f', 'w+'); os.unlink(f.name)",
        also=("own-mounts",),
    ),
    case(
        "mounts-upon-mounts",
        "again(0x20000); d = (TMP + '/d').encode(); os.makedirs(d + b'/e/f'); os.mkdir(d + "
        "b'/e2')\n"
        "[libc.mount(p, p, None, 0x1000, None) for p in (d, d + b'/e', d + b'/e/f')]\n"
        "f = open(TMP + '/d/e2/f', 'w'); os.chdir(d)",
    ),
    case("uts-namespace-of-its-own", "again(0x04000000); socket.sethostname('other')"),
    case("cgroup-namespace-of-its-own", "again(0x02000000)"),
]

REFUSED = [
    case(
        "traced",
        "r, w = os.pipe()\n"
        "if os.fork() == 0:\n"
        # PTRACE_SEIZE
        " os.close(READY); os.setsid(); target = int(os.read(r, 20)); libc.ptrace(0x4206, target, "
        "None, None)\n"
        " os.close(r); os.close(w); open(TMP + '/traced', 'w').close(); sleep()\n"
        "pid = os.fork()\n"
        "if pid:\n os.close(READY); os.write(w, str(pid).encode()); sleep()\n"
        "os.close(r); os.close(w); os.setsid()\n"
        "while not os.path.exists(TMP + '/traced'): pass",
        "traced",
    ),
    case("io-uring", "u = call(425, 4, b'\\0' * 120)", "io-uring"),
    case(
        "io-uring-mapped",
        "u = call(425, 4, b'\\0' * 120); map_fd(u, 4096); os.close(u)",
        "io-uring",
    ),
    case("userfaultfd", "u = call(323, 0)", "descriptor-kind"),
    case(
        "perf-event",
        "p = call(298, struct.pack('IIQ', 1, 112, 0) + b'\\0' * 96, 0, -1, -1, 0)",
        "descriptor-kind",
    ),
    case(
        "perf-event-mapped",
        "p = call(298, struct.pack('IIQ', 1, 112, 0) + b'\\0' * 96, 0, -1, -1, 0); map_fd(p, "
        "8192); os.close(p)",
        "mapping-kind",
    ),
    case("landlock", "l = call(444, struct.pack('Q', 1), 8, 0)", "descriptor-kind"),
    # A CRIU that was built with libbpf saves these two; Debian's was not.
    case(
        "bpf-hash-map",
        "f = call(321, 0, struct.pack('IIII', 1, 4, 4, 1) + b'\\0' * 56, 72)",
        "descriptor-kind",
    ),
    case(
        "bpf-array-map",
        "f = call(321, 0, struct.pack('IIII', 2, 4, 4, 1) + b'\\0' * 56, 72)",
        "descriptor-kind",
    ),
    case("mount-descriptor", "m = call(430, b'tmpfs', 0)", "descriptor-kind"),
    case(
        "secret-memory", "m = call(447, 0); os.ftruncate(m, 4096); map_fd(m, 4096)", "secret-memory"
    ),
    case(
        "secret-memory-closed",
        "m = call(447, 0); os.ftruncate(m, 4096); map_fd(m, 4096); os.close(m)",
        "secret-memory",
    ),
    case("fuse-device", "f = os.open('/dev/fuse', os.O_RDWR)", "device", needs="/dev/fuse"),
    case("block-device", "f = os.open('/dev/loop0', os.O_RDONLY)", "device", needs="/dev/loop0"),
    case(
        "loop-control",
        "f = os.open('/dev/loop-control', os.O_RDWR)",
        "device",
        needs="/dev/loop-control",
    ),
    case("tunnel", "f = os.open('/dev/net/tun', os.O_RDWR)", "device", needs="/dev/net/tun"),
    case(
        "serial-line",
        "f = os.open('/dev/ttyS0', os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)",
        "device",
        needs="/dev/ttyS0",
    ),
    case(
        "program-in-memory",
        "m = os.memfd_create('p', 0); os.write(m, open('/bin/sleep', 'rb').read())\n"
        "os.posix_spawn(f'/proc/self/fd/{m}', ['sleep', '1000'], {}, "
        "file_actions=[(os.POSIX_SPAWN_CLOSE, READY)])",
        "program-in-memory",
        criu=True,  # no restore of it works
    ),
    case(
        "huge-memfd",
        f"n = int(open('{HUGE}/free_hugepages').read()); m = os.memfd_create('h', os.MFD_HUGETLB)\n"
        "if n: os.ftruncate(m, n << 21); map_fd(m, n << 21)",
        "huge-pages",
        needs=HUGE,
    ),
    case("xdp", "s = socket.socket(44, socket.SOCK_RAW)", "socket-family"),
    case("vsock", "s = socket.socket(socket.AF_VSOCK)", "socket-family"),
    case("mptcp", "s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)", "socket-protocol"),
    case(
        "mptcp-listening",
        "s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262); s.bind(('127.0.0.1', 0)); "
        "s.listen()",
        "socket-protocol",
    ),
    case(
        "mptcp-connected",
        "s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262); s.bind(('127.0.0.1', 0)); "
        "s.listen()\n"
        "c = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262); c.connect(s.getsockname()); "
        "s.close()",
        "socket-protocol",
    ),
    # Raw CRIU would dump it, and never restore it.
    case(
        "scheduled-by-deadlines",
        "t = threading.Thread(target=sleep, daemon=True); t.start()\n"
        "call(314, t.native_id, struct.pack('IIQiIQQQ', 48, 6, 0, 0, 0, 10**6, 10**8, 10**8), 0)",
        "scheduling-policy",
        criu=True,
    ),
    case(
        "file-system-watched",
        "f = call(300, 2, 0); call(301, f, 0x101, ctypes.c_long(0x20), -100, TMP.encode())",
        "watch-of-file-system",
        criu=True,
    ),
    case(
        "address-space-used-up",
        "import resource\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "ready(); resource.setrlimit(resource.RLIMIT_AS, (used + 16384, -1))",
        "address-space-used-up",
    ),
    case("mappings-used-up", USED_UP.format(left=1), "mappings-used-up"),
    case(
        "descriptors-used-up",
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); f = [os.dup(0) "
        "for _ in range(58)]",
        "descriptors-used-up",
    ),
    case(
        "unix-data-waiting-outside",
        "def make():\n s = socket.socket(socket.AF_UNIX); s.bind(TMP + '/s'); s.listen(); return "
        "s\n"
        "s = outside(make); s.close(); c = socket.socket(socket.AF_UNIX); c.connect(TMP + '/s'); "
        "c.send(b'x')",
        "unix-not-accepted",
    ),
    case(
        "unix-data-not-accepted",
        "s, c = unaccepted()\nc.send(b'x')",
        "unix-not-accepted",
    ),
    case(
        "unix-closed-not-accepted",
        "s, c = unaccepted()\nc.close()",
        "unix-not-accepted",
    ),
    case(
        "unix-relative-renamed",
        "os.chdir(TMP); s = socket.socket(socket.AF_UNIX); s.bind('a'); os.rename('a', 'b')",
        "unix-name",
    ),
    case(
        "unix-relative-roundabout",
        "os.mkdir(TMP + '/d'); os.chdir(TMP + '/d'); s = socket.socket(socket.AF_UNIX); "
        "s.bind('../d/a')",
        "unix-name",
    ),
    case(
        "unix-relative-roundabout-deleted",
        "os.mkdir(TMP + '/d'); os.chdir(TMP + '/d'); s = socket.socket(socket.AF_UNIX); "
        "s.bind('../d/a'); os.unlink('a')",
        "unix-name",
    ),
    case(
        "credentials-unread",
        "a, b = socket.socketpair(); b.setsockopt(1, 16, 1); a.send(b'x')",
        "unix-credentials",
    ),
    case(
        "netlink-unread",
        "s = socket.socket(16, 3, 0); s.bind((0, 0)); s.send(struct.pack('IHHIIB3x', 20, 18, "
        "0x301, 1, 0, 0))",
        "netlink-queue",
    ),
    case(
        "corked-datagram",
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('127.0.0.1', 9)); "
        "s.setsockopt(17, 1, 1); s.send(b'x')",
        "corked-datagram",
    ),
    case(
        "corked-without-data",
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.setsockopt(17, 1, 1)",
        "corked-datagram",
    ),
    case(
        "credentials-by-pidfd",
        "a, b = socket.socketpair(); b.setsockopt(1, 76, 1); a.send(b'x')",
        "unix-credentials",
    ),
    case(
        "long-datagram",
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); b.setsockopt(1, 7, 2304); "
        "a.send(b'x' * 20000)",
        "unix-datagram-long",
    ),
    *(  # CRIU takes it for the end of what waits
        case(
            f"empty-message-{kind.lower()}",
            f"a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_{kind}); [a.send(m) for m in "
            "(b'', b'x')]",
            "unix-message-empty",
            criu=True,
        )
        for kind in ("DGRAM", "SEQPACKET")
    ),
    case(
        "netlink-groups-without-address",
        "s = socket.socket(16, 3, 0); s.setsockopt(270, 1, 1)",
        "netlink-groups",
    ),
    case(
        "netlink-group-33",
        "s = socket.socket(16, 3, 0); s.bind((0, 0)); s.setsockopt(270, 1, 33)",
        "netlink-groups",
    ),
    *(
        case(
            f"filtered-by-program-{name}",
            # r0 = 0; exit
            "code = ctypes.create_string_buffer(struct.pack('<BBhiBBhi', 0xB7, 0, 0, 0, 0x95, 0, "
            "0, 0))\n"
            "free = ctypes.create_string_buffer(b'GPL')\n"
            "program = struct.pack('IIQQ', 1, 2, ctypes.addressof(code), ctypes.addressof(free)) + "
            "b'\\0' * 96\n"
            f"f = call(321, 5, program, 72); s = {made}; s.setsockopt(1, 50, f); os.close(f)",
            "socket-filter",
        )
        for name, made in (
            ("udp", "socket.socket(2, 2)"),
            ("listener", "socket.create_server(('127.0.0.1', 0))"),
            ("unix", "socket.socket(1, 1)"),
        )
    ),
    case(
        "socket-of-another-namespace",
        "s = socket.create_server(('127.0.0.1', 0)); libc.unshare(0x40000000); loopback_up()",
        "net-namespace",
    ),
    case(
        "shared-memory-of-the-host",
        "i = libc.shmget(0, 4096, 0o600); a = libc.shmat(i, None, 0); libc.shmctl(i, 0, None)",
        "sysv-shm",
    ),
    case("packet-pipe", "r, w = os.pipe2(os.O_DIRECT)", "packet-pipe"),
    case("pidfd-outside", "p = outside(lambda: os.pidfd_open(os.getpid()))", "pidfd-outside"),
    case("pidfd-of-thread", "p = call(434, os.getpid(), os.O_EXCL)", "pidfd-thread"),
    case("alarm-timer", "t = call(283, 9, 0)", "timer-clock"),
    case(
        "message-queue",
        "n = f'/q{os.getpid()}'.encode(); q = libc.mq_open(n, 0o102, 0o600, None); "
        "libc.mq_unlink(n)",
        "message-queue",
    ),
    case(
        "watch-of-deleted-in-memory",
        "d = f'/dev/shm/criuctl-{os.getpid()}'; os.mkdir(d); i = libc.inotify_init(); "
        "libc.inotify_add_watch(i, d.encode(), 2)\n"
        "f = os.open(d, 0); os.rmdir(d)",
        "watch-of-deleted",
    ),
    case(
        "watch-of-link",
        "os.symlink('x', TMP + '/l'); i = libc.inotify_init()\n"
        "assert libc.inotify_add_watch(i, (TMP + '/l').encode(), 0x2000002) > 0",
        "watch-of-link",
        criu=True,  # it cannot restore it
    ),
    case(
        "watch-of-what-others-keep",
        "f = outside(lambda: os.open(TMP + '/f', os.O_CREAT)); i = libc.inotify_init()\n"
        "assert libc.inotify_add_watch(i, (TMP + '/f').encode(), 2) > 0\n"
        "os.unlink(TMP + '/f'); os.close(f)",
        "watch-of-deleted",
        criu=True,  # as before
    ),
    case(
        "watch-of-hidden-in-memory",
        "again(0x20000); d = TMP + '/d'; os.mkdir(d); assert libc.mount(b'x', d.encode(), "
        "b'tmpfs', 0, None) == 0\n"
        "os.makedirs(d + '/e/f'); i = libc.inotify_init(); assert libc.inotify_add_watch(i, (d + "
        "'/e/f').encode(), 2) > 0\n"
        "assert libc.mount(b'x', (d + '/e').encode(), b'tmpfs', 0, None) == 0",
        "watch-of-deleted",
    ),
    case(
        "watch-in-overlay",
        "again(0x20000); [os.mkdir(TMP + '/' + n) for n in ('low', 'top', 'all')]\n"
        "assert libc.mount(b't', (TMP + '/top').encode(), b'tmpfs', 0, None) == 0\n"
        "[os.mkdir(TMP + '/top/' + n) for n in 'uw']\n"
        "o = f'lowerdir={TMP}/low,upperdir={TMP}/top/u,workdir={TMP}/top/w'\n"
        "assert libc.mount(b'o', (TMP + '/all').encode(), b'overlay', 0, o.encode()) == 0\n"
        "i = libc.inotify_init(); assert libc.inotify_add_watch(i, (TMP + '/all').encode(), 2) > 0",
        "watch-without-path",
    ),
    case(
        "watch-in-proc",
        "i = libc.inotify_init(); assert libc.inotify_add_watch(i, b'/proc/self/status', 2) > 0",
        "watch-without-path",
    ),
    case(
        "watch-in-sys",
        "i = libc.inotify_init(); assert libc.inotify_add_watch(i, b'/sys/kernel', 2) > 0",
        "watch-without-path",
    ),
    case(
        "epoll-of-closed-here",
        "import select\ne = select.epoll(); r, w = os.pipe(); e.register(r, 1); pid = "
        "child(lambda: None); os.close(r)",
        "epoll-target",
    ),
    case(
        "epoll-of-what-a-child-has",
        "import select\ne = select.epoll(); pid = child(lambda: globals().update(q=os.pipe()) or "
        "e.register(q[0], 1))",
        "epoll-target",
    ),
    case(
        "epoll-of-closed-that-was-inherited",
        "import select\nr, w = os.pipe()\n"
        "def run():\n global e, d\n e = select.epoll(); e.register(r, 1); d = os.dup(r); "
        "os.close(r)\npid = child(run)",
        "epoll-target",
    ),
    case(
        "deleted-from-overlay",
        "again(0x20000); [os.mkdir(TMP + '/' + n) for n in ('low', 'top', 'all')]; open(TMP + "
        "'/low/f', 'w').close()\n"
        "assert libc.mount(b't', (TMP + '/top').encode(), b'tmpfs', 0, None) == 0\n"
        "[os.mkdir(TMP + '/top/' + n) for n in 'uw']\n"
        "o = f'lowerdir={TMP}/low,upperdir={TMP}/top/u,workdir={TMP}/top/w'\n"
        "assert libc.mount(b'o', (TMP + '/all').encode(), b'overlay', 0, o.encode()) == 0\n"
        "f = open(TMP + '/all/f'); os.unlink(f.name)",
        also=("overlay-deleted",),
        criu=False,
    ),
    case(
        "mapped-socket",
        "s = socket.socket(); call(9, 0, 4096, 1, 1, s.fileno(), 0)",
        "mapping-kind",
    ),
    case(
        "path-of-socket",
        "s = socket.socket(socket.AF_UNIX); s.bind(TMP + '/s'); f = os.open(TMP + '/s', os.O_PATH)",
        "path-of-socket",
    ),
    *(
        case(f"path-of-{name}", f"{before}f = os.open({path}, os.O_PATH)", code)
        for name, before, path, code in (
            ("fifo", "os.mkfifo(TMP + '/f'); ", "TMP + '/f'", "path-of-fifo"),
            ("terminal", "", "'/dev/tty'", "path-of-terminal"),
            ("terminals-master", "", "'/dev/ptmx'", "path-of-terminal"),
        )
    ),
    case(
        "namespace-of-others",
        "def make():\n r, w = os.pipe(); pid = os.fork()\n if pid == 0:\n"
        "  os.close(READY); libc.unshare(0x04000000); os.write(w, b'x'); sleep()\n"
        " os.read(r, 1); os.close(r); os.close(w); return os.open(f'/proc/{pid}/ns/uts', 0)\n"
        "f = outside(make)",
        "namespace-file",
    ),
    # CRIU, which is in it, dumps this one, and then cannot restore it.
    case(
        "namespace-of-the-host",
        "f = os.open('/proc/self/ns/uts', 0); assert libc.unshare(0x04000000) == 0",
        "namespace-file",
        criu=True,
    ),
    case("moved-to-mount-namespace", "assert libc.unshare(0x20000) == 0", "mount-namespace"),
    case(
        "folder-unmounted",
        "again(0x20000); d = (TMP + '/d').encode(); os.mkdir(d); assert libc.mount(b'x', d, "
        "b'tmpfs', 0, None) == 0\n"
        "os.chdir(d); assert libc.umount2(d, 2) == 0",
        "mount-namespace",
    ),
    case(
        "mapping-unmounted",
        "again(0x20000); d = (TMP + '/d').encode(); os.mkdir(d); assert libc.mount(b'x', d, "
        "b'tmpfs', 0, None) == 0\n"
        "f = open(TMP + '/d/f', 'w+'); f.truncate(4096); map_fd(f.fileno()); f.close(); assert "
        "libc.umount2(d, 2) == 0",
        "mount-namespace",
    ),
    *(
        case(
            f"hidden-folder{name}",
            "again(0x20000); d = TMP + '/d'; os.makedirs(d + '/e'); os.chdir(d + '/e')\n"
            f"assert libc.mount(b'x', d.encode(), b'tmpfs', 0, None) == 0{more}",
            "path-hidden",
            also=("own-mounts",),
        )
        for name, more in (("", ""), ("-by-another", "\nos.mkdir(d + '/e')"))
    ),
    *(
        case(
            f"{name}-hidden-by-the-same",
            "again(0x20000); d = (TMP + '/d').encode(); os.mkdir(d); assert libc.mount(d, d, "
            "None, 0x1000, None) == 0\n"
            f"{use}; assert libc.mount(d, d, None, 0x1000, None) == 0",
            "path-hidden",
        )
        for name, use in (("file", "f = open(TMP + '/d/f', 'w')"), ("folder", "os.chdir(d)"))
    ),
    case(
        "deep-folder",
        "os.chdir(TMP)\nfor _ in range(20):\n os.mkdir('x' * 250); os.chdir('x' * 250)",
        "path-too-long",
    ),
    case(
        "deep-file",
        "os.chdir(TMP)\nfor _ in range(20):\n os.mkdir('x' * 250); os.chdir('x' * 250)\nf = "
        "open('f', 'w'); os.chdir('/')",
        "path-too-long",
    ),
    case(
        "hidden-file",
        "again(0x20000)\nos.mkdir(TMP + '/d'); f = open(TMP + '/d/f', 'w')\n"
        "assert libc.mount(b'x', (TMP + '/d').encode(), b'tmpfs', 0, None) == 0\n"
        "g = open(TMP + '/d/f', 'w')",
        "path-hidden",
        "own-mount",
    ),
    # CRIU dumps the first three, which then cannot be restored; in the fourth it cannot be started.
    case(
        "daemon-of-a-subreaper",
        "r, w = os.pipe()\n"
        "if os.fork() == 0:\n libc.prctl(36, 1, 0, 0, 0); pid = os.fork()\n"
        " if pid:\n  os.close(READY); os.waitpid(pid, 0); os.close(w); sleep()\n"
        " os.setsid(); os.fork() and os._exit(0); os.close(w); os.close(READY); sleep()\n"
        "os.close(w); os.read(r, 1)",
        "session-lost",
        criu=True,
    ),
    case(
        "file-on-a-mount-of-its-own",
        "again(0x20000); os.mkdir(TMP + '/d'); assert libc.mount(b'x', (TMP + '/d').encode(), "
        "b'tmpfs', 0, None) == 0\n"
        "f = open(TMP + '/d/f', 'w')",
        "own-mount",
        also=("own-mounts",),
        criu=True,
    ),
    case(
        "folder-on-a-mount-of-its-own",
        "again(0x20000); os.mkdir(TMP + '/d'); assert libc.mount(b'/etc', (TMP + '/d').encode(), "
        "None, 0x1000, None) == 0\n"
        "os.chdir(TMP + '/d')",
        "own-mount",
        also=("own-mounts",),
        criu=True,
    ),
    case(
        "socket-on-a-mount-of-its-own",
        "again(0x20000); os.mkdir(TMP + '/d'); assert libc.mount(b'x', (TMP + '/d').encode(), "
        "b'tmpfs', 0, None) == 0\n"
        "os.mkdir(TMP + '/d/e'); s = socket.socket(socket.AF_UNIX); s.bind(TMP + '/d/e/s'); "
        "s.listen()",
        "own-mount",
        also=("own-mounts",),
        criu=True,
    ),
    case(
        "chroot-with-a-mount-of-its-own",
        "again(0x20000); r = TMP + '/r'; os.makedirs(r + '/etc')\n"
        "assert libc.mount(b'/etc', (r + '/etc').encode(), None, 0x1000, None) == 0\n"
        "os.chroot(r); os.chdir('/'); f = open('/etc/hostname')",
        "own-mount",
        also=("own-mounts",),
        criu=None,
    ),
    case(
        "root-of-its-own",
        "again(0x20000); r = TMP + '/r'; os.mkdir(r); assert libc.mount(b'x', r.encode(), "
        "b'tmpfs', 0, None) == 0\n"
        "os.mkdir(r + '/old'); call(155, r.encode(), (r + '/old').encode()); os.chdir('/')",
        "own-root",
    ),
    case(
        "nested-pid-namespace",
        "assert libc.unshare(0x20000000) == 0; child(lambda: None)",
        "nested-namespace",
    ),
    case("nested-uts-namespace", "child(lambda: libc.unshare(0x04000000))", "nested-namespace"),
    case("nested-ipc-namespace", "child(lambda: libc.unshare(0x08000000))", "nested-namespace"),
    case("user-namespace-of-its-own", "again(0x10000000)", "user-namespace", criu=None),
    case("nested-user-namespace", "child(lambda: libc.unshare(0x10000000))", "nested-namespace"),
    case("nested-cgroup-namespace", "child(lambda: libc.unshare(0x02000000))", "nested-namespace"),
    case("time-namespace-of-children", "assert libc.unshare(0x80) == 0", "nested-namespace"),
    # CRIU dumps these two and then cannot restore them.
    case(
        "nested-net-namespace",
        "child(lambda: libc.unshare(0x40000000))",
        "nested-namespace",
        criu=True,
    ),
    case(
        "nested-mount-namespace",
        "child(lambda: libc.unshare(0x00020000))",
        "nested-namespace",
        criu=True,
    ),
    case(
        "session-outside-pid-namespace",
        "pid = os.fork()\nif pid:\n os.close(READY); sleep()\nlibc.unshare(0x20000000)\n"
        "r, w = os.pipe(); pid = os.fork()\nif pid == 0:\n os.close(READY); os.read(r, 1); "
        "sleep()\n"
        "os.write(READY, str(pid).encode()); os.close(READY); READY = -1",
        "session-outside-pid-namespace",
    ),
    case(
        "memory-shared-with-a-child",
        "libc.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]\n"
        "stack = map_fd(-1, 65536, 3, 0x22) + 65536\n"
        "assert libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), stack, 0x100 | 0x400 | 17, "
        "None) > 0",
        "shared-with-parent",
    ),
    case(
        "folder-shared-with-a-child",
        "if call(56, 0x200 | 17, None, None, None, None) == 0:\n os.close(READY); sleep()",
        "shared-with-parent",
    ),
    case(
        "leader-gone",
        "threading.Thread(target=sleep).start(); ready(); libc.syscall(60, 0)",
        "leader-gone",
    ),
    case(
        "sigtrap-pending",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [5]); os.kill(os.getpid(), 5)",
        "pending-sigtrap",
    ),
    case(
        "loopback-down-and-another-run",
        "again(0x40020000); libc.mount(b'none', b'/run', b'tmpfs', 0, None)\n"
        # not to be saved
        "os.system('ip link add v0 type veth peer name v1 && ip link add m0 link v0 type macvlan')",
        "loopback-down",
        also=("foreign-mount", "own-network"),
    ),
    case(
        "terminal-outside",
        "m, s = outside(os.openpty); os.close(m); fcntl.ioctl(s, 0x540E, 0)",
        also=("terminal-outside",),
    ),
    case(
        "terminals-outside",
        "m, s, m2, s2 = outside(lambda: os.openpty() + os.openpty()); os.close(m); os.close(m2)",
        also=("terminal-outside",),
    ),
    case(
        "terminal-with-a-high-number",
        "import resource\nagain(0x20000); resource.setrlimit(resource.RLIMIT_NOFILE, (4096, "
        "4096)); os.mkdir(TMP + '/p')\n"
        "assert libc.mount(b'd', (TMP + '/p').encode(), b'devpts', 0, "
        "b'newinstance,ptmxmode=666') == 0\n"
        "m = [os.open(TMP + '/p/ptmx', os.O_RDWR | os.O_NOCTTY) for _ in "
        "range(1002)]\n[os.close(each) for each in m[:-1]]",
        "terminal-number",
    ),
    case(
        "terminal-opened-often",
        "m, s = outside(os.openpty); os.close(m); f = [os.open(os.ttyname(s), os.O_RDWR | "
        "os.O_NOCTTY) for _ in range(64)]",
        "many-terminals",
        also=("terminal-outside",),
    ),
    case(
        "many-pipes",
        "import fcntl, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)); p = []\n"
        # each of one page: the kernel counts all pipes of a user together, those of other tests too
        "for _ in range(1025):\n p.append(os.pipe()); fcntl.fcntl(p[-1][1], fcntl.F_SETPIPE_SZ, "
        "4096)",
        "many-pipes",
    ),
    case(
        "proc-of-another-pid-namespace",
        "pid = os.fork()\nif pid:\n os.close(READY); sleep()\nlibc.unshare(0x20000000)\n"
        "if os.fork() == 0:\n os.close(READY); sleep()\n"  # PID 1; CRIU would stay outside of it
        "r, w = os.pipe(); pid = os.fork()\nif pid == 0:\n os.close(READY); os.close(r); "
        "os.setsid(); os.close(w); sleep()\n"
        "os.close(w); os.read(r, 1); os.close(r)\n"  # its session is its own before anybody looks
        "os.write(READY, str(pid).encode()); os.close(READY); READY = -1",
        "proc-mount",
    ),
    case(
        "vforked-by-a-thread",  # its main thread sleeps as always
        "libc.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]\n"
        "stack = map_fd(-1, 65536, 3, 0x22) + 65536; pause = ctypes.cast(libc.pause, "
        "ctypes.c_void_p)\n"
        "threading.Thread(target=libc.clone, args=(pause, stack, 0x100 | 0x400 | 0x4000 | 17, "
        "None), daemon=True).start()\n"
        "while not any(open(f'/proc/self/task/{t}/children').read() for t in "
        "os.listdir('/proc/self/task')): pass",
        "vfork",
        criu=None,
    ),
    case(
        "vforked",
        "os.mkfifo(TMP + '/f'); ready(); wait_for_pipe = (os.POSIX_SPAWN_OPEN, 5, TMP + '/f', "
        "os.O_RDONLY, 0)\n"
        "os.posix_spawn('/bin/sleep', ['sleep', '9'], {}, file_actions=[wait_for_pipe])",
        "vfork",
        criu=None,  # it says no after ten seconds
    ),
]
