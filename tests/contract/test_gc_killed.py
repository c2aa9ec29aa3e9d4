"""Garbage collection on a real S3 server: many processes that are killed at it, and buckets that
keep what is deleted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from servers.radosgw import RadosGateway
from support import checkpoints as kit
from support import collectors
from support.command import Criuctl
from support.places import Place

from criuctl.checkpoint import gc, gclists
from criuctl.checkpoint.gc import Collection
from criuctl.checkpoint.gc_result import Collected
from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.report import Reporter
from criuctl.store import open_store

pytestmark = pytest.mark.contract

TESTS = Path(__file__).resolve().parents[1]


def collect(repo: Repository) -> Collected:
    return Collection(repo, Reporter(), grace=0).run()


def config(place: Place, path: Path, host: str) -> Config:
    return replace(place.config, key_dir=str(path / "keys"), cache_dir=str(path / host), workers=1)


@pytest.mark.parametrize("place", ["radosgw"], indirect=True)
def test_killed_at_every_change_during_dumps_and_other_collections(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint whose dump has returned is there and whole, whichever process was killed when;
    all of the rest can be freed.
    """
    Repository.init(place.open(), encryption=False, config=config(place, tmp_path, "first")).close()
    done = subprocess.run(
        [sys.executable, collectors.__file__, place.url, tmp_path, "1"],
        env={**os.environ, **place.environment, "PYTHONPATH": f"{TESTS.parent}:{TESTS}"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    repo = Repository.open(place.open(), config(place, tmp_path, "last"))
    assert collect(repo).lost == 0
    listed = {summary.session: summary for summary in repo.list()}
    outcome = json.loads(done.stdout)
    assert (
        len(outcome["committed"]) >= 2
        and outcome["killed"] >= 2
        and set(outcome["committed"]) <= set(listed)
    )
    for session, summary in listed.items():
        kit.check(repo, summary, collectors.content(session))
        repo.remove(summary)
    # as if a week had passed since writers were killed
    monkeypatch.setattr(gclists, "ABANDONED", 0.0)
    monkeypatch.setattr(gc, "ABANDONED", 0.0)
    for _ in range(2):
        collect(Repository.open(place.open(), config(place, tmp_path, "last")))
    # a clock object of a process that was killed while it read it goes after a day
    kept = ("config", "numbers", "gc/now-", "probe-")
    assert [name for name in place.left() if not any(part in name for part in kept)] == []


def bucket_with(server: RadosGateway, name: str, **options: Any) -> str:
    """A bucket of its own; the URL of a store in it."""
    server.client().create_bucket(Bucket=name, **options)
    return f"s3://{name}/trees"


def test_versions_and_locks_that_a_bucket_keeps_are_reported(
    gateway: Place, radosgw_server: RadosGateway, tmp_path: Path, criuctl: Criuctl
) -> None:
    """Versions and locks: deletes hide objects, which is reported; no version is touched."""
    server = radosgw_server
    url = bucket_with(server, "locked", ObjectLockEnabledForBucket=True)
    retention = {
        "ObjectLockEnabled": "Enabled",
        "Rule": {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}},
    }
    server.client().put_object_lock_configuration(
        Bucket="locked", ObjectLockConfiguration=retention
    )
    criuctl.extra |= {**gateway.environment, "CRIUCTL_STORE": url}
    criuctl("store", "init", "--no-encrypt")
    # which made the store
    settings = replace(
        config(gateway, tmp_path, "host"), state_dir=str(criuctl.home.path / "state")
    )
    repo = Repository.open(open_store(url, settings), settings)
    repo.remove(kit.write(repo))
    done = criuctl("gc", "--grace", "0")
    assert (done["deleted"], done["refused"], done["refused_others"]) == (1, 0, 0)
    # With versions, radosgw takes a conditional write whatever is there; `store init` has found
    # that out.
    assert ["no other host writes" in warning for warning in done["warnings"]] == [True]
    retained = criuctl("store", "info")["kept"]
    assert (
        retained["versions"]
        and retained["lock"] == "governance 1 days"
        and retained["bytes"] >= done["freed_bytes"]
    )
    kept = server.client().list_object_versions(Bucket="locked", Prefix="trees/packs/")
    assert len(kept["Versions"]) == len(kept["DeleteMarkers"]) == 1
    command = criuctl.start("store", "info", json_output=False)
    assert command.process.wait(120) == 0 and "locked (governance 1 days)" in command.output()


def test_deletes_that_a_policy_refuses_are_reported_and_tried_again(
    gateway: Place, radosgw_server: RadosGateway, tmp_path: Path, criuctl: Criuctl
) -> None:
    server = radosgw_server
    url = bucket_with(server, "kept")
    criuctl.extra |= {**gateway.environment, "CRIUCTL_STORE": url}
    criuctl("store", "init", "--no-encrypt")
    # which made the store
    settings = replace(
        config(gateway, tmp_path, "host"), state_dir=str(criuctl.home.path / "state")
    )
    repo = Repository.open(open_store(url, settings), settings)
    repo.remove(kit.write(repo, session="gone"))
    kept = kit.write(repo, kit.Content(b"k" * 300_000, {"k.img": b"k"}), session="kept")
    deny = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:DeleteObject",
        "Resource": "arn:aws:s3:::kept/*",
    }
    server.client().put_bucket_policy(
        Bucket="kept", Policy=json.dumps({"Version": "2012-10-17", "Statement": [deny]})
    )
    for _ in range(2):
        done = criuctl("gc", "--grace", "0", check=False)
        assert (
            (done["exit_code"], done["deleted"], done["refused"]) == (11, 0, 1)
            and done["refused_others"]
            and done["warnings"]
        )
    criuctl("verify", "kept")
    server.client().delete_bucket_policy(Bucket="kept")
    assert criuctl("gc", "--grace", "0")["deleted"] == 1
    kit.check(
        Repository.open(repo.store, settings), kept, kit.Content(b"k" * 300_000, {"k.img": b"k"})
    )
