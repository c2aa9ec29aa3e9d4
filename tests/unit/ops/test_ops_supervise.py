"""A supervisor on a host whose own disk is full, or whose store is damaged: it goes on, and tries
again.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from criuctl.checkpoint import leases
from criuctl.checkpoint.repository import Repository
from criuctl.config import Config
from criuctl.errors import Conflict, PlatformError, WrongKey
from criuctl.host import fencing
from criuctl.host.registry import SessionRecord, boot_id
from criuctl.ops.supervise import Supervisor
from criuctl.ops.supervising import recoverer, snapshots
from criuctl.ops.supervising.context import Post, SupervisorSettings
from criuctl.ops.supervising.recoverer import Loss, Recoverer
from criuctl.proc.tree import ProcessIdentity
from criuctl.report import Reporter
from criuctl.store import open_store


def full(*_args: object, **_more: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def events() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def post(tmp_path: Path, events: list[dict[str, Any]]) -> Post:
    config = Config(
        store=str(tmp_path / "store"),
        state_dir=str(tmp_path / "state"),
        key_dir=str(tmp_path / "keys"),
        hook_dirs=(),
    )
    with (
        open_store(config.store, config) as store,
        Repository.open(store, config, create_local=True),
    ):
        return Post(
            config, "web", SupervisorSettings(keep_last=1), reporter=Reporter(), tell=events.append
        )


def test_a_snapshot_that_finds_no_room_here_is_taken_again_later(
    post: Post, events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    me = ProcessIdentity.of(os.getpid())
    record = SessionRecord("web", pid=me.pid, start_time=me.start_time, boot_id=boot_id())
    monkeypatch.setattr(snapshots, "dump", full)
    monkeypatch.setattr(snapshots, "prune", full)
    heart: Any = SimpleNamespace()
    taken = snapshots.Snapshots(post, heart, print)
    assert taken.take(record, "period")
    taken._prune()
    assert [one["event"] for one in events] == ["snapshot-failed", "prune-failed"]
    assert {one["error"]["code"] for one in events} == {"platform"}


def test_a_restore_that_finds_no_room_here_counts_as_one_that_failed(
    post: Post, events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = SimpleNamespace(id="ab" * 16, session_id="cd" * 16, number=1)
    monkeypatch.setattr(recoverer, "candidates", lambda *_args: [summary])
    monkeypatch.setattr(recoverer, "restore", full)
    heart: Any = SimpleNamespace(start=lambda _session: None)
    one = Recoverer(post, heart)
    assert isinstance(one._try(Loss(None, 0.0), []), PlatformError)
    assert one.guard.failures == 1
    assert [one["event"] for one in events] == ["restore-failed"]


@pytest.fixture
def lease(post: Post) -> Path:
    """The record by which another host holds the session."""
    with post.repository() as repository:
        leases.claim(repository, "web", "cd" * 16, 1, host="ef" * 16, host_name="other").keep()
    (found,) = (
        path for path in Path(post.config.store).glob("sessions/*/*") if path.name.isdigit()
    )
    return found


def test_a_lease_that_cannot_be_read_is_waited_for(
    post: Post, events: list[dict[str, Any]], lease: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session may be brought back later, and only by this supervisor."""
    good, looks = lease.read_bytes(), list[float]()

    def mended(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            lease.write_bytes(good)

    monkeypatch.setattr(post, "sleep", mended)
    lease.chmod(0o600)
    lease.write_bytes(good[:-1])
    assert Supervisor(post)._role_again() == "standby"
    assert len(looks) == 2
    assert [(one["event"], one["error"]["exit_code"]) for one in events] == [("store-failed", 8)]


def test_a_session_that_runs_here_is_supervised_whatever_its_lease_says(
    post: Post, events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may write it faster than it can be read."""
    me = ProcessIdentity.of(os.getpid())
    post.registry.put(
        SessionRecord("web", "cd" * 16, pid=me.pid, start_time=me.start_time, boot_id=boot_id())
    )

    def restless(*_args: object) -> None:
        raise Conflict("the lease of 'web' changes faster than it can be read")

    monkeypatch.setattr(fencing, "check", restless)
    assert Supervisor(post)._role(first=True) == "home"
    assert [one["event"] for one in events] == ["store-failed"]


def test_a_damaged_lease_is_no_damaged_checkpoint(
    post: Post, events: list[dict[str, Any]], lease: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every one was passed over for it, and the session given up."""
    summary = SimpleNamespace(id="ab" * 16, session_id="cd" * 16, number=1)
    here = SessionRecord("web", "cd" * 16)

    def mended(_seconds: float) -> None:
        monkeypatch.setattr(post, "lives", lambda: here)

    monkeypatch.setattr(recoverer, "candidates", lambda *_args: [summary])
    monkeypatch.setattr(
        recoverer, "restore", lambda *_args, **more: leases.read_head(more["repository"], "web")
    )
    monkeypatch.setattr(post, "sleep", mended)
    lease.chmod(0o600)
    lease.write_bytes(lease.read_bytes()[:-1])
    heart: Any = SimpleNamespace(start=lambda _session: None)
    one = Recoverer(post, heart)
    assert one.recover(Loss(None, 0.0), []) == "back"
    assert [one["event"] for one in events] == ["store-failed", "waiting"]
    assert one.guard.failures == 0


@pytest.mark.parametrize("what", ["role", "recover"])
def test_a_wrong_key_is_not_waited_for(
    tmp_path: Path, events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It does not become another one; what is damaged may be mended."""
    phrase = tmp_path / "phrase"
    phrase.write_text("not this one\n")
    phrase.chmod(0o600)
    config = Config(
        store=str(tmp_path / "store"),
        state_dir=str(tmp_path / "state"),
        key_dir=str(tmp_path / "keys"),
        passphrase_file=str(phrase),
    )
    Repository.init(
        open_store(config.store, config), encryption=True, passphrase=b"another one", config=config
    ).close()
    post = Post(config, "web", SupervisorSettings(), reporter=Reporter(), tell=events.append)
    monkeypatch.setattr(post, "sleep", lambda _seconds: pytest.fail("it is waited for"))
    heart: Any = SimpleNamespace(start=lambda _session: None)
    look = (
        Supervisor(post)._role_again
        if what == "role"
        else lambda: Recoverer(post, heart).recover(Loss(None, 0.0), [])
    )
    with pytest.raises(WrongKey):
        look()
    assert events == []
