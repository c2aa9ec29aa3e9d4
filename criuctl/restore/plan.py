"""The plan of a restore: a pure function of the manifest, the wishes and what this host is like.

`observe` looks at the host, `make_plan` decides, ``restore --dry-run`` prints what it decided.  A
plan with error findings is never carried out.
"""

from __future__ import annotations

import errno
import functools
import os
import platform
import pwd
import shutil
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

from msgspec import Struct, field

from ..checkpoint.manifest import UNCONNECTED, Manifest
from ..connections.rules import JOURNAL, Rules, endpoint
from ..connections.secret_scope import Owner
from ..files import carried_binaries
from ..files.deleted_names import DeletedName
from ..files.judgement import Judgement, Policy, judge_all
from ..files.socket_names import TakenName, covering, settle
from ..namespaces import interfaces
from ..namespaces.interfaces import BoundSocket
from ..namespaces.network_choice import NetMode, Place, is_new, opened
from ..namespaces.network_choice import find as find_net
from ..namespaces.network_choice import new as new_net
from ..namespaces.ports import is_taken
from ..proc.connecting import spelled
from ..proc.sockdiag import Address, socket_inside, sockets
from ..proc.tree import ProcessIdentity, members, wait_gone
from ..quoting import quoted
from ..report import Finding
from .connection_plan import ConnectionPlan, in_use, plan_connections

PidMode = Literal["same", "private", "init"]
_ZOMBIE_WAIT = 3.0  # seconds that PIDs of our own dump may take to become free


class Wishes(Struct, frozen=True):
    """What the caller asks for."""

    pids: str = "auto"  # auto | same | private
    copy: bool = False  # --as: beside a live original
    connections: str | None = None
    files: Policy = "restore"
    rules: Rules = field(default_factory=Rules)  # of this host's configuration
    # seconds for connections to be back, instead of what the rules say
    deadline: float | None = None
    # the names of this host's reconnect hooks; None if nobody has looked
    hooks: frozenset[str] | None = None
    alone: bool = False  # in a network of its own, whatever is free here
    prepared: bool = False  # this host has pre-restore hooks, which may add addresses


ADD_ADDRESS = (
    "Add it (`ip address add`), or allow foreign ones until the tree is here: `sysctl "
    "net.ipv4.ip_nonlocal_bind=1`."
)


class HostFacts(Struct, frozen=True):
    """What this host is like, as far as this checkpoint is concerned."""

    kernel_arch: str
    cpu_flags: frozenset[str]
    page_size: int
    taken_pids: tuple[int, ...]
    # "tcp 127.0.0.1:80" -> inode (0: unknown), in the namespace the tree would come to
    listening: dict[str, int]
    # of the external connections' local ends, those that this host has
    local_addresses: frozenset[str]
    netns: Place  # how its net namespace can be had, and where
    users: frozenset[int]
    files: tuple[Judgement, ...]
    findings: tuple[Finding, ...] = ()
    deleted: tuple[DeletedName, ...] = ()
    # (local, peer) of connections that are open here
    open_pairs: frozenset[tuple[str, str]] = frozenset()
    # paths of unix datagram sockets, and of journals, that are not there
    missing_peers: frozenset[str] = frozenset()
    # working folders that are not here and are not put back
    missing_folders: frozenset[str] = frozenset()
    names: tuple[TakenName, ...] = ()  # of unix sockets, that somebody has here
    # local ends, of sockets that wait, that cannot be bound to here
    missing_addresses: frozenset[str] = frozenset()
    bound: tuple[BoundSocket, ...] = ()  # sockets that are bound to a network interface
    # of the tree's processes, by its own PIDs
    owners: Mapping[int, Owner] = field(default_factory=dict)


