"""The input of a restore's plan: the caller's request, and the facts of this host."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from ..connections.rules import Rules
from ..connections.secret_scope import Owner
from ..files.deleted_names import DeletedName
from ..files.judgement import Judgement, Policy
from ..files.socket_names import TakenName
from ..namespaces.interfaces import BoundSocket
from ..namespaces.network_choice import Place
from ..report import Finding


class PlanOptions(Struct, frozen=True):
    """The caller's request."""

    pids: str = "auto"  # auto | same | private
    copy: bool = False  # --as: next to a live original
    connections: str | None = None
    files: Policy = "restore"
    rules: Rules = field(default_factory=Rules)  # of this host's configuration
    # seconds for connections to be back, instead of the rules' value
    deadline: float | None = None
    # the names of this host's reconnect hooks; None if they are not known
    hooks: frozenset[str] | None = None
    alone: bool = False  # in a network of its own, even if everything is free here
    grouped: bool = False  # connections to other members of the group are kept
    network: str = ""  # path of the net namespace that was made for them
    shown: bool = False  # a folder is shown to the tree alone at another place
    prepared: bool = False  # this host has pre-restore hooks, which may add addresses


class HostFacts(Struct, frozen=True):
    """The facts of this host that matter for this checkpoint."""

    kernel_arch: str
    cpu_flags: frozenset[str]
    page_size: int
    taken_pids: tuple[int, ...]
    # "tcp 127.0.0.1:80" -> who listens there ("": unknown), in the namespace of the tree to be
    listening: dict[str, str]
    # local ends of the external connections that this host has
    local_addresses: frozenset[str]
    netns: Place  # how it gets its net namespace, and from where
    users: frozenset[int]
    files: tuple[Judgement, ...]
    findings: tuple[Finding, ...] = ()
    deleted: tuple[DeletedName, ...] = ()
    # (local, peer) of connections that are open here
    open_pairs: frozenset[tuple[str, str]] = frozenset()
    # paths of unix datagram sockets, and of journals, that do not exist here
    missing_peers: frozenset[str] = frozenset()
    # working folders that do not exist here and are not put back
    missing_folders: frozenset[str] = frozenset()
    names: tuple[TakenName, ...] = ()  # names of unix sockets that are taken here
    # local ends of waiting sockets that cannot be bound to here
    missing_addresses: frozenset[str] = frozenset()
    bound: tuple[BoundSocket, ...] = ()  # sockets that are bound to a network interface
    # the future credentials of the tree's processes, by their PIDs in the tree
    owners: Mapping[int, Owner] = field(default_factory=dict)
