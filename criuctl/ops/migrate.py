"""A migration, as the home that the session leaves runs it.

It is a dump (`criuctl.dump.story`) into the other host's inbox, with one more step before the tree
is ended: the other host restores the checkpoint and holds it.

    examine the other host -> send what can be sent while the tree runs -> freeze, send the rest
    -> there: restored, connections handed back, held -> **here: recorded, killed, seen gone**
    -> there: go

RULE: never two copies running: the word ``go`` is sent only when every process of the tree is known
to be gone here.

RULE: never none: until CRIU may end it, every failure lets the tree go on here; before that, its
complete checkpoint is durable in the other host's inbox.

When the link dies before the tree is ended, the tree goes on, and the other host undoes what it
has. When it dies after, it is made again for a while; if that does not help, `InDoubt` is raised,
and ``criuctl migrate --resolve`` (`migrate_resolve`) sends the word later. The record of the move
(`moves`) is enough for that after ``kill -9`` at any moment.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..checkpoint.manifest import SessionRef
from ..config import Config
from ..dump.after_commit import AfterCommit
from ..dump.job import DumpRequest
from ..dump.story import dump
from ..dump.subject import session_for
from ..errors import PreflightRefused
from ..host import rights
from ..host.journal import events
from ..host.lost_homes import stopping
from ..host.moves import Moves, Outgoing
from ..host.registry import Registry, check_outside
from ..host.target import Target, resolve_target
from ..proc import address_choice
from ..report import RECORDED, Finding, Reporter, summarised
from ..session.client.session import Session
from ..transport import ssh
from .moving.delivery import HostDelivery, MoveOptions
from .moving.departure import check_home, moved_away
from .moving.needs import gather
from .moving.other_host import reach

_CARRIED_MIB = 1 << 20  # MiB; files open for writing are always carried, whatever their size


class MigrateResult(Struct):
    """The result of a migration; `to_dict` is the contract of ``migrate --json``."""

    session: str
    source: str
    host: str
    to: str
    checkpoint: str
    incarnation: int
    pid: int  # on the other host
    frozen_ms: float  # from the freeze here until it ran there
    total_ms: float
    bytes: dict[str, int]
    precopy: list[dict[str, Any]]
    connections: list[dict[str, Any]]
    files: list[dict[str, str]]
    warnings: list[str]
    degraded: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return one JSON object with all keys."""
        return {
            "session": self.session,
            "from": self.source,
            "host": self.host,
            "to": self.to,
            "checkpoint": self.checkpoint,
            "incarnation": self.incarnation,
            "pid": self.pid,
            "frozen_ms": self.frozen_ms,
            "total_ms": self.total_ms,
            "bytes": self.bytes,
            "precopy": self.precopy,
            "connections": self.connections,
            "files": self.files,
            "warnings": self.warnings,
        }


def examine(
    config: Config, target: str, to: str, options: MoveOptions, *, reporter: Reporter
) -> list[Finding]:
    """Check whether the session could be moved to the host, without moving it."""
    check_outside(config)
    _here(config, target)
    with reach(config, to, reporter) as there:
        return _look(config, target, there, _travelling(config, target, options))


