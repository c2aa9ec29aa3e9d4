"""Children that have ended, are stopped, have sessions, parents and ends of their own."""

from __future__ import annotations

import contextlib
import os
import resource
import signal

from . import Place, Step, call, kind

SYS_CLONE = 56
CLONE_FILES, CLONE_IO, CLONE_SYSVSEM = 0x400, 0x80000000, 0x40000


def _states(child: int) -> list[object]:
    found: list[object] = []
    try:
        result = os.waitid(
            os.P_PID,
            child,
            os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOHANG | os.WNOWAIT | 0x40000000,
        )
        found.append([result.si_status, result.si_code] if result else None)
    except OSError as error:
        found.append(error.errno)
    return found


@kind
def ended(place: Place) -> Step:
    """Zombies, by an exit code or a signal."""
    child = os.fork()
    how = place.one([0, 1, 255, -signal.SIGKILL, -signal.SIGTERM])
    if not child:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if how < 0:
            if how != -signal.SIGKILL:
                signal.signal(-how, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            os.kill(os.getpid(), -how)
        os._exit(how)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    yield
    while True:
        yield _states(child)


@kind
def stopped(place: Place) -> Step:
    """A child that is stopped, reported to its parent or not yet, and goes on later."""
    child = os.fork()
    if not child:
        while True:
            signal.pause()
    os.kill(child, signal.SIGSTOP)
    os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOWAIT)
    if place.random.random() < 0.5:
        os.waitpid(child, os.WUNTRACED)
    yield
    while True:
        with open(f"/proc/{child}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
        yield "stopped" if state == "T" else "goes on"
        os.kill(child, signal.SIGCONT)
        os.waitid(os.P_PID, child, os.WCONTINUED | os.WNOWAIT | os.WNOHANG)


@kind
def of_a_group(place: Place) -> Step:
    """In a group or a session of its own, whose leader may have ended: what it leaves is ours."""
    call(157, 36, 1, 0, 0, 0)
    r, w = os.pipe()
    child = os.fork()
    if not child:
        leader = place.one(["group", "session"])
        if leader == "group":
            os.setpgid(0, 0)
        else:
            os.setsid()
        follower = os.fork() if place.random.random() < 0.7 else 1
        if follower:
            os.write(w, b".")
        gone = leader == "group" and place.random.random() < 0.4
        if follower and gone and follower != 1:
            os._exit(0)
        while True:
            signal.pause()
    os.read(r, 1)
    os.close(w)
    yield
    while True:
        try:
            found: list[object] = [os.getpgid(child) == child, os.getsid(child) == child]
        except ProcessLookupError:
            found = ["gone"]
        yield [*found, _states(child)]


@kind
def odd_clone(place: Place) -> Step:
    """A child that shares its descriptors with us."""
    shares = place.some([CLONE_FILES, CLONE_IO, CLONE_SYSVSEM])
    asked, ask = os.pipe()
    answered, answer = os.pipe()
    child = call(SYS_CLONE, shares | signal.SIGCHLD, 0, 0, 0, 0)
    if not child:
        while os.read(asked, 1) == b"?":
            os.open("/dev/null", os.O_RDONLY)
            os.write(answer, b".")
        os._exit(9)
    yield
    while True:
        before = os.listdir("/proc/self/fd")
        os.write(ask, b"?")
        os.read(answered, 1)
        yield len(os.listdir("/proc/self/fd")) - len(before)


@kind
def adopted(place: Place) -> Step:
    """A grandchild whose parent has ended, under a process that adopts (or its parent does, and so
    on).
    """
    call(157, 36, 1, 0, 0, 0)
    r, w = os.pipe()
    child = os.fork()
    if not child:
        grandchild = os.fork()
        if not grandchild:
            if place.random.random() < 0.5:
                os.setsid()
            while True:
                signal.pause()
        os.write(w, b"%d\n" % grandchild)
        os._exit(0)
    grandchild = int(os.read(r, 20))
    with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored it leaves nothing
        os.waitpid(child, 0)
    made = os.getpid()
    yield
    while True:
        with open(f"/proc/{grandchild}/stat") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
        yield [parent == made, os.getpgid(grandchild) == grandchild]
