"""Trying a hook by hand: it gets its usual input, but nothing is dumped, frozen or restored.

The tree of a TARGET runs on; a REF is only read. For ``reconnect`` the hook gets a new socket of
the same kind as the program's descriptor, in the same net namespace, and connects that: the
program's own socket is not touched, and the new one is closed when the hook has answered.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack
from typing import Any

from msgspec import Struct, field

from ..checkpoint.connection_record import ConnectionRecord
from ..checkpoint.manifest import Manifest
from ..config import Config
from ..connections import secrets
from ..connections.decision import decide
from ..connections.record import look
from ..connections.rule_parsing import parse
from ..connections.secret_scope import Owner, of_tree
from ..errors import NoSuchProcess, NotFound, UsageError
from ..hooks import PHASES, Hooks
from ..hooks.contract import RECONNECT, HookResult, policies
from ..hooks.find import all_hooks, executables
from ..hooks.reconnect import run_reconnect
from ..hooks.runner import check, find_hook, request, run_hook
from ..host import hook_facts
from ..host.registry import Registry, SessionRecord
from ..host.target import resolve_target
from ..proc.descriptors import descriptors
from ..proc.namespace_sockets import namespace_socket
from ..proc.tree import read_process, read_tree
from ..report import Reporter
from .inspect import show

_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6, "unix": socket.AF_UNIX}
# The additional input of a phase; nothing of it has happened.
_MORE: dict[str, dict[str, Any]] = {
    "loss-exceeded": {"loss_s": 0.0, "max_loss_s": 0.0},
    "recovered": {
        "recovered_ms": 0.0,
        "restore_ms": 0.0,
        "lost_s": 0.0,
        "passed_over": [],
        "from_host": None,
        "warnings": [],
    },
    "gave-up": {"failures": 0},
}
_TYPES = {
    "stream": socket.SOCK_STREAM,
    "dgram": socket.SOCK_DGRAM,
    "seqpacket": socket.SOCK_SEQPACKET,
}


class Trial(Struct, frozen=True):
    """The input and answers of hooks; `verdict` is what they would have led to."""

    phase: str
    requests: list[dict[str, Any]]
    results: list[dict[str, Any]] = field(default_factory=list)
    verdict: str = "ok"  # ok | veto | warn

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of ``hooks run``."""
        return {
            "phase": self.phase,
            "verdict": self.verdict,
            "requests": self.requests,
            "results": self.results,
        }


class _Subject(Struct, frozen=True):
    """The subject of the trial: a running tree or a checkpoint."""

    facts: dict[str, Any]
    connections: list[ConnectionRecord]
    pid: int | None  # of the tree's root, if it runs
    commands: dict[int, str]
    owners: dict[int, Owner]


def list_hooks(config: Config) -> list[dict[str, Any]]:
    """Return every hook by phase, in the order in which they run."""
    check(config)
    policy = policies(config)
    found = []
    for phase in PHASES:
        for order, hook in enumerate(all_hooks(config, phase), 1):
            failure = None if hook.origin == "built-in" or phase == RECONNECT else policy[phase]
            found.append({**hook.to_dict(), "order": order, "on_failure": failure})
    return found


def try_hooks(
    config: Config,
    phase: str,
    name: str | None,
    *,
    target: str | None = None,
    ref: str | None = None,
    fd: tuple[int | None, int] | None = None,
) -> Trial:
    """Run the executables of `phase` (only `name`, if given) against a running tree or a
    checkpoint.
    """
    check(config)
    if phase not in PHASES:
        raise UsageError(f"there is no phase {phase!r}", hint=f"Phases: {', '.join(PHASES)}.")
    if name is not None and any(
        h.name == name and h.origin == "built-in" for h in all_hooks(config, phase)
    ):
        raise UsageError(
            f"the {phase} hook {name!r} is built in; it runs only as part of a dump or a restore"
        )
    if (target is None) == (ref is None):
        raise UsageError(
            "give either a target or a reference",
            hint="--target for a running tree, --ref for a checkpoint.",
        )
    subject = _running(config, target) if target is not None else _stored(config, str(ref))
    if phase == RECONNECT:
        if name is None or fd is None:
            raise UsageError(
                "a reconnect hook is tried by its name on one connection",
                hint="Give NAME and --fd.",
            )
        return _reconnect(config, name, subject, fd)
    hooks = executables(config, phase) if name is None else [find_hook(config, phase, name)]
    facts = subject.facts | {
        "connections": [c.to_dict() for c in subject.connections if not c.waits],
        "trial": True,
    }
    facts |= _MORE.get(phase, {})
    if phase == "snapshot-failed":
        facts["target"] = target or facts["session"]
    if phase.endswith("-failed") or phase == "gave-up":
        facts["error"] = {
            "code": "trial",
            "exit_code": 1,
            "message": "nothing has failed: this is a trial",
            "hint": "",
        }
    trial = Trial(phase, [request(phase, facts, hook.name) for hook in hooks])
    verdicts = []
    for hook, body in zip(hooks, trial.requests, strict=True):
        result = run_hook(config, hook, body)
        trial.results.append(result.to_dict())
        verdicts.append(_verdict(config, result))
    verdict = next((v for v in ("veto", "warn") if v in verdicts), "ok")
    return Trial(phase, trial.requests, trial.results, verdict)


