"""What a host knows of its sessions: found by name, by PID and by lock, among however many."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from criuctl.config import Config
from criuctl.errors import Conflict, PlatformError
from criuctl.host import stale_locks
from criuctl.host.registry import Registry, SessionRecord, boot_id, exclusive_session
from criuctl.host.stale_locks import forget_stale_locks
from criuctl.proc import netfilter
from criuctl.proc.tree import ProcessIdentity

ME = ProcessIdentity.of(os.getpid())
READ_ONLY = """
mount -t tmpfs criuctl-test /dev/shm && mount -t tmpfs criuctl-test /run && "$@" &&
    mount -o remount,ro /run || exit
exec "$PYTHON" -c '
import os, sys
from criuctl.config import Config
from criuctl.errors import Conflict
from criuctl.host.registry import exclusive_session
from criuctl.host import stale_locks
from criuctl.host.stale_locks import forget_stale_locks
config, results = Config(state_dir=sys.argv[1]), []
with exclusive_session(config, "web"):
    forget_stale_locks(config)
    try:
        exclusive_session(config, "web").__enter__()
    except Conflict:
        results.append("conflict")
    for folder in ("/dev/shm/criuctl", "/dev/shm/criuctl/locks"):
        results.append(f"{os.stat(folder).st_mode & 0o777:o}")
print(*results, os.listdir("/dev/shm/criuctl/locks"))
' "$STATE"
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(state_dir=str(tmp_path), run_dir=str(tmp_path / "run"))


def record(name: str, **known: object) -> SessionRecord:
    here: dict[str, object] = {"pid": ME.pid, "start_time": ME.start_time, "boot_id": boot_id()}
    return SessionRecord(name, **(here | known))  # type: ignore[arg-type]


def held(config: Config, name: str, pid: int | None) -> None:
    """As the holder of a session leaves it; this very process is the holder."""
    folder = Path(config.run_dir) / "holders" / name
    folder.mkdir(parents=True)
    state = {
        "session": name,
        "id": "1",
        "state": "running",
        "incarnation": 3,
        "boot_id": boot_id(),
        "pid": pid,
    }
    state |= {"start_time": ME.start_time, "holder": {"pid": ME.pid, "start_time": ME.start_time}}
    (folder / "state.json").write_text(json.dumps(state))


def test_a_tree_is_found_by_its_root(config: Config) -> None:
    registry = Registry(config)
    assert registry.all() == [] and registry.of_pid(ME.pid) == [] and registry.find(ME) is None
    mine = registry.put(record("mine"))
    earlier = registry.put(record("earlier", start_time=1))
    registry.put(record("other", pid=ME.pid * 10))  # begins with the same digits
    registry.put(record("boot", boot_id="another"))
    (registry.folder / "broken.json").write_text(f'{{"pid": {ME.pid}, ')
    (registry.folder / "no name.json").write_text("{}")
    assert [found.name for found in registry.all()] == ["boot", "earlier", "mine", "other"]
    assert [found.name for found in registry.of_pid(ME.pid)] == ["boot", "earlier", "mine"]
    assert registry.find(ME) == mine
    assert registry.find(ProcessIdentity(ME.pid, 1)) == earlier
    # its dump was killed before the tree was ended
    ended = registry.put(record("mine", state="checkpointed"))
    assert registry.find(ME) == replace(ended, state="running")
    registry.put(record("mine", state="lost"))
    assert registry.find(ME) is None


def test_a_holder_knows_its_session_better(config: Config) -> None:
    registry = Registry(config)
    registry.put(record("held", pid=1 << 22, incarnation=2))  # of an earlier life
    held(config, "held", ME.pid)
    held(config, "waiting", None)  # for its tree to come
    assert [(found.name, found.pid, found.incarnation) for found in registry.all()] == [
        ("held", ME.pid, 3)
    ]
    assert [found.name for found in registry.of_pid(ME.pid)] == ["held"] and registry.of_pid(
        1 << 22
    ) == []
    found = registry.find(ME)
    assert found is not None and found.incarnation == 3


def test_stale_firewall_tables_are_removed(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    table = netfilter.criu_table("1")
    gone: list[str] = []
    monkeypatch.setattr(netfilter, "delete_table", gone.append)
    registry = Registry(config)
    registry.put(record("killed", lock_table=table))
    registry.put(record("kept", lock_table=table, lock_kept=True))
    registry.put(record("boot", lock_table=table, boot_id="another"))
    registry.put(record("busy", lock_table=table))
    registry.put(record("free"))
    with exclusive_session(config, "busy"):
        forget_stale_locks(config)
    assert gone == [table]  # that of an earlier boot went with it
    assert {found.name for found in registry.locked()} == {"kept", "busy"}


def test_another_user_that_knows_a_name_cannot_block_it(config: Config) -> None:
    """A socket's abstract name anybody could take, root's locks only root."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as taken:
        taken.bind(f"\0criuctl/session/{config.state_dir}/web"[:107])
        with (
            exclusive_session(config, "web"),
            pytest.raises(Conflict, match="in use") as raised,
            exclusive_session(config, "web"),
        ):
            pass
    assert f"PID {os.getpid()}" in raised.value.hint
    assert stat.S_IMODE((Path(config.run_dir) / "locks").stat().st_mode) == 0o700


@pytest.mark.parametrize("run_dir", ["/proc/self", "/proc/self/comm", "/proc/version/x"])
def test_a_run_folder_that_cannot_hold_locks_is_reported(config: Config, run_dir: str) -> None:
    with (
        pytest.raises(PlatformError, match=run_dir) as raised,
        exclusive_session(replace(config, run_dir=run_dir), "web"),
    ):
        pass
    assert "run_dir" in raised.value.hint


@pytest.mark.parametrize("before", ["true", "mkdir /run/criuctl"])
def test_locks_where_run_cannot_be_written(tmp_path: Path, before: str) -> None:
    """In a container whose root is read-only, say; here in a mount namespace of its own."""
    given = os.environ | {"PYTHON": sys.executable, "STATE": str(tmp_path)}
    argv = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", *before.split()]
    done = subprocess.run(argv, env=given, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("conflict 755 700 []\n", "")


def test_what_killed_ones_have_left_of_their_locks_is_removed(config: Config) -> None:
    folder = Path(config.run_dir) / "locks"
    with exclusive_session(config, "busy"):
        busy = os.listdir(folder)
        (folder / "left").touch()
        forget_stale_locks(config)
        assert os.listdir(folder) == busy
    assert os.listdir(folder) == []


def test_the_record_is_read_again_under_the_lock(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dump that had it has ended meanwhile; what it has written down stays."""
    registry = Registry(config)
    registry.put(record("web", lock_table=netfilter.criu_table("1")))
    real = exclusive_session

    def ended_meanwhile(config: Config, name: str) -> object:
        registry.put(record("web", state="checkpointed", checkpoint="1", start_time=1))
        return real(config, name)

    monkeypatch.setattr(stale_locks, "exclusive_session", ended_meanwhile)
    forget_stale_locks(config)
    found = registry.get("web")
    assert found is not None and (found.state, found.checkpoint) == ("checkpointed", "1")


def test_a_checkpointed_tree_that_is_about_to_end_is_not_running(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(config)
    registry.put(record("web", state="checkpointed"))
    found = registry.get("web")
    # its dump was killed, and CRIU let it go on
    assert found is not None and found.state == "running"
    monkeypatch.setattr(ProcessIdentity, "doomed", lambda _identity: True)
    found = registry.get("web")
    assert found is not None and (found.state, found.alive()) == ("checkpointed", False)
