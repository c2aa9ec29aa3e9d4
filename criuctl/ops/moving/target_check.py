"""Whether a tree of another host can run here: everything that is missing, before the source
freezes anything.

`examine` takes the needs that the source has gathered (`criuctl.ops.moving.needs`). They come from
another host and are not trusted. They are validated first, and then only used to ask the kernel and
to examine absolute paths: `stat`, and for programs the ELF notes. Nothing is opened that could
block, nothing is written, and no contents are sent back.

The restore's own plan (`criuctl.restore.plan`) decides, on a manifest that is made from the needs;
mapped and read files are judged by `criuctl.files.judgement`. In addition, the checks here and in
the modules `target_files`, `target_addresses` and `target_resources` find what a restore would only
find when CRIU refuses: build-ids, modes, working folders, addresses of listeners, free space.
"""

from __future__ import annotations

import grp
import os
import platform
import pwd
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from ...config import Config
from ...criu import binary
from ...errors import CriuctlError
from ...host.registry import Registry
from ...proc.procfs import read_raw
from ...report import Finding
from ...restore.outcome import check_not_running
from .. import doctor
from .arrival import Arrival
from .needs_format import read
from .target_addresses import addresses
from .target_files import judge_files
from .target_resources import memory, room, terminals

_CLOCK = 5.0  # seconds of difference that are not reported
_ORDER = {"error": 0, "warning": 1, "info": 2}

Check = Callable[[Arrival], Iterable[Finding]]


def examine(needs: Mapping[str, Any], config: Config, clock: float) -> list[Finding]:
    """Return all findings about the tree that `needs` describes, errors first; without errors it
    may move here.

    `clock` is the source's clock at its request. Raise only `Damaged` or `UnsupportedFormat`, for
    needs that are not valid.
    """
    return findings(Arrival(read(needs), config, clock), (*HOST_CHECKS, *TREE_CHECKS))


def findings(coming: Arrival, checks: Iterable[Check]) -> list[Finding]:
    """Return the findings of these checks, errors first."""
    found: list[Finding] = []
    for check in checks:
        try:
            found += check(coming)
        except CriuctlError as error:
            found.append(Finding("error", error.code, error.message, error.hint))
        except OSError as error:
            what = check.__name__.strip("_").replace("_", " ")
            found.append(
                Finding(
                    "warning",
                    "check-incomplete",
                    f"the check of the {what} was not possible: {error}",
                )
            )
    return sorted(found, key=lambda f: _ORDER[f.level])


# -- the host


def _host(coming: Arrival) -> Iterator[Finding]:
    """Check rights, CRIU, kernel and programs: the findings of `doctor`, raised to errors where
    this tree depends on them.
    """
    needed: dict[str, str] = {}
    # the finding `capabilities` matters only to a tree with users or groups other than root
    others = {*coming.needs.users, *coming.needs.groups} - {"0"}
    tcp = any(c.protocol == "tcp" and not c.waits for c in coming.needs.connections)
    if tcp:
        needed["nftables"] = "the tree has TCP connections"
    if any(c.external and c.policy == "reconnect" for c in coming.needs.connections):
        needed["pidfd-getfd"] = "the tree has connections that are to be reconnected"
    for finding in doctor.readiness(coming.config):
        if finding.level == "warning" and finding.code in needed:
            yield replace(finding, level="error", text=f"{finding.text}; {needed[finding.code]}")
        elif finding.level != "info" and (others or finding.code != "capabilities"):
            yield finding
    for kind, entry in coming.needs.namespaces.items():
        if entry.get("mode") != "host" and not os.path.exists(f"/proc/self/ns/{kind}"):
            text = f"this kernel has no {kind} namespaces, and the tree runs in one of its own"
            yield Finding("error", "namespaces", text, "Use a distribution's stock kernel.")


def _criu(coming: Arrival) -> Iterator[Finding]:
    theirs = coming.needs.criu
    if not theirs:
        return
    found = binary.find(coming.config)
    numbers = _release(found.recorded_version)
    ours = numbers if len(numbers) == 2 else found.version()
    if ours[:2] < theirs[:2]:
        here = found.recorded_version or _dotted(ours)
        text = (
            f"CRIU here is {here}, the source's is {_dotted(theirs)}; an older one may not "
            "understand its images"
        )
        yield Finding(
            "warning",
            "criu-older",
            text,
            "Install the same CRIU on both hosts (`criuctl doctor --fix`).",
        )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _kernel(coming: Arrival) -> Iterator[Finding]:
    ours, theirs = platform.release(), coming.needs.host.kernel
    if _release(ours) < _release(theirs):
        text = f"the kernel here is older ({ours}) than the source's ({theirs[:60]})"
        yield Finding(
            "info",
            "kernel-older",
            text,
            "Features of newer kernels that the tree uses are missing here.",
        )


