"""The line that lets a guest in, and what is no such line."""

from __future__ import annotations

import pytest

from criuctl.errors import UsageError
from criuctl.share.invitation import Invitation, decode, encode, private_key, public_key, raw_key

_KEYS = {"host_key": bytes(range(32)), "secret": bytes(range(32, 64))}


@pytest.mark.parametrize("host", ["relay.example.com", "10.0.0.1", "fe80::1", "h"])
def test_there_and_back(host: str) -> None:
    there = Invitation(host, 40127, "4f1c22ab", **_KEYS)
    assert Invitation.parse(f" {there.line()}\n") == there
    assert "'" not in there.line() and there.name == "share-4f1c22ab"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("share://", "ssh://"),
        (":40127", ""),
        (":40127", ":0"),
        (":40127", ":65536"),
        ("4f1c22ab", "../../ab"),
        ("#", "?"),
        ("relay", "-oProxyCommand=x"),
        ("relay", "a b"),
        ("AAECAw", "AAECA"),
        ("AAECAw", "AAECAwA"),
        ("AAECAw", "AAEC+w"),
    ],
)
def test_what_is_none_is_not_repeated(old: str, new: str) -> None:
    line = Invitation("relay", 40127, "4f1c22ab", **_KEYS).line()
    assert old in line
    with pytest.raises(UsageError) as refused:
        Invitation.parse(line.replace(old, new, 1))
    assert encode(_KEYS["secret"]) not in f"{refused.value} {refused.value.hint}"


def test_keys() -> None:
    key = private_key(_KEYS["secret"])
    assert raw_key(public_key(raw_key(key))) == raw_key(key) != _KEYS["secret"]
    assert decode(encode(raw_key(key))) == raw_key(key)
    for text in ("", "A" * 42, "A" * 44, "é" * 43, "+" * 43):
        with pytest.raises(ValueError):
            decode(text)
