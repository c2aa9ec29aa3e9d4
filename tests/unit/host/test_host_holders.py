"""A holder that was started for a restore which fails is gone when the restore has ended."""

from __future__ import annotations

import json
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from criuctl.checkpoint.manifest import Manifest, PredicateRecord, SessionRef
from criuctl.checkpoint.reader import CheckpointReader
from criuctl.checkpoint.terminal_records import HolderRecord
from criuctl.config import Config
from criuctl.host import key
from criuctl.host.holders import RestoredHolder
from criuctl.host.registry import SessionRecord
from criuctl.proc.tree import ProcessIdentity
from criuctl.session import sessions


class SlowHolder:
    """Stands in for a holder: it answers at once when it is asked to end, and ends a while
    later.
    """

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(["sleep", "600"])
        self.identity = ProcessIdentity.of(self.process.pid)
        self.asked: list[str] = []
        self.hello: dict[str, Any] = {"features": ()}
        self._later = threading.Timer(0.3, self.process.kill)
        folder.mkdir(parents=True)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        holder = {"pid": self.identity.pid, "start_time": self.identity.start_time}
        (folder / "state.json").write_text(
            json.dumps({"state": "starting", "boot_id": boot, "holder": holder})
        )

    def request(self, verb: str, **_: Any) -> dict[str, Any]:
        self.asked.append(verb)
        self._later.start()
        return {}

    def leave(self) -> None:
        self.asked.append("leave")

    def end(self) -> None:
        self._later.cancel()
        self.process.kill()
        self.process.wait()


def test_it_is_gone_when_the_restore_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(run_dir=str(tmp_path))
    manifest = Manifest(id="0" * 32, session=SessionRef("s", "1" * 32), holder=HolderRecord())
    holder = SlowHolder(tmp_path / "started")
    monkeypatch.setattr(
        RestoredHolder,
        "_start",
        lambda *_: (tmp_path / "started").rename(tmp_path / "holders" / "s"),
    )
    monkeypatch.setattr(RestoredHolder, "_connect", lambda *_: holder)
    (tmp_path / "holders").mkdir()
    try:
        with ExitStack() as stack:
            restored = RestoredHolder(config, manifest, SessionRecord("s"))
            restored.prepare(cast("CheckpointReader", None), stack, private=False)
            state = sessions.state_of(config, "s")
            assert state is not None and state["holder_alive"]
        assert holder.asked == ["shutdown", "leave"]
        assert not holder.identity.alive()
    finally:
        holder.end()


def test_a_command_of_another_host_s_checkpoint_is_foreign(tmp_path: Path) -> None:
    here = Config(state_dir=str(tmp_path / "here"))
    conditions = [
        {"kind": "output", "argument": "true", "foreign": False},
        {"kind": "age", "argument": "7d"},
        "nonsense",
    ]
    mac = key.seal(here, "output:true")
    manifest = Manifest(
        id="ab" * 16,
        session=SessionRef("web", "cd" * 16),
        holder=HolderRecord(inside={"conditions": conditions, "checkpoints": ["t"]}),
        predicates=(PredicateRecord("output", "true", mac=mac),),
    )
    record = SessionRecord(name="web")

    def foreign(config: Config) -> list[bool]:
        asked = RestoredHolder(config, manifest, record, copy=True)._asked_inside()
        assert (asked["fork"], asked["checkpoint"], asked["checkpoints"]) == (
            True,
            manifest.id,
            ["t"],
        )
        return [one["foreign"] for one in asked["conditions"]]

    assert foreign(here) == [False, True]
    for forged in (
        {"conditions": 7},
        {"conditions": [[], {"kind": []}]},
    ):  # of a hostile checkpoint
        held = HolderRecord(inside=forged)
        asked = RestoredHolder(here, manifest.with_use(holder=held), record)._asked_inside()
        assert asked["conditions"] in ([], [{"kind": [], "foreign": True}])
    assert foreign(Config(state_dir=str(tmp_path / "there"))) == [True, True]
