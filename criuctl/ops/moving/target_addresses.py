"""Checks of the addresses of an arriving tree: those that move along with it, and those that its
listeners are bound to.

A restore would find a missing address only when it binds the socket, when the source is frozen
already.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator

from ...checkpoint.connection_record import endpoint
from ...errors import CriuctlError
from ...proc.address_choice import choose_device, find
from ...quoting import quoted
from ...report import Finding
from ...restore.observe import is_local
from ...restore.plan import ADD_ADDRESS, RestorePlan
from .arrival import Arrival

_ANY = ("0.0.0.0", "::", "")


def addresses(coming: Arrival) -> Iterator[Finding]:
    """Check the addresses that sockets are bound to, and those that are to move along."""
    for text in coming.needs.keep_addresses:
        wanted, _at, device = text.partition("@")
        here = find(wanted, None)
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
            choose_device(wanted, device or None, None)
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
