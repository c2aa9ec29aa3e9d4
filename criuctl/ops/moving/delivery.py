"""A dump's delivery to another host: its inbox, the hand-over, and the word to let the session run
there.

What is to be known after any interruption is written down before it is done (`moves`).
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ...checkpoint import keys, writers
from ...checkpoint.manifest import Manifest
from ...checkpoint.repository import Repository
from ...config import Config
from ...errors import CriuctlError, InDoubt, LinkLost, RestoreFailed, TimedOut
from ...host.moves import Moves, Outgoing, new_id
from ...host.registry import SessionRecord, boot_id
from ...proc import addresses
from ...proc.scratch import Scratch
from ...proc.tree import ProcessIdentity, wait_ended
from ...quoting import quoted
from ...report import Reporter
from ...store.remote import RemoteStore
from ...transport import ssh
from . import inbox
from .other_host import RESTORE, reach, session_url

SETTLE = 60.0  # seconds for which a broken link is made again
_PAUSE = 1.0  # between two tries


class Wishes(Struct, frozen=True):
    """How the session is to come back there, and what travels."""

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

    def options(self) -> dict[str, Any]:
        """Of the restore."""
        return {
            "pids": self.pids,
            "connections": self.connections,
            "files": self.files,
            "lazy": self.lazy,
        }


class HostDelivery(Struct):
    """The other host as the dump sees it; see `criuctl.dump.delivery`."""

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

    def __enter__(self) -> HostDelivery:
        self.host_name = str(self.there.link.hello.get("host") or self.to)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # -- called by the dump
    # ----------------------------------------------------------------------------

    def open(self, session: SessionRecord) -> Repository:
        """The other host's inbox."""
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
        asked["origin"] = platform.node()
        kept = self._kept_key()
        if kept is not None and (earlier := _writer_key(kept)) is not None:
            asked["writer"] = inbox.proof(earlier, self.move.id)
        self.reporter.step("connect", store=f"{self.host_name}: inbox")
        with self._named():
            told = self.there.link.ask("begin", asked).arguments
        self.moves.put(self.move)
        key = self._keep_key(str(told["key"]), kept)
        store = RemoteStore(self.there.link, f"{self.to}{told['store']}")
        repository = Repository.open(
            store,
            replace(self.config, key_file=str(key), passphrase_file="", passphrase_command=""),
        )
        repository.features &= frozenset(told.get("features", ()))  # that criuctl may be older
        return repository

    def _kept_key(self) -> Path | None:
        """Where this host keeps the key by which it writes to the other one's inbox."""
        host = str(self.there.link.hello.get("host_id", ""))
        # it may be any text
        folder = hashlib.sha256(host.encode(errors="surrogateescape")).hexdigest()[:32]
        return Path(self.config.state_dir) / "deliveries" / folder / "key" if host else None

    def _keep_key(self, text: str, kept: Path | None) -> Path:
        """The key in a file; kept for the next time, with what was sealed by it, if it is one of a
        write-only host.
        """
        # an older criuctl tells the inbox's own
        if kept is not None and text.startswith(writers.LINE):
            kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with suppress(FileNotFoundError):
                if kept.read_text() == text:
                    return kept
                kept.unlink()
            with suppress(FileExistsError):  # another criuctl was faster, with a key of its own
                keys.write_secret(kept, text)
                return kept
        key = Path(self._stack.enter_context(Scratch()).path) / "inbox-key"
        keys.write_secret(key, text)
        return key

    def _end_earlier(self) -> None:
        """Earlier moves of the session that came to nothing: it is here, and nobody else works on
        it.
        """
        assert self.move is not None
        for move in list(self.moves.all()):
            if move.session_id == self.move.session_id:
                put_back(move, self.reporter)
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
        for ip, device in dict(map(addresses.parse, self.wishes.keep_addresses)).items():
            self._take(ip, device)
        asked = {"checkpoint": manifest.id, "addresses": list(self.move.addresses), **options}
        with self._named(f"; {self.move.session!r} goes on here"):
            self.there.link.ask("restore", asked, timeout=RESTORE)
        self.reporter.step("decide")
        self.move = self.moves.put(replace(self.move, state="handed-over"))

    def ended(self, left: Sequence[ProcessIdentity]) -> None:
        """The tree was killed: once it is gone, say so."""
        assert self.move is not None
        if left and wait_ended(left, SETTLE):
            self._error = InDoubt(
                f"processes of {self.move.session!r} do not end; it is held at {self.host_name}"
            )
            return
        try:
            # that it was handed over is known, and that it is gone can be seen
            with suppress(OSError):
                self.move = self.moves.put(replace(self.move, state="ended"))
            self.reporter.step("go")
            answer = self._say_go()
            self.running_at = time.monotonic() - float(answer.get("ran_for", 0.0))
            self._answer = dict(answer["result"])
        except CriuctlError as error:
            self._error = error
        # of our own side: no descriptor, no thread left; the word is to be said later, not taken
        # back
        except Exception as error:
            self._error = CriuctlError(f"{type(error).__name__}: {error}")

    @contextmanager
    def _named(self, more: str = "") -> Iterator[None]:
        """What fails there is told with the host's name."""
        try:
            yield
        except CriuctlError as error:
            error.message = f"{self.host_name}: {error.message}{more}"
            error.args = (error.message,)
            raise

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

    # -- called by the migration
    # -----------------------------------------------------------------------

    def settled(self) -> bool:
        """After a failure of the dump: whether the tree is gone all the same, so that it lives
        there.
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
        """The tree goes on here: have the other host undo what it has; if it cannot be told, it
        will find out by itself.
        """
        if self.move is None:
            return
        told = False
        with suppress(CriuctlError):
            self.there.link.ask("abort", timeout=SETTLE)
            told = True
        move = put_back(self.move, self.reporter)
        if told:
            self.moves.forget(move.id)
        elif move != self.move:
            self.moves.put(move)

    def outcome(self) -> dict[str, Any]:
        """What the other host says of the session that runs there."""
        if self._answer is None:
            assert self.move is not None
            why = f": {self._error.message}" if self._error is not None else ""
            raise InDoubt(
                f"{self.move.session!r} was ended here, and {self.host_name} could not be told "
                f"to let it run{why}",
                hint=(
                    f"`criuctl migrate --resolve {quoted(self.move.session)}` tells it; its "
                    "checkpoint is in the inbox there."
                ),
                session=self.move.session,
                host=self.host_name,
            ) from self._error
        return self._answer

    def _say_go(self) -> dict[str, Any]:
        """Until it is heard."""
        assert self.move is not None
        deadline = time.monotonic() + SETTLE
        try:
            return dict(self.there.link.ask("go", timeout=RESTORE).arguments)
        except (LinkLost, TimedOut) as error:
            self.reporter.step("link-lost", why=error.message)
        asked = {
            "id": self.move.id,
            "word": "go",
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


def _writer_key(path: Path) -> writers.WriterKey | None:
    """The key that was kept; None if there is none that is whole."""
    try:
        return writers.WriterKey.parse(keys.read_secret(path), str(path))
    except CriuctlError:
        return None


def put_back(move: Outgoing, reporter: Reporter) -> Outgoing:
    """The tree stays: what was taken away for it comes back.  The move as it is then: none comes
    back twice, once it may have gone elsewhere."""
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