def _release(text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in text.split("-", maxsplit=1)[0].split(".")[:2]:
        if not part.isdigit() or len(part) > 6:
            break
        numbers.append(int(part))
    return tuple(numbers)


def _session(coming: Arrival) -> Iterator[Finding]:
    check_not_running(coming.config, Registry(coming.config), coming.needs.session.name, copy=False)
    yield from ()


def _clock(coming: Arrival) -> Iterator[Finding]:
    ahead = coming.now - coming.clock
    if abs(ahead) > _CLOCK:
        yield Finding(
            "warning",
            "clock",
            f"the clock here is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the "
            "source's: timers of the tree that expire at a time of day are off by that",
            "Have both hosts set their clocks by NTP (timedatectl set-ntp true).",
        )
    theirs = coming.needs.monotonic + (coming.clock - coming.needs.time)
    gone = time.monotonic() - (time.time() - coming.now) - theirs
    if gone < -_CLOCK and coming.needs.namespaces.get("time", {}).get("mode") != "dumped":
        yield Finding(
            "warning",
            "monotonic-clock",
            f"this host has been up {-gone:.0f} s less than the source: its CLOCK_MONOTONIC "
            "jumps back by that, and a program that waits until a moment on it waits that much "
            "longer",
            "Start such programs in a time namespace (`unshare --time`), which keeps the clock.",
        )


# -- what the restore's plan says


def _plan(coming: Arrival) -> Iterator[Finding]:
    """Check architecture, CPU, PIDs, ports and connections; `_users` checks users, by name."""
    yield from (f for f in coming.plan.findings if f.code != "user")


def _pids(coming: Arrival) -> Iterator[Finding]:
    highest = max(coming.needs.ids, default=0)
    most = int(read_raw("/proc/sys/kernel/pid_max"))
    if highest >= most:
        text = f"the tree has the PID {highest}, the highest here is {most - 1}"
        yield Finding(
            "error",
            "pid-max",
            text,
            f"`sysctl kernel.pid_max={max(4194304, highest + 1)}` on this host.",
        )


# -- files


def _files(coming: Arrival) -> Iterable[Finding]:
    return judge_files(
        coming.needs.files, coming.policy, {process.uid for process in coming.needs.processes}
    )


# -- users


def _users(coming: Arrival) -> Iterator[Finding]:
    for uid, name in coming.needs.users.items():
        yield from _identity(
            "user",
            int(uid),
            name,
            lambda i: pwd.getpwuid(i).pw_name,
            lambda n: pwd.getpwnam(n).pw_uid,
        )
    for gid, name in coming.needs.groups.items():
        yield from _identity(
            "group",
            int(gid),
            name,
            lambda i: grp.getgrgid(i).gr_name,
            lambda n: grp.getgrnam(n).gr_gid,
        )


def _identity(
    what: str,
    number: int,
    name: str,
    name_of: Callable[[int], str],
    number_of: Callable[[str], int],
) -> Iterator[Finding]:
    here, elsewhere = "", None
    with suppress(KeyError, OverflowError):
        here = name_of(number)
    with suppress(KeyError, ValueError):
        elsewhere = number_of(name) if name and "\0" not in name else None
    if here == name:
        return
    hint = f"The tree keeps its numbers: give {name} the id {number} here too." if name else ""
    if elsewhere is not None and elsewhere != number:
        text = f"the {what} {name} is {number} on the source and {elsewhere} here"
    elif here:
        text = f"the {what} id {number} is {name or 'without a name'} on the source and {here} here"
    else:
        text, hint = (
            f"the {what} id {number} ({name}) has no name here",
            f"Add the {what} {name} with the id {number}.",
        )
    yield Finding(
        "warning",
        what,
        text + ("" if not here or elsewhere is None else f"; {number} is {here} here"),
        hint,
    )


HOST_CHECKS: tuple[Check, ...] = (_host, _criu, _kernel)
TREE_CHECKS: tuple[Check, ...] = (
    _session,
    _plan,
    _pids,
    addresses,
    _files,
    _users,
    terminals,
    memory,
    room,
    _clock,
)
