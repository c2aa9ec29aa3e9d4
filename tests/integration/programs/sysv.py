"""System V shared memory, semaphores and a message queue (to be run in an IPC namespace of its
own).
"""

from __future__ import annotations

import ctypes
import os
import struct

from animal import Check, libc, serve

IPC_CREAT, IPC_PRIVATE, IPC_RMID, SETVAL, GETVAL = 0o1000, 0, 0, 16, 12
libc.shmat.restype = ctypes.c_void_p
libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
segment = libc.shmget(0x5A5A, 1 << 20, IPC_CREAT | 0o600)
address = libc.shmat(segment, None, 0)
ctypes.memmove(address, b"shared by key", 13)
removed = libc.shmget(IPC_PRIVATE, 1 << 20, IPC_CREAT | 0o600)
unnamed = libc.shmat(removed, None, 0)
ctypes.memmove(unnamed, b"ends with us", 12)
libc.shmctl(removed, IPC_RMID, None)
semaphores = libc.semget(IPC_PRIVATE, 2, IPC_CREAT | 0o600)
libc.semctl(semaphores, 1, SETVAL, 5)
queue = libc.msgget(IPC_PRIVATE, IPC_CREAT | 0o600)
libc.msgsnd(queue, struct.pack("q", 3) + b"a message", 9, 0)
left = True


def check(found: Check) -> None:
    global left
    found.equal("segment", ctypes.string_at(address, 13), b"shared by key")
    found.equal("segment by key", libc.shmget(0x5A5A, 0, 0), segment)
    found.equal("removed segment", ctypes.string_at(unnamed, 12), b"ends with us")
    with open("/proc/sysvipc/shm") as file:
        found.equal(
            "modes", sorted(line.split()[2] for line in file.readlines()[1:]), ["1600", "600"]
        )
    found.equal("semaphore", libc.semctl(semaphores, 1, GETVAL), 5)
    if left:
        left = False
        buffer = ctypes.create_string_buffer(64)
        found.equal(
            "message", (libc.msgrcv(queue, buffer, 50, 0, 0), buffer.raw[8:17]), (9, b"a message")
        )


os.chdir("/")
serve(check)
