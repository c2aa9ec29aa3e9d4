"""What a process or one of its threads can ask about itself."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import threading
from collections.abc import Callable
from typing import Any

from . import Place, Step, call, kind, libc

PRCTL = 157
PR_SET_PDEATHSIG, PR_GET_PDEATHSIG, PR_SET_SECUREBITS, PR_GET_SECUREBITS = 1, 2, 28, 27
PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, PR_CAP_AMBIENT_RAISE = 47, 1, 2
SECBIT_NO_CAP_AMBIENT_RAISE = 1 << 6
SYS_CAPGET, SYS_CAPSET = 125, 126
SYS_SETRESUID, SYS_SETFSUID, SYS_SETRESGID, SYS_SETGROUPS, SYS_SECCOMP = 117, 122, 119, 116, 317
SYS_MEMBARRIER = 324


def _prctl(option: int, *arguments: int) -> int:
    return call(PRCTL, option, *(ctypes.c_ulong(one) for one in (*arguments, 0, 0, 0, 0)[:4]))


def _asked(option: int) -> int:
    """An option that answers through a pointer."""
    value = ctypes.c_int()
    call(PRCTL, option, ctypes.byref(value), 0, 0, 0)
    return value.value


def _capabilities() -> str:
    with open("/proc/thread-self/status") as file:
        return " ".join(
            line.split()[1] for line in file if line.startswith(("Cap", "NoNewPrivs", "Seccomp"))
        )


def _credentials() -> list[object]:
    with open("/proc/thread-self/status") as file:
        return [line.split() for line in file if line.startswith(("Uid", "Gid", "Groups", "Cap"))]


# how to set -> how to ask; each is given a Place and set in the thread that takes the step
def _set_name(place: Place) -> Callable[[], Any]:
    _prctl(
        15,
        ctypes.addressof(
            kept := ctypes.create_string_buffer(place.one([b"a name", b"(", b"x y) z", b""]))
        ),
    )
    del kept

    def ask() -> str:
        with open("/proc/thread-self/comm", "rb") as file:
            return file.read().hex()

    return ask


def _set_death_signal(place: Place) -> Callable[[], Any]:
    # not of the root, whose parent is another one after a restore
    if "/" in place.label.partition(" ")[0][2:]:
        _prctl(PR_SET_PDEATHSIG, place.one([10, 12, 36]))
    return lambda: _asked(PR_GET_PDEATHSIG)


def _set_nice(place: Place) -> Callable[[], Any]:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), place.random.randint(-10, 19))
    return lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def _set_policy(place: Place) -> Callable[[], Any]:
    policy = place.one([os.SCHED_BATCH, os.SCHED_FIFO, os.SCHED_RR, os.SCHED_OTHER])
    priority = place.random.randint(1, 5) if policy in (os.SCHED_FIFO, os.SCHED_RR) else 0
    os.sched_setscheduler(0, policy | place.one([0, 0x40000000]), os.sched_param(priority))
    return lambda: [os.sched_getscheduler(0), os.sched_getparam(0).sched_priority]


def _set_affinity(place: Place) -> Callable[[], Any]:
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [place.one(processors)])
    return lambda: sorted(os.sched_getaffinity(0))


def _set_capabilities(place: Place) -> Callable[[], Any]:
    """Some taken from each set, some ambient; the bounding set, too."""
    header = struct.pack("Ii", 0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    call(SYS_CAPGET, header, data)
    for word in range(6):
        data[word] &= ~place.some([1 << bit for bit in (16, 20, 22, 23, 25, 26, 29)])
    data[0] &= data[1]
    data[3] &= data[4]
    data[2] |= 1 << 13 & data[1]
    call(SYS_CAPSET, header, data)
    _prctl(24, 16)
    if place.random.random() < 0.5:
        _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, 13)
    return _capabilities


def _set_secure_bits(place: Place) -> Callable[[], Any]:
    bits = place.one([0b1, 0b11, 0b100, 0b10000, 0b1010101])
    if _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, 13):
        bits &= ~SECBIT_NO_CAP_AMBIENT_RAISE  # a dump of both is refused
    _prctl(PR_SET_SECUREBITS, bits)
    return lambda: _prctl(PR_GET_SECUREBITS)


def _set_credentials(place: Place) -> Callable[[], Any]:
    """Of this thread alone: by the system calls themselves."""
    groups = [place.random.randint(0, 2**31) for _ in range(place.random.randrange(4))]
    call(SYS_SETGROUPS, len(groups), (ctypes.c_uint32 * 4)(*groups))
    call(SYS_SETRESGID, *(place.one([0, 5, 65534]) for _ in range(3)))
    call(SYS_SETRESUID, 0, place.one([0, 1]), 0)
    call(SYS_SETFSUID, place.one([0, 3]))
    return _credentials


def _set_filter(place: Place) -> Callable[[], Any]:
    """seccomp: one or two filters that answer sethostname with an error."""
    for _ in range(place.random.randint(1, 2)):
        answer = place.one([118, 38, 1])
        parts = [
            (0x20, 0, 0, 0),
            (0x15, 0, 1, 170),
            (0x06, 0, 0, 0x00050000 | answer),
            (0x06, 0, 0, 0x7FFF0000),
        ]
        program = ctypes.create_string_buffer(
            b"".join(struct.pack("HBBI", *part) for part in parts)
        )
        call(
            SYS_SECCOMP,
            1,
            place.some([0x2, 0x4]),
            struct.pack("HxxxxxxQ", 4, ctypes.addressof(program)),
        )

    def ask() -> list[object]:
        ctypes.set_errno(0)
        return [libc.sethostname(b"x", -1), ctypes.get_errno(), _capabilities()]

    return ask


OF_A_THREAD = {
    "name": _set_name,
    "death_signal": _set_death_signal,
    "nice": _set_nice,
    "policy": _set_policy,
    "affinity": _set_affinity,
    "capabilities": _set_capabilities,
    "secure_bits": _set_secure_bits,
    "credentials": _set_credentials,
    "filter": _set_filter,
}


def _thread(place: Place, setting: Callable[[Place], Callable[[], Any]]) -> Step:
    """In a thread of its own, that answers for itself."""
    asked, asking = os.pipe()
    answers: list[Any] = []
    answered, answering = os.pipe()
    owner = os.getpid()

    def run() -> None:
        try:
            ask = setting(place)
        except OSError as error:
            failed = error.errno

            def ask() -> Any:
                return failed

        os.write(answering, b".")
        while os.read(asked, 1):
            answers.append(ask())
            os.write(answering, b".")

    threading.Thread(target=run, daemon=True).start()
    os.read(answered, 1)
    yield
    while True:
        if os.getpid() != owner:
            yield "of another process"
            continue
        os.write(asking, b"?")
        os.read(answered, 1)
        yield answers.pop()


def _kinds() -> None:
    for name, setting in OF_A_THREAD.items():

        def in_a_thread(
            place: Place, setting: Callable[[Place], Callable[[], Any]] = setting
        ) -> Step:
            return _thread(place, setting)

        in_a_thread.__name__ = f"thread_{name}"
        kind(in_a_thread)
    for name, setting in OF_A_THREAD.items():
        if name == "credentials":
            continue

        def in_the_process(
            place: Place, setting: Callable[[Place], Callable[[], Any]] = setting
        ) -> Step:
            ask = setting(place)
            yield
            while True:
                yield ask()

        in_the_process.__name__ = f"process_{name}"
        kind(in_the_process)


_kinds()


@kind
def limits(place: Place) -> Step:
    names = [
        f"RLIMIT_{name}"
        for name in ("CORE", "MEMLOCK", "MSGQUEUE", "NICE", "RTPRIO", "RTTIME", "SIGPENDING", "RSS")
    ]
    for name in names:
        if place.random.random() < 0.3:
            number = getattr(resource, name)
            hard = resource.getrlimit(number)[1]
            wanted = place.one([1000, 1 << 20, 1 << 30])
            if hard == resource.RLIM_INFINITY or wanted <= hard:
                resource.setrlimit(number, (wanted, place.one([hard, wanted])))
    yield
    while True:
        yield {name: resource.getrlimit(getattr(resource, name)) for name in names}


@kind
def flags_of_the_process(place: Place) -> Step:
    """What prctl keeps for a process: (to set, its argument, to ask)."""
    for option, value in (
        (4, 1),
        (4, 0),
        (8, 1),
        (36, 1),
        (38, 1),
        (41, 1),
        (57, 1),
        (67, 1),
        (33, 1),
    ):
        if place.random.random() < 0.25:
            try:
                _prctl(option, value, 1 if option == 33 else 0)
            except OSError:
                continue
    yield
    while True:
        yield [
            _prctl(3),
            _prctl(7),
            _asked(37),
            _prctl(39),
            _prctl(42),
            _prctl(58),
            _prctl(68),
            _prctl(34),
        ]


@kind
def mask_and_folder(place: Place) -> Step:
    os.mkdir(place.path("here"))
    os.chdir(place.path("here"))
    os.umask(place.one([0, 0o77, 0o777]))
    if place.random.random() < 0.3:
        os.rmdir(place.path("here"))
    yield
    while True:
        mask = os.umask(0)
        os.umask(mask)
        yield [mask, os.readlink("/proc/self/cwd").removeprefix(place.folder)]


@kind
def files_about_oneself(place: Place) -> Step:
    """What is set through /proc/self."""
    wanted = {"oom_score_adj": ["-500", "700"], "comm": ["other"]}
    for name, values in wanted.items():
        if place.random.random() < 0.4:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(place.one(values))
    yield
    while True:
        found = {}
        for name in wanted:
            with open(f"/proc/self/{name}") as file:
                found[name] = file.read().strip()
        yield found


@kind
def barriers(place: Place) -> Step:
    """membarrier: what the process has registered for."""
    for command in (1 << 2, 1 << 4, 1 << 6):
        if place.random.random() < 0.5:
            call(SYS_MEMBARRIER, command, 0, 0)
    yield
    while True:
        yield call(SYS_MEMBARRIER, 1 << 9, 0, 0)
