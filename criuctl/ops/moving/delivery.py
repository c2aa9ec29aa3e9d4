"""A dump's delivery to another host: its inbox, the hand-over, and the word to let the session run
there.

Facts that are needed after an interruption are recorded before the step they describe (`moves`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ...checkpoint import key_files, writer_keys
from ...checkpoint.manifest import Manifest
from ...checkpoint.repository import Repository
from ...config import Config
from ...errors import CriuctlError, InDoubt, LinkLost, RestoreFailed, TimedOut
from ...host.identity import host_name
from ...host.moves import Incoming, Moves, Outgoing, new_id
from ...host.registry import SessionRecord, boot_id
from ...proc import address_choice, addresses
from ...proc.scratch import Scratch
from ...proc.tree import ProcessIdentity, wait_ended
from ...quoting import quoted
from ...report import Reporter
from ...store.remote import RemoteStore
from ...transport import ssh
from . import inbox
from .other_host import RESTORE, reach, session_url

SETTLE = 60.0  # seconds for which a broken link is made again
_PAUSE = 1.0  # seconds between two tries


class MoveOptions(Struct, frozen=True):
    """The options of a move: how the session is restored there, and what is carried."""

    name: str | None = None
    pids: str | None = None
    connections: str | None = None
    files: str | None = None
    with_files: tuple[str, ...] = ()
    carry_binaries: bool = False
    keep_addresses: tuple[str, ...] = ()
    precopy: bool = True
    lazy: bool | None = None  # None: for large trees
    max_freeze: float | None = None  # seconds; None: as configured

    def restore_options(self) -> dict[str, Any]:
        """Return the options of the restore."""
        return {
            "pids": self.pids,
            "connections": self.connections,
            "files": self.files,
            "lazy": self.lazy,
        }


class HostDelivery(Struct):
    """The other host during the dump; see `criuctl.dump.delivery`."""

    config: Config
    to: str
    there: ssh.Connection
    moves: Moves[Outgoing]
    options: MoveOptions
    reporter: Reporter
    leases: tuple[str, ...] = ()  # proofs for the other host, of `departure.check_home`
    host_name: str = ""
    manifest: Manifest | None = None
    frozen_at: float = 0.0  # monotonic
    running_at: float = 0.0
    move: Outgoing | None = None
    _answer: dict[str, Any] | None = None
    _error: CriuctlError | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> HostDelivery:
        self.host_name = str(self.there.link.hello.get("host") or self.to)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # -- called by the dump
    # ----------------------------------------------------------------------------

    def open(self, session: SessionRecord) -> Repository:
        """Open the other host's inbox."""
        self.move = Outgoing(
            id=new_id(),
            session=session.name,
            session_id=session.id,
            to=self.to,
            host=self.host_name,
            url=session_url(self.to, self.config, session.name),
            boot_id=boot_id(),
        )
        self._end_earlier()
        asked: dict[str, Any] = {
            "id": self.move.id,
            "session": session.name,
            "session_id": session.id,
        }
        asked |= {"origin": host_name(self.config), "leases": list(self.leases)}
        if (arrived := self._arrived(session)) is not None:
            asked["arrived"] = arrived
        kept = self._kept_key()
        if kept is not None and (earlier := _writer_key(kept)) is not None:
            asked["writer"] = inbox.proof(earlier, self.move.id)
        self.reporter.step("connect", store=f"{self.host_name}: inbox")
        with self._named():
            answer = self.there.link.ask("begin", asked).arguments
        key = self._keep_key(str(answer["key"]), kept)
        if (writer := _writer_key(key)) is not None:
            self.move = replace(self.move, proof=inbox.proof(writer, self.move.id))
        self.moves.put(self.move)
        store = RemoteStore(self.there.link, f"{self.to}{answer['store']}")
        repository = Repository.open(
            store,
            replace(self.config, key_file=str(key), passphrase_file="", passphrase_command=""),
        )
        repository.features &= frozenset(answer.get("features", ()))  # that criuctl may be older
        return repository

    def _arrived(self, session: SessionRecord) -> dict[str, Any] | None:
        """Return the move by which the session came here, with the proof that it has run here: its
        earlier home may not have got that answer.
        """
        records = (m for m in Moves(self.config, Incoming).all() if m.session_id == session.id)
        newest = max(records, key=lambda m: m.updated, default=None)
        if newest is None or newest.state != "running" or not newest.writer:
            return None
        with (
            suppress(CriuctlError),
            closing(inbox.opened(self.config)) as repository,
            closing(repository.store),
        ):
            key = inbox.key_of(repository, newest.writer)
            return {"move": newest.id, **inbox.proof(key, newest.id)}
        return None

    def _kept_key(self) -> Path | None:
        """Return the path of the key with which this host writes to the other one's inbox."""
        host = str(self.there.link.hello.get("host_id", ""))
        # it may be any text
        folder = hashlib.sha256(host.encode(errors="surrogateescape")).hexdigest()[:32]
        return Path(self.config.state_dir) / "deliveries" / folder / "key" if host else None

    def _keep_key(self, text: str, kept: Path | None) -> Path:
        """Write the key to a file; keep it for the next time, with the content sealed by it, if it
        is one of a write-only host.
        """
        # an older criuctl sends the inbox's own key
        if kept is not None and text.startswith(writer_keys.LINE):
            kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with suppress(FileNotFoundError):
                if kept.read_text() == text:
                    return kept
                kept.unlink()
            with suppress(FileExistsError):  # another criuctl was faster, with another key
                key_files.write_secret(kept, text)
                return kept
        key = Path(self._stack.enter_context(Scratch()).path) / "inbox-key"
        key_files.write_secret(key, text)
        return key

    def _end_earlier(self) -> None:
        """End earlier failed moves of the session: it is here, and no other process works on it."""
        assert self.move is not None
        for move in list(self.moves.all()):
            if move.session_id == self.move.session_id:
                put_back(move, self.reporter)
                self.moves.forget(move.id)

    def frozen(self) -> None:
        """Record that the tree is frozen from now on."""
        self.frozen_at = time.monotonic()

    def hand_over(self, manifest: Manifest, tree: Sequence[ProcessIdentity]) -> None:
        """Have the checkpoint restored and held there, then record that the tree is to be ended
        here.
        """
        assert self.move is not None
        self.manifest = manifest
        options = {k: v for k, v in self.options.restore_options().items() if v is not None}
        identities = tuple((i.pid, i.start_time) for i in tree)
        self.move = replace(self.move, checkpoint=manifest.id, tree=identities, options=options)
        self.reporter.step("hand-over")
        for ip, device in dict(map(address_choice.parse, self.options.keep_addresses)).items():
            self._take(ip, device)
        asked = {"checkpoint": manifest.id, "addresses": list(self.move.addresses), **options}
        with self._named(f"; {self.move.session!r} goes on here"):
            self.there.link.ask("restore", asked, timeout=RESTORE)
        self.reporter.step("decide")
        self.move = self.moves.put(replace(self.move, state="handed-over"))

    def ended(self, left: Sequence[ProcessIdentity]) -> None:
        """Send the word to run once the killed tree is gone."""
        assert self.move is not None
        if left and wait_ended(left, SETTLE):
            self._error = InDoubt(
                f"processes of {self.move.session!r} do not end; it is held at {self.host_name}"
            )
            return
        try:
            # the hand-over is recorded, and that the tree is gone can be seen
            with suppress(OSError):
                self.move = self.moves.put(replace(self.move, state="ended"))
            self.reporter.step("go")
            answer = self._say_go()
            self.running_at = time.monotonic() - float(answer.get("ran_for", 0.0))
            self._answer = dict(answer["result"])
        except CriuctlError as error:
            self._error = error
        # an error of this side, for example no descriptor left: the word must be sent later, not
        # taken back
        except Exception as error:
            self._error = CriuctlError(f"{type(error).__name__}: {error}")

    @contextmanager
    def _named(self, more: str = "") -> Iterator[None]:
        """Add the host's name to errors from there."""
        try:
            yield
        except CriuctlError as error:
            error.message = f"{self.host_name}: {error.message}{more}"
            error.args = (error.message,)
            raise

    def _take(self, ip: str, device: str | None) -> None:
        """Remove an address here; recorded before, so that it can always be put back."""
        assert self.move is not None
        move = self.move

        def note(held: addresses.HeldAddress) -> None:
            described = held.to_dict() | {"wanted_device": device}
            self.move = self.moves.put(replace(move, addresses=(*move.addresses, described)))

        held = addresses.take(ip, None, note)
        note(held)
        for text in held.notes:
            self.reporter.warning(text)

    # -- called by the migration
    # -----------------------------------------------------------------------

    def settled(self) -> bool:
        """Return, after a failure of the dump, whether the tree is gone nevertheless, so that it
        lives there.
        """
        if self._answer is not None or self._error is not None:
            return True
        move = self.move
        if (
            move is None
            or move.state not in ("handed-over", "ended")
            or (move.alive() and not move.doomed())
        ):
            return False
        self.ended(
            [ProcessIdentity(pid, start) for pid, start in move.tree] if move.alive() else ()
        )
        return True

    def stays(self) -> None:
        """Make the other host undo its part, because the tree continues here; a host that cannot be
        reached undoes it by itself later.
        """
        if self.move is None:
            return
        undone = False
        with suppress(CriuctlError):
            self.there.link.ask("abort", timeout=SETTLE)
            undone = True
        move = put_back(self.move, self.reporter)
        if undone:
            self.moves.forget(move.id)
        elif move != self.move:
            self.moves.put(move)

    def outcome(self) -> dict[str, Any]:
        """Return the other host's report on the session that runs there."""
        if self._answer is None:
            assert self.move is not None
            why = f": {self._error.message}" if self._error is not None else ""
            raise InDoubt(
                f"{self.move.session!r} was ended here, and the word to let it run did not reach "
                f"{self.host_name}{why}",
                hint=(
                    f"`criuctl migrate --resolve {quoted(self.move.session)}` sends it again; the "
                    "checkpoint is in the inbox there."
                ),
                session=self.move.session,
                host=self.host_name,
            ) from self._error
        return self._answer

    def _say_go(self) -> dict[str, Any]:
        """Send the word to run until it is confirmed."""
        assert self.move is not None
        deadline = time.monotonic() + SETTLE
        try:
            return dict(self.there.link.ask("go", timeout=RESTORE).arguments)
        except (LinkLost, TimedOut) as error:
            self.reporter.step("link-lost", why=error.message)
        asked = {
            "id": self.move.id,
            "word": "go",
            "writer": self.move.proof,
            "addresses": list(self.move.addresses),
            **self.move.options,
        }
        while True:
            try:
                with reach(self.config, self.to, self.reporter) as again:
                    return dict(again.link.ask("settle", asked, timeout=RESTORE).arguments)
            except CriuctlError as error:
                if time.monotonic() > deadline or isinstance(error, RestoreFailed):
                    raise
                time.sleep(_PAUSE)


def _writer_key(path: Path) -> writer_keys.WriterKey | None:
    """Return the kept key; None if there is none that is whole."""
    try:
        return writer_keys.WriterKey.parse(key_files.read_secret(path), str(path))
    except CriuctlError:
        return None


def put_back(move: Outgoing, reporter: Reporter) -> Outgoing:
    """Restore what was removed for the move, since the tree stays; return the move's new record.
    Nothing is restored twice, because it may have gone elsewhere meanwhile.
    """
    left = []
    for described in move.addresses:
        try:
            addresses.HeldAddress.from_dict(described).put_back()
        except CriuctlError as error:
            reporter.warning(
                f"{described.get('ip')} could not be put back: {error.message}", error.hint
            )
            left.append(described)
    return replace(move, addresses=tuple(left))
