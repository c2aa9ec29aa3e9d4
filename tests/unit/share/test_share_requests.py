"""What of a guest's requests reaches the holder, and as what."""

from __future__ import annotations

import json
from typing import Any

import pytest

from criuctl.session import protocol
from criuctl.share.requests import Filter, Refusal


def _passed(rules: Filter, message: Any, known: tuple[str, str] | None = None) -> dict[str, Any]:
    frame = rules.frame(protocol.JSON, json.dumps(message).encode(), known)
    found: dict[str, Any] = json.loads(frame[5:])
    return found


@pytest.mark.parametrize(("asked", "role"), [("admin", "write"), ("observe", "observe")])
def test_the_greeting_is_the_share_s(asked: str, role: str) -> None:
    hello = {"id": 1, "op": "hello", "kind": "service", "name": "criuctl-x", "role": asked}
    stolen = hello | {"operator": "op-1", "token": "t"}
    own = {"id": 1, "op": "hello", "kind": "human", "name": "share-1", "role": role}
    assert _passed(Filter("share-1", "write"), stolen, None) == own
    assert _passed(Filter("share-1", "write"), stolen, ("op-1", "other")) == own
    resumed = own | {"operator": "op-1", "token": "t"}
    rules = Filter("share-1", "write")
    assert _passed(rules, stolen, ("op-1", "t")) == resumed
    with pytest.raises(Refusal):
        _passed(rules, hello)
    assert _passed(Filter("share-1", "observe"), hello)["role"] == "observe"


def test_unknown_keys_do_not_pass() -> None:
    attach = {"id": 2, "op": "attach", "from": 0, "write": True, "size": {}, "within": "x", "y": 1}
    assert set(_passed(Filter("s", "write"), attach)) == {"id", "op", "from", "write", "size"}
    assert set(_passed(Filter("s", "observe"), attach)) == {"id", "op", "from"}


@pytest.mark.parametrize("message", [[], 1, "x", {}, {"op": "status"}, {"id": True, "op": "bye"}])
def test_what_is_no_request(message: Any) -> None:
    with pytest.raises(protocol.ProtocolError):
        _passed(Filter("s", "write"), message)


def test_input_needs_the_role() -> None:
    frame = protocol.input_frame(7, b"x")
    assert Filter("s", "write").frame(protocol.INPUT, frame[5:], None) == frame
    with pytest.raises(Refusal) as refused:
        Filter("s", "observe").frame(protocol.INPUT, frame[5:], None)
    assert refused.value.answer["id"] == 7
    for kind in (protocol.OUTPUT, protocol.DATA, 0):
        with pytest.raises(protocol.ProtocolError):
            Filter("s", "write").frame(kind, b"x" * 20, None)
