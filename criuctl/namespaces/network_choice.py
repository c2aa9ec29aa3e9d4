"""Choose the net namespace that a tree comes back into: that of the dump, if it still exists.

A name means what the operator assigned to it, also a namespace that was made again under it.
Without a name the namespace is looked for by its inode, which alone proves nothing: the kernel
gives the number to the next namespace at once, perhaps an unrelated one, in which sockets would be
bound and connections ended.  So its cookie must be that of the dump as well, which no two
namespaces of a boot share.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple

from ..checkpoint.connection_record import endpoint
from ..checkpoint.manifest import Manifest
from ..errors import RestoreFailed
from ..host.registry import boot_id
from ..proc.namespace_sockets import net_cookie
from ..proc.procfs import open_entry

NetMode = Literal["host", "named", "existing", "private", "dumped", "shared"]
_FOLDERS = ("/run/netns", "/var/run/netns")


def is_new(mode: NetMode) -> bool:
    """Return whether it is made for the tree: with a loopback interface alone, for several trees
    (shared) or for this one, or by CRIU with all that was in that of the dump.
    """
    return mode in ("private", "dumped", "shared")


def new(manifest: Manifest) -> NetMode:
    """Return what a tree of `manifest` gets if it is to have a new net namespace."""
    return "dumped" if manifest.namespaces.get("net", {}).get("mode") == "dumped" else "private"


class Place(NamedTuple):
    """How a tree gets its net namespace, and from where."""

    mode: NetMode
    path: str = ""
    # private, because one that exists here might be that of the dump, and that cannot be verified
    unsure: bool = False


def find(manifest: Manifest, *, copy: bool, shared: str = "") -> Place:
    """Return where the tree of `manifest` belongs; a `copy` never where its original is. `shared`:
    the path of a namespace that was made for it and others.
    """
    if shared:
        return Place("shared", shared)
    net = manifest.namespaces.get("net", {})
    if net.get("mode") not in ("entered", "dumped"):
        return Place("host")
    name = net.get("name")
    if name and not copy:
        for folder in _FOLDERS:
            if os.path.exists(f"{folder}/{os.path.basename(name)}"):
                return Place("named", f"{folder}/{os.path.basename(name)}")
    saved = net.get("networks")
    several = isinstance(saved, list) and len(saved) > 1  # CRIU makes all of them, or none
    if copy or several or manifest.host.boot_id != boot_id():
        # identifiers of another kernel's namespaces mean nothing here
        return Place(new(manifest))
    unsure = False
    for path in _with_inode(net.get("inode")):
        with suppress(OSError):  # its process has just ended
            same = _is_of(path, net)
            if same:
                return Place("existing", path)
            unsure |= same is None
    return Place(new(manifest), unsure=unsure)


def addresses(manifest: Manifest) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return those of a host's own addresses at which the tree waits for clients, or is connected
    to itself or to another member of its group.
    """
    found = set()
    for record in manifest.connections:
        inside = record.linked or not record.external
        if record.family not in ("inet", "inet6") or not (record.waits or inside):
            continue
        with suppress(ValueError):
            ip = ipaddress.ip_address(endpoint(record.local)[0])
            ip = getattr(ip, "ipv4_mapped", None) or ip
            if not (
                ip.is_loopback
                or ip.is_unspecified
                or ip.is_multicast
                or (ip.version == 6 and ip.is_link_local)
            ):
                found.add(ip)
    return found


def lend_addresses(manifest: Manifest, pid: int) -> None:
    """Give the new net namespace of `pid` the addresses that the tree's sockets are bound to, on
    its loopback interface.

    CRIU binds them again, and no other process has them in there.
    """
    wanted = addresses(manifest)
    if not wanted:
        return
    from ..proc import rtnetlink  # few trees need it

    namespace = open_entry(pid, "ns/net", os.O_RDONLY)
    try:
        with rtnetlink.Rtnetlink(namespace) as net:
            loopback = next(
                link.index for link in net.links() if link.flags & rtnetlink.IFF_LOOPBACK
            )
            for ip in wanted:
                family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
                attributes = ((rtnetlink.IFA_LOCAL, ip.packed), (rtnetlink.IFA_ADDRESS, ip.packed))
                address = rtnetlink.Address(
                    family, ip.max_prefixlen, rtnetlink.F_NODAD, 0, loopback, attributes
                )
                # no IPv6 here, for example: CRIU reports which socket lacks it
                with suppress(OSError):
                    net.add_address(address)
    finally:
        os.close(namespace)


def _with_inode(inode: Any) -> Iterator[str]:
    """Yield the paths of a net namespace of this inode: of processes, and of names that were given
    since the dump.
    """
    held = [f"/proc/{pid}/ns/net" for pid in os.listdir("/proc") if pid.isdigit()]
    named = [
        f"{folder}/{name}"
        for folder in _FOLDERS
        if os.path.isdir(folder)
        for name in os.listdir(folder)
    ]
    for path in (*held, *named):
        try:
            found = os.stat(path).st_ino == inode
        except OSError:
            continue
        if found:
            yield path


def _is_of(path: str, net: dict[str, Any]) -> bool | None:
    """Return whether it is the net namespace of the dump; None if that cannot be determined."""
    namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _known(namespace, net)
    finally:
        os.close(namespace)


def _known(namespace: int, net: dict[str, Any]) -> bool | None:
    if os.fstat(namespace).st_ino != net.get("inode"):
        return False
    then = net.get("cookie")  # missing: written by a criuctl or a kernel that knew of none
    here = net_cookie(namespace) if then else 0
    return here == then if here else None


def enter(manifest: Manifest, mode: NetMode, path: str) -> tuple[int, str]:
    """Return a descriptor of the namespace that was found there, and a path of it, valid while that
    is open; `RestoreFailed`.
    """
    namespace = _open(mode, path)
    if mode == "named":
        return namespace, path
    # A process that has ended since may have left its PID, and the namespace its inode, to another
    # one.
    if mode != "shared" and not _known(namespace, manifest.namespaces.get("net", {})):
        os.close(namespace)
        raise _ended(mode, path)
    return namespace, f"/proc/{os.getpid()}/fd/{namespace}"


@contextmanager
def opened(place: Place) -> Iterator[int | None]:
    """Return a descriptor of the namespace, None if it is criuctl's or not made yet;
    `RestoreFailed`.
    """
    if place.mode == "host" or is_new(place.mode):
        yield None
        return
    namespace = _open(place.mode, place.path)
    try:
        yield namespace
    finally:
        os.close(namespace)


def _open(mode: NetMode, path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _ended(mode, f"{path}: {error.strerror}") from error


def _ended(mode: NetMode, what: str) -> RestoreFailed:
    again = (
        "Restore again: it gets a network of its own then."
        if mode == "existing"
        else "`ip netns` lists those that exist."
    )
    return RestoreFailed(f"the net namespace of the tree has just ended: {what}", hint=again)
