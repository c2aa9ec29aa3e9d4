"""The life of a migration, told by the home that the session leaves.

It is a dump (`criuctl.ops.dump`) into the other host's inbox, with one more step before the tree is ended: the other
host restores the checkpoint and holds it.

    examine the other host -> send what can be sent while the tree runs -> freeze, send the rest
    -> there: restored, connections handed back, held -> **here: written down, killed, seen gone** -> there: go

RULE: never two copies running: the word ``go`` is said only when every process of the tree is known to be gone here.
RULE: never none: until CRIU is let end it, every failure lets the tree go on here; before that, its complete checkpoint is
durable in the other host's inbox.

When the link dies before the tree is ended, the tree goes on, and the other host undoes what it has.  When it dies after, it is
made again for a while; if that does not help, `InDoubt` tells so, and ``criuctl migrate --resolve`` says the word later.
What is written down (`moves`) is enough for that after ``kill -9`` at any moment.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..checkpoint import leases
from ..checkpoint.manifest import Manifest, SessionRef
from ..checkpoint.repository import Repository
from ..config import Config
from ..errors import (
    CriuctlError,
    InDoubt,
    LinkLost,
    NotFound,
    PreflightRefused,
    RestoreFailed,
    StoreError,
    TimedOut,
)
from ..proc import addresses, netfilter
from ..proc.scratch import Scratch
from ..proc.tree import ProcessIdentity, wait_ended
from ..report import Finding, Reporter
from ..session import sessions
from ..session.client import Session
from ..session.names import valid_name
from ..store import open_store
from ..store.remote import RemoteStore
from ..transport import ssh
from ..transport.link import Request
from . import fencing, inbox
from .dump import dump, session_for
from .host import host_id
from .moves import Incoming, Moves, Outgoing, new_id
from .needs import gather
from .registry import Registry, SessionRecord, boot_id, exclusive_session
from .standdown import stopping
from .target import resolve_target

_RESTORE = 600.0  # seconds for the other host to restore
_SETTLE = 60.0  # seconds for which a broken link is made again
_PAUSE = 1.0  # between two tries
_CARRIED_MIB = 1 << 20  # files open for writing travel whatever their size


@dataclass(slots=True)
class MigrateResult:
    """What a migration answers; `to_dict` is the contract of ``migrate --json``."""

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
        """One object, all keys."""
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


@dataclass(frozen=True, slots=True)
class Wishes:
    """How the session is to come back there, and what travels."""

    name: str | None = None
    pids: str | None = None
    connections: str | None = None
    files: str | None = None
    with_files: tuple[str, ...] = ()
    carry_binaries: bool = False
    keep_addresses: tuple[str, ...] = ()
    precopy: bool = True
    lazy: bool = False

    def options(self) -> dict[str, Any]:
        """Of the restore."""
        return {"pids": self.pids, "connections": self.connections, "files": self.files, "lazy": self.lazy or None}


def examine(config: Config, target: str, to: str, wishes: Wishes, *, reporter: Reporter) -> list[Finding]:
    """Only look whether the session could go there."""
    with _reach(config, to, reporter) as there:
        return _look(config, target, there, _travelling(config, target, wishes))


def migrate(config: Config, target: str, to: str, wishes: Wishes, *, reporter: Reporter) -> MigrateResult:
    """Move the tree that `target` names to the host `to`; whatever fails before it is ended here lets it go on here."""
    began = time.monotonic()
    moves = Moves(config, Outgoing)
    with ExitStack() as stack:
        stack.enter_context(stopping(config, reporter))
        reporter.step("reach", host=to)
        there = stack.enter_context(_reach(config, to, reporter))
        reporter.step("examine")
        wishes = _travelling(config, target, wishes)
        registry = Registry(config)
        _check_home(config, registry.find(resolve_target(target, registry.lookup, registry.session_of).root), reporter)
        findings = _look(config, target, there, wishes)
        errors = [f for f in findings if f.level == "error"]
        if errors:
            text = f"{to} cannot take it: " + "; ".join(str(f) for f in errors)
            raise PreflightRefused(text, hint=errors[0].hint, findings=[f.to_dict() for f in errors])
        for finding in findings:
            reporter.finding(finding)
        delivery = stack.enter_context(_Delivery(config, to, there, moves, wishes, reporter))
        carrying = replace(_keeping(config, wishes), files="carry", files_max_mib=_CARRIED_MIB)
        try:
            dumped = dump(
                carrying,
                target,
                reporter=reporter,
                name=wishes.name,
                with_files=wishes.with_files,
                carry_binaries=wishes.carry_binaries,
                connections=wishes.connections,
                precopy=wishes.precopy,
                delivery=delivery,
            )
        except BaseException:
            if not delivery.settled():
                delivery.stays()
                raise
            dumped = None
        answer = delivery.outcome()
        _moved_away(config, delivery, answer, reporter)
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
        warnings=[*reporter.warnings, *(f"{delivery.host_name}: {w}" for w in answer.get("warnings", []))],
        degraded=bool(answer.get("degraded")) or bool(dumped and dumped.degraded),
    )


def resolve(config: Config, session: str | None, *, reporter: Reporter) -> list[dict[str, Any]]:
    """Say the word on moves that were interrupted; one answer for each."""
    moves = Moves(config, Outgoing)
    found = [m for m in moves.all() if session in (None, m.session)]
    if session is not None and not found:
        raise NotFound(f"no move of {session!r} was interrupted on this host", hint=_arrived(config, session))
    answers: list[dict[str, Any]] = []
    for move in found:
        answer = {"session": move.session, "host": move.host or move.to, "checkpoint": move.checkpoint, "error": ""}
        stays = True
        try:
            with exclusive_session(config, move.session):
                stays = _stays(move)
                answer |= {"outcome": "stays" if stays else "in-doubt"}
                if stays:
                    _put_back(move, reporter)
                with _reach(config, move.to, reporter) as there:
                    asked = {"id": move.id, "word": "abort" if stays else "go", "addresses": list(move.addresses), **move.options}
                    told = there.link.ask("settle", asked, timeout=_RESTORE).arguments
                if not stays:
                    answer |= {"outcome": "moved", "pid": told["result"].get("pid")}
                    _record_moved(config, move, int(told["result"].get("incarnation", 0)))
                moves.forget(move.id)
        except CriuctlError as error:
            answer |= {"error": error.message}
        answers.append({"outcome": "in-doubt", **answer})
    return answers


def _arrived(config: Config, session: str) -> str:
    """What can be done here about a session that has come and was not told to run."""
    move = Moves(config, Incoming).of(session)
    if move is None or move.state == "running":
        return ""
    inbox_store = inbox.configured(config).store
    return (
        f"It has come here from {move.origin}, which has not said that it is gone there: resolve it there. If that host is lost"
        f" for good: `criuctl restore {session} --store {inbox_store} --take-over`."
    )


def _stays(move: Outgoing) -> bool:
    """Whether the tree is at home after all.  A CRIU that is just ending it, or letting it go, is waited for."""
    deadline = time.monotonic() + _SETTLE
    while move.state == "handed-over" and move.alive() and move.traced():
        if time.monotonic() > deadline:
            raise TimedOut(f"CRIU still holds {move.session!r}", hint="See what it waits for: `ps axf`.")
        time.sleep(0.05)
    return move.state == "sending" or move.alive()


def _reach(config: Config, to: str, reporter: Reporter) -> ssh.Connection:
    """A criuctl on the other host, ready to receive."""

    def told(request: Request) -> None:
        if request.verb == "step":
            reporter.step("there", what=str(request.arguments.get("what"))[:40])

    return ssh.Connection.open(ssh.Host.parse(to, config), ["receive"], config, told, timeout=config.link_timeout)


def _url(to: str, config: Config, session: str) -> str:
    """Of the session on the other host."""
    address = ssh.Host.parse(to, config).address
    host = address.destination.rpartition("@")[2]
    user = address.destination.removesuffix(host)
    return f"ssh://{user}{f'[{host}]' if ':' in host else host}{f':{address.port}' if address.port else ''}/{session}"


def _travelling(config: Config, target: str, wishes: Wishes) -> Wishes:
    """What travels, the session's workspace included."""
    state = sessions.state_of(config, target) if valid_name(target) else None
    if state is None or not state["holder_alive"]:
        return wishes
    with Session.connect(target, config=config, kind="service", operator="criuctl-migrate") as holder:
        workspace = str(holder.status().get("facts", {}).get("workspace", ""))
    return replace(wishes, with_files=(*wishes.with_files, workspace)) if workspace else wishes


