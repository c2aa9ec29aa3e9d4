"""The networks that the restored members of a group share.

Alone, a tree whose addresses are taken, or whose network is gone, gets a network of its own
(`criuctl.namespaces.network_choice`). Members of a group that were in one network would not reach
each other then. So one network, with only a loopback interface, is made for all of them. It has the
addresses that their sockets are bound to. It is kept by the trees in it, and ends with the last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from ...checkpoint.connection_record import ConnectionRecord, endpoint
from ...checkpoint.manifest import Manifest
from ...namespaces import network_choice
from ...proc.privatens import PrivateNamespaces


@contextmanager
def made(manifests: Mapping[str, Manifest], *, copy: bool) -> Iterator[dict[str, str]]:
    """Make the networks that the restored trees of these sessions share; yield session -> path of
    its net namespace, valid in this block, for those that need one.

    With `copy` they are copies, next to which their originals may have the same addresses.
    """
    found: dict[str, str] = {}
    with ExitStack() as stack:
        for names in _together(manifests):
            members = [manifests[name] for name in names]
            if not _needed(members, copy=copy):
                continue
            spaces = stack.enter_context(PrivateNamespaces(net=True))
            for manifest in members:
                network_choice.lend_addresses(manifest, spaces.init.pid)
            found |= dict.fromkeys(names, f"/proc/{spaces.init.pid}/ns/net")
        yield found


def _together(manifests: Mapping[str, Manifest]) -> Collection[list[str]]:
    """Return the sessions by the net namespace that they were in, without those that only their
    own tree used: CRIU makes these again.
    """
    found: dict[object, list[str]] = {}
    for name, manifest in manifests.items():
        net = manifest.namespaces.get("net", {})
        if net.get("mode") != "dumped":
            found.setdefault(net.get("inode"), []).append(name)
    return found.values()


def _needed(members: list[Manifest], *, copy: bool) -> bool:
    mode = network_choice.find(members[0], copy=copy).mode
    if mode == "host":
        return copy and any(_has_address(c) for one in members for c in one.connections)
    return mode == "private" and len(members) > 1


def _has_address(record: ConnectionRecord) -> bool:
    """Return whether only one socket of a network can have this one's name, or that of its peer in
    the group.
    """
    if record.family == "unix":  # an abstract name is one of the network
        return "@" in (record.local[:1], record.peer[:1]) and bool(record.linked)
    return bool(record.linked) or (not record.external and endpoint(record.local)[1] != 0)