class RestorePlan(Struct, frozen=True):
    """What will be done; `to_dict` is what ``--dry-run`` prints."""

    pids: PidMode
    net: NetMode
    net_source: str
    connections: tuple[ConnectionPlan, ...]
    files: tuple[Judgement, ...]
    findings: tuple[Finding, ...] = field(default=())
    deleted: tuple[DeletedName, ...] = ()
    names: tuple[TakenName, ...] = ()  # of unix sockets, that come under names of their own
    # that sockets are bound to, and that are not where the tree comes to
    no_interfaces: frozenset[str] = frozenset()

    @property
    def policies(self) -> dict[tuple[int, int], str]:
        """(PID, fd) of each external connection -> keep | reconnect | hangup | refuse."""
        return {(c.record.pid, c.record.fd): c.policy for c in self.connections}

    @property
    def errors(self) -> list[Finding]:
        """What forbids it."""
        return [f for f in self.findings if f.level == "error"]

    def to_dict(self) -> dict[str, Any]:
        """JSON of the plan."""
        return {
            "ok": not self.errors,
            "pids": self.pids,
            "net": self.net,
            "connections": [c.to_dict() for c in self.connections],
            "files": [
                {"path": j.record.path, "verdict": j.verdict, "why": j.why}
                for j in self.files
                if j.verdict != "same"
            ],
            "findings": [f.to_dict() for f in self.findings],
        }


def taken(numbers: Iterable[int]) -> list[int]:
    """Which of these are in use as a PID, thread, group or session here (zombies count)."""
    wanted = set(numbers)
    return sorted(members(wanted).keys() | {n for n in wanted if os.path.exists(f"/proc/{n}")})


def wait_free(numbers: Iterable[int], ours: Iterable[ProcessIdentity]) -> list[int]:
    """`taken`, after waiting a little for remains of the dump that this checkpoint is from."""
    numbers = list(numbers)
    remains = [i for i in ours if i.exists() and not i.alive()]
    if remains:
        wait_gone(remains, _ZOMBIE_WAIT)
    return taken(numbers)


def observe(
    manifest: Manifest,
    reserved: Iterable[int],
    remains: Iterable[ProcessIdentity],
    wishes: Wishes,
    uids: Collection[int] = carried_binaries.ROOTS,
) -> HostFacts:
    """Look at everything on this host that the plan depends on; `uids` are the users of the tree,
    by its images.
    """
    from ..host.identity import cpu, machine_id

    net = find_net(manifest, copy=wishes.copy)
    listening, pairs = _used(manifest, net)
    users = frozenset(uid for uid in {p.uid for p in manifest.processes} if _known_user(uid))
    at_home = (
        manifest.host.machine_id == machine_id()
        and manifest.namespaces.get("mnt", {}).get("mode", "host") == "host"
    )
    files = tuple(judge_all(manifest.files, wishes.files, uids, at_home=at_home))
    return HostFacts(
        kernel_arch=platform.machine(),
        cpu_flags=frozenset(cpu()[1]),
        page_size=os.sysconf("SC_PAGE_SIZE"),
        taken_pids=tuple(wait_free(reserved, remains)),
        listening=listening,
        local_addresses=_local_addresses(manifest, net),
        netns=net,
        users=users,
        files=files,
        open_pairs=pairs,
        missing_peers=_missing_peers(manifest, net),
        missing_folders=_missing_folders(manifest, files),
        missing_addresses=missing_addresses(manifest, net),
        findings=tuple(_network_tools(net)),
        # until there are images to tell
        owners={p.ns_pid: Owner(frozenset({p.uid})) for p in manifest.processes},
    )


def _network_tools(net: Place) -> Iterator[Finding]:
    if net.mode == "dumped" and shutil.which("ip") is None:
        text = "CRIU makes the tree's network with the `ip` command, which is not here"
        yield Finding("error", "ip-missing", text, "Install iproute2.")


def _used(manifest: Manifest, net: Place) -> tuple[dict[str, int], frozenset[tuple[str, str]]]:
    """What the network that the tree comes to has already: see `HostFacts.listening` and
    `HostFacts.open_pairs`.
    """
    if is_new(net.mode):
        return {}, frozenset()
    with opened(net) as namespace:
        here = sockets(namespace=namespace)
        listening = {f"{s.protocol} {s.local}": s.inode for s in here if s.local and s.listening}
        others = [s.local for s in here if s.protocol == "tcp" and s.local and s.listening]
        for c in manifest.connections:
            # Of those that are bound to an address of IPv6 any may be for that alone.
            udp, tcp = (
                c.state == "bound",
                c.state == "listen" and c.protocol == "tcp" and _overlaps(c.local, others),
            )
            idle = c.state == UNCONNECTED and c.protocol == "tcp" and endpoint(c.local)[1] != 0
            kind = socket.SOCK_DGRAM if udp else socket.SOCK_STREAM
            if (udp or tcp or idle) and is_taken(c.local, kind, namespace, v6only=True):
                listening.setdefault(f"{c.protocol} {c.local}", 0)
        return listening, frozenset(
            (str(s.local), str(s.peer)) for s in here if s.local and s.peer and s.connected
        )


