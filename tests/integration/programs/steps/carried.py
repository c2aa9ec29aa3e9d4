"""What lies outside the tree's memory and is its state all the same: files in memory, of /proc,
removed with their folders.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import shutil
import signal
import stat
import threading

from . import Place, Step, kind, libc

PAGE = mmap.PAGESIZE
F_ADD_SEALS, F_GET_SEALS, F_SETLEASE, F_GETLEASE = 1033, 1034, 1024, 1025
SEALS = [fcntl.F_SEAL_SEAL, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE, 0x10, 0x20]
libc.sem_open.restype = ctypes.c_void_p


@kind
def mapped_and_closed(place: Place) -> Step:
    """A file in memory or on the disk, shared through mappings alone; one of them perhaps only for
    reading.
    """
    path = place.one([place.path, place.fleeting])("shared")
    pages = place.random.randint(1, 5)
    with open(path, "w+b") as file:
        file.write(place.random.randbytes(pages * PAGE - place.one([0, 100])))
        file.flush()
        one = mmap.mmap(file.fileno(), pages * PAGE - 200)
        other = mmap.mmap(
            file.fileno(),
            PAGE // 2,
            prot=place.one([mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE]),
        )
    if place.random.random() < 0.2:
        os.unlink(path)
    yield
    while True:
        one[7:12] = place.random.randbytes(5)
        yield [one[:50].hex(), other[:50].hex(), one[-20:].hex()]


@kind
def posix_memory(place: Place) -> Step:
    """shm_open, perhaps kept open, perhaps unlinked."""
    name = f"/{os.path.basename(place.fleeting('memory'))}".encode()
    fd = libc.shm_open(name, os.O_RDWR | os.O_CREAT, 0o600)
    os.truncate(fd, 3 * PAGE)
    area = mmap.mmap(fd, 3 * PAGE)
    os.pwrite(fd, b"through the descriptor", PAGE)
    kept = place.random.random() < 0.4
    if not kept:
        os.close(fd)
    if place.random.random() < 0.3:
        libc.shm_unlink(name)
    yield
    while True:
        area[:4] = place.random.randbytes(4)
        found = [area[:9].hex(), area[PAGE : PAGE + 22].hex()]
        yield [*found, os.pread(fd, 4, 0).hex(), os.fstat(fd).st_nlink] if kept else found


@kind
def posix_semaphore(place: Place) -> Step:
    """By name, perhaps unlinked since, or opened twice."""
    name = f"/{os.path.basename(place.fleeting('count'))}".encode()
    one = libc.sem_open(name, os.O_CREAT, 0o600, place.random.randrange(5))
    other = libc.sem_open(name, 0) if place.random.random() < 0.5 else one
    if place.random.random() < 0.3:
        libc.sem_unlink(name)
    yield
    value = ctypes.c_int()
    while True:
        libc.sem_post(ctypes.c_void_p(one))
        libc.sem_getvalue(ctypes.c_void_p(other), ctypes.byref(value))
        yield [value.value, libc.sem_trywait(ctypes.c_void_p(other))]


@kind
def sealed(place: Place) -> Step:
    """A memory file with seals, mapped before or after they were set, perhaps closed."""
    fd = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    os.write(fd, place.random.randbytes(2 * PAGE + place.one([0, 70])))
    areas = []
    if place.random.random() < 0.3:
        areas.append(mmap.mmap(fd, PAGE, mmap.MAP_PRIVATE))
        areas[0][:4] = b"mine"
    seals = place.some(SEALS)
    fcntl.fcntl(fd, F_ADD_SEALS, seals)
    areas += [
        mmap.mmap(fd, 2 * PAGE, prot=mmap.PROT_READ) for _ in range(place.random.randrange(3))
    ]
    closed = bool(areas) and place.random.random() < 0.4
    if closed:
        os.close(fd)
    yield
    while True:
        found: list[object] = [area[:16].hex() for area in areas]
        if not closed:
            found += [
                fcntl.fcntl(fd, F_GET_SEALS),
                os.pread(fd, 9, 2 * PAGE - 9).hex(),
                os.lseek(fd, 0, os.SEEK_CUR),
            ]
        yield found


@kind
def of_proc(place: Place) -> Step:
    """Files about a thread of ours, ourselves, our parent, a child: the offset of each, and the
    process that it is about.
    """
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    me, tid = os.getpid(), thread.native_id or 0
    child = os.fork()
    if not child:
        while True:
            signal.pause()
    names = {
        f"/proc/{me}/task/{tid}/stat": tid,
        f"/proc/{tid}/stat": tid,
        "/proc/self/stat": me,
        "/proc/thread-self/stat": me,
        f"/proc/{child}/stat": child,
        f"/proc/{child}/task/{child}/stat": child,
    }
    opened = []
    for name in place.random.sample(sorted(names), 3):
        fd = os.open(name, os.O_RDONLY | place.some([os.O_CLOEXEC]))
        os.lseek(fd, place.random.randrange(9), os.SEEK_SET)
        opened.append((fd, names[name]))
    yield
    while True:
        found: list[object] = []
        for fd, about in opened:
            try:
                found += [
                    os.lseek(fd, 0, os.SEEK_CUR),
                    os.pread(fd, 99, 0).startswith(b"%d (" % about),
                ]
            except OSError as error:
                found.append(error.errno)
        yield found


@kind
def removed_folder(place: Place) -> Step:
    """Folders that were removed with what was in them, opened in any order: folders, files, perhaps
    as the working folder.
    """
    top = place.path("tree")
    inner = os.path.join(top, "inner")
    os.makedirs(inner)
    wanted = [top, inner, os.path.join(top, "file"), os.path.join(inner, "file")]
    fds = []
    for path in place.random.sample(wanted, place.random.randint(1, 4)):
        if path.endswith("file"):
            fds.append(os.open(path, os.O_RDWR | os.O_CREAT))
            os.write(fds[-1], place.bytes(3000))
        else:
            fds.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
    shutil.rmtree(top)
    again = place.random.random() < 0.3
    if again:
        os.mkdir(top)
    yield
    while True:
        found: list[object] = []
        for fd in fds:
            status = os.fstat(fd)
            folder = stat.S_ISDIR(status.st_mode)
            found.append(
                [
                    status.st_nlink,
                    os.listdir(fd) if folder else [status.st_size, os.pread(fd, 20, 0).hex()],
                ]
            )
        yield [*found, os.path.exists(top)]


@kind
def own_file(place: Place) -> Step:
    """A small file open for writing, such as a PID file, that its program would remove at its end
    (the test does).
    """
    path = place.one([place.path, place.fleeting])("tidy")
    fd = os.open(path, os.O_RDWR | os.O_CREAT, place.one([0o600, 0o644]))
    os.write(fd, place.bytes(200))
    yield
    while True:
        os.lseek(fd, 0, os.SEEK_SET)
        yield [os.read(fd, 300).hex(), oct(os.fstat(fd).st_mode), os.write(fd, b"more")]


@kind
def lease(place: Place) -> Step:
    """Of a file that nothing else has open."""
    path = place.path("leased")
    with open(path, "wb") as file:
        file.write(place.bytes(100))
    mode, kinds = place.one([(os.O_RDONLY, [fcntl.F_RDLCK]), (os.O_RDWR, [fcntl.F_WRLCK])])
    fd = os.open(path, mode)
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    fcntl.fcntl(fd, F_SETLEASE, place.one(kinds))
    yield
    while True:
        yield [fcntl.fcntl(fd, F_GETLEASE), os.lseek(fd, 0, os.SEEK_CUR)]
