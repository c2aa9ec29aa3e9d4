"""The plan of a restore: a pure function of the manifest, the request and the facts of this host.

`criuctl.restore.observe` collects the facts, `make_plan` decides, ``restore --dry-run`` prints the
decision.  A plan with error findings is never carried out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from msgspec import Struct, field

from ..checkpoint.connection_record import endpoint
from ..checkpoint.manifest import Manifest
from ..files.deleted_names import DeletedName
from ..files.judgement import Judgement
from ..files.socket_names import TakenName, covering, settle
from ..namespaces import interfaces
from ..namespaces.interfaces import BoundSocket
from ..namespaces.network_choice import NetMode, is_new
from ..namespaces.network_choice import new as new_net
from ..quoting import quoted
from ..report import Finding
from .connection_plan import ConnectionPlan, in_use, plan_connections
from .host_facts import HostFacts, PlanOptions

PidMode = Literal["same", "private", "init"]

ADD_ADDRESS = (
    "Add it (`ip address add`), or allow foreign ones until the tree is here: `sysctl "
    "net.ipv4.ip_nonlocal_bind=1`."
)


class RestorePlan(Struct, frozen=True):
    """The decision; `to_dict` is what ``--dry-run`` prints."""

    pids: PidMode
    net: NetMode
    net_source: str
    connections: tuple[ConnectionPlan, ...]
    files: tuple[Judgement, ...]
    findings: tuple[Finding, ...] = field(default=())
    deleted: tuple[DeletedName, ...] = ()
    names: tuple[TakenName, ...] = ()  # unix sockets that come under names of their own
    # interfaces that sockets are bound to, and that the tree's network does not have
    no_interfaces: frozenset[str] = frozenset()

    @property
    def policies(self) -> dict[tuple[int, int], str]:
        """Return (PID, fd) of each external connection -> keep | reconnect | hangup | refuse."""
        return {(c.record.pid, c.record.fd): c.policy for c in self.connections}

    @property
    def errors(self) -> list[Finding]:
        """Return the findings that forbid it."""
        return [f for f in self.findings if f.level == "error"]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the plan."""
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


def make_plan(manifest: Manifest, facts: HostFacts, options: PlanOptions) -> RestorePlan:
    """Decide.  Pure: everything it knows is in its arguments."""
    findings: list[Finding] = list(facts.findings)
    _platform(manifest, facts, findings)
    init = bool(manifest.namespaces.get("pid", {}).get("init"))
    own_names = settle(
        facts.names,
        findings,
        copy=options.copy,
        init=init,
        pids=options.pids,
        grouped=options.grouped,
    )
    # the other copies of a group may have sockets that are to be shown
    shown = bool(covering(own_names)) or (options.copy and options.grouped) or options.shown
    pids = _pids(manifest, facts, options, findings, shown=shown)
    net, source, _ = facts.netns
    fresh = new_net(manifest)
    again = "what was in that of the dump" if fresh == "dumped" else "loopback only"
    if options.alone:
        net, source = fresh, ""
    net = _abstract_names(facts, options, net, fresh, again, findings)
    net = _taken_addresses(manifest, facts, options, net, fresh, again, findings)
    if not is_new(net):
        findings += _missing_addresses(manifest, facts, prepared=options.prepared)
    if net == "private" and facts.netns.mode == "private" and not options.alone:
        findings.append(_new_network(copy=options.copy, unsure=facts.netns.unsure))
    if net == "shared":
        text = "the members of the group get a network of their own (loopback only)"
        findings.append(Finding("warning", "netns-new", text))
    if net == "private" and pids == "same":
        pids = "private"  # both namespaces are kept alive by the same PID 1
        if options.pids == "same":
            text = "it gets a network of its own, which needs a PID namespace of its own"
            findings.append(Finding("error", "pids", text, "Restore with --pids auto."))
    commands = {p.ns_pid: p.command for p in manifest.processes}
    connections = plan_connections(manifest.connections, facts, options, commands, net, findings)
    absent = interfaces.missing(facts.bound, net)
    findings += _interfaces(absent, connections, prepared=options.prepared and not is_new(net))
    findings += [f for j in facts.files if (f := j.finding()) is not None]
    findings += [f for name in facts.deleted if (f := name.finding()) is not None]
    findings += _missing_folders(manifest, facts)
    gone = interfaces.names(absent)
    return RestorePlan(
        pids, net, source, connections, facts.files, tuple(findings), facts.deleted, own_names, gone
    )


