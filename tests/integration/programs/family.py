"""Processes: groups, sessions, a stopped job, a background job, threads, a zombie, an orphan
adopted by a subreaper root.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

from animal import Check, libc, serve, sleeper

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
answers_read, answers_write = os.pipe()


def talker(
    name: str, *, group: bool = False, session: bool = False, threads: int = 0
) -> tuple[int, int]:
    """A child that answers each byte on its pipe with its name, PID, group and session; its PID and
    the pipe.
    """
    commands_read, commands_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(commands_write)
        if session:
            os.setsid()
        elif group:
            os.setpgid(0, 0)
        hold = threading.Lock()
        hold.acquire()
        for number in range(threads):
            thread = threading.Thread(target=hold.acquire, daemon=True)
            thread.name = f"{name}-{number}"
            thread.start()
        os.write(answers_write, _who(name))
        while os.read(commands_read, 1):
            os.write(answers_write, _who(name))
        os._exit(0)
    os.close(commands_read)
    os.read(answers_read, 4096)
    return pid, commands_write


def _who(name: str) -> bytes:
    ids = f"{os.getpid()} {os.getpgid(0)} {os.getsid(0)} {os.getppid()}"
    return f"{name} {ids} {threading.active_count()}".encode()


def ask(pipe: int) -> str:
    os.write(pipe, b"?")
    return os.read(answers_read, 4096).decode()


own_session, own_group = os.getsid(0), os.getpgid(0)
plain, plain_pipe = talker("plain", threads=5)
background, background_pipe = talker("background", group=True)
session, session_pipe = talker("session", session=True, threads=2)
stopped, stopped_pipe = talker("stopped", group=True)
os.kill(stopped, signal.SIGSTOP)
os.waitpid(stopped, os.WUNTRACED)

# A whole pipeline of three in one group whose leader ended and was reaped: the group's id belongs
# to no process any more.
leaderless_read, leaderless_write = os.pipe()
leader = os.fork()
if leader == 0:
    os.setpgid(0, 0)
    if os.fork() == 0:
        os.write(leaderless_write, str(os.getpid()).encode())
        sleeper()
    os._exit(0)
os.waitpid(leader, 0)
member = int(os.read(leaderless_read, 64))

# A double-forked daemon in a session of its own, adopted by this root.
daemon_read, daemon_write = os.pipe()
middle = os.fork()
if middle == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(daemon_write, str(os.getpid()).encode())
        sleeper()
    os._exit(0)
os.waitpid(middle, 0)
daemon = int(os.read(daemon_read, 64))

zombies = {}  # PID -> exit code
for code in (7, 128, 255):
    zombies[zombie := os.fork()] = code
    if zombie == 0:
        os._exit(code)
    os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)

deep_read, deep_write = os.pipe()
deep = os.fork()
if deep == 0:
    for _ in range(6):
        if os.fork() != 0:
            sleeper()
    os.write(deep_write, b"%d" % os.getpid())
    sleeper()
deepest = int(os.read(deep_read, 64))
zombie_pending = True


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def check(found: Check) -> None:
    global zombie_pending
    me = os.getpid()
    found.equal("own session and group", (os.getsid(0), os.getpgid(0)), (own_session, own_group))
    found.equal("plain child", ask(plain_pipe), f"plain {plain} {own_group} {own_session} {me} 6")
    found.equal(
        "background job",
        ask(background_pipe),
        f"background {background} {background} {own_session} {me} 1",
    )
    found.equal(
        "session leader", ask(session_pipe), f"session {session} {session} {session} {me} 3"
    )
    found.equal("the group without its leader", os.getpgid(member), leader)
    found.equal("the orphans' parent", (parent_of(member), parent_of(daemon)), (me, me))
    found.equal("the daemon's session", os.getsid(daemon), middle)
    os.kill(deepest, 0)
    value = ctypes.c_int()
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0)
    found.equal("subreaper", value.value, 1)
    if zombie_pending:
        zombie_pending = False
        found.equal("stopped job", state_of(stopped), "T")
        codes = {pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in zombies}
        found.equal("zombies", codes, zombies)
        os.kill(stopped, signal.SIGCONT)
        found.equal(
            "continued job", ask(stopped_pipe), f"stopped {stopped} {stopped} {own_session} {me} 1"
        )
        orphan = os.fork()
        if orphan == 0:
            if os.fork() == 0:
                time.sleep(0.01)
                os._exit(9)
            os._exit(0)
        os.waitpid(orphan, 0)
        found.equal(
            "a new orphan comes to the subreaper",
            os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1]),
            9,
        )


serve(check)
