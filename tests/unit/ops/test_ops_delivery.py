"""The word to let a session run on another host: whatever fails once it is gone here, it is never
taken back.
"""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from criuctl.checkpoint.manifest import Manifest
from criuctl.config import Config
from criuctl.errors import InDoubt, LinkLost, NotFound
from criuctl.host.moves import Moves, Outgoing, new_id
from criuctl.ops import migrate_resolve
from criuctl.ops.moving.delivery import HostDelivery, MoveOptions
from criuctl.proc import addresses
from criuctl.report import Reporter
from criuctl.transport import ssh


@pytest.mark.parametrize(
    "here", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("can't start new thread")]
)
@pytest.mark.parametrize("at", ["go", "again"])
def test_a_failure_of_our_own_leaves_the_word_to_be_said_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Exception, at: str
) -> None:
    asked: list[str] = []

    def ask(verb: str, *_args: Any, **_wishes: Any) -> Any:
        asked.append(verb)
        raise here if at == "go" and verb == "go" else LinkLost("cut")

    def reach(*_args: Any) -> Any:
        raise here

    moves = Moves(Config(state_dir=str(tmp_path)), Outgoing)
    there = cast("ssh.Connection", SimpleNamespace(link=SimpleNamespace(ask=ask)))
    delivery = HostDelivery(
        Config(), "gamma", there, moves, MoveOptions(), Reporter(), host_name="gamma"
    )
    delivery.move = moves.put(Outgoing(new_id(), "web", new_id(), to="gamma", state="handed-over"))
    monkeypatch.setattr("criuctl.ops.moving.delivery.reach", reach)
    delivery.ended(())
    assert delivery.settled() and asked == ["go"]
    with pytest.raises(InDoubt, match="web"):
        delivery.outcome()
    assert [move.state for move in moves.all()] == ["ended"]


def test_a_session_that_is_known_to_be_gone_here_does_not_stay(tmp_path: Path) -> None:
    moves = Moves(Config(state_dir=str(tmp_path)), Outgoing)
    answer = {"result": {"pid": 4711}, "ran_for": 0.5}
    link = SimpleNamespace(
        ask=lambda verb, **_wishes: SimpleNamespace(arguments=answer if verb == "go" else {})
    )
    there = cast("ssh.Connection", SimpleNamespace(link=link))
    delivery = HostDelivery(
        Config(), "gamma", there, moves, MoveOptions(), Reporter(), host_name="gamma"
    )
    delivery.move = moves.put(Outgoing(new_id(), "web", new_id(), to="gamma", state="ended"))
    assert delivery.settled() and delivery.outcome()["pid"] == 4711


def test_an_address_that_is_named_twice_is_taken_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    def take(ip: str, _namespace: None, noted: Any) -> Any:
        taken.append(ip)
        held = SimpleNamespace(to_dict=lambda: {"ip": ip}, notes=[])
        noted(held)
        return held

    monkeypatch.setattr(addresses, "take", take)
    moves = Moves(Config(state_dir=str(tmp_path)), Outgoing)
    asked: list[dict[str, Any]] = []
    link = SimpleNamespace(ask=lambda _verb, arguments, **_wishes: asked.append(arguments))
    there = cast("ssh.Connection", SimpleNamespace(link=link))
    options = MoveOptions(
        keep_addresses=("192.0.2.1", "2001:DB8::1", "192.0.2.1@eth1", "2001:db8:0::1")
    )
    delivery = HostDelivery(Config(), "gamma", there, moves, options, Reporter(), host_name="gamma")
    delivery.move = moves.put(Outgoing(new_id(), "web", new_id(), to="gamma"))
    delivery.hand_over(cast("Manifest", SimpleNamespace(id=new_id())), [])
    assert taken == ["192.0.2.1", "2001:db8::1"]
    asked_for = [(one["ip"], one["wanted_device"]) for one in asked[0]["addresses"]]
    assert asked_for == [("192.0.2.1", "eth1"), ("2001:db8::1", None)]


def test_an_address_comes_back_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other host could not be reached; when it is, the address may belong to another host since
    long ago.
    """
    came_back: list[str] = []

    class Held:
        """An address; one has no device any more."""

        def __init__(self, described: dict[str, Any]) -> None:
            self.ip = described["ip"]

        @classmethod
        def from_dict(cls, described: dict[str, Any]) -> Held:
            return cls(described)

        def put_back(self) -> None:
            came_back.append(self.ip)
            if self.ip == "192.0.2.2":
                raise NotFound("the network device eth1 is gone")

    def ask(*_args: Any, **_wishes: Any) -> Any:
        raise LinkLost("cut")

    def reach(*_args: Any) -> Any:
        raise LinkLost("cut")

    monkeypatch.setattr(addresses, "HeldAddress", Held)
    monkeypatch.setattr(migrate_resolve, "reach", reach)
    config = Config(state_dir=str(tmp_path))
    moves = Moves(config, Outgoing)
    there = cast("ssh.Connection", SimpleNamespace(link=SimpleNamespace(ask=ask)))
    delivery = HostDelivery(
        config, "gamma", there, moves, MoveOptions(), Reporter(), host_name="gamma"
    )
    taken = ({"ip": "192.0.2.1"}, {"ip": "192.0.2.2"})
    delivery.move = moves.put(Outgoing(new_id(), "web", new_id(), to="gamma", addresses=taken))
    delivery.stays()
    (answer,) = migrate_resolve.resolve(config, "web", reporter=Reporter())
    assert (answer["outcome"], answer["error"]) == ("stays", "cut")
    assert came_back == ["192.0.2.1", "192.0.2.2", "192.0.2.2"]
    assert [move.addresses for move in moves.all()] == [({"ip": "192.0.2.2"},)]