def _taken_addresses(
    manifest: Manifest,
    facts: HostFacts,
    options: PlanOptions,
    net: NetMode,
    fresh: NetMode,
    again: str,
    findings: list[Finding],
) -> NetMode:
    """Return the network, given the addresses that sockets of this host have already."""
    conflicts = [c for c in manifest.connections if in_use(c, facts)]
    if not conflicts or net != facts.netns.mode:
        return net
    if options.copy:
        names = sorted({c.local for c in conflicts})
        verb = "is" if len(names) == 1 else "are"
        text = f"{', '.join(names)} {verb} taken, so the copy gets a network of its own ({again})"
        findings.append(Finding("warning", "port-taken", text))
        return fresh
    hint = "End what uses it, or restore a copy with --as NAME, which gets a network of its own."
    for c in conflicts:
        by = facts.listening.get(f"{c.protocol} {c.local}")
        text = f"{c.local} is taken on this host" + (f" by {by}" if by else "")
        findings.append(Finding("error", "port-taken", text, hint, c.pid, c.fd))
    return net


def _missing_addresses(
    manifest: Manifest, facts: HostFacts, *, prepared: bool
) -> Iterator[Finding]:
    """Report local ends of waiting sockets that this host does not have; a hook may add them."""
    for c in manifest.connections:
        if c.waits and c.local in facts.missing_addresses:
            text = (
                f"{c.protocol} {c.local} is bound to {endpoint(c.local)[0]}, which is no address "
                "of this host"
            )
            if prepared:
                text = f"{text}, unless a hook adds it"
                yield Finding("info", "address-missing", text, "", c.pid, c.fd)
            else:
                yield Finding("error", "address-missing", text, ADD_ADDRESS, c.pid, c.fd)


def _new_network(*, copy: bool, unsure: bool) -> Finding:
    """Return the warning that the tree does not get the network namespace of the dump."""
    text, hint = (
        "the network namespace of the dump is gone; a new one with only a loopback interface is "
        "made",
        "",
    )
    if copy:
        text = (
            "the copy gets a network of its own (loopback only), not the network namespace of the "
            "dump"
        )
    elif unsure:
        text = (
            "cannot verify that the network namespace with this number is still that of the dump; "
            "a new one with only a loopback interface is made"
        )
        hint = (
            "Before the next dump, give it a name by which a restore finds it: `ip netns attach "
            "NAME PID`."
        )
    return Finding("warning", "netns-new", text, hint)


def _missing_folders(manifest: Manifest, facts: HostFacts) -> Iterator[Finding]:
    """Report working folders that do not exist here and are not put back."""
    for folder in sorted(facts.missing_folders):
        pid = next(p.pid for p in manifest.processes if p.cwd == folder)
        hint = (
            f"Bring it here, or make it: `mkdir -p {quoted(folder)}`; next time dump with "
            "--with-files."
        )
        text = f"{folder}: is a working folder, and is no folder here"
        yield Finding("error", "folder-missing", text, hint, pid)


def _interfaces(
    absent: Iterable[BoundSocket], connections: Iterable[ConnectionPlan], *, prepared: bool
) -> Iterator[Finding]:
    """Report interfaces that CRIU would not find; a connection that is given up does not need its
    interface.
    """
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
                f"a socket is bound to the network interface {s.interface}, which the tree's "
                "network does not have"
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
    options: PlanOptions,
    net: NetMode,
    fresh: NetMode,
    again: str,
    findings: list[Finding],
) -> NetMode:
    """Return the network, given the abstract names of unix sockets that are taken in the one that
    the tree would get.
    """
    found = [n for n in facts.names if n.what == "abstract"]
    if not found or is_new(net):
        return net
    if options.copy:
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
    manifest: Manifest,
    facts: HostFacts,
    options: PlanOptions,
    findings: list[Finding],
    *,
    shown: bool,
) -> PidMode:
    init = bool(manifest.namespaces.get("pid", {}).get("init"))
    overlaid = next((j.record.path for j in facts.files if j.verdict == "overlaid"), None)
    if overlaid is not None and (init or options.pids == "same"):
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
        if options.pids == "same":
            text = "its root was PID 1 of a PID namespace and cannot be that of the host"
            findings.append(Finding("error", "pids", text, "Restore with --pids auto."))
        return "init"
    # PIDs of a namespace of its own mean nothing here, even if they happen to be free.
    own = manifest.namespaces.get("pid", {}).get("mode") == "entered"
    if options.pids == "private" or (
        options.pids == "auto" and (own or overlaid is not None or shown)
    ):
        return "private"
    if not facts.taken_pids:
        return "same"
    some = ", ".join(map(str, facts.taken_pids[:8])) + (" ..." if len(facts.taken_pids) > 8 else "")
    if options.pids == "same":
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