@events.recorded("migrate", about=events.target)
def migrate(
    config: Config, target: str, to: str, options: MoveOptions, *, reporter: Reporter
) -> MigrateResult:
    """Move the tree that `target` names to the host `to`; after any failure before its end here it
    continues here.
    """
    began = time.monotonic()
    check_outside(config)
    moves, registry = Moves(config, Outgoing), Registry(config)
    with AfterCommit(reporter) as after, ExitStack() as stack:
        stack.enter_context(stopping(config, reporter))
        root = _here(config, target).root
        if (name := registry.held(root)) is not None:
            rights.check(config, "migrate", name)
        reporter.step("reach", host=to)
        there = stack.enter_context(reach(config, to, reporter))
        reporter.step("examine")
        options = _travelling(config, target, options)
        proofs = check_home(config, registry.find(root), reporter)
        findings = _look(config, target, there, options)
        errors = [f for f in findings if f.level == "error"]
        if errors:
            text = f"{to} cannot take it: " + "; ".join(map(str, summarised(errors)))
            raise PreflightRefused(
                text, hint=errors[0].hint, findings=[f.to_dict() for f in errors]
            )
        for finding in summarised(findings, named=RECORDED):
            reporter.finding(finding)
        delivery = stack.enter_context(
            HostDelivery(config, to, there, moves, options, reporter, proofs)
        )
        carrying = replace(_keeping(config, options), files="carry", files_max_mib=_CARRIED_MIB)
        try:
            carried = DumpRequest(
                name=options.name,
                with_files=options.with_files,
                carry_binaries=options.carry_binaries,
                connections=options.connections,
                precopy=options.precopy,
                max_freeze=options.max_freeze,
            )
            dumped = dump(carrying, target, request=carried, reporter=reporter, delivery=delivery)
        except BaseException:
            if not delivery.settled():
                delivery.stays()
                raise
            dumped = None
        answer = delivery.outcome()
        assert delivery.move is not None
        after.begins()
        moved_away(
            config, delivery.move, str(there.link.hello.get("host_id", "")), answer, reporter, after
        )
    manifest = delivery.manifest
    assert manifest is not None
    return MigrateResult(
        session=manifest.session.name,
        source=manifest.host.name,
        host=delivery.host_name,
        to=to,
        checkpoint=manifest.id,
        incarnation=answer.get("incarnation", manifest.incarnation + 1),
        pid=answer.get("pid", 0),
        frozen_ms=round((delivery.running_at - delivery.frozen_at) * 1000, 1),
        total_ms=round((time.monotonic() - began) * 1000, 1),
        bytes=dict(dumped.manifest.bytes if dumped is not None else manifest.bytes),
        precopy=dumped.rounds if dumped is not None else [],
        connections=answer.get("connections", []),
        files=answer.get("files", []),
        warnings=[
            *reporter.warnings,
            *(f"{delivery.host_name}: {w}" for w in answer.get("warnings", [])),
        ],
        degraded=after.degraded or bool(answer.get("degraded")) or bool(dumped and dumped.degraded),
    )


def _here(config: Config, target: str) -> Target:
    """Return what is to be moved, before the other host is asked, which may not answer."""
    registry = Registry(config)
    return resolve_target(target, registry.lookup, registry.session_of)


def _travelling(config: Config, target: str, options: MoveOptions) -> MoveOptions:
    """Return the options with the session's workspace added."""
    name = Registry(config).held(_here(config, target).root)
    if name is None:
        return options
    with Session.connect(name, config=config, kind="service", operator="criuctl-migrate") as holder:
        workspace = str(holder.status().get("facts", {}).get("workspace", ""))
    return replace(options, with_files=(*options.with_files, workspace)) if workspace else options


def _keeping(config: Config, options: MoveOptions) -> Config:
    """Return a configuration in which connections of an address that moves along are kept, whatever
    the rules say of others.
    """
    rules = (
        (
            f"--keep-address {wanted}",
            {"match": {"local": address_choice.parse(wanted)[0]}, "policy": "keep"},
        )
        for wanted in options.keep_addresses
    )
    return replace(config, connection_rules=(*rules, *config.connection_rules))


def _look(
    config: Config, target: str, there: ssh.Connection, options: MoveOptions
) -> list[Finding]:
    resolved = _here(config, target)
    session = session_for(Registry(config), resolved, options.name)
    needs = gather(
        _keeping(config, options),
        resolved.root.pid,
        session=SessionRef(session.name, session.id),
        incarnation=session.incarnation,
        with_files=options.with_files,
        carry_binaries=options.carry_binaries,
        keep_addresses=options.keep_addresses,
        connections=options.connections,
        pids=options.pids or "auto",
        file_conflicts=options.files or "",
    )
    answer = there.link.ask("examine", {"needs": needs, "clock": time.time()})
    return [Finding(**f) for f in answer.arguments["findings"]]