def _overlaps(local: str, others: Iterable[Address]) -> bool:
    """Whether one of the others has the port at an address that this one covers, or covers this
    one.

    Not told of one for IPv6 beside others for IPv4: whether it leaves IPv4 to them is not recorded.
    """
    host, port = endpoint(local)
    for other in others:
        if other.port == port and other.host != host:
            if other.host == "::" or (other.host == "0.0.0.0" and ":" not in host):
                return True
            if host == ("::" if ":" in other.host else "0.0.0.0"):
                return True
    return False


def _known_user(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _missing_folders(manifest: Manifest, files: Iterable[Judgement]) -> frozenset[str]:
    """Working folders that CRIU would not find; what a tree with a root of its own sees is not
    known before it is there.
    """
    if manifest.namespaces.get("mnt", {}).get("mode", "host") != "host":
        return frozenset()
    folders = {
        p.cwd
        for p in manifest.processes
        if p.cwd.startswith("/") and not p.cwd.endswith(" (deleted)")
    }
    made = [j.record.path + "/" for j in files if j.verdict == "put-back"]
    return frozenset(
        f
        for f in folders
        if not os.path.isdir(f) and not any(path.startswith(f"{f}/") for path in made)
    )


def _missing_peers(manifest: Manifest, net: Place) -> frozenset[str]:
    """Names of unix datagram peers that CRIU could not connect to, and of journals.

    A name that is relative to wherever its server was is one of them.  What a tree with a root or a
    network of its own sees is not known before it is there: nothing of that is missing.
    """
    unix = [c for c in manifest.connections if c.external and c.family == "unix" and c.peer]
    wanted = {c.peer for c in unix if c.type == "dgram" or c.application == JOURNAL}
    missing = {name for name in wanted if not name.startswith(("/", "@"))}
    own_root = manifest.namespaces.get("mnt", {}).get("mode", "host") != "host"
    for name in wanted - missing:
        if net.mode != "host" if name.startswith("@") else own_root:
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(spelled(name) or name)
            except OSError as error:
                if error.errno != errno.EPROTOTYPE:  # a stream socket, on which somebody listens
                    missing.add(name)
    return frozenset(missing)


def _local_addresses(manifest: Manifest, net: Place) -> frozenset[str]:
    """The external connections' local ends that can be bound to in the network that the tree comes
    to.
    """
    hosts = {c.local: endpoint(c.local)[0] for c in manifest.connections if c.external}
    here = _local({host for host in hosts.values() if host}, net)
    return frozenset(local for local, host in hosts.items() if host in here)


def missing_addresses(manifest: Manifest, net: Place) -> frozenset[str]:
    """Local ends at which CRIU could not have sockets wait there; those of IPv6 it binds to
    whatever they were bound to.
    """
    if is_new(net.mode):
        return frozenset()
    waiting = (c for c in manifest.connections if c.waits and c.family == "inet")
    hosts = {c.local: host for c in waiting if (host := endpoint(c.local)[0])}
    here = _local(set(hosts.values()), net)
    return frozenset(local for local, host in hosts.items() if host not in here)


def _local(hosts: Iterable[str], net: Place) -> set[str]:
    """Those of these addresses that can be bound to in that network."""
    with opened(net) as namespace:
        return {host for host in hosts if is_local(host, namespace)}


def is_local(host: str, namespace: int | None) -> bool:
    """Whether sockets can be bound to this address, in the net namespace of that descriptor (None:
    ours).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket if namespace is None else functools.partial(socket_inside, namespace)
    with made(family, socket.SOCK_STREAM, 0) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def make_plan(manifest: Manifest, facts: HostFacts, wishes: Wishes) -> RestorePlan:
    """Decide.  Pure: everything it knows is in its arguments."""
    findings: list[Finding] = list(facts.findings)
    _platform(manifest, facts, findings)
    init = bool(manifest.namespaces.get("pid", {}).get("init"))
    own_names = settle(facts.names, findings, copy=wishes.copy, init=init, pids=wishes.pids)
    pids = _pids(manifest, facts, wishes, findings, shown=bool(covering(own_names)))
    net, source, unsure = facts.netns
    fresh = new_net(manifest)
    again = "what was in that of the dump" if fresh == "dumped" else "loopback only"
    if wishes.alone:
        net, source = fresh, ""
    net = _abstract_names(facts, wishes, net, fresh, again, findings)
    conflicts = [c for c in manifest.connections if in_use(c, facts)]
    if conflicts and net == facts.netns.mode:
        names = sorted({c.local for c in conflicts})
        if wishes.copy:
            net = fresh
            verb = "is" if len(names) == 1 else "are"
            text = (
                f"{', '.join(names)} {verb} taken, so the copy gets a network of its own ({again})"
            )
            findings.append(Finding("warning", "port-taken", text))
        else:
            hint = (
                "End what uses it, or restore a copy with --as NAME, which gets a network of its "
                "own."
            )
            findings += [
                Finding(
                    "error", "port-taken", f"{c.local} is taken on this host", hint, c.pid, c.fd
                )
                for c in conflicts
            ]
    if not is_new(net):
        for c in manifest.connections:
            if c.waits and c.local in facts.missing_addresses:
                text = (
                    f"{c.protocol} {c.local} is bound to {endpoint(c.local)[0]}, which is no "
                    "address of this host"
                )
                if wishes.prepared:
                    findings.append(
                        Finding(
                            "info",
                            "address-missing",
                            f"{text}, unless a hook adds it",
                            "",
                            c.pid,
                            c.fd,
                        )
                    )
                else:
                    findings.append(
                        Finding("error", "address-missing", text, ADD_ADDRESS, c.pid, c.fd)
                    )
    if net == "private" and facts.netns.mode == "private" and not wishes.alone:
        text, hint = (
            "the network namespace of the dump is gone; a new one with only a loopback interface "
            "is made",
            "",
        )
        if wishes.copy:
            text = (
                "the copy gets a network of its own (loopback only), not the network namespace of "
                "the dump"
            )
        elif unsure:
            text = (
                "nothing tells whether the network namespace with the number of that of the dump "
                "is still the same one; "
            )
            text += "a new one with only a loopback interface is made"
            hint = (
                "Before the next dump, give it a name by which a restore finds it: `ip netns "
                "attach NAME PID`."
            )
        findings.append(Finding("warning", "netns-new", text, hint))
    if net == "private" and pids == "same":
        pids = "private"  # both namespaces are kept alive by the same PID 1
        if wishes.pids == "same":
            text = "it gets a network of its own, with which goes a PID namespace of its own"
            findings.append(Finding("error", "pids", text, "Restore with --pids auto."))
    commands = {p.ns_pid: p.command for p in manifest.processes}
    connections = plan_connections(manifest.connections, facts, wishes, commands, net, findings)
    absent = interfaces.missing(facts.bound, net)
    findings += _interfaces(absent, connections, prepared=wishes.prepared and not is_new(net))
    findings += [f for j in facts.files if (f := j.finding()) is not None]
    findings += [f for name in facts.deleted if (f := name.finding()) is not None]
    for folder in sorted(facts.missing_folders):
        pid = next(p.pid for p in manifest.processes if p.cwd == folder)
        hint = (
            f"Bring it here, or make it: `mkdir -p {quoted(folder)}`; next time dump with "
            "--with-files."
        )
        findings.append(
            Finding(
                "error",
                "folder-missing",
                f"{folder}: is a working folder and no folder is here",
                hint,
                pid,
            )
        )
    gone = interfaces.names(absent)
    return RestorePlan(
        pids, net, source, connections, facts.files, tuple(findings), facts.deleted, own_names, gone
    )


def _interfaces(
    absent: Iterable[BoundSocket], connections: Iterable[ConnectionPlan], *, prepared: bool
) -> Iterator[Finding]:
    """What CRIU would fail at; a connection that is given up comes without its interface."""
    given_up = {
        holder
        for c in connections
        if c.policy in ("hangup", "reconnect")
        for holder in c.record.holders
    }
    for s in absent:
        if given_up.isdisjoint(s.holders):
            pid, fd = next(iter(s.holders), (None, None))
            text = (
                f"a socket is bound to the network interface {s.interface}, which is not where "
                "the tree comes to"
            )
            if prepared:
                yield Finding(
                    "info", "interface-missing", f"{text}, unless a hook adds it", "", pid, fd
                )
            else:
                yield Finding(
                    "error", "interface-missing", text, "Add one of that name (`ip link`).", pid, fd
                )


def _abstract_names(
    facts: HostFacts,
    wishes: Wishes,
    net: NetMode,
    fresh: NetMode,
    again: str,
    findings: list[Finding],
) -> NetMode:
    """The network, given the abstract names of unix sockets that are taken in the one that the tree
    would come to.
    """
    found = [n for n in facts.names if n.what == "abstract"]
    if not found or is_new(net):
        return net
    if wishes.copy:
        names = ", ".join(f"{n.path} ({n.by})" for n in found)
        text = (
            "abstract names of unix sockets are taken, so the copy gets a network of its own "
            f"({again}): {names}"
        )
        findings.append(Finding("warning", "socket-taken", text))
        return fresh
    hint = (
        "End that process first, or restore a copy with --as NAME, which gets a network of its own."
    )
    for n in found:
        text = f"{n.path} is the abstract name of a unix socket of the tree, and {n.by} has it"
        findings.append(Finding("error", "socket-taken", text, hint, n.pid, n.fd))
    return net


def _platform(manifest: Manifest, facts: HostFacts, findings: list[Finding]) -> None:
    host = manifest.host
    if host.arch != facts.kernel_arch:
        text = f"the tree is of a {host.arch} host, this one is {facts.kernel_arch}"
        findings.append(
            Finding("error", "arch", text, f"Only another {host.arch} host can run it.")
        )
    if host.page_size and host.page_size != facts.page_size:
        text = f"pages were {host.page_size} bytes, here they are {facts.page_size}"
        findings.append(
            Finding(
                "error", "page-size", text, "Use a kernel that is built with the same page size."
            )
        )
    missing = sorted(set(host.cpu_flags) - facts.cpu_flags)
    if missing and host.arch == facts.kernel_arch:
        text = (
            f"this processor lacks {', '.join(missing[:12])}{' ...' if len(missing) > 12 else ''}"
        )
        findings.append(
            Finding(
                "warning",
                "cpu",
                text,
                "A program that uses these instructions will be killed by SIGILL.",
            )
        )
    unknown = sorted({p.uid for p in manifest.processes} - facts.users)
    findings += [
        Finding("info", "user", f"user id {uid} has no name on this host") for uid in unknown
    ]


def _pids(
    manifest: Manifest, facts: HostFacts, wishes: Wishes, findings: list[Finding], *, shown: bool
) -> PidMode:
    init = bool(manifest.namespaces.get("pid", {}).get("init"))
    overlaid = next((j.record.path for j in facts.files if j.verdict == "overlaid"), None)
    if overlaid is not None and (init or wishes.pids == "same"):
        text = (
            f"{overlaid} came along and would have to lie over this host's, which a tree can have "
            "only in namespaces of its own"
        )
        hint = (
            "Install that version here; its root was PID 1 of a PID namespace."
            if init
            else "Restore with --pids auto."
        )
        findings.append(Finding("error", "overlay", text, hint))
    if init:
        if wishes.pids == "same":
            text = "its root was PID 1 of a PID namespace and cannot be that of the host"
            findings.append(Finding("error", "pids", text, "Restore with --pids auto."))
        return "init"
    # Numbers of a namespace of its own mean nothing here, even where they happen to be free.
    own = manifest.namespaces.get("pid", {}).get("mode") == "entered"
    if wishes.pids == "private" or (
        wishes.pids == "auto" and (own or overlaid is not None or shown)
    ):
        return "private"
    if not facts.taken_pids:
        return "same"
    some = ", ".join(map(str, facts.taken_pids[:8])) + (" ..." if len(facts.taken_pids) > 8 else "")
    if wishes.pids == "same":
        findings.append(
            Finding(
                "error",
                "pids-taken",
                f"PIDs of the tree are taken: {some}",
                "Restore with --pids auto or private.",
            )
        )
        return "same"
    findings.append(
        Finding(
            "info", "pids-private", f"PIDs {some} are taken: restored in a PID namespace of its own"
        )
    )
    return "private"
