"""Whether a tree of another host can run here: everything that is missing, before the source
freezes anything.

`examine` takes the needs that the source has gathered (`criuctl.ops.moving.needs`). They come from
another host and are not trusted. They are validated first, and then only used to ask the kernel and
to examine absolute paths: `stat`, and for programs the ELF notes. Nothing is opened that could
block, nothing is written, and no contents are sent back.

The restore's own plan (`criuctl.restore.plan`) decides, on a manifest that is made from the needs;
mapped and read files are judged by `criuctl.files.judgement`. In addition this module checks what a
restore would only find when CRIU refuses: build-ids, modes, working folders, addresses of
listeners, free space.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import pwd
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from msgspec import Struct, field
from msgspec.structs import replace

from ...checkpoint.connection_record import endpoint
from ...checkpoint.manifest import Manifest
from ...config import Config
from ...connections import rule_parsing
from ...criu import binary
from ...errors import CriuctlError
from ...files.judgement import Policy
from ...hooks.contract import RECONNECT
from ...hooks.find import executables
from ...host.registry import Registry
from ...proc.procfs import memory_info, read_raw
from ...proc.scratch import Scratch
from ...quoting import quoted
from ...report import Finding
from ...restore.host_facts import HostFacts, PlanOptions
from ...restore.observe import is_local, observe
from ...restore.outcome import check_not_running
from ...restore.plan import ADD_ADDRESS, RestorePlan, make_plan
from .. import doctor
from .needs_format import Needs, read
from .target_files import judge_files

_CLOCK = 5.0  # seconds of difference that are not reported
_ORDER = {"error": 0, "warning": 1, "info": 2}
_MIB = 1 << 20
_ANY = ("0.0.0.0", "::", "")


class Arrival(Struct, dict=True):
    """The tree that is to move here, and this host."""

    needs: Needs
    config: Config
    clock: float  # the source's, at its request
    now: float = field(default_factory=time.time)  # this host's, when the request arrived

    @property
    def policy(self) -> Policy:
        """The policy for files that already exist here."""
        return cast("Policy", self.needs.file_conflicts or self.config.file_conflicts)

    @cached_property
    def kept(self) -> frozenset[str]:
        """The addresses that move along, as the kernel writes them."""
        return frozenset(
            str(ipaddress.ip_address(text.partition("@")[0])) for text in self.needs.keep_addresses
        )

    @cached_property
    def facts(self) -> HostFacts:
        """This host, as a restore would see it, with the addresses that move along."""
        needs = self.needs
        manifest, options = self.manifest, self.options
        facts = observe(manifest, needs.ids, (), options)
        moved = {c.local for c in needs.connections if endpoint(c.local)[0] in self.kept}
        # `target_files` checks files and folders, depending on what travels; `_addresses` checks
        # the addresses of listeners.
        found = replace(facts, local_addresses=facts.local_addresses | moved)
        return replace(found, missing_folders=frozenset(), missing_addresses=frozenset())

    @cached_property
    def manifest(self) -> Manifest:
        """The checkpoint's future manifest, as far as a plan reads it; without files, which are
        judged here.
        """
        needs = self.needs
        return Manifest(
            id="0" * 32,
            session=needs.session,
            incarnation=needs.incarnation,
            host=needs.host,
            processes=needs.processes,
            namespaces=needs.namespaces,
            connections=needs.connections,
        )

    @cached_property
    def options(self) -> PlanOptions:
        """The options of the plan, as a restore makes them."""
        return PlanOptions(
            self.needs.pids,
            False,
            self.needs.connections_wish or None,
            self.policy,
            rule_parsing.parse(self.config),
            None,
            frozenset(hook.name for hook in executables(self.config, RECONNECT)),
        )

    @cached_property
    def plan(self) -> RestorePlan:
        """The plan of the restore."""
        return make_plan(self.manifest, self.facts, self.options)


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
            "warning", "criu-older", text, "Install the same CRIU on both hosts (scripts/setup)."
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


def _addresses(coming: Arrival) -> Iterator[Finding]:
    """Check the addresses that sockets are bound to, and those that are to move along."""
    from ...proc import addresses

    for text in coming.needs.keep_addresses:
        wanted, _at, device = text.partition("@")
        here = addresses.find(wanted, None)
        if here is not None:
            yield Finding(
                "error",
                "address-here",
                f"{wanted}, which is to move along, is already an address of {here.device} here",
                f"Remove it: `ip address del {quoted(wanted)}/{here.prefix} dev "
                f"{quoted(here.device)}`, or migrate without --keep-address.",
            )
            continue
        try:
            addresses.choose_device(wanted, device or None, None)
        except CriuctlError as error:
            yield Finding("error", error.code, error.message, error.hint)
    client = os.environ.get("SSH_CONNECTION", " ").split(" ")[0]
    if client in coming.kept:
        yield Finding(
            "error",
            "address-of-link",
            f"the source reaches this host from {client}, which is to move along: that would cut "
            "the link between them",
            "Let ssh use another address of the source (`BindAddress` in ~/.ssh/config), or "
            f"migrate without {client}.",
        )
    reported: set[str] = set()
    for record in coming.needs.connections:
        host = endpoint(record.local)[0]
        if (
            record.family not in ("inet", "inet6")
            or not record.waits
            or host in (*_ANY, *coming.kept, *reported)
        ):
            continue
        free = record.local in coming.needs.free_binds
        # CRIU does not save IP_FREEBIND of IPv4 sockets
        if ipaddress.ip_address(host).is_loopback or (free and record.family == "inet6"):
            continue
        if coming.plan.net == "private" or not _is_here(host, coming.plan):
            reported.add(host)
            yield Finding(
                "error",
                "address-missing",
                f"{record.protocol} {record.local} waits for clients, but {host} will not be an "
                "address of the tree here",
                ADD_ADDRESS
                if free
                else (
                    f"Take the address along with --keep-address {quoted(host)}, or have the "
                    "program listen on all addresses."
                ),
                record.pid,
                record.fd,
            )


def _is_here(host: str, plan: RestorePlan) -> bool:
    if plan.net not in ("named", "existing"):
        return is_local(host, None)
    namespace = os.open(plan.net_source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return is_local(host, namespace)
    finally:
        os.close(namespace)


# -- files


def _files(coming: Arrival) -> Iterable[Finding]:
    return judge_files(
        coming.needs.files, coming.policy, {process.uid for process in coming.needs.processes}
    )


# -- users and free space


def _users(coming: Arrival) -> Iterator[Finding]:
    import grp

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


def _terminals(coming: Arrival) -> Iterator[Finding]:
    pts = [t for t in coming.needs.terminals if t.kind == "pts"]
    for terminal in coming.needs.terminals:
        if terminal.kind != "pts" and terminal.path and not os.path.exists(terminal.path):
            pid, fd = terminal.holders[0] if terminal.holders else (None, None)
            text = f"{terminal.path}: a terminal of the tree does not exist here"
            yield Finding(
                "error",
                "terminal",
                text,
                "Have the program run on a pseudo-terminal (`criuctl run`).",
                pid,
                fd,
            )
    with suppress(FileNotFoundError):
        used, most = (int(read_raw(f"/proc/sys/kernel/pty/{name}")) for name in ("nr", "max"))
        if most - used < len(pts):
            text = f"the tree needs {len(pts)} pseudo-terminals, {most - used} are free here"
            yield Finding("error", "terminals", text, "`sysctl kernel.pty.max` is the limit.")


def _memory(coming: Arrival) -> Iterator[Finding]:
    wanted = coming.needs.memory
    info = memory_info()
    free = sum(
        int(info[key].split()[0]) * 1024 for key in ("MemAvailable", "SwapFree") if key in info
    )
    if wanted > free:
        text = (
            f"the tree has {wanted // _MIB} MiB in memory, {free // _MIB} MiB of memory and swap "
            "are free here"
        )
        yield Finding(
            "error", "memory", text, "End something here, or give the host more memory or swap."
        )
        return
    with Scratch() as scratch:
        room = scratch.free_bytes()
    if wanted > room:
        text = (
            f"the tree has {wanted // _MIB} MiB in memory; plain images lie in memory too, where "
            f"{room // _MIB} MiB fit"
        )
        yield Finding("error", "memory", text, "Give the host more memory.")


def _room(coming: Arrival) -> Iterator[Finding]:
    """Check the disk space for arriving files, and for the checkpoint in the inbox, which is
    compressed.
    """
    wanted: dict[int, tuple[str, int]] = {}

    def add(path: str, size: int) -> None:
        nearest = next(str(p) for p in (Path(path), *Path(path).parents) if p.exists())
        device = os.stat(nearest).st_dev
        wanted[device] = (
            wanted.get(device, (nearest, 0))[0],
            wanted.get(device, ("", 0))[1] + size,
        )

    coming_bytes = coming.needs.more_bytes
    for needed in coming.needs.files:
        if needed.travels and needed.use != "mapped":
            coming_bytes += needed.blocks
            add(os.path.dirname(needed.path), needed.blocks)
    for place, size in wanted.values():
        free = _free(place)
        if size > free:
            text = (
                f"files of {size // _MIB} MiB come to the file system of {place}, where "
                f"{free // _MIB} MiB are free"
            )
            yield Finding("error", "space", text, "Make room there, or carry fewer files.")
    inbox = next(
        str(p)
        for p in (Path(coming.config.state_dir), *Path(coming.config.state_dir).parents)
        if p.exists()
    )
    most, free = coming.needs.memory + coming_bytes, _free(inbox)
    if most > free:
        text = (
            f"the checkpoint may take {most // _MIB} MiB before compression; {inbox} has "
            f"{free // _MIB} MiB left"
        )
        yield Finding(
            "warning",
            "space",
            text,
            "If it gets full, the tree stays on the source. state_dir may be elsewhere.",
        )


def _free(path: str) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


HOST_CHECKS: tuple[Check, ...] = (_host, _criu, _kernel)
TREE_CHECKS: tuple[Check, ...] = (
    _session,
    _plan,
    _pids,
    _addresses,
    _files,
    _users,
    _terminals,
    _memory,
    _room,
    _clock,
)
