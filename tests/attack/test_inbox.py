"""A host that may send sessions to another one: what it can reach of what others have sent
there.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from msgspec.structs import replace
from support import checkpoints as kit
from support.command import Criuctl

from criuctl.checkpoint import key_files, leases, writer_keys
from criuctl.checkpoint.manifest import SessionRef
from criuctl.checkpoint.repository import Repository
from criuctl.checkpoint.summary import CheckpointSummary
from criuctl.config import Config
from criuctl.errors import (
    Conflict,
    CriuctlError,
    Damaged,
    DataError,
    Forbidden,
    NoSuchCheckpoint,
    ObjectExists,
    ObjectMissing,
    StoreCannot,
)
from criuctl.host import moves
from criuctl.host.identity import host_id
from criuctl.host.registry import Registry, SessionRecord, boot_id
from criuctl.ops.moving import inbox
from criuctl.ops.moving.departure import lease_proof
from criuctl.ops.moving.inbox_part import OwnPart
from criuctl.ops.moving.incoming import Arrival
from criuctl.proc.tree import ProcessIdentity
from criuctl.report import Reporter
from criuctl.store.local import LocalStore
from criuctl.store.remote import RemoteStore
from criuctl.transport.link import Link

SECRET = b"what only the first host may know; "
FIRST = kit.Content((SECRET * 8000)[: 256 << 10], {"inventory.img": SECRET}, b"file of the first")
OTHER = kit.Content(bytes(range(256)) * 1024, {"inventory.img": b"other"}, b"file of the other")


class Source:
    """A host that speaks to ``criuctl receive`` of the target, whatever criuctl itself would
    say.
    """

    def __init__(self, criuctl: Criuctl, path: Path, stack: ExitStack) -> None:
        self.path = path
        path.mkdir(mode=0o700, exist_ok=True)
        command = [sys.executable, "-m", "criuctl", "receive"]
        self.process = subprocess.Popen(
            command, env=criuctl.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        stack.callback(self._end)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.link = Link(
            os.dup(self.process.stdout.fileno()), os.dup(self.process.stdin.fileno()), timeout=30.0
        )
        self.process.stdin.close()
        self.process.stdout.close()
        self.link.start()

    def begin(
        self,
        session: str,
        writer: dict[str, str] | None = None,
        move: str | None = None,
        **more: object,
    ) -> str:
        """Begin a move and return the key of the answer."""
        asked = {
            "id": move or secrets.token_hex(16),
            "session": session,
            "session_id": secrets.token_hex(16),
            "origin": "here",
            **more,
        }
        answer = self.link.ask(
            "begin", asked | ({} if writer is None else {"writer": writer})
        ).arguments
        self.move, self.session_id = str(asked["id"]), str(asked["session_id"])
        self.proof = inbox.proof(
            writer_keys.WriterKey.parse(str(answer["key"]).encode(), "key"), self.move
        )
        self.store = RemoteStore(self.link, "b:inbox")
        self.key = self.path / "key"
        self.key.unlink(missing_ok=True)
        key_files.write_secret(self.key, answer["key"])
        return str(answer["key"])

    def open(self) -> Repository:
        """The inbox, as far as the key opens what is shown."""
        return Repository.open(self.store, self.config)

    @property
    def config(self) -> Config:
        return kit.config(self.path, key_file=str(self.key), workers=1)

    def send(self, content: kit.Content, session: str) -> CheckpointSummary:
        """Deliver a checkpoint; whether it is restored or not."""
        with self.open() as repository:
            repository.preflight_write()
            return kit.write(repository, content, session=session)

    def _end(self) -> None:
        self.link.close()
        self.process.wait(60)


@pytest.fixture
def sources(criuctl: Criuctl) -> Iterator[Callable[[str], Source]]:
    """Makes hosts that send, each with a folder of its own."""
    with ExitStack() as stack:
        yield lambda name: Source(criuctl, criuctl.home.path / name, stack)


@pytest.fixture
def delivered(sources: Callable[[str], Source]) -> tuple[Source, CheckpointSummary]:
    """A host that has sent its session, and the checkpoint that lies in the inbox now."""
    first = sources("first")
    first.begin("work")
    return first, first.send(FIRST, "work")


def target(criuctl: Criuctl) -> Config:
    """The host that receives."""
    path = criuctl.home.path
    return Config(
        state_dir=str(path / "state"),
        cache_dir=str(path / "cache"),
        key_dir=str(path / "keys"),
        run_dir=str(criuctl.home.run),
    )


@pytest.mark.parametrize("session", ["work", "another"])
def test_nothing_that_another_host_has_sent_can_be_had(
    session: str,
    delivered: tuple[Source, CheckpointSummary],
    sources: Callable[[str], Source],
    criuctl: Criuctl,
) -> None:
    first, checkpoint = delivered
    theirs = [info.name for info in LocalStore(inbox.configured(target(criuctl)).store).list()]
    thief = sources("thief")
    thief.begin(session)
    with thief.open() as repository:
        hidden: list[DataError] = []
        assert repository.list(hidden=hidden) == []
        for name in (checkpoint.object, checkpoint.id):
            with pytest.raises(CriuctlError):
                repository.manifest(name) if "/" not in name else repository.manifest_at(name)
    packs = [
        name
        for name in theirs
        if name.startswith(("packs/", "index/", "writers/", "checkpoints/", "keys/"))
    ]
    assert len([name for name in packs if name.startswith("packs/")]) > 0
    for name in packs:
        for read in (
            thief.store.get,
            lambda name: thief.store.get_range(name, 0, 8),
            thief.store.stat,
        ):
            with pytest.raises(ObjectMissing):
                read(name)
    assert not {info.name for info in thief.store.list()} & {
        n for n in packs if not n.startswith("checkpoints/")
    }
    (config,) = [thief.store.get("config")]
    assert config.count(b'"type"') == 1 and b'"writer"' in config, "no other key's slot is shown"
    first.link.close()


def test_a_copy_of_the_whole_inbox_is_closed_to_a_source(
    delivered: tuple[Source, CheckpointSummary], sources: Callable[[str], Source], criuctl: Criuctl
) -> None:
    """An attacker who has read the disk as well: the key that a source gets opens nothing of
    others.
    """
    _first, checkpoint = delivered
    thief = sources("thief")
    thief.begin("work")
    mine = thief.send(OTHER, "work")
    own = inbox.configured(target(criuctl)).store
    shown = Repository.open(thief.store, thief.config)
    copy = LocalStore(own)
    # With the config that names it a writer, and every object that there is.
    reader = Repository(copy, thief.config, shown.about, shown.opened)
    hidden: list[DataError] = []
    assert [summary.id for summary in reader.list(hidden=hidden)] == [mine.id] and len(hidden) == 1
    with pytest.raises(DataError):
        reader.manifest_at(checkpoint.object)
    for info in copy.list():
        assert SECRET not in copy.get(info.name)


def test_what_others_have_sent_cannot_be_changed(
    delivered: tuple[Source, CheckpointSummary], sources: Callable[[str], Source], criuctl: Criuctl
) -> None:
    _first, checkpoint = delivered
    store = LocalStore(inbox.configured(target(criuctl)).store)
    before = {info.name: store.get(info.name) for info in store.list()}
    thief = sources("thief")
    thief.begin("work")
    for name in before:
        with pytest.raises((StoreCannot, ObjectExists)):
            thief.store.put(name, b"mine")
        with pytest.raises(StoreCannot):
            thief.store.delete(name)
    for name in (
        "config",
        f"keys/{9:020d}",
        "pins/" + "0" * 32,
        f"gc/doomed-{'0' * 32}",
        f"checkpoints/{'0' * 32}/{1:020d}-{'0' * 32}",
    ):
        with pytest.raises((StoreCannot, ObjectExists)):
            thief.store.put(name, b"mine")
    assert {name: store.get(name) for name in before} == before
    with inbox.opened(target(criuctl)) as repository:
        kit.check(repository, checkpoint, FIRST)


def test_only_what_a_source_has_sent_is_restored_for_it(
    delivered: tuple[Source, CheckpointSummary], sources: Callable[[str], Source]
) -> None:
    _first, checkpoint = delivered
    thief = sources("thief")
    thief.begin("work")
    with pytest.raises(NoSuchCheckpoint, match="has not sent"):
        thief.link.ask("restore", {"checkpoint": checkpoint.id, "addresses": []}, timeout=60)


def test_who_proves_to_be_the_same_host_sends_only_what_is_new(
    delivered: tuple[Source, CheckpointSummary], sources: Callable[[str], Source], criuctl: Criuctl
) -> None:
    first, checkpoint = delivered
    earlier = writer_keys.WriterKey.parse(first.key.read_bytes(), "key")
    again = sources("first")
    move = secrets.token_hex(16)
    assert again.begin("work", inbox.proof(earlier, move), move) == earlier.text()
    with again.open() as repository:
        repository.preflight_write()
        with repository.writer(Reporter()) as writer:
            changed = kit.Content(FIRST.memory, FIRST.images, b"another file")
            newer = writer.commit(kit.fill(writer, changed, session="work"))
            assert 0 < writer.stats.bytes_new < 4096 < writer.stats.bytes_in
    with inbox.opened(target(criuctl)) as repository:
        kit.check(repository, checkpoint, FIRST)
        kit.check(repository, newer, changed)


def test_who_does_not_prove_it_is_another_host(
    delivered: tuple[Source, CheckpointSummary], sources: Callable[[str], Source]
) -> None:
    """The id of a source is no secret, nor is a proof that was given for another move."""
    first, _checkpoint = delivered
    earlier = writer_keys.WriterKey.parse(first.key.read_bytes(), "key")
    thief = sources("thief")
    replayed = inbox.proof(earlier, secrets.token_hex(16))
    for claim in (
        replayed,
        replayed | {"proof": "00" * 32},
        replayed | {"proof": ""},
        {"id": "", "proof": ""},
        {"id": "xx"},
    ):
        key = thief.begin("work", claim)
        assert key != earlier.text()
        with thief.open() as repository:
            assert repository.list() == []


def test_the_target_reads_what_was_there_before_and_what_came(
    criuctl: Criuctl, sources: Callable[[str], Source]
) -> None:
    """An inbox that an older criuctl has made, whose sources got its key."""
    config = inbox.configured(target(criuctl))
    with (
        closing(LocalStore(config.store)) as store,
        Repository.init(store, encryption=True, config=config) as old,
    ):
        before = kit.write(old, OTHER, session="work")
    source = sources("first")
    source.begin("work")
    came = source.send(FIRST, "work")
    assert came.number == before.number + 1
    with inbox.opened(target(criuctl)) as repository:
        kit.check(repository, before, OTHER)
        kit.check(repository, came, FIRST)
        try:
            part = OwnPart(repository, inbox.key_of(repository, source.proof["id"]), "work")
            inbox.tidy(repository, part, "work", {came.id}, Reporter())
        except Damaged as error:
            pytest.fail(error.message)
        kit.check(repository, came, FIRST)


def moves_in(criuctl: Criuctl) -> dict[str, moves.Incoming]:
    return {move.id: move for move in moves.Moves(target(criuctl), moves.Incoming).all()}


def listed(criuctl: Criuctl, session: str = "work") -> list[str]:
    with inbox.opened(target(criuctl)) as repository:
        return [summary.id for summary in repository.list(session)]


@pytest.mark.parametrize("sends", [False, True])
def test_abort_removes_only_what_its_sender_has_sent(
    sends: bool,
    delivered: tuple[Source, CheckpointSummary],
    sources: Callable[[str], Source],
    criuctl: Criuctl,
) -> None:
    """With the name and the id of the other's session; the sender's own checkpoint goes."""
    first, checkpoint = delivered
    thief = sources("thief")
    thief.begin("work", session_id=first.session_id)
    if sends:
        own = thief.send(OTHER, "work")
        assert own.id in listed(criuctl)
        with pytest.raises(CriuctlError):  # it is no tree that could run
            thief.link.ask("restore", {"checkpoint": own.id, "addresses": []}, timeout=60)
    thief.link.ask("abort", timeout=60)
    assert listed(criuctl) == [checkpoint.id] and first.move in moves_in(criuctl)
    first.link.ask("abort", timeout=60)
    assert listed(criuctl) == [] and moves_in(criuctl) == {}


@pytest.mark.parametrize("word", ["abort", "go"])
def test_a_move_is_settled_by_the_host_that_began_it(
    word: str,
    delivered: tuple[Source, CheckpointSummary],
    sources: Callable[[str], Source],
    criuctl: Criuctl,
) -> None:
    first, checkpoint = delivered
    first.link.close()
    first.process.wait(60)
    assert moves_in(criuctl)[first.move].state == "given-up"
    thief = sources("thief")
    thief.begin("work", session_id=first.session_id)
    own = writer_keys.WriterKey.parse(thief.key.read_bytes(), "key")
    for claim in ({}, None, "x", inbox.proof(own, first.move), {"id": "", "proof": ""}):
        with pytest.raises(Forbidden):
            thief.link.ask("settle", {"id": first.move, "word": word, "writer": claim}, timeout=60)
    assert listed(criuctl) == [checkpoint.id] and first.move in moves_in(criuctl)
    again = sources("first-again")
    asked = {"id": first.move, "word": word, "writer": first.proof, "addresses": []}
    if word == "go":  # it is no tree that could run
        with pytest.raises(CriuctlError) as failure:
            again.link.ask("settle", asked, timeout=60)
        assert not isinstance(failure.value, Forbidden)
        return
    again.link.ask("settle", asked, timeout=60)
    assert listed(criuctl) == [] and first.move not in moves_in(criuctl)


def test_a_move_s_id_is_used_once(
    delivered: tuple[Source, CheckpointSummary], sources: Callable[[str], Source], criuctl: Criuctl
) -> None:
    first, _checkpoint = delivered
    before = moves_in(criuctl)
    with pytest.raises(Conflict, match="begun there already"):
        sources("thief").begin("another", move=first.move)
    assert moves_in(criuctl) == before


@pytest.mark.parametrize("by", ["session_id", "name"])
def test_a_session_that_left_is_not_forgotten_for_another_host(
    by: str, sources: Callable[[str], Source], criuctl: Criuctl
) -> None:
    """It waits at another host for the word to run; only that one proves that it has run there."""
    leaving = moves.Moves(target(criuctl), moves.Outgoing)
    proof = {"id": "11" * 16, "proof": "22" * 32}
    left = leaving.put(
        moves.Outgoing(
            moves.new_id(), "gone", moves.new_id(), to="gamma", state="ended", proof=proof
        )
    )
    thief = sources("thief")
    name = "another" if by == "session_id" else "gone"
    session_id = left.session_id if by == "session_id" else moves.new_id()
    for arrived in (None, {"move": left.id}, {"move": left.id, **proof, "proof": ""}):
        with pytest.raises(Conflict, match="not been informed"):
            thief.begin(name, session_id=session_id, arrived=arrived)
    assert [move.id for move in leaving.all()] == [left.id]
    thief.begin(name, session_id=session_id, arrived={"move": left.id, **proof})
    assert not list(leaving.all())


def test_a_checkpoint_of_another_session_is_not_restored_under_an_announced_one(
    sources: Callable[[str], Source], criuctl: Criuctl
) -> None:
    source = sources("thief")
    source.begin("work")
    sent = source.send(OTHER, "work")  # its session has another id
    with pytest.raises(Conflict, match="announced"):
        source.link.ask("restore", {"checkpoint": sent.id, "addresses": []}, timeout=60)
    assert moves_in(criuctl)[source.move].checkpoint == ""


def test_the_name_of_a_session_that_is_checkpointed_here_is_not_taken(
    sources: Callable[[str], Source], criuctl: Criuctl
) -> None:
    registry = Registry(target(criuctl))
    registry.put(SessionRecord("work", state="checkpointed", checkpoint="c" * 32))
    before = registry.get("work")
    with pytest.raises(Conflict, match="checkpointed there"):
        sources("thief").begin("work")
    assert registry.get("work") == before


def test_leases_in_the_inbox_are_written_by_its_own_host(
    delivered: tuple[Source, CheckpointSummary], sources: Callable[[str], Source]
) -> None:
    """A record with the highest number would keep every later restore of that name away."""
    _first, checkpoint = delivered
    thief = sources("thief")
    thief.begin("work")
    token = checkpoint.object.split("/")[1]
    with pytest.raises(StoreCannot):
        thief.store.put(f"sessions/{token}/{10**19:020d}", b"mine")


@pytest.mark.parametrize("proves", [False, True])
def test_the_lease_of_another_home_is_taken_only_with_its_store_s_key(
    proves: bool, tmp_path: Path
) -> None:
    """A sender names a session of this host's store, by name and id, that lives on a third host."""
    config = kit.config(tmp_path, store=str(tmp_path / "store"))
    ref = SessionRef("work", moves.new_id())
    with (
        closing(LocalStore(config.store)) as store,
        Repository.init(store, encryption=True, config=config) as shared,
    ):
        leases.claim(shared, ref.name, ref.id, 1, host="third").keep()
        here = ProcessIdentity.of(os.getpid())
        Registry(config).put(
            SessionRecord(
                ref.name, ref.id, 2, pid=here.pid, start_time=here.start_time, boot_id=boot_id()
            )
        )
        move = moves.Incoming(moves.new_id(), ref.name, ref.id, origin="thief", writer="00" * 16)
        if proves:
            move = replace(move, leases=(lease_proof(shared, ref.id),))
        with inbox.opened(config) as own, closing(own.store):
            part = OwnPart(own, inbox.key_of(own, move.writer), ref.name)
            arrivals = moves.Moves(config, moves.Incoming)
            Arrival(config, Reporter(), own, arrivals, move, part)._claim()
        head = leases.read_head(shared, ref.name)
        assert head is not None and (head.host == host_id(config)) == proves


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        *(("begin", {}), ("begin", {"id": 5, "session": ["x"], "session_id": None, "origin": {}})),
        ("begin", {"id": "0" * 32, "session": 5, "session_id": "0" * 32, "origin": "x"}),
        ("begin", {"id": "0" * 32, "session": "../x", "session_id": "0" * 32, "origin": "x"}),
        *(("examine", {"needs": 5, "clock": "x"}), ("examine", {"needs": {}, "clock": []})),
        *(("restore", {}), ("restore", {"checkpoint": {}}), ("settle", {"id": {}})),
        *(("settle", {"id": "0" * 32}), ("settle", {"id": "0" * 32, "word": [], "writer": 5})),
    ],
)
def test_requests_that_make_no_sense(
    verb: str, arguments: dict[str, object], sources: Callable[[str], Source]
) -> None:
    """They are refused as the peer's fault, and the next one is answered."""
    source = sources("fool")
    with pytest.raises(CriuctlError) as refused:
        source.link.ask(verb, arguments, timeout=60)
    assert refused.value.exit_code != 1 and "bug" not in refused.value.message
    source.begin("work", leases=5, arrived=[], more={})
