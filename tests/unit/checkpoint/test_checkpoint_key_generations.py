"""Adding and removing keys: interrupted at each step, by two hosts at once, on weak servers, and by
an attacker without any key.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import checkpoints as kit
from support import golden

from criuctl.checkpoint import configobject, key_files, key_generations, key_slots, keys, recovery
from criuctl.checkpoint.codec import Sealer, fingerprint
from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.errors import (
    Conflict,
    CriuctlError,
    Damaged,
    KeyMissing,
    NotFound,
    StoreDenied,
    StoreUnreachable,
    UsageError,
    WrongKey,
)
from criuctl.ops.store_keys import (
    NewKey,
    key_add,
    key_list,
    key_recovery,
    key_remove,
    key_rotate,
    key_tidy,
)
from criuctl.report import Reporter
from criuctl.store import memory
from criuctl.store.base import Capabilities, Data, ObjectInfo
from criuctl.store.local import LocalStore


class Killed(BaseException):
    """What a `kill -9` is to the code that it hits."""


class Stage(memory.MemoryStore):
    """A store on which something happens just before, or just after, one of its verbs.

    A weak one ignores conditions; and replacing an object there removes it first, so that a kill
    may lose it.
    """

    def __init__(self, url: str, *, weak: bool = False) -> None:
        super().__init__(url)
        self.weak = weak
        self.at: Callable[[str, str], None] = lambda _verb, _name: None
        self.replaced: list[str] = []

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        self.at("put", name)
        if name in self._objects and not if_absent:
            self.replaced.append(name)
        super().put(name, data, if_absent=if_absent and not self.weak)
        self.at("was put", name)

    def delete(self, name: str) -> None:
        self.at("delete", name)
        # Another host may have settled on it: what is removed is older than something that exists.
        assert name != "config" and (key_generations.number(name) or 0) < max(
            [1, *key_generations.names(self).values()]
        )
        super().delete(name)
        self.at("was deleted", name)

    def get(self, name: str, limit: int | None = None) -> bytes:
        self.at("get", name)
        return super().get(name, limit)

    def stat(self, name: str) -> ObjectInfo:
        self.at("stat", name)
        return super().stat(name)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.at("list", prefix)
        return super().list(prefix)

    def probe(self) -> Capabilities:
        return Capabilities(conditional_create=not self.weak, kind="memory")

    def config_body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self._objects["config"][0])
        return body

    def text(self) -> str:
        return "".join(content.decode("latin-1") for content, _time in self._objects.values())


@dataclass
class Site:
    """A store, its checkpoint, and two hosts, each with a key file of its own."""

    stage: Stage
    one: Config
    two: Config
    id: str

    def opens(self, config: Config) -> bool:
        """Whether `config` opens the store; `WrongKey` and `KeyMissing` are no."""
        try:
            Repository.open(self.stage, config)
        except (WrongKey, KeyMissing):
            return False
        return True

    def fingerprint(self, config: Config) -> str:
        path = Path(config.key_file) if config.key_file else keys.key_path(config, self.id)
        return fingerprint(key_files.KeyText.parse(path.read_bytes(), "").key)

    def kinds(self, config: Config) -> list[str]:
        return [one.kind for one in key_list(config)[0]]


Setting = Callable[..., Site]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """Makes sites, each in folders of its own."""
    monkeypatch.delenv(keys.RECOVERY_VARIABLE, raising=False)
    monkeypatch.setattr("criuctl.checkpoint.key_generations._PAUSE", 0.001)
    monkeypatch.setitem(key_slots._SCRYPT, "n", 16)
    monkeypatch.setattr(key_slots, "_SCRYPT_LEAST", 16)
    count = iter(range(1000))

    def make(*, weak: bool = False, second: bool = True) -> Site:
        folder = tmp_path / f"{next(count)}"
        stage = Stage(f"memory:{folder}", weak=weak)
        monkeypatch.setitem(memory._named, stage.url, stage)
        one = kit.config(folder, store=stage.url, state_dir=str(folder / "state"))
        with Repository.init(stage, encryption=True, config=one) as repository:
            made = Site(stage, one, replace(one, key_file=str(folder / "two.key")), repository.id)
        if second:
            key_add(one, NewKey(Path(made.two.key_file), label="two"))
        return made

    return make


def steps(stage: Stage, verbs: tuple[str, ...], work: Callable[[], object]) -> int:
    """How many of `verbs` the work has."""
    count = 0

    def at(verb: str, _name: str) -> None:
        nonlocal count
        count += verb in verbs

    stage.at = at
    work()
    stage.at = lambda _verb, _name: None
    return count


def happening(
    stage: Stage, number: int, verbs: tuple[str, ...], what: Callable[[], object]
) -> None:
    """At the `number`-th of these verbs, once."""
    left = number

    def at(verb: str, _name: str) -> None:
        nonlocal left
        if verb in verbs:
            left -= 1
            if left == -1:
                stage.at = lambda _verb, _name: None
                what()

    stage.at = at


WRITES = ("put", "was put", "delete", "was deleted")
READS = ("get", "stat", "list")


def kill() -> None:
    raise Killed


CHANGES: dict[str, Callable[[Site], object]] = {
    "add": lambda site: key_add(site.one, NewKey(Path(site.one.key_dir) / "third.key")),
    "remove": lambda site: key_remove(site.one, "two"),
    "remove the own": lambda site: key_remove(
        site.one, site.fingerprint(site.one), other_key_file=Path(site.two.key_file)
    ),
    "rotate": lambda site: key_rotate(site.one, NewKey()),
    "rotate to a file": lambda site: key_rotate(
        site.two, NewKey(Path(site.one.key_dir) / "third.key")
    ),
    "recovery": lambda site: key_recovery(site.one),
}


@pytest.mark.parametrize("weak", [False, True], ids=["strong", "weak"])
@pytest.mark.parametrize("change", CHANGES)
def test_killed_anywhere_the_store_opens_and_the_next_change_settles_it(
    site: Setting, change: str, weak: bool
) -> None:
    model = site(weak=weak)
    count = steps(model.stage, WRITES, lambda: CHANGES[change](model))
    assert count >= 2
    for number in range(count):
        here = site(weak=weak)
        before = {config.key_dir + config.key_file: config for config in (here.one, here.two)}
        happening(here.stage, number, WRITES, kill)
        with pytest.raises(Killed):
            CHANGES[change](here)
        able = [config for config in before.values() if here.opens(config)]
        if change == "rotate":
            assert here.one in able  # by whatever lies in its file
        stays = here.two if change == "remove the own" else here.one
        assert stays in able, f"{change} killed at {number}"
        key_tidy(stays)
        assert not key_list(stays)[1]
        if change != "rotate to a file":
            with contextlib.suppress(NotFound, Conflict, WrongKey):  # it was done, for all that
                CHANGES[change](here)
        assert here.opens(stays) and len(key_list(stays)[0]) <= 4
        assert not here.stage.replaced if weak else set(here.stage.replaced) == {"config"}


@pytest.mark.parametrize("tidied", [False, True])
@pytest.mark.parametrize("number", range(2))
def test_a_key_file_that_is_being_replaced_opens_the_store_at_every_instant(
    site: Setting, number: int, tidied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = site(second=False)
    path = keys.key_path(here.one, here.id)
    real, old = os.replace, path.read_bytes()

    def replace_and_die(source: Path, target: Path) -> None:
        if number:
            real(source, target)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace_and_die)
        with pytest.raises(Killed):
            key_rotate(here.one, NewKey())
    assert here.opens(here.one) and (path.read_bytes() != old) is bool(number)
    assert any("rotation" in note for note in key_list(here.one)[1]) is bool(number)
    if tidied:
        # its place was taken; before that it is the one in use
        assert len(key_tidy(here.one).removed) == number
        assert [one.used for one in key_list(here.one)[0]] == [True, False][: 2 - number]
    key_rotate(here.one, NewKey())  # goes on with the key that was made, or replaces that
    assert here.opens(here.one) and not path.with_suffix(".new").exists()
    assert [one.fingerprint for one in key_list(here.one)[0]] == [here.fingerprint(here.one)]


def test_two_on_one_host_do_not_replace_its_key_file_at_once(site: Setting) -> None:
    here = site(second=False)
    errors: list[CriuctlError] = []

    def other() -> None:
        with pytest.raises(Conflict, match="another process") as caught:
            key_rotate(here.one, NewKey())
        errors.append(caught.value)

    happening(here.stage, 0, ("was put",), other)
    key_rotate(here.one, NewKey())
    assert errors and here.opens(here.one) and len(key_list(here.one)[0]) == 1


def test_a_new_key_file_that_was_half_written_is_made_again(site: Setting) -> None:
    here = site()
    torn = keys.key_path(here.one, here.id).with_suffix(".new")
    key_files.write_secret(torn, "criuctl ke")
    done = key_rotate(here.one, NewKey(label="fresh"))
    assert here.opens(here.one) and here.opens(here.two) and not torn.exists()
    kept = replace(here.one, key_file=str(done.previous))
    with pytest.raises(WrongKey, match="does not open"):
        Repository.open(here.stage, kept)
    assert [one.label for one in key_list(here.one)[0] if one.used] == ["fresh"]


def test_two_changes_at_once_both_count_or_one_fails(site: Setting) -> None:
    """At each step of the first, the second makes its whole change: either both are in force, or
    the loser gets an error that says why.
    """
    model = site()
    for number in range(steps(model.stage, WRITES + READS, lambda: CHANGES["add"](model))):
        here = site()
        happening(here.stage, number, WRITES + READS, lambda here=here: key_recovery(here.two))  # type: ignore[misc]
        CHANGES["add"](here)
        assert (
            sorted(here.kinds(here.one)) == ["file", "file", "file", "recovery"]
            and not key_list(here.two)[1]
        )
    lost = 0
    for number in range(20):  # each removes the other's key
        here = site()
        ended: list[CriuctlError] = []

        def other(here: Site = here, ended: list[CriuctlError] = ended) -> None:
            try:
                key_remove(here.two, here.fingerprint(here.one))
            except CriuctlError as error:
                ended.append(error)

        happening(here.stage, number, WRITES + READS, other)
        try:
            key_remove(here.one, "two")
        except CriuctlError as error:
            ended.append(error)
        assert here.opens(here.one) != here.opens(here.two)
        assert len(ended) == 1 and isinstance(ended[0], Conflict | WrongKey)
        lost += not here.opens(here.one)
    assert 0 < lost < 20


def test_two_at_once_on_a_weak_server_never_shut_anybody_out(site: Setting) -> None:
    model = site(weak=True)
    for number in range(steps(model.stage, WRITES + READS, lambda: CHANGES["add"](model))):
        here = site(weak=True)
        happening(here.stage, number, WRITES + READS, lambda here=here: key_recovery(here.two))  # type: ignore[misc]
        CHANGES["add"](here)
        assert (
            sorted(here.kinds(here.one)) == ["file", "file", "file", "recovery"]
            and here.stage.replaced == []
        )
    # One that dies after both have put the same number leaves two texts: the keys of both count.
    here = site(weak=True)

    def be_overtaken_and_die() -> None:
        key_remove(here.two, here.fingerprint(here.one))
        happening(here.stage, 0, ("was put",), kill)

    happening(here.stage, 0, ("put",), be_overtaken_and_die)
    with pytest.raises(Killed):
        key_remove(here.one, "two")
    assert here.opens(here.one) and here.opens(here.two)
    key_tidy(here.one)
    assert here.opens(here.one) and here.opens(here.two) and not key_list(here.one)[1]
    assert len([name for name in here.stage._objects if name.startswith("keys/")]) == 1


def test_who_opens_meanwhile_is_not_disturbed(site: Setting) -> None:
    """At each step of an opening the keys are changed twice; a key that stays opens the store,
    another one may be refused.
    """
    model = site()
    for number in range(steps(model.stage, READS, lambda: Repository.open(model.stage, model.two))):
        here = site()
        happening(
            here.stage,
            number,
            READS,
            lambda here=here: [  # type: ignore[misc]
                key_rotate(here.one, NewKey()) for _ in "12"
            ],
        )
        Repository.open(here.stage, here.two)


def test_a_removed_key_is_refused_and_gone_from_the_store(site: Setting) -> None:
    here = site()
    old = here.stage.config_body()
    gone = next(slot for slot in old["slots"] if slot.get("label") == "two")
    done = key_remove(here.one, "two")
    assert done.removed == [gone["fingerprint"]] and not done.warnings and done.generation == 2
    with pytest.raises(WrongKey, match="does not open"):
        Repository.open(here.stage, here.two)
    assert gone["wrapped"] not in here.stage.text()
    # An attacker puts the old config back: the newest generation counts, wherever it is.
    here.stage.put("config", json.dumps(old).encode())
    with pytest.raises(WrongKey, match="was removed"):
        Repository.open(here.stage, here.two)
    assert here.opens(here.one) and key_list(here.one)[1]
    key_tidy(here.one)
    assert gone["wrapped"] not in here.stage.text() and not key_list(here.one)[1]


def test_the_config_may_be_lost_or_damaged_once_there_are_generations(site: Setting) -> None:
    here = site()
    whole = here.stage.get("config")
    for damage in (None, b"", whole[: len(whole) // 2], whole.replace(b"memory", b"MEMORY")):
        memory.MemoryStore.delete(here.stage, "config")
        if damage is not None:
            here.stage.put("config", damage)
        assert here.opens(here.one) and here.opens(here.two)
        with pytest.raises(Conflict):  # and no other store can be created over it
            Repository.init(here.stage, encryption=True, config=here.one)
        key_tidy(here.one)
        assert here.stage.get("config") == whole


def test_what_was_not_written_with_the_key_counts_for_nothing(site: Setting) -> None:
    here = site()
    body = here.stage.config_body()
    forged = {**body, "generation": 7, "slots": body["slots"][:1]}
    names = ["0" * 19 + "7", "0" * 19 + "8", "0" * 19 + "9" + "-" + "ab" * 16, "9" * 20, "readme"]
    for name, text in zip(
        names, [json.dumps(forged), "nonsense", '{"format": 1}', "x", "y"], strict=True
    ):
        here.stage.put(f"keys/{name}", text.encode())
    assert here.opens(here.one) and here.opens(here.two)
    key_remove(here.one, "two")
    assert here.opens(here.one) and not here.opens(here.two)
    assert [one.used for one in key_list(here.one)[0]] == [True]
    here.stage.put("keys/" + "0" * 19 + "3", b"in the way")
    with pytest.raises(Damaged, match="in the way"):
        key_recovery(here.one)


def test_golden_generations_and_stores_of_before_there_were_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(golden.FOLDER / "1" / "encrypted", tmp_path / "store")
    config = kit.config(tmp_path, store=str(tmp_path / "store"), state_dir=str(tmp_path / "state"))
    first = tmp_path / golden.KEY
    shutil.copyfile(golden.FOLDER / "1" / golden.KEY, first)
    first.chmod(0o600)
    by_first = replace(config, key_file=str(first))
    # One that was made before there were generations: its key is replaced, its checkpoints are read
    # by the new one.
    done = key_rotate(by_first, NewKey(tmp_path / "new.key"))
    by_new = replace(config, key_file=str(tmp_path / "new.key"))
    assert done.generation == 1 and [one.fingerprint for one in key_list(by_new)[0]] == done.added
    with pytest.raises(WrongKey):
        key_list(by_first)
    with Repository.open(LocalStore(config.store), by_new) as repository:
        repository.verify(repository.manifest("golden"), Reporter())
    # And a generation as it was written first.
    store = LocalStore(config.store)
    store.put(f"keys/{2:020d}", (golden.FOLDER / "generation-2.json").read_bytes())
    monkeypatch.setenv(keys.PASSPHRASE_VARIABLE, "protects nothing")
    assert [(one.kind, one.label, one.used) for one in key_list(config)[0]] == [
        ("file", "", False),
        ("passphrase", "words", True),
        ("recovery", "paper", False),
    ]
    assert {one.used for one in key_list(by_first)[0]} == {True, False}
    with pytest.raises(WrongKey):
        key_list(by_new)
    monkeypatch.setenv(
        keys.RECOVERY_VARIABLE, "AAYTTH-HEBRYK-DPJEMA-VJGYDV-SVKBAC-FZNRPM-NWSNJX-PEKPGX"
    )
    with Repository.open(store, config) as repository:
        assert repository.key_info()["fingerprint"] == "4d2ca2693f70d882"
        repository.verify(repository.manifest("golden"), Reporter())


def test_an_older_criuctl_reads_the_keys_as_they_are(site: Setting) -> None:
    """It knows the object `config` only, and passes over what it does not know in it."""
    here = site()
    key_recovery(here.one)
    key_rotate(here.one, NewKey())
    body = here.stage.config_body()
    assert (body["version"], body["features"]) == (1, [])
    path = keys.key_path(here.one, here.id)
    opened = keys.open_by_file(body["slots"], here.id, path)
    assert configobject.fits(body, Sealer(opened.master, encrypted=True))
    with pytest.raises(WrongKey):
        keys.open_by_file(body["slots"], here.id, next(path.parent.glob(f"{here.id}.*.key")))


def test_the_last_key_is_not_removed_by_mistake(site: Setting, tmp_path: Path) -> None:
    here = site(second=False)
    mine = here.fingerprint(here.one)
    with pytest.raises(Conflict, match="last key"):
        key_remove(here.one, mine)
    shown = key_recovery(here.one)
    with pytest.raises(Conflict, match="seen to open"):
        key_remove(here.one, mine)  # it was not checked that the paper key is right
    paper = tmp_path / "paper"
    key_files.write_secret(paper, f"{shown.recovery_key}\n")
    other = tmp_path / "other"
    key_files.write_secret(other, recovery.to_text(bytes(20)))
    with pytest.raises(WrongKey):
        key_remove(here.one, mine, other_key_file=other)
    with pytest.raises(NotFound):
        key_remove(here.one, "beta")
    by_paper = replace(here.one, key_file=str(paper))
    with pytest.raises(UsageError, match="recovery key"):
        key_rotate(by_paper, NewKey())
    with pytest.raises(Conflict, match="seen to open"):
        key_recovery(by_paper, replace=True)
    key_remove(here.one, mine[:6], other_key_file=paper)
    assert not here.opens(here.one) and here.opens(by_paper)
    # it may have been removed for a reason
    with pytest.raises(Conflict, match="has a key file already"):
        key_add(by_paper, NewKey())
    keys.key_path(here.one, here.id).unlink()
    key_add(by_paper, NewKey())
    with pytest.raises(Conflict, match="opens the store already"):
        key_add(by_paper, NewKey(keys.key_path(here.one, here.id)))
    again = key_recovery(here.one, replace=True)
    assert again.removed == shown.added and not here.opens(by_paper) and here.opens(here.one)
    assert (
        again.recovery_key is not None and again.recovery_key not in repr(again) + here.stage.text()
    )


def test_an_exported_master_key_is_no_slot(site: Setting, tmp_path: Path) -> None:
    here = site()
    phrase = tmp_path / "phrase"
    key_files.write_secret(phrase, "correct horse\n")
    key_add(here.one, NewKey(passphrase=b"correct horse"))
    by_phrase = replace(here.one, key_dir=str(tmp_path / "none"), passphrase_file=str(phrase))
    exported = tmp_path / "master.key"
    Repository.open(here.stage, by_phrase).export_key(exported)
    by_master = replace(here.one, key_file=str(exported))
    key_rotate(by_phrase, NewKey(passphrase=b"battery staple"))
    assert not here.opens(by_phrase) and here.opens(by_master)
    with pytest.raises(UsageError, match="master key"):
        key_rotate(by_master, NewKey())
    with pytest.raises(UsageError, match="none of the store's keys"):
        key_remove(here.one, here.fingerprint(here.one), other_key_file=exported)
    with pytest.raises(Conflict, match="seen to open"):
        key_remove(by_master, "two")
    key_remove(by_master, "two", other_passphrase=b"battery staple")
    assert sorted(here.kinds(by_master)) == ["file", "passphrase"]
    plain = kit.config(tmp_path, store=str(tmp_path / "plain"))
    Repository.init(LocalStore(plain.store), encryption=False, config=plain)
    with pytest.raises(Conflict, match="not encrypted"):
        key_list(plain)


def test_a_file_that_opens_no_more_is_passed_over_for_a_passphrase(
    site: Setting, tmp_path: Path
) -> None:
    here = site()
    phrase = tmp_path / "phrase"
    key_files.write_secret(phrase, "correct horse\n")
    key_add(here.one, NewKey(passphrase=b"correct horse"))
    both = replace(here.one, passphrase_file=str(phrase))
    assert Repository.open(here.stage, both).key_info()["kind"] == "file"
    key_remove(here.one, here.fingerprint(here.one), other_passphrase=b"correct horse")
    assert Repository.open(here.stage, both).key_info()["kind"] == "passphrase"
    with pytest.raises(WrongKey, match="fingerprint"):
        Repository.open(here.stage, here.one)


def test_a_lost_answer_is_resolved_and_a_refused_clean_up_is_reported(site: Setting) -> None:
    here = site()
    written = kit.write(Repository.open(here.stage, here.two))

    def lose() -> None:
        raise StoreUnreachable("the answer was lost")

    happening(here.stage, 0, ("was put",), lose)
    key_remove(here.one, "two")
    assert not here.opens(here.two)
    happening(here.stage, 0, ("put",), lose)
    with pytest.raises(StoreUnreachable):
        key_recovery(here.one)
    assert here.kinds(here.one) == ["file"]

    def refuse(verb: str, name: str) -> None:
        if verb == "delete" or (verb, name) == ("put", "config"):
            raise StoreDenied("this bucket is locked")

    here.stage.at = refuse
    done = key_recovery(here.one)
    assert (
        "key tidy" in done.warnings[0]
        and done.degraded
        and here.kinds(here.one) == ["file", "recovery"]
    )
    here.stage.at = lambda _verb, _name: None
    assert key_list(here.one)[1] and not key_tidy(here.one).warnings and not key_list(here.one)[1]
    # by keys that are not those by which it was written
    kit.check(Repository.open(here.stage, here.one), written)
