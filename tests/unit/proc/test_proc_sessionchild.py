"""A session's command is refused io_uring and Multipath TCP, by a seccomp filter, and nothing
else.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from criuctl.proc import sessionchild

ASK = """
import ctypes, os, runpy, socket, sys
child = runpy.run_path(sys.argv[1])
if os.getuid() == 0 and sys.argv[3] == "user":
    os.setgroups(()); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
if sys.argv[2] != "-":
    child["refuse"](sys.argv[2].split(","))
libc = ctypes.CDLL(None, use_errno=True)
ring = libc.syscall(425, 4, ctypes.create_string_buffer(120))
print(0 if ring >= 0 else ctypes.get_errno())
for family, kind, protocol in (
    (2, 1, 262), (10, 1, 262), (2, 1 | socket.SOCK_CLOEXEC, 262), (2, 1, 0), (2, 1, 6), (1, 1, 0)
):
    try:
        socket.socket(family, kind, protocol).close()
        print(0)
    except OSError as error:
        print(error.errno)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("NoNewPrivs")))
"""
HAD, NO_RING, NO_MPTCP = 0, 38, 93  # ENOSYS, EPROTONOSUPPORT


@pytest.mark.parametrize(
    ("refused", "user", "ring", "mptcp", "gave_up"),
    [
        ("-", "root", HAD, HAD, 0),
        ("io_uring", "root", NO_RING, HAD, 0),
        ("mptcp", "root", HAD, NO_MPTCP, 0),
        ("io_uring,mptcp", "root", NO_RING, NO_MPTCP, 0),
        # a default refusal does not disable setuid programs
        ("mptcp", "user", HAD, HAD, 0),
        ("io_uring,mptcp", "user", NO_RING, NO_MPTCP, 1),
    ],
)
def test_what_is_refused(refused: str, user: str, ring: int, mptcp: int, gave_up: int) -> None:
    argv = [sys.executable, "-I", "-c", ASK, sessionchild.__file__, refused, user]
    said = subprocess.run(
        argv, capture_output=True, text=True, timeout=60, check=True, cwd="/"
    ).stdout
    assert [int(word) for word in said.split()] == [
        ring,
        mptcp,
        mptcp,
        mptcp,
        HAD,
        HAD,
        HAD,
        gave_up,
    ]


def test_nothing_is_refused_by_an_empty_filter() -> None:
    assert sessionchild.filter_of((), sessionchild._SOCKET_CALLS) == [(0x06, 0, 0, 0x7FFF0000)]
