"""System V IPC (the tree has an IPC namespace of its own), POSIX message queues, locks in shared
memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct

from . import Place, Step, kind, libc

libc.shmat.restype = ctypes.c_void_p
libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
IPC_CREAT, IPC_STAT, GETALL, SETALL = 0o1000, 2, 13, 17
IPC_PRIVATE = 0


def _key(place: Place) -> int:
    return place.one([IPC_PRIVATE, place.random.randint(1, 1 << 30)])


@kind
def segments(place: Place) -> Step:
    """Shared memory, attached once or twice."""
    mode = place.one([0o600, 0o644, 0o666])
    ident = libc.shmget(_key(place), 3 * mmap.PAGESIZE + 5, IPC_CREAT | mode)
    address = libc.shmat(ident, None, 0)
    ctypes.memmove(address + 100, b"a segment", 9)
    again = libc.shmat(ident, None, 0) if place.random.random() < 0.5 else None
    yield
    while True:
        buffer = ctypes.create_string_buffer(112)
        result = libc.shmctl(ident, IPC_STAT, buffer)
        key, uid, gid, _, _, mode = struct.unpack_from("iIIIII", buffer)
        found = [
            result,
            key,
            uid,
            gid,
            oct(mode),
            *struct.unpack_from("Q", buffer, 48),
            *struct.unpack_from("Q", buffer, 88),
        ]
        ctypes.memmove(address + 300, place.random.randbytes(5), 5)
        yield [
            *found,
            ctypes.string_at(address + 100, 9).hex(),
            ctypes.string_at((again or address) + 300, 5).hex(),
        ]


@kind
def semaphores(place: Place) -> Step:
    """With values, what is undone at the end of a process, and the PID that did the last
    operation.
    """
    count = place.random.randint(1, 5)
    ident = libc.semget(_key(place), count, IPC_CREAT | 0o640)
    values = (ctypes.c_ushort * count)(*(place.random.randrange(9) for _ in range(count)))
    libc.semctl(ident, 0, SETALL, values)
    if place.random.random() < 0.4:
        libc.semop(ident, struct.pack("HhH", 0, 2, 0), 1)
    yield
    while True:
        array = (ctypes.c_ushort * count)()
        found = [libc.semctl(ident, 0, GETALL, array), list(array)]
        libc.semop(ident, struct.pack("HhH", 0, 1, 0), 1)
        status = ctypes.create_string_buffer(104)
        libc.semctl(ident, 0, IPC_STAT, status)
        yield [*found, struct.unpack_from("iIIIII", status)]


@kind
def messages(place: Place) -> Step:
    ident = libc.msgget(_key(place), IPC_CREAT | 0o600)
    for _ in range(place.random.randrange(5)):
        text = place.bytes(300)
        libc.msgsnd(ident, struct.pack("q", place.random.randint(1, 5)) + text, len(text), 0)
    yield
    while True:
        libc.msgsnd(ident, struct.pack("q", 3) + b"mark", 4, 0)
        found, buffer = [], ctypes.create_string_buffer(400)
        status = ctypes.create_string_buffer(120)
        libc.msgctl(ident, IPC_STAT, status)
        numbers = [struct.unpack_from("iIIIII", status), *struct.unpack_from("QQQ", status, 72)]
        while (length := libc.msgrcv(ident, buffer, 390, 0, 0o4000)) >= 0:
            found.append(buffer.raw[: length + 8].hex())
        yield [numbers, found]


@kind
def robust_locks(place: Place) -> Step:
    """A mutex in shared memory whose owner has ended holding it: the next owner gets EOWNERDEAD."""
    area = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    pthread = ctypes.CDLL("libc.so.6")
    attributes = ctypes.create_string_buffer(64)
    pthread.pthread_mutexattr_init(attributes)
    pthread.pthread_mutexattr_setpshared(attributes, 1)
    pthread.pthread_mutexattr_setrobust(attributes, 1)
    pthread.pthread_mutexattr_setprotocol(attributes, place.one([0, 1]))
    pthread.pthread_mutex_init(ctypes.c_void_p(address), attributes)
    answered, answer = os.pipe()
    asked, ask = os.pipe()
    child = os.fork()
    if not child:
        pthread.pthread_mutex_lock(ctypes.c_void_p(address))
        os.write(answer, b".")
        os.read(asked, 1)  # after the restore
        os._exit(0)
    os.read(answered, 1)
    made = os.getpid()
    yield
    if os.getpid() != made:
        yield "of another process"
        return
    busy = pthread.pthread_mutex_trylock(ctypes.c_void_p(address))
    os.write(ask, b"!")
    os.waitpid(child, 0)
    found = [busy, pthread.pthread_mutex_lock(ctypes.c_void_p(address))]
    pthread.pthread_mutex_consistent(ctypes.c_void_p(address))
    yield [*found, pthread.pthread_mutex_unlock(ctypes.c_void_p(address))]
    area.flush()