def _keeping(config: Config, wishes: Wishes) -> Config:
    """Connections of an address that moves along are kept, whatever the rules say of others."""
    rules = (
        (f"--keep-address {wanted}", {"match": {"local": addresses.parse(wanted)[0]}, "policy": "keep"})
        for wanted in wishes.keep_addresses
    )
    return replace(config, connection_rules=(*rules, *config.connection_rules))


def _look(config: Config, target: str, there: ssh.Connection, wishes: Wishes) -> list[Finding]:
    registry = Registry(config)
    resolved = resolve_target(target, registry.lookup, registry.session_of)
    session = session_for(registry, resolved, wishes.name)
    needs = gather(
        _keeping(config, wishes),
        resolved.root.pid,
        session=SessionRef(session.name, session.id),
        incarnation=session.incarnation,
        with_files=wishes.with_files,
        carry_binaries=wishes.carry_binaries,
        keep_addresses=wishes.keep_addresses,
        connections=wishes.connections,
        pids=wishes.pids or "auto",
        file_conflicts=wishes.files or "",
    )
    answer = there.link.ask("examine", {"needs": needs, "clock": time.time()})
    return [Finding(**f) for f in answer.arguments["findings"]]


@dataclass(slots=True)
class _Delivery:
    """The other host as the dump sees it; see `criuctl.ops.delivery`."""

    config: Config
    to: str
    there: ssh.Connection
    moves: Moves[Outgoing]
    wishes: Wishes
    reporter: Reporter
    host_name: str = ""
    manifest: Manifest | None = None
    frozen_at: float = 0.0  # monotonic
    running_at: float = 0.0
    move: Outgoing | None = None
    _answer: dict[str, Any] | None = None
    _error: CriuctlError | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> _Delivery:
        self.host_name = str(self.there.link.hello.get("host") or self.to)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # -- called by the dump ----------------------------------------------------------------------------

    def open(self, session: SessionRecord) -> Repository:
        """The other host's inbox."""
        self.move = Outgoing(
            id=new_id(),
            session=session.name,
            session_id=session.id,
            to=self.to,
            host=self.host_name,
            url=_url(self.to, self.config, session.name),
            boot_id=boot_id(),
        )
        self._end_earlier()
        asked = {"id": self.move.id, "session": session.name, "session_id": session.id, "origin": host_name()}
        self.reporter.step("connect", store=f"{self.host_name}: inbox")
        told = self.there.link.ask("begin", asked).arguments
        self.moves.put(self.move)
        folder = self._stack.enter_context(Scratch())
        key = Path(folder.path) / "inbox-key"
        key.write_text(told["key"])
        key.chmod(0o600)
        store = RemoteStore(self.there.link, f"{self.to}{told['store']}")
        return Repository.open(store, replace(self.config, key_file=str(key), passphrase_file="", passphrase_command=""))

    def _end_earlier(self) -> None:
        """Earlier moves of the session that came to nothing: it is here, and nobody else works on it."""
        assert self.move is not None
        for move in list(self.moves.all()):
            if move.session_id == self.move.session_id:
                _put_back(move, self.reporter)
                self.moves.forget(move.id)

    def frozen(self) -> None:
        """The tree stands still from now on."""
        self.frozen_at = time.monotonic()

    def hand_over(self, manifest: Manifest, tree: Sequence[ProcessIdentity]) -> None:
        """Have it restored and held there, then write down that it is to be ended here."""
        assert self.move is not None
        self.manifest = manifest
        options = {k: v for k, v in self.wishes.options().items() if v is not None}
        identities = tuple((i.pid, i.start_time) for i in tree)
        self.move = replace(self.move, checkpoint=manifest.id, tree=identities, options=options)
        self.reporter.step("hand-over")
        for wanted in self.wishes.keep_addresses:
            self._take(*addresses.parse(wanted))
        asked = {"checkpoint": manifest.id, "addresses": list(self.move.addresses), **options}
        try:
            self.there.link.ask("restore", asked, timeout=_RESTORE)
        except CriuctlError as error:
            error.message = f"{self.host_name}: {error.message}; {self.move.session!r} goes on here"
            error.args = (error.message,)
            raise
        self.reporter.step("decide")
        self.move = self.moves.put(replace(self.move, state="handed-over"))

    def ended(self, left: Sequence[ProcessIdentity]) -> None:
        """The tree was killed: once it is gone, say so."""
        assert self.move is not None
        if left and wait_ended(left, _SETTLE):
            self._error = InDoubt(f"processes of {self.move.session!r} do not end; it is held at {self.host_name}")
            return
        try:
            self.move = self.moves.put(replace(self.move, state="ended"))
            self.reporter.step("go")
            self._answer = self._say_go()
            self.running_at = time.monotonic()
        except CriuctlError as error:
            self._error = error

    def _take(self, ip: str, device: str | None) -> None:
        """Take an address away here; written down before, so that it can always be put back."""
        assert self.move is not None
        move = self.move

        def note(held: addresses.HeldAddress) -> None:
            described = held.to_dict() | {"wanted_device": device}
            self.move = self.moves.put(replace(move, addresses=(*move.addresses, described)))

        held = addresses.take(ip, None, note)
        note(held)
        for text in held.notes:
            self.reporter.warning(text)

    # -- called by the migration -----------------------------------------------------------------------

    def settled(self) -> bool:
        """After a failure of the dump: whether the tree is gone all the same, so that it lives there."""
        if self._answer is not None or self._error is not None:
            return True
        if self.move is None or self.move.state != "handed-over" or self.move.alive():
            return False
        self.ended(())
        return True

    def stays(self) -> None:
        """The tree goes on here: have the other host undo what it has; if it cannot be told, it will find out by itself."""
        if self.move is None:
            return
        told = False
        with suppress(CriuctlError):
            self.there.link.ask("abort", timeout=_SETTLE)
            told = True
        _put_back(self.move, self.reporter)
        if told:
            self.moves.forget(self.move.id)

    def outcome(self) -> dict[str, Any]:
        """What the other host says of the session that runs there."""
        if self._answer is None:
            assert self.move is not None
            why = f": {self._error.message}" if self._error is not None else ""
            raise InDoubt(
                f"{self.move.session!r} was ended here, and {self.host_name} could not be told to let it run{why}",
                hint=f"`criuctl migrate --resolve {self.move.session}` tells it; its checkpoint is in the inbox there.",
                session=self.move.session,
                host=self.host_name,
            ) from self._error
        return self._answer

    def _say_go(self) -> dict[str, Any]:
        """Until it is heard."""
        assert self.move is not None
        deadline = time.monotonic() + _SETTLE
        try:
            return dict(self.there.link.ask("go", timeout=_RESTORE).arguments["result"])
        except (LinkLost, TimedOut) as error:
            self.reporter.step("link-lost", why=error.message)
        asked = {"id": self.move.id, "word": "go", "addresses": list(self.move.addresses), **self.move.options}
        while True:
            try:
                with _reach(self.config, self.to, self.reporter) as again:
                    return dict(again.link.ask("settle", asked, timeout=_RESTORE).arguments["result"])
            except CriuctlError as error:
                if time.monotonic() > deadline or isinstance(error, RestoreFailed):
                    raise
                time.sleep(_PAUSE)


