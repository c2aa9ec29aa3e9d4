"""Open files, folders, their locks and flags; memory files; named pipes."""

from __future__ import annotations

import fcntl
import os
import struct

from . import Place, Step, kind

F_OFD_GETLK, F_OFD_SETLK = 36, 37
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SET_RW_HINT, F_GET_RW_HINT = 1036, 1035


def _written(place: Place, name: str = "file") -> str:
    path = place.path(name)
    with open(path, "wb") as file:
        file.write(place.bytes(20000))
    return path


def _state(fd: int) -> list[object]:
    """Flags of the open file and of the descriptor, size, links.

    O_DIRECTORY and O_NOFOLLOW only have a meaning while a file is being opened: see the limits.
    """
    status = os.fstat(fd)
    return [
        fcntl.fcntl(fd, fcntl.F_GETFL) & ~(os.O_DIRECTORY | os.O_NOFOLLOW),
        fcntl.fcntl(fd, fcntl.F_GETFD),
        status.st_size,
        status.st_nlink,
    ]


def _use(place: Place, fd: int) -> list[object]:
    """Where it stands, what comes next there, and a few bytes more."""
    access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    found: list[object] = [os.lseek(fd, 0, os.SEEK_CUR)]
    if access != os.O_WRONLY:
        found.append(os.read(fd, 10).hex())
    if access != os.O_RDONLY:
        found.append(os.write(fd, b"more"))
    return [*found, *_state(fd)]


def _opened(place: Place, path: str) -> int:
    flags = place.one([os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
    flags |= place.some(
        [
            os.O_APPEND,
            os.O_NOATIME,
            os.O_NONBLOCK,
            os.O_CLOEXEC,
            os.O_SYNC,
            os.O_DSYNC,
            os.O_NOFOLLOW,
        ]
    )
    fd = os.open(path, flags)
    os.set_inheritable(fd, not flags & os.O_CLOEXEC)
    os.lseek(fd, place.random.randrange(30000), os.SEEK_SET)
    return fd


@kind
def regular_file(place: Place) -> Step:
    fd = _opened(place, _written(place))
    yield
    while True:
        yield _use(place, fd)


@kind
def removed_file(place: Place) -> Step:
    """One without a name any more; perhaps opened twice, perhaps with another name elsewhere."""
    path = _written(place)
    if place.random.random() < 0.4:
        os.link(path, place.path("other"))
    fds = [_opened(place, path) for _ in range(place.random.randint(1, 2))]
    os.unlink(path)
    if place.random.random() < 0.3:
        _written(place)  # another file has its name
    yield
    while True:
        yield [_use(place, fd) for fd in fds]


@kind
def sparse_file(place: Place) -> Step:
    fd = os.open(place.path("sparse"), os.O_RDWR | os.O_CREAT, 0o600)
    os.unlink(place.path("sparse"))
    os.truncate(fd, 3 << 20)
    os.pwrite(fd, b"in the middle", 1 << 20)
    yield
    while True:
        yield [
            os.pread(fd, 13, 1 << 20).hex(),
            os.lseek(fd, 0, os.SEEK_DATA),
            os.fstat(fd).st_blocks < 100,
            *_state(fd),
        ]


@kind
def renamed_file(place: Place) -> Step:
    path = _written(place)
    fd = _opened(place, path)
    os.mkdir(place.path("folder"))
    os.rename(path, os.path.join(place.path("folder"), "name"))
    yield
    while True:
        yield [_use(place, fd), os.readlink(f"/proc/self/fd/{fd}").removeprefix(place.folder)]


@kind
def duplicates(place: Place) -> Step:
    fd = _opened(place, _written(place))
    other = place.random.randint(100, 400)
    os.dup2(fd, other, inheritable=place.random.random() < 0.5)
    again = os.open(f"/proc/self/fd/{fd}", fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE)
    yield
    while True:
        os.lseek(fd, place.random.randrange(20000), os.SEEK_SET)
        yield [_use(place, one) for one in (fd, other, again)]


@kind
def folder(place: Place) -> Step:
    """An open folder, read half, perhaps removed."""
    path = place.path("folder")
    os.mkdir(path, 0o750)
    for name in "abc":
        os.mkdir(os.path.join(path, name))
    fd = os.open(path, os.O_RDONLY | place.some([os.O_DIRECTORY, os.O_CLOEXEC]))
    removed = place.random.random() < 0.3
    if removed:
        for name in "abc":
            os.rmdir(os.path.join(path, name))
        os.rmdir(path)
    yield
    while True:
        yield [sorted(os.listdir(fd)), oct(os.fstat(fd).st_mode), os.fstat(fd).st_nlink]


@kind
def path_only(place: Place) -> Step:
    """O_PATH, of a file, a folder, a symbolic link."""
    path = place.one([_written(place), place.folder, place.path("link")])
    if path.endswith("-link"):
        os.symlink("nowhere", path)
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | place.some([os.O_CLOEXEC]))
    yield
    while True:
        yield [
            os.readlink(f"/proc/self/fd/{fd}").removeprefix(place.folder),
            *_state(fd)[:2],
            oct(os.fstat(fd).st_mode),
        ]


@kind
def device(place: Place) -> Step:
    fd = os.open(
        place.one(["/dev/null", "/dev/zero", "/dev/full", "/dev/urandom"]),
        place.one([os.O_RDONLY, os.O_RDWR]),
    )
    yield
    while True:
        yield [len(os.read(fd, 7)), *_state(fd)[:2], os.fstat(fd).st_rdev]


@kind
def of_the_kernel(place: Place) -> Step:
    """Files of /proc and /sys, read a little."""
    name = place.one(
        [
            "/proc/sys/kernel/hostname",
            "/proc/filesystems",
            "/sys/kernel/mm/transparent_hugepage/enabled",
        ]
    )
    fd = os.open(name, os.O_RDONLY)
    os.read(fd, 3)
    yield
    while True:
        yield [os.lseek(fd, 0, os.SEEK_CUR), os.read(fd, 3).hex()]


@kind
def memory_file(place: Place) -> Step:
    """memfd, sealed somehow, also without the right to execute it."""
    flags = os.MFD_ALLOW_SEALING | place.some([os.MFD_CLOEXEC, 0x0008])  # MFD_NOEXEC_SEAL
    fd = os.memfd_create("of a step", flags)
    os.write(fd, place.bytes(30000))
    fcntl.fcntl(
        fd,
        F_ADD_SEALS,
        place.some([fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE, 0x0010]),
    )
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    yield
    while True:
        yield [
            fcntl.fcntl(fd, F_GET_SEALS),
            os.pread(fd, 8, 2).hex(),
            os.read(other, 5).hex(),
            *_state(fd),
            oct(os.fstat(fd).st_mode),
        ]


@kind
def locks(place: Place) -> Step:
    """All four families, on one file opened twice."""
    path = _written(place)
    one, two = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    if place.random.random() < 0.5:
        fcntl.flock(one, place.one([fcntl.LOCK_SH, fcntl.LOCK_EX]))
    for _ in range(place.random.randrange(3)):
        fcntl.lockf(
            two,
            place.one([fcntl.LOCK_SH, fcntl.LOCK_EX]) | fcntl.LOCK_NB,
            place.random.randint(1, 50),
            place.random.randrange(300),
        )
    if place.random.random() < 0.5:
        wanted = struct.pack("hhqqi4x", place.one([fcntl.F_RDLCK, fcntl.F_WRLCK]), 0, 1000, 0, 0)
        fcntl.fcntl(one, F_OFD_SETLK, wanted)
    yield
    while True:
        fresh = os.open(f"/proc/self/fd/{one}", os.O_RDWR)  # a copy finds its own file nowhere else
        found: list[object] = []
        for operation in (fcntl.LOCK_SH, fcntl.LOCK_EX):
            try:
                fcntl.flock(fresh, operation | fcntl.LOCK_NB)
                found.append("had")
            except BlockingIOError:
                found.append("held")
        for start in range(0, 400, 5):  # the kernel chooses which of several it reports
            asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, start, 5, 0)
            found.append(struct.unpack("hhqqi4x", fcntl.fcntl(fresh, F_OFD_GETLK, asked))[0])
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 900, 0, 0)
        found.append(struct.unpack("hhqqi4x", fcntl.fcntl(fresh, F_OFD_GETLK, asked))[:4])
        yield found
        return  # closing the fresh one ends the POSIX locks of this process


