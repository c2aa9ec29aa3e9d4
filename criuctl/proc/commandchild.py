"""Start a command next to a session's terminal, with its output in memory files.

A separate program: ``python commandchild.py NAME CWD USER REFUSED COMMAND...``.

It is executed in a child of the session's init (`joined_process`), in which all signals are
blocked.  It leads a session of its own without a terminal, and makes four memory files named after
NAME: standard input, output and error, and one for the exit code.  Then it stops itself: its
starter opens the files, fills the first, and continues it.  COMMAND (one word: a line of shell)
runs below a small ``sh`` that waits for it and writes its exit code.  So a checkpoint of the
session has the command with all that it has printed, and a restored one still gets its exit code.

CWD is where it runs.  USER is "" or a user to become.  REFUSED is as for `sessionchild`.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys

# What sh itself says of a command that was killed is no output of the command.
SCRIPT = (
    "exec 4>&2 2>/dev/null; trap : HUP INT QUIT TERM; "
    '"$@" 2>&4 3>&- 4>&-; printf \'%s\\n\' "$?" >&3'
)
FILES = ("in", "out", "err", "code")  # descriptors 0 to 3
_CANNOT_BEGIN = 126  # as a shell reports a command that cannot be executed


def _become(user: str, environment: dict[bytes, bytes]) -> None:
    """Become the user, with the groups and variables that a login gives."""
    import pwd

    try:
        entry = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
    except KeyError:
        raise OSError(2, "no such user", user) from None
    if entry.pw_uid != os.geteuid():
        os.initgroups(entry.pw_name, entry.pw_gid)
        os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
        os.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)
    for name, value in (
        ("HOME", entry.pw_dir),
        ("USER", entry.pw_name),
        ("LOGNAME", entry.pw_name),
        ("SHELL", entry.pw_shell or "/bin/sh"),
    ):
        environment[name.encode()] = os.fsencode(value)


def _make_files(name: str) -> None:
    """Make the files, as descriptors 0 to 3, and close all others."""
    made = [os.memfd_create(f"{name}-{kind}", os.MFD_CLOEXEC) for kind in FILES]
    # Out of the way of the numbers that are wanted, then to them.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, len(FILES)) for fd in made]
    for number, fd in enumerate(high):
        os.dup2(fd, number, inheritable=True)
    os.closerange(len(FILES), 1 << 16)


def main() -> None:
    """Run the program; never returns."""
    name, cwd, user, refused, *argv = sys.argv[1:]
    with open("/proc/self/environ", "rb") as file:
        pairs = (entry.partition(b"=") for entry in file.read().split(b"\0") if entry)
        environment = {key: value for key, _, value in pairs}
    os.setsid()
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _make_files(name)
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        os.chdir(cwd)
        if refused != "-":
            sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
            import sessionchild  # type: ignore[import-not-found]  # next to this program

            sessionchild.refuse(refused.split(","))
        if user:
            _become(user, environment)
        words = argv if len(argv) > 1 else ["/bin/sh", "-c", argv[0]]
        os.execve("/bin/sh", ["sh", "-c", SCRIPT, name, *words], environment)
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        os.write(2, f"criuctl: {what}{error.strerror}\n".encode())
        os.write(3, b"%d\n" % _CANNOT_BEGIN)
    os._exit(_CANNOT_BEGIN)


if __name__ == "__main__":
    main()