def host_name() -> str:
    """This host's."""
    import platform

    return platform.node()


def _put_back(move: Outgoing, reporter: Reporter) -> None:
    """The tree stays: what was taken away for it comes back."""
    for described in move.addresses:
        try:
            addresses.HeldAddress.from_dict(described).put_back()
        except CriuctlError as error:
            reporter.warning(f"{described.get('ip')} could not be put back: {error.message}", error.hint)


def _moved_away(config: Config, delivery: _Delivery, answer: Mapping[str, Any], reporter: Reporter) -> None:
    """It runs there: everything here that speaks of it says so."""
    move = delivery.move
    assert move is not None
    record = Registry(config).get(move.session)
    _record_moved(config, move, answer.get("incarnation", 0))
    delivery.moves.forget(move.id)
    try:
        _tell_operators(config, move, answer)
    except CriuctlError as error:
        reporter.warning(f"those who are attached here could not be told where {move.session!r} is: {error.message}", error.hint)
    if record is not None:
        _pass_leases(config, record, delivery, answer, reporter)


def _record_moved(config: Config, move: Outgoing, incarnation: int = 0) -> None:
    registry = Registry(config)
    record = registry.get(move.session) or SessionRecord(move.session, move.session_id)
    if record.alive():
        return  # it has come back meanwhile
    if record.lock_table and record.boot_id == boot_id():  # its connections have left with it: here is nothing to shield any more
        netfilter.delete_table(record.lock_table)
    newest = max(record.incarnation, incarnation)
    record = replace(
        record, state="checkpointed", incarnation=newest, checkpoint=move.checkpoint, moved_to=move.url, home=move.host
    )
    registry.put(replace(record, lock_table="", lock_kept=False))


