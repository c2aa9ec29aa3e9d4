"""The leak guard: what a test left behind on the machine, by name.

A `State` is everything that criuctl or CRIU could leave: processes, stopped tasks, mounts, named
net namespaces, nftables tables, iptables chains, listening sockets, and entries of the folders
where temporary things live.  The guard takes one before and one after a test; what is new and
belongs to the test is a leak.  A thing belongs to the test when it carries the test's token (every
process that a test starts has it in its environment, every folder in its name) or when only criuctl
or CRIU could have made it.  So tests of several people may run on one machine.

Endings take a moment (a killed process's mounts, a netlink table), so the guard asks again for a
while before it complains.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .keeper import start_time
from .oracle import listdir, read, status_of

TEMPORARY = (
    "/tmp",
    "/dev/shm",
    "/run",
    "/run/criuctl",
    "/run/netns",
    "/var/tmp",
    "/var/lib/criuctl",
    "/var/cache/criuctl",
)
TOKEN = re.compile(rb"czoo[0-9a-f]{10}")  # of any test
OURS = re.compile(r"criu|cr-", re.IGNORECASE)
# What is kept of what the kernel can do, and the folder of the locks of this host, meant to stay;
# and what other programs of this project make at the same time.
# The quickstart, which may run in the other half of the tests, uses the default folders: on a new
# machine it makes them.
_DEFAULTS = (
    r"^/run/criuctl(/locks|/features|/inside)?$"
    r"|^/var/lib/criuctl/(sessions|latest|stores|store|events\.[a-z.]+)$"
)
IGNORED = re.compile(rf"criu\.kdat|{_DEFAULTS}|criuctl-(bench|setup|quickstart)")
SETTLE_SECONDS = 30.0
# what does not bear our token may belong to a dump of another user, and go with it
OTHERS_SECONDS = 30.0


@dataclass
class State:
    """What is there now; every value is a readable name.  It is taken before any process of the
    test, and then again.
    """

    processes: dict[tuple[int, int], str] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)
    mounts: set[str] = field(default_factory=set)
    tables: set[str] = field(default_factory=set)
    entries: set[str] = field(default_factory=set)
    listeners: dict[str, str] = field(default_factory=dict)


def processes_of(token: str) -> dict[tuple[int, int], str]:
    """Identity -> description of every process that carries `token` in environment, command line or
    folder, zombies left out.
    """
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        pid = int(name)
        if _mentions(pid, token):
            started = start_time(pid)
            if started is not None:
                found[pid, started] = _describe(pid)
    return found


def _mentions(pid: int, token: str) -> bool:
    needle = token.encode()
    try:
        for part in ("environ", "cmdline"):
            if needle in Path(f"/proc/{pid}/{part}").read_bytes():
                return True
        return token in os.readlink(f"/proc/{pid}/cwd")
    except OSError:  # it ended, or it is a kernel thread
        return False


def _describe(pid: int) -> str:
    try:
        command = (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
    except OSError:
        command = ""
    return (
        f"process {pid} ({command[:120] or 'no command line'}; "
        f"{status_of(f'/proc/{pid}/status').get('State', 'gone')})"
    )


def _of_another(pid: int, token: str) -> bool:
    """Whether the process bears the token of another test, which has a guard of its own."""
    borne = {
        found.decode()
        for part in ("environ", "cmdline")
        for found in TOKEN.findall(_bytes(f"/proc/{pid}/{part}"))
    }
    return bool(borne) and token not in borne


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _orphans(token: str) -> dict[tuple[int, int], str]:
    """CRIU processes without a parent, and inits of private namespaces without any other process:
    nothing will ever end them.
    """
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        lonely = "nsinit" in read(f"/proc/{name}/cmdline") and not read(
            f"/proc/{name}/task/{name}/children"
        )
        criu = (
            read(f"/proc/{name}/comm") == "criu\n"
            and status_of(f"/proc/{name}/status").get("PPid") == "1"
        )
        if (lonely or criu) and not _of_another(int(name), token):
            started = start_time(int(name))
            if started is not None:
                found[int(name), started] = _describe(int(name))
    return found


def nft_tables() -> set[str]:
    """Names of the nftables tables of this net namespace, asked over netlink (the nft program may
    not be installed).
    """
    netlink_netfilter, get_table, dump_flags, table_name = 12, 10 << 8 | 1, 0x301, 1
    found: set[str] = set()
    try:
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, netlink_netfilter)
    except OSError:
        return set()  # a kernel without netfilter has no tables
    with sock:
        sock.send(struct.pack("=IHHIIBBH", 20, get_table, dump_flags, 1, 0, 0, 0, 0))
        while True:
            data = sock.recv(1 << 16)
            at = 0
            while at < len(data):
                length, kind = struct.unpack_from("=IH", data, at)
                if kind in (2, 3):
                    return found
                attribute = at + 20
                while attribute < at + length:
                    size, name = struct.unpack_from("=HH", data, attribute)
                    if name == table_name:
                        found.add(data[attribute + 4 : attribute + size].rstrip(b"\0").decode())
                    attribute += (size + 3) & ~3
                at += (length + 3) & ~3


def _iptables_chains() -> set[str]:
    """CRIU's chains in the legacy tables, where those are in use at all."""
    if (
        not os.path.exists("/proc/net/ip_tables_names")
        or not Path("/proc/net/ip_tables_names").read_text()
    ):
        return set()
    saved = subprocess.run(
        ["iptables-save"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return {line.split()[0] for line in saved.splitlines() if line.startswith(":CRIU")}


def _listeners() -> dict[str, str]:
    """Listening TCP sockets of this net namespace: what /proc/PID/fd calls each, and a readable
    name.
    """
    found: dict[str, str] = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            asked = _ask_for_listeners(family)
        # a kernel that answers no such questions has a file to read, which takes it longer
        except OSError:
            path = Path(f"/proc/net/{name}")
            lines = (
                [line.split() for line in path.read_text().splitlines()[1:]]
                if path.exists()
                else []
            )
            asked = {
                int(line[9]): int(line[1].rpartition(":")[2], 16)
                for line in lines
                if line[3] == "0A"
            }
        found |= {
            f"socket:[{inode}]": f"listening {name} socket on port {port}"
            for inode, port in asked.items()
        }
    return found


def _ask_for_listeners(family: int) -> dict[int, int]:
    """Inode -> port of the listening TCP sockets of a family, asked over netlink."""
    netlink_sock_diag, sock_diag_by_family, dump_flags, listening = 4, 20, 0x301, 1 << 10
    found: dict[int, int] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, netlink_sock_diag) as sock:
        question = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, 0, 0, listening)
        sock.send(
            struct.pack("=IHHII", 16 + len(question), sock_diag_by_family, dump_flags, 0, 0)
            + question
        )
        while True:
            data = sock.recv(1 << 16)
            at = 0
            while at < len(data):
                length, kind = struct.unpack_from("=IH", data, at)
                if kind == 3:
                    return found
                if kind == 2:
                    raise OSError(-struct.unpack_from("=i", data, at + 16)[0], "sock_diag")
                found[struct.unpack_from("=I", data, at + 84)[0]] = struct.unpack_from(
                    ">H", data, at + 20
                )[0]
                at += (length + 3) & ~3


