"""What a holder hands over to the next program: nothing is lost, and what an older version writes
is read.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from criuctl.proc.tree import ProcessIdentity
from criuctl.session.holder import cgroup
from criuctl.session.holder.audit_log import AuditLog
from criuctl.session.holder.base64_text import decoded
from criuctl.session.holder.holder import Holder
from criuctl.session.holder.kept_screen import Kept
from criuctl.session.holder.master import Chunk
from criuctl.session.holder.output_log import OutputLog
from criuctl.session.holder.session_files import SessionFiles
from criuctl.session.holder.session_state import Identity
from criuctl.session.holder.waits import Wait
from criuctl.session.screen.modes import Modes

# Format 1.  A holder of an older version writes these keys, and a newer program must read them.
KEYS = {
    "identity", "folders", "state", "collected", "paused_by", "halted", "input_offset", "until",
    "checkpoint", "linger", "sequence", "audit", "events", "log", "modes", "root", "stopped",
    "frozen", "moved", "expecting", "asleep", "helpers", "master", "size", "held", "queue",
    "operators", "ceilings", "lease", "soft", "lease_held", "echoes", "listener",
    "connections", "waits", "shell", "reserved", "new_commands", "inside", "screen",
    "environment",
}  # fmt: skip
# keys that the first holders did not write
LATER = {
    "input_offset",
    "lease_held",
    "echoes",
    "until",
    "moved",
    "expecting",
    "asleep",
    "soft",
    "shell",
    "reserved",
    "new_commands",
    "inside",
    "screen",
    "environment",
}


class Restored(Holder):
    """A holder that takes over without the signals of a process of its own."""

    def prepare(self) -> None: ...


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Holder]:
    """A holder with something in every part."""
    monkeypatch.setattr(cgroup, "create", lambda _name: None)
    log = OutputLog(tmp_path / "output", base=100)
    log.append(b"some output")
    identity = Identity(
        "s", "0" * 32, 3, ["sh", "-c", "x"], 12.5, {"a": "b"}, {"host": "h"}, {"init": 0}
    )
    files = SessionFiles(tmp_path, tmp_path, log, AuditLog(tmp_path / "audit.jsonl"), identity.id)
    made = Holder(identity, files, Modes(title="t", alternate_since=100, carry=b"\x1b["))
    session, tree, authority = made.session, made.tree, made.leasing.authority
    session.paused_by, session.halted, session.input_offset, session.checkpoint_id = (
        {"name": "x"},
        True,
        105,
        "c" * 32,
    )
    session.moved = {"to": "ssh://b/s", "host": "b", "incarnation": 4}
    tree.stopped, tree.asleep = [ProcessIdentity(7, 8)], frozenset({ProcessIdentity(9, 10)})
    tree.root, tree.frozen = ProcessIdentity(5, 6), "SIGSTOP"
    made.clients.listen(files.socket)
    ours, theirs = socket.socketpair()
    client = made.clients.add(ours, 42)
    client.operator = authority.join("human", "me", "admin", 42, 1.0)
    client.position, client.subscribed = 103, True
    authority.request(client.operator, 600.0, 0.0, soft=True)
    authority.ceilings["agent", "ci"] = "observe"
    made.waits.add(Wait(client, 17, "state", states=["exited"]))
    made.master.hold(True)
    made.master.put(Chunk(b"typed\xff", client.operator.who(), "human", ours.fileno(), 18))
    made.master.resize(31, 99, 5, 6)
    made.kept_screen.restore({"offset": 105, "since": 100, "base64": "eA=="})
    made.environment.restore({"environment": [["DISPLAY"], {"DISPLAY": None}, 3]})
    made.lifetime.linger, made.lifetime.collected = 77.0, True
    made.events.emit("paused", by=None)
    log.flush()
    yield made
    made.clients.close("the test ends")
    assert made.clients.listener is not None
    made.clients.listener.close()
    theirs.close()
    made.loop.close()
    log.close()
    files.audit.close()


@contextmanager
def handed_over(state: dict[str, Any]) -> Iterator[Holder]:
    """The holder that the next program makes of `state`; the descriptors in it stay those of the
    one before.
    """
    state = json.loads(json.dumps(state))
    identity, modes = Identity(**state["identity"]), Modes.from_dict(state["modes"][0])
    modes.carry = decoded(state["modes"][1])
    made = Restored(identity, SessionFiles.reopen(state, identity.id), modes)
    try:
        made.restore(state)
        yield made
    finally:
        for connection in made.clients.all():
            connection.sock.detach()
        if made.clients.listener is not None:
            made.clients.listener.detach()
        made.loop.close()
        made.log.close()
        made.files.audit.close()


def test_all_of_it_is_in_the_state_of_the_next_program(before: Holder) -> None:
    state = json.loads(json.dumps(before.to_state()))
    assert set(state) == KEYS
    with handed_over(state) as after:
        assert json.loads(json.dumps(after.to_state())) == state
        assert after.kept_screen.current() == Kept(105, 100, b"x")
        assert after.report.status()["operators"] == before.report.status()["operators"]


def test_a_holder_of_an_older_version_is_understood(before: Holder) -> None:
    """It knew fewer things: what it did not write is as it was for it."""
    state = {key: value for key, value in before.to_state().items() if key not in LATER}
    with handed_over(state) as after:
        session, tree = after.session, after.tree
        assert (session.input_offset, session.moved, tree.asleep) == (before.log.end, None, None)
        assert (after.self_fence.until, after.lifetime.expecting, after.leasing.authority.soft) == (
            None,
            False,
            False,
        )
        assert session.identity == before.session.identity
