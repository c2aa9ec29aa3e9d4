"""Observe what the plan of a restore needs to know of this host: free PIDs, network, addresses,
files.

`criuctl.restore.observation` adds what depends on the request.  Nothing is decided here.
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
from contextlib import suppress

from ..checkpoint.connection_record import UNCONNECTED, endpoint
from ..checkpoint.manifest import Manifest
from ..connections.decision import JOURNAL
from ..connections.secret_scope import Owner
from ..errors import CriuctlError
from ..files import carried_binaries
from ..files.judgement import Judgement, judge_all
from ..host.identity import cpu, machine_id
from ..namespaces.network_choice import Place, is_new, opened
from ..namespaces.network_choice import find as find_net
from ..namespaces.ports import is_taken
from ..proc.connecting import spelled
from ..proc.namespace_sockets import socket_inside
from ..proc.procfs import read_text
from ..proc.sockdiag import Address, is_remembered, sockets
from ..proc.sockets import outside_holders
from ..proc.tree import ProcessIdentity, members, wait_gone
from ..report import Finding
from .host_facts import HostFacts, PlanOptions

_ZOMBIE_WAIT = 3.0  # seconds that the PIDs of the dump on this host may take to become free


def taken(numbers: Iterable[int]) -> list[int]:
    """Return which of these are in use as a PID, thread, group or session here (zombies count)."""
    wanted = set(numbers)
    return sorted(members(wanted).keys() | {n for n in wanted if os.path.exists(f"/proc/{n}")})


def wait_free(numbers: Iterable[int], processes: Iterable[ProcessIdentity]) -> list[int]:
    """Return `taken`, after a short wait for remains of the dump of this checkpoint."""
    numbers = list(numbers)
    remains = [i for i in processes if i.exists() and not i.alive()]
    if remains:
        wait_gone(remains, _ZOMBIE_WAIT)
    return taken(numbers)


def observe(
    manifest: Manifest,
    reserved: Iterable[int],
    remains: Iterable[ProcessIdentity],
    options: PlanOptions,
    uids: Collection[int] = carried_binaries.ROOTS,
) -> HostFacts:
    """Return the facts of this host that the plan depends on; `uids`: the users of the tree, by its
    images.
    """
    net = find_net(manifest, copy=options.copy, shared=options.network)
    listening, pairs = _used(manifest, net)
    users = frozenset(uid for uid in {p.uid for p in manifest.processes} if _known_user(uid))
    at_home = sees_mounts_of_dump(manifest)
    files = tuple(judge_all(manifest.files, options.files, uids, at_home=at_home))
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
        # until the images are read
        owners={p.ns_pid: Owner(frozenset({p.uid})) for p in manifest.processes},
    )


def sees_mounts_of_dump(manifest: Manifest) -> bool:
    """Return whether this is the host of the dump, and the tree saw its mounts."""
    return (
        manifest.host.machine_id == machine_id()
        and manifest.namespaces.get("mnt", {}).get("mode", "host") == "host"
    )


def _network_tools(net: Place) -> Iterator[Finding]:
    if net.mode == "dumped" and shutil.which("ip") is None:
        text = "CRIU makes the tree's network with the `ip` command, which is not here"
        yield Finding("error", "ip-missing", text, "Install iproute2.")


def _used(manifest: Manifest, net: Place) -> tuple[dict[str, str], frozenset[tuple[str, str]]]:
    """Return what the network that the tree gets has already: see `HostFacts.listening` and
    `HostFacts.open_pairs`.
    """
    if is_new(net.mode):
        return {}, frozenset()
    with opened(net) as namespace:
        here = sockets(namespace=namespace)
        listening = {f"{s.protocol} {s.local}": s.inode for s in here if s.local and s.listening}
        others = [s.local for s in here if s.protocol == "tcp" and s.local and s.listening]
        for c in manifest.connections:
            # A socket bound to an IPv6 address may be for IPv6 only.
            udp, tcp = (
                c.state == "bound",
                c.state == "listen" and c.protocol == "tcp" and _overlaps(c.local, others),
            )
            port = endpoint(c.local)[1]
            idle = c.state == UNCONNECTED and c.protocol == "tcp" and port != 0
            kind = socket.SOCK_DGRAM if udp else socket.SOCK_STREAM
            if not (udp or tcp or idle) or not is_taken(c.local, kind, namespace, v6only=True):
                continue
            used = any(s.protocol == "tcp" and s.local and s.local.port == port for s in here)
            if idle and not used and is_remembered(port, namespace):
                continue  # by its own connection, which is over; the restore frees it
            listening.setdefault(f"{c.protocol} {c.local}", 0)
        return _with_users(listening, manifest), frozenset(
            (str(s.local), str(s.peer)) for s in here if s.local and s.peer and s.connected
        )


def _with_users(listening: Mapping[str, int], manifest: Manifest) -> dict[str, str]:
    """Return who listens at each address; read from all of this host only for those of the tree."""
    wanted = {f"{c.protocol} {c.local}" for c in manifest.connections} & listening.keys()
    holders = outside_holders({listening[name] for name in wanted} - {0}) if wanted else {}
    users = dict.fromkeys(listening, "")
    for name in wanted:
        with suppress(KeyError, CriuctlError):  # ended meanwhile, or not readable
            pid, _ = holders[listening[name]]
            users[name] = f"PID {pid} ({read_text(pid, 'comm').strip()})"
    return users


def _overlaps(local: str, others: Iterable[Address]) -> bool:
    """Return whether one of the others has the port at an address that this one covers, or that
    covers it.

    An IPv6 address next to IPv4 ones is not reported: whether it leaves IPv4 to them is not
    recorded.
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
    """Return working folders that CRIU would not find; what a tree with a root of its own sees is
    not known beforehand.
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
    """Return names of unix datagram peers, and of journals, that CRIU could not connect to.

    A name relative to the folder of its server is one of them.  What a tree with a root or a
    network of its own sees is not known beforehand: nothing of that is missing.
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
                if error.errno != errno.EPROTOTYPE:  # a stream socket with a listener
                    missing.add(name)
    return frozenset(missing)


def _local_addresses(manifest: Manifest, net: Place) -> frozenset[str]:
    """Return the external connections' local ends that can be bound to in the network that the tree
    gets.
    """
    hosts = {c.local: endpoint(c.local)[0] for c in manifest.connections if c.external}
    here = _local({host for host in hosts.values() if host}, net)
    return frozenset(local for local, host in hosts.items() if host in here)


def missing_addresses(manifest: Manifest, net: Place) -> frozenset[str]:
    """Return local ends at which CRIU could not have sockets wait there; IPv6 ones it binds in any
    case.
    """
    if is_new(net.mode):
        return frozenset()
    waiting = (c for c in manifest.connections if c.waits and c.family == "inet")
    hosts = {c.local: host for c in waiting if (host := endpoint(c.local)[0])}
    here = _local(set(hosts.values()), net)
    return frozenset(local for local, host in hosts.items() if host not in here)


def _local(hosts: Iterable[str], net: Place) -> set[str]:
    """Return those of these addresses that can be bound to in that network."""
    with opened(net) as namespace:
        return {host for host in hosts if is_local(host, namespace)}


def is_local(host: str, namespace: int | None) -> bool:
    """Return whether sockets can be bound to this address.

    `netns`: descriptor of a net namespace; None: criuctl's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket if namespace is None else functools.partial(socket_inside, namespace)
    with made(family, socket.SOCK_STREAM, 0) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True
