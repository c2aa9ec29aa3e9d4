"""``restore NAME`` means the last state: an older one, or that of another session, does not come
back without a word.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from servers.common import S3Server
from support.command import Criuctl, Home
from support.keeper import Keeper
from support.zoo import Animal, Zoo

from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.store.local import LocalStore

pytestmark = pytest.mark.integration


@pytest.fixture
def elsewhere(keeper: Keeper, criuctl: Criuctl, tmp_path: Path, home: Home) -> Iterator[Criuctl]:
    """criuctl on another host that uses the same store and has its keys."""
    path, run = tmp_path / "elsewhere", home.run / "elsewhere"
    path.mkdir()
    run.mkdir()
    other = Criuctl(keeper, Home(home.token, path, run))
    other.extra = {"CRIUCTL_STORE": str(criuctl.store), "CRIUCTL_KEY_DIR": str(home.path / "keys")}
    yield other
    shutil.rmtree(run)


def stored(
    criuctl: Criuctl, zoo: Zoo, times: int = 2, init: Sequence[str] = ()
) -> tuple[Animal, list[dict[str, Any]]]:
    """A session ``work`` that was dumped so many times; the last dump has ended it."""
    criuctl("store", "init", *init)
    animal = zoo.launch("memory.py", "1")
    reports = [
        criuctl("dump", animal.pid, "--name", "work", "--leave-running") for _ in range(times - 1)
    ]
    return animal, [*reports, criuctl("dump", animal.pid, "--name", "work")]


def remove_manifest(store: Path, checkpoint: str) -> None:
    """As an attacker does who can write to the folder."""
    (found,) = (store / "checkpoints").rglob(f"*-{checkpoint}")
    found.unlink()


def refused(answer: dict[str, Any], code: str = "older-checkpoint") -> dict[str, Any]:
    """The error of a command that ended with 9."""
    assert answer["exit_code"] == 9, answer
    error: dict[str, Any] = answer["error"]
    assert error["code"] == code, error
    return error


def test_the_newest_manifest_was_removed(criuctl: Criuctl, zoo: Zoo) -> None:
    """Refused, with both named; the explicit ways go on, and tell what is newer, and from then on
    that is the last one.
    """
    animal, reports = stored(criuctl, zoo, 3)
    status = criuctl("status", "work")["checkpoint"]
    assert (status["id"], status["number"], status["store"]) == (
        reports[2]["checkpoint"],
        3,
        str(criuctl.store),
    )
    assert 0 <= status["age_s"] < 300
    remove_manifest(criuctl.store, reports[2]["checkpoint"])
    for more in ((), ("--dry-run",), ("--as", "copy"), ("--force",), ("--take-over",)):
        error = refused(criuctl("restore", "work", *more, check=False))
        assert (
            "work@2" in error["message"]
            and "work@3" in error["message"]
            and "--older" in error["hint"]
        )
        assert (error["found"]["number"], error["newer"]["number"]) == (2, 3)
    refused(criuctl("restore", "work@-1", check=False))
    copied = criuctl("restore", "work@1", "--as", "copy")
    zoo.adopt(copied["pid"], animal)
    assert (copied["number"], copied["newer"]["number"], copied["newer"]["id"]) == (
        1,
        3,
        reports[2]["checkpoint"],
    )
    criuctl("kill", "copy")
    refused(criuctl("restore", "work", check=False))
    back = criuctl("restore", "work", "--older")
    zoo.adopt(back["pid"], animal)
    assert (back["checkpoint"], back["number"], back["store"]) == (
        reports[1]["checkpoint"],
        2,
        str(criuctl.store),
    )
    assert back["newer"]["id"] == reports[2]["checkpoint"] and 0 <= back["age_s"] < 300
    criuctl("kill", "work")
    again = criuctl("restore", "work")  # which is the last one now
    zoo.adopt(again["pid"], animal)
    assert (again["number"], again["newer"]) == (2, None)


def test_another_store_than_that_of_the_last_dump(
    criuctl: Criuctl, zoo: Zoo, home: Home, radosgw_server: S3Server
) -> None:
    """The last dump went to S3; the default store has an older one, or none: both are named."""
    radosgw_server.make_bucket(home.token)
    cloud = {**radosgw_server.env, "CRIUCTL_STORE": f"s3://{home.token}/x"}
    criuctl("store", "init", env=cloud)
    criuctl("store", "init")
    animal = zoo.launch("memory.py", "1")
    criuctl("dump", animal.pid, "--name", "work", "--leave-running")
    last = criuctl("dump", animal.pid, "--name", "work", env=cloud)
    error = refused(criuctl("restore", "work", check=False))
    assert (
        str(criuctl.store) in error["message"] and f"--store s3://{home.token}/x" in error["hint"]
    )
    criuctl("rm", "work")
    answer = criuctl("restore", "work", check=False)
    assert answer["exit_code"] == 3 and f"--store s3://{home.token}/x" in answer["error"]["hint"]
    back = criuctl("restore", "work", env=cloud)
    zoo.adopt(back["pid"], animal)
    assert (back["checkpoint"], back["newer"], back["store"]) == (
        last["checkpoint"],
        None,
        f"s3://{home.token}/x",
    )


def test_what_the_operator_removes_is_no_loss(criuctl: Criuctl, zoo: Zoo) -> None:
    """After `rm` and `prune` the newest of the rest is the last one; what is removed behind them is
    still noticed.
    """
    animal, reports = stored(criuctl, zoo, 4)
    criuctl("rm", "work")
    assert criuctl("status", "work")["checkpoint"]["number"] == 3
    dry = criuctl("restore", "work", "--dry-run")
    assert dry["ok"] is True
    criuctl("rm", "work@3", "work@1")
    remove_manifest(criuctl.store, reports[1]["checkpoint"])
    answer = criuctl("restore", "work", check=False)
    assert answer["exit_code"] == 3
    assert animal


def test_a_killed_session_is_remembered(criuctl: Criuctl, zoo: Zoo) -> None:
    """`kill` ends it; `forget` makes the host know nothing."""
    animal, reports = stored(criuctl, zoo)
    zoo.adopt(criuctl("restore", "work")["pid"], animal)
    criuctl("kill", "work")
    remove_manifest(criuctl.store, reports[1]["checkpoint"])
    refused(criuctl("restore", "work", check=False))
    criuctl("forget", "work")
    zoo.adopt(criuctl("restore", "work")["pid"], animal)


def test_an_import_is_the_newest_by_the_operators_word(
    criuctl: Criuctl, zoo: Zoo, home: Home
) -> None:
    """It may be as old as it likes."""
    animal, reports = stored(criuctl, zoo, 3)
    file = home.path / "work.criuctl"
    criuctl("export", "work@1", file)
    criuctl("rm", "work@1")
    brought = criuctl("import", file)
    back = criuctl("restore", "work")
    zoo.adopt(back["pid"], animal)
    assert (
        (back["checkpoint"], back["number"])
        == (reports[0]["checkpoint"], brought["number"])
        == (reports[0]["checkpoint"], 4)
    )


def test_another_host_has_dumped_it_since(criuctl: Criuctl, elsewhere: Criuctl, zoo: Zoo) -> None:
    """Newer than what is known here is fine, and a host that knows nothing asks nothing; retention
    elsewhere is asked about.
    """
    animal, reports = stored(criuctl, zoo)
    moved = zoo.adopt(elsewhere("restore", "work")["pid"], animal)
    there = elsewhere("dump", moved.pid, "--name", "work")
    back = criuctl("restore", "work")
    moved = zoo.adopt(back["pid"], animal)
    assert (back["checkpoint"], back["number"], back["newer"]) == (there["checkpoint"], 3, None)
    last = criuctl("dump", moved.pid, "--name", "work")
    elsewhere("rm", last["checkpoint"])
    error = refused(criuctl("restore", "work", check=False))
    assert "another host" in error["hint"]
    zoo.adopt(criuctl("restore", "work", "--older")["pid"], animal)
    assert reports


def test_a_forged_checkpoint_under_the_same_name(criuctl: Criuctl, zoo: Zoo, home: Home) -> None:
    """An attacker adds a checkpoint of another session, with a higher number, to a store without
    encryption: it is not run for a NAME.
    """
    animal, reports = stored(criuctl, zoo, init=["--no-encrypt"])
    forger = Config(
        store=str(criuctl.store),
        state_dir=str(home.path / "forger"),
        cache_dir=str(home.path / "c"),
        key_dir=str(home.path / "k"),
    )
    with Repository.open(LocalStore(forger.store), forger) as repository:
        manifest = repository.manifest("work")
        body = json.loads(json.dumps(manifest.to_dict()))
        body["session"]["id"], body["id"], body["incarnation"] = "f" * 32, "e" * 32, 99
        forged = repository.publish(type(manifest).from_dict(body), 7)
    for more in ((), ("--as", "copy"), ("--older",)):
        error = refused(criuctl("restore", "work", *more, check=False), "another-session")
        assert "ffffffffffff" in error["message"] and "work@7" in error["hint"]
    refused(criuctl("verify", "work", "--restore", check=False), "another-session")
    criuctl("kill", "work")  # it is not waited for
    refused(criuctl("restore", "work", check=False), "another-session")
    back = criuctl("restore", reports[1]["checkpoint"])
    zoo.adopt(back["pid"], animal)
    assert (back["number"], back["newer"]["id"]) == (2, forged.id)


def test_restore_and_status_name_the_checkpoint(criuctl: Criuctl, zoo: Zoo) -> None:
    """In the words of `restore` and `status`."""
    animal, reports = stored(criuctl, zoo)
    command = criuctl.start("restore", "work", json_output=False)
    assert command.process.wait(120) == 0, command.output()
    text = command.out.read_text()
    assert (
        f"from checkpoint 2 ({reports[1]['checkpoint'][:12]}, " in text
        and f" s old) in {criuctl.store}" in text
    )
    zoo.adopt(criuctl("status", "work")["pid"], animal)
    shown = criuctl.start("status", "work", json_output=False)
    assert (
        shown.process.wait(60) == 0
        and f"2 ({reports[1]['checkpoint'][:12]}, " in shown.out.read_text()
    )