def _new_listeners(before: State, now: State, token: str) -> list[str]:
    """Listening sockets that were not there before, and that processes of this test hold, or no
    process any more.
    """
    old = set(before.listeners.values())
    lines = {
        held: text
        for held, text in now.listeners.items()
        if held not in before.listeners and text not in old
    }
    for pid in (name for name in os.listdir("/proc") if lines and name.isdigit()):
        if not _mentions(int(pid), token):
            try:
                held = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
            except OSError:
                continue  # it ended meanwhile; what it held is closed
            for target in held:
                lines.pop(target, None)
    return sorted(lines.values())


def _stopped(processes: Mapping[tuple[int, int], str]) -> set[str]:
    found = set()
    for (pid, _), text in processes.items():
        for task in listdir(f"/proc/{pid}/task"):
            if status_of(f"/proc/{pid}/task/{task}/status").get("State", "R")[0] in "Tt":
                found.add(f"stopped task {task} of {text}")
    return found


def _entries() -> set[str]:
    return {f"{folder}/{name}" for folder in TEMPORARY for name in listdir(folder)}


def look(token: str) -> State:
    """The state of the machine, as far as it concerns the test of this token."""
    ours = processes_of(token)
    return State(
        processes=ours | _orphans(token),
        stopped=_stopped(ours),
        mounts={
            line.split(" ", 3)[3] for line in Path("/proc/self/mountinfo").read_text().splitlines()
        },
        tables={f"nftables table {name}" for name in nft_tables()}
        | {f"iptables chain {name}" for name in _iptables_chains()},
        entries=_entries(),
        listeners=_listeners(),
    )


def leftovers(before: State, token: str, *, allowed: frozenset[str] = frozenset()) -> list[str]:
    """What is there that was not there before and that this test is to blame for."""

    def blame(text: str) -> bool:
        return (
            text not in allowed
            and not IGNORED.search(text)
            and (token in text or OURS.search(text) is not None)
        )

    began = time.monotonic()
    steady: set[str] | None = None  # what was there at every look: others' dumps come and go
    while True:
        now = look(token)
        found = [
            text for identity, text in now.processes.items() if identity not in before.processes
        ]
        found += sorted(now.stopped - before.stopped)
        found += _new_listeners(before, now, token)
        found += [f"mount {text}" for text in sorted(now.mounts - before.mounts) if blame(text)]
        found += [text for text in sorted(now.tables - before.tables) if blame(text)]
        found += [f"entry {text}" for text in sorted(now.entries - before.entries) if blame(text)]
        steady = set(found) if steady is None else steady & set(found)
        surely_ours = any(token in text for text in steady)
        if not steady or time.monotonic() - began > (
            SETTLE_SECONDS if surely_ours else OTHERS_SECONDS
        ):
            return sorted(steady)
        time.sleep(0.05)


def end_processes(token: str, timeout: float = 60) -> None:
    """Kill every process that carries the token: only what the test itself started."""
    deadline = time.monotonic() + timeout
    while found := processes_of(token):
        for pid, started in found:
            if start_time(pid) == started:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"cannot end {', '.join(found.values())}")
        time.sleep(0.01)
