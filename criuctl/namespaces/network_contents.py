"""What a net namespace of a tree holds that a new one does not: what would be lost with it.

A net namespace without a name ends with its last process.  If only the tree uses it, and CRIU can
make again all that is in it (`own_network`), CRIU stays outside it and saves it: links, addresses,
the routes of the main table, rules, firewall tables.  What CRIU leaves out (most settings under
/proc/sys/net, routes of other tables) criuctl notes itself, and puts back into the new one before
the program runs.  In all other cases CRIU enters the namespace and saves nothing of it; then
`check` and `dump` warn of the differences from a new one.

`Network` is compared with one of a namespace that was just made, so what every namespace has (the
devices of tunnels that the kernel makes itself, its rules) is no difference, whatever the kernel.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from ..errors import CriuctlError, NoSuchProcess
from ..host.target import ancestors
from ..proc import netfilter, rtnetlink
from ..proc.namespace_sockets import socket_inside
from ..proc.namespaces import in_net_namespace, named_netns, new_net_namespace
from ..proc.procfs import all_pids, read_link, read_text, reading
from ..report import Reporter

_SYSCTLS = "/proc/sys/net"
_SECRETS = ("key", "secret")  # name suffixes of settings that differ in every namespace
_OF_LOOPBACK = frozenset({"127.0.0.1/8 on lo", "::1/128 on lo"})
_WITH_DEVICES = ("conf", "neigh")
_ALWAYS = ("all", "default", "lo")
# kinds of links that CRIU restores with all their settings
_SAVED_KINDS = frozenset({"veth", "bridge", "tun"})
_FIRST = ("ip_forward", "forwarding")
_PID_1 = "/nsinit.py"


_LISTED, _COUNTED = ("links", "addresses", "tables", "queueing"), ("routes", "rules")


class Network(Struct, frozen=True):
    """The contents of a net namespace, in readable form."""

    links: frozenset[str]  # "v0 (veth)"
    addresses: frozenset[str]  # "10.9.9.1/24 on lo"
    routes: frozenset[bytes]
    rules: frozenset[bytes]
    tables: frozenset[str]  # of nftables, "inet filter"
    queueing: frozenset[str]  # "tbf on v0"
    settings: dict[str, str]  # "ipv4/ip_forward" -> "1", all that can be set
    lost: frozenset[str] = frozenset()  # those of the links that CRIU cannot make again

    def beyond(self, other: Network) -> Network:
        """Return what this one has and the other has not."""
        return Network(
            self.links - other.links,
            self.addresses - other.addresses,
            self.routes - other.routes,
            self.rules - other.rules,
            self.tables - other.tables,
            self.queueing - other.queueing,
            {
                name: value
                for name, value in self.settings.items()
                if other.settings.get(name) != value
            },
            self.lost - other.links,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what a manifest keeps: what a restore puts back itself, and what it expects in the
        new namespace.
        """
        listed = {name: sorted(getattr(self, name)) for name in _LISTED}
        return {
            **listed,
            **{name: sorted(v.hex() for v in getattr(self, name)) for name in _COUNTED},
            "settings": self.settings,
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Network:
        """Return it from a manifest; fields of another form are left out."""
        parts: dict[str, Any] = {name: frozenset(_texts(value.get(name))) for name in _LISTED}
        parts |= {
            name: frozenset(map(_bytes, _texts(value.get(name)))) - {b""} for name in _COUNTED
        }
        settings = value.get("settings")
        known = settings.items() if isinstance(settings, Mapping) else ()
        return cls(
            **parts, settings={n: v for n, v in known if isinstance(n, str) and isinstance(v, str)}
        )

    def words(self) -> list[str]:
        """Return the contents as parts of a sentence; [] for nothing."""
        return [
            *_some("interface", "interfaces", sorted(self.links)),
            *_some("address", "addresses", sorted(self.addresses)),
            *_some("firewall table", "firewall tables", sorted(self.tables)),
            *_some("queueing discipline", "queueing disciplines", sorted(self.queueing)),
            *([_count(len(self.routes), "route")] if self.routes else []),
            *([_count(len(self.rules), "routing rule")] if self.rules else []),
            *_some(
                "setting",
                "settings",
                [f"net.{_dotted(n)}={v}" for n, v in sorted(self.settings.items())],
            ),
        ]


def _texts(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _some(one: str, many: str, items: list[str]) -> Iterator[str]:
    if items:
        more = f" and {len(items) - 3} more" if len(items) > 3 else ""
        yield f"{one if len(items) == 1 else many} {', '.join(items[:3])}{more}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number != 1 else ''}"


def _dotted(name: str) -> str:
    return name.replace("/", ".")


def look(namespace: int, others: Iterable[int] = ()) -> Network:
    """Return what is in the net namespace of that descriptor; `OSError`, `PlatformError`.

    `others` are those that CRIU saves as well: an interface may have its other end there.
    """
    with rtnetlink.Rtnetlink(namespace) as net:
        links = {link.index: link for link in net.links()}
        saved = {None, *(net.number_of(other) for other in others)}
        names = {index: link.name for index, link in links.items()}
        addresses = {
            f"{a.ip}/{a.prefix} on {names.get(a.index, '?')}"
            for a in net.addresses()
            if not _by_itself(a.ip)
        }
        routes = frozenset(_all_routes(net))
        rules = net.rules()
        queueing = {f"{kind} on {names.get(index, '?')}" for index, kind in net.queueing()}
    tables = frozenset(netfilter.all_tables(partial(socket_inside, namespace)))
    own = [link for link in links.values() if not link.flags & rtnetlink.IFF_LOOPBACK]
    return Network(
        frozenset(map(_name, own)),
        frozenset(addresses - _OF_LOOPBACK),
        routes,
        frozenset(rules),
        tables,
        frozenset(queueing),
        in_net_namespace(namespace, _settings),
        frozenset(
            _name(link)
            for link in own
            if link.driver not in _SAVED_KINDS or link.lower_namespace not in saved
        ),
    )


def _all_routes(net: rtnetlink.Rtnetlink) -> Iterator[bytes]:
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):  # a kernel without IPv6
            yield from (route.message for route in net.routes(family))


def _by_itself(ip: str) -> bool:
    """Return whether a device has such an address as soon as it is up."""
    return ip.startswith("fe80:") and "ff:fe" in ip


def _name(link: rtnetlink.Link) -> str:
    return f"{link.name} ({link.driver or 'physical'})"


def _settings() -> dict[str, str]:
    """Return the settings under /proc/sys/net of the caller's net namespace, without those of
    devices.
    """
    found = {}
    for folder, folders, files in os.walk(_SYSCTLS):
        if os.path.basename(folder) in _WITH_DEVICES:
            folders[:] = [name for name in folders if name in _ALWAYS]
        for name in files:
            path = os.path.join(folder, name)
            with suppress(OSError, UnicodeDecodeError):  # a write-only setting, for example
                if os.stat(path).st_mode & 0o200 and not name.endswith(_SECRETS):
                    found[path[len(_SYSCTLS) + 1 :]] = Path(path).read_text().strip()
    return found


class OwnNetwork(Struct, frozen=True):
    """The net namespace of a tree's root, which ends with the tree."""

    # what it, and other namespaces of the tree's processes, have beyond a new one, by a PID in it
    networks: dict[int, Network]
    why_not: str = ""  # why CRIU cannot save it; "" if it can

    @property
    def network(self) -> Network:
        """Return the contents of the root's own."""
        return next(iter(self.networks.values()))

    @property
    def saved(self) -> bool:
        """Return whether CRIU stays outside it and saves it."""
        return not self.why_not


def own_network(root: int, tree: Collection[int], *, tools_in: str = "/") -> OwnNetwork | None:
    """Return that of `root`, if it is not criuctl's; None if something other than the `tree` keeps
    it.

    `tools_in` is the root folder in which CRIU looks for the programs it runs.  `NoSuchProcess`,
    `OSError`, `PlatformError`.
    """
    with ExitStack() as stack:
        opened: dict[int, tuple[int, int]] = {}  # inode -> a PID, and a descriptor
        for pid in (root, *tree):
            with suppress(NoSuchProcess) if pid != root else nullcontext(), reading(pid):
                inode = os.stat(f"/proc/{pid}/ns/net").st_ino
                if inode not in opened:
                    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                    stack.callback(os.close, namespace)
                    opened[inode] = pid, namespace
        own = os.stat("/proc/self/ns/net").st_ino
        kept = [pid for inode, (pid, _) in opened.items() if inode == own or _is_kept(inode, tree)]
        if root in kept:
            return None
        descriptors = [namespace for _, namespace in opened.values()]
        networks = {pid: beyond_new(namespace, descriptors) for pid, namespace in opened.values()}
    lost = sorted(set().union(*(network.lost for network in networks.values())))
    queueing = sorted(set().union(*(network.queueing for network in networks.values())))
    why = ""
    if kept:
        why = f"PID {kept[0]} lives in another net namespace, which does not end with the tree"
    elif lost:
        why = f"CRIU cannot make {', '.join(lost)} again"
    elif queueing:
        why = f"CRIU does not save queueing disciplines: {', '.join(queueing)}"
    elif _tools_missing(tools_in):
        why = f"CRIU finds no `ip` command in {tools_in}"
    return OwnNetwork(networks, why)


def beyond_new(namespace: int, others: Iterable[int] = ()) -> Network:
    """Return what the net namespace of that descriptor has beyond a new one; see `look`."""
    fresh = new_net_namespace()
    try:
        return look(namespace, others).beyond(look(fresh))
    finally:
        os.close(fresh)


def _is_kept(inode: int, tree: Collection[int]) -> bool:
    """Return whether a net namespace has a name, or a process that does not end with the tree."""
    if named_netns(inode):
        return True
    inside = (pid for pid in all_pids() if pid not in tree and _lives_in(pid, inode))
    return not all(_below(pid, tree) or _ends_with_child(pid) for pid in inside)


def _lives_in(pid: int, inode: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino == inode
    except OSError:
        return False


def _below(pid: int, tree: Collection[int]) -> bool:
    """Return whether a process of the tree has started it, since the tree was read."""
    try:
        return not ancestors(pid).isdisjoint(tree)
    except NoSuchProcess:
        return True  # it has ended


def _ends_with_child(pid: int) -> bool:
    """Return whether it has made namespaces for a tree and waits: ``unshare --fork``, or the PID 1
    of a restored tree.
    """
    try:
        words = read_text(pid, "cmdline").split("\0")
        return os.path.basename(read_link(pid, "exe")) == "unshare" or any(
            w.endswith(_PID_1) for w in words
        )
    except NoSuchProcess:
        return True  # it has ended
    except CriuctlError:
        return False  # it cannot be read


def _tools_missing(folder: str) -> bool:
    path = os.pathsep.join(
        folder.rstrip("/") + place for place in os.get_exec_path() if place.startswith("/")
    )
    return shutil.which("ip", path=path) is None


def complete(net: Mapping[str, Any], pids: Mapping[int, int], reporter: Reporter) -> None:
    """Put what CRIU has left out into the net namespaces that it has just made; warn of what is
    missing.

    `net`: their records in a manifest; `pids`: PID in the manifest -> PID here.
    """
    networks = net.get("networks")
    for record in networks if isinstance(networks, list) else ():
        there = record.get("pid") if isinstance(record, Mapping) else None
        pid = pids.get(there) if isinstance(there, int) else None
        if pid is None:
            continue
        try:
            with reading(pid):
                namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                # Images and manifest are separate: together they must not change a network that is
                # not the tree's own.
                if os.fstat(namespace).st_ino == os.stat("/proc/self/ns/net").st_ino:
                    reporter.warning(
                        f"PID {pid} has no net namespace of its own: nothing is set in this one"
                    )
                    continue
                missing = _complete(namespace, Network.from_dict(record)).words()
            finally:
                os.close(namespace)
        except (CriuctlError, OSError) as error:
            reporter.warning(f"the network of PID {pid} may not be complete: {error}")
            continue
        if missing:
            reporter.warning(
                f"the network of PID {pid} is not complete, missing: {'; '.join(missing)}"
            )


def _complete(namespace: int, wanted: Network) -> Network:
    """Set what is missing, except settings that the namespace does not have; return what is missing
    then.
    """
    in_net_namespace(namespace, partial(_set, wanted.settings))
    with rtnetlink.Rtnetlink(namespace) as net:
        for message in wanted.routes - set(_all_routes(net)):
            with suppress(OSError):  # it is missing
                net.add_route(rtnetlink.Route(message, 0))
    return wanted.beyond(beyond_new(namespace))


def _set(wanted: Mapping[str, str]) -> None:
    """Set settings of the caller's net namespace to their recorded values.

    Those that turn forwarding on come first: the kernel changes others with them.
    """
    now = _settings()
    for name in sorted(wanted, key=lambda name: (name.rpartition("/")[2] not in _FIRST, name)):
        if now.get(name, wanted[name]) != wanted[name]:
            with suppress(OSError):
                Path(_SYSCTLS, name).write_text(wanted[name])
