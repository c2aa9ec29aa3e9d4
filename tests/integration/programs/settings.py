"""What a process can ask about itself: name, limits, priority, credentials, capabilities, filters,
and more.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct

from animal import Check, libc, path, serve

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG, PR_SET_DUMPABLE, PR_GET_DUMPABLE = 1, 2, 4, 3
PR_SET_NAME, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_THP_DISABLE, PR_GET_THP_DISABLE = (
    15,
    38,
    22,
    41,
    42,
)
PR_CAPBSET_DROP, PR_SET_SECUREBITS, PR_GET_SECUREBITS, PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = (
    24,
    28,
    27,
    29,
    30,
)
CAP_SYS_TIME, CAP_SYS_MODULE = 25, 16
SYS_GETCPU_X86 = 309

os.mkdir(path("place"))
os.chdir(path("place"))
os.umask(0o027)
os.environ["SET_WHILE_RUNNING"] = "yes"
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 600))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_STACK, (4 << 20, 16 << 20))
os.nice(5)
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("321")
libc.prctl(PR_SET_NAME, b"it's (a) name", 0, 0, 0)
libc.prctl(PR_CAPBSET_DROP, CAP_SYS_MODULE, 0, 0, 0)
libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
os.setgroups([10, 20, 30])
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
processors = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, processors[:1])


class CapHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def capabilities() -> list[int]:
    """Effective, permitted, inheritable, low and high words."""
    data = (ctypes.c_uint32 * 6)()
    libc.capget(ctypes.byref(CapHeader(0x20080522, 0)), data)
    return list(data)


caps = capabilities()
caps[0] &= ~(1 << CAP_SYS_TIME)
caps[1] &= ~(1 << CAP_SYS_TIME)
libc.capset(ctypes.byref(CapHeader(0x20080522, 0)), (ctypes.c_uint32 * 6)(*caps))
caps = capabilities()

libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
# A filter that answers sethostname with ENOTNAM and allows the rest (x86-64: 170, elsewhere 161).
number = 170 if os.uname().machine == "x86_64" else 161
program = struct.pack("HBBI", 0x20, 0, 0, 0) + struct.pack("HBBI", 0x15, 0, 1, number)
program += struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | 118) + struct.pack(
    "HBBI", 0x06, 0, 0, 0x7FFF0000
)
buffer = ctypes.create_string_buffer(program, len(program))
installed = libc.prctl(
    PR_SET_SECCOMP,
    2,
    ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(buffer))),
    0,
    0,
)

go_read, go_write = os.pipe()
answer_read, answer_write = os.pipe()
if os.fork() == 0:
    libc.prctl(PR_SET_PDEATHSIG, 12, 0, 0, 0)
    while os.read(go_read, 1):
        value = ctypes.c_int()
        libc.prctl(PR_GET_PDEATHSIG, ctypes.byref(value), 0, 0, 0)
        os.write(answer_write, b"%d" % value.value)
    os._exit(0)


def check(found: Check) -> None:
    found.equal("seccomp installed", installed, 0)
    found.equal("cwd", os.getcwd(), path("place"))
    mask = os.umask(0o077)
    os.umask(mask)
    found.equal("umask", oct(mask), oct(0o027))
    found.equal("limits", resource.getrlimit(resource.RLIMIT_NOFILE), (300, 600))
    found.equal("stack limit", resource.getrlimit(resource.RLIMIT_STACK), (4 << 20, 16 << 20))
    found.equal("nice", os.getpriority(os.PRIO_PROCESS, 0), 5)
    found.equal("processors", sorted(os.sched_getaffinity(0)), processors[:1])
    found.equal("policy", os.sched_getscheduler(0), os.SCHED_BATCH)
    with open("/proc/self/comm") as file:
        found.equal("name", file.read(), "it's (a) name\n")
    with open("/proc/self/oom_score_adj") as file:
        found.equal("oom_score_adj", file.read().strip(), "321")
    found.equal("groups", sorted(os.getgroups()), [10, 20, 30])
    found.equal("capabilities", capabilities(), caps)
    found.equal("thp disabled", libc.prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0), 1)
    found.equal("environment", os.environ.get("SET_WHILE_RUNNING"), "yes")
    ctypes.set_errno(0)
    found.equal("filtered call", (libc.sethostname(b"x", 1), ctypes.get_errno()), (-1, 118))
    os.write(go_write, b"?")
    found.equal("child's parent-death signal", os.read(answer_read, 16), b"12")


serve(check)
