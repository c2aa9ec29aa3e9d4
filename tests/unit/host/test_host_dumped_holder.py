"""The holder of a session that is dumped."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support import checkpoints as kit

from criuctl.config import Config
from criuctl.errors import SessionGone
from criuctl.host.dumped_holder import DumpedHolder
from criuctl.host.registry import SessionRecord
from criuctl.proc.tree import ProcessIdentity
from criuctl.report import Reporter
from criuctl.session.client.session import Output, Session


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