def _tell_operators(config: Config, move: Outgoing, answer: Mapping[str, Any]) -> None:
    """The holder that waits here sends them after it."""
    state = sessions.state_of(config, move.session)
    if state is None or not state["holder_alive"] or state["id"] != move.session_id:
        return
    with Session.connect(move.session, config=config, kind="service", operator="criuctl-migrate", role="admin") as holder:
        holder.request("moved", to=move.url, host=move.host, incarnation=answer.get("incarnation", 0))


def _check_home(config: Config, record: SessionRecord | None, reporter: Reporter) -> None:
    """A home that another host has taken over moves nothing: its copy is stale."""
    for repository in _leased(config, record, reporter):
        assert record is not None
        fenced = fencing.check(config, repository, record)
        if fenced is not None:
            raise fenced.error()


def _pass_leases(
    config: Config, record: SessionRecord, delivery: _Delivery, answer: Mapping[str, Any], reporter: Reporter
) -> None:
    """Whoever shares a store with us sees where the session's home is now."""
    for repository in _leased(config, record, reporter):
        try:
            leases.pass_on(
                repository,
                SessionRef(record.name, record.id),
                from_host=host_id(config),
                to_host=str(delivery.there.link.hello.get("host_id", "")),
                to_name=delivery.host_name,
                incarnation=int(answer.get("incarnation", 0)),
            )
        except CriuctlError as error:
            reporter.warning(f"the lease of {record.name!r} could not be passed on: {error.message}", error.hint)


def _leased(config: Config, record: SessionRecord | None, reporter: Reporter) -> Iterator[Repository]:
    """The stores in which this home holds the session's lease; one that does not answer is told of and left out."""
    for lease in () if record is None else record.leases.values():
        url = str(lease["url"])
        try:
            with open_store(url, config) as store, Repository.open(store, config) as repository:
                yield repository
        except StoreError as error:
            reporter.warning(f"{url}, which has the lease of the session, cannot be asked: {error.message}", error.hint)