def _verdict(config: Config, result: HookResult) -> str:
    if result.ok:
        return "ok"
    policy = policies(config)[result.phase]
    if PHASES[result.phase].vetoes and (result.veto or policy == "veto"):
        return "veto"
    return "ok" if policy == "ignore" else "warn"


def _running(config: Config, target: str) -> _Subject:
    registry = Registry(config)
    resolved = resolve_target(target, registry.lookup, registry.session_of)
    root = resolved.root
    session = registry.find(root) or SessionRecord(
        name=resolved.session or read_process(root.pid).command
    )
    hooks = hook_facts.of_dump(config, Reporter(), session, root.pid, labels={}, leave_running=True)
    tree = read_tree(root.pid)
    found = look(tree, {p.pid: descriptors(p.pid) for p in tree if not p.zombie})
    facts = hooks.facts | {"processes": [p.pid for p in tree]}
    return _Subject(
        facts,
        [c.record for c in found.connections],
        root.pid,
        {p.ns_pid: p.command for p in tree},
        of_tree(tree),
    )


def _stored(config: Config, ref: str) -> _Subject:
    manifest: Manifest = show(config, ref).manifest
    hooks: Hooks = hook_facts.of_restore(config, Reporter(), manifest, manifest.session.name)
    commands = {p.ns_pid: p.command for p in manifest.processes}
    # the owners in a manifest are only claims
    return _Subject(hooks.facts, list(manifest.connections), None, commands, {})


def _reconnect(config: Config, name: str, subject: _Subject, fd: tuple[int | None, int]) -> Trial:
    record = _record(subject, fd)
    decision = decide(
        record,
        parse(config),
        "reconnect",
        commands=subject.commands,
        owners=subject.owners,
    )
    secret = secrets.resolve(decision.settings.secret)
    with ExitStack() as stack:
        family, kind = _FAMILIES[record.family], _TYPES[record.type]
        sock = (
            socket.socket(family, kind)
            if subject.pid is None
            else namespace_socket(subject.pid, family, kind)
        )
        stack.enter_context(sock)
        body = record.to_dict()
        options = dict(decision.settings.options)
        deadline = time.monotonic() + decision.deadline
        facts = subject.facts | {"trial": True}
        answer = run_reconnect(
            config,
            name,
            sock.fileno(),
            body,
            options=options,
            secret=secret,
            deadline=deadline,
            facts=facts,
        )
    ok = answer["outcome"] == "reconnected"
    asked = request(RECONNECT, facts | {"connection": body, "options": options}, name)
    asked["secret"] = "on descriptor 4" if secret is not None else None
    return Trial(
        RECONNECT,
        [asked],
        [{"name": name, "phase": RECONNECT, "ok": ok, **answer}],
        "ok" if ok else "warn",
    )


def _record(subject: _Subject, fd: tuple[int | None, int]) -> ConnectionRecord:
    pid, number = fd
    for record in subject.connections:
        holders = {(record.pid, record.fd), *record.holders}
        if (
            any(held == number and pid in (None, holder) for holder, held in holders)
            and not record.waits
        ):
            if record.family not in _FAMILIES or record.type not in _TYPES:
                raise UsageError(
                    f"descriptor {number} is a {record.family} {record.type} socket: none that is "
                    "connected again"
                )
            return record
    if subject.pid is not None and not os.path.exists(f"/proc/{subject.pid}"):
        raise NoSuchProcess(f"PID {subject.pid} has ended")
    where = "" if pid is None else f" of PID {pid}"
    raise NotFound(
        f"descriptor {number}{where} is no connection of this tree",
        hint="`criuctl show REF` lists those of a checkpoint.",
    )