@kind
def named_pipe(place: Place) -> Step:
    path = place.path("fifo")
    os.mkfifo(path)
    both = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    ends = [
        os.open(path, os.O_RDONLY | os.O_NONBLOCK),
        os.open(path, os.O_WRONLY | place.some([os.O_NONBLOCK])),
    ]
    if place.random.random() < 0.5:
        os.write(both, place.bytes(3000))
    if place.random.random() < 0.5:
        os.close(both)
    if place.random.random() < 0.3:
        os.unlink(path)
    yield
    while True:
        os.write(ends[1], b"mark")
        yield [os.read(ends[0], 9999).hex(), [fcntl.fcntl(fd, fcntl.F_GETFL) for fd in ends]]


@kind
def attributes(place: Place) -> Step:
    """Times, mode and owner of a file that is removed."""
    path = _written(place)
    fd = os.open(path, os.O_RDWR)
    os.fchmod(fd, place.one([0o600, 0o4755, 0o444, 0]))
    os.fchown(fd, place.one([0, 1, 65534]), place.one([0, 7]))
    os.utime(fd, (1e9, 1.5e9))
    if place.random.random() < 0.7:
        os.unlink(path)
    yield
    while True:
        status = os.fstat(fd)
        yield [oct(status.st_mode), status.st_uid, status.st_gid, status.st_mtime]


@kind
def write_hint(place: Place) -> Step:
    """What a file is expected to live: of its inode, kept by the kernel."""
    fd = os.open(_written(place), os.O_RDWR)
    fcntl.fcntl(fd, F_SET_RW_HINT, struct.pack("Q", place.random.randint(1, 5)))
    yield
    while True:
        yield struct.unpack("Q", fcntl.fcntl(fd, F_GET_RW_HINT, bytes(8)))
