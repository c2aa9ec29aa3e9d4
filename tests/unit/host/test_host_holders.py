"""A holder that was started for a restore which fails is gone when the restore has ended."""

from __future__ import annotations

import json
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support import checkpoints as kit

from criuctl.checkpoint.manifest import HolderRecord, Manifest, SessionRef
from criuctl.checkpoint.reader import CheckpointReader
from criuctl.config import Config
from criuctl.errors import SessionGone
from criuctl.host.holders import DumpedHolder, RestoredHolder
from criuctl.host.registry import SessionRecord
from criuctl.proc.tree import ProcessIdentity
from criuctl.report import Reporter
from criuctl.session import sessions
from criuctl.session.client.session import Output, Session


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


def test_a_scrollback_with_a_gap_begins_behind_it(tmp_path: Path) -> None:
    """A program that prints faster than it is dumped: what was read ahead and what is there at the
    freeze are not neighbours.
    """
    repository = kit.repository(tmp_path)
    answer = dict.fromkeys(("rows", "cols", "events", "audit"), 0) | {
        "offset": 900,
        "modes": {},
        "roles": [],
    }
    answer["input_offset"] = 893
    outputs = [Output(100, b"read ahead"), Output(890, b"at the end")]
    session = SimpleNamespace(
        read=lambda _start, _end: outputs.pop(0),
        request=lambda _op: answer,
        status=lambda: {"created": 1.0, "command": ["yes"], "labels": {}},
        kept_screen=lambda: {"offset": 895},
    )
    holder = DumpedHolder(
        Config(run_dir=str(tmp_path)), SessionRecord("s"), ProcessIdentity(1, 1), ExitStack()
    )
    holder._session, holder._base, holder._end = cast("Session", session), -1, -1
    with repository.writer(Reporter()) as writer:
        holder.read_ahead(writer)
        record = holder.begin(writer)
        assert record is not None and record.scrollback is not None
        # so the next byte is the 900th, as the status says
        assert (record.base, record.scrollback.size) == (890, 10)
        assert record.modes["screen"] == {"offset": 895}
        assert record.input_offset == 893


def test_a_holder_that_ends_meanwhile_fails_no_dump_that_goes_on_without_it(tmp_path: Path) -> None:
    def gone(_op: str, **_arguments: Any) -> dict[str, Any]:
        raise SessionGone("the holder closed the connection")

    holder = DumpedHolder(
        Config(run_dir=str(tmp_path)), SessionRecord("s"), ProcessIdentity(1, 1), ExitStack()
    )
    holder._session, holder._begun = cast("Session", SimpleNamespace(request=gone)), True
    holder.thawed()
    holder.done("c1", 1, ended=False)
    with pytest.raises(SessionGone):
        holder.commit("c1")  # the tree must not be ended then
