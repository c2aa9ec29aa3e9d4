"""What is taken from other hosts' answers, and what is not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from criuctl.config import Config
from criuctl.errors import DataError, UsageError
from criuctl.web.hosts import careful, parse_hosts, parse_list, plain
from criuctl.web.remote_terminal import check_message

_ONE = {"session": "work", "state": "running", "unknown": {"x": [1]}}


def _parsed(*found: Any) -> list[dict[str, Any]]:
    return parse_list(json.dumps(found).encode())


def test_a_list() -> None:
    (one,) = _parsed(_ONE | {"labels": {"team": "core"}, "exit_code": None, "holder": True})
    assert (one["session"], one["labels"], one["holder"]) == ("work", {"team": "core"}, True)
    assert "unknown" not in one
    assert _parsed() == []
    assert len(_parsed(_ONE, _ONE)) == 1
    assert _parsed(_ONE | {"session": "../x"}) == []


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"{}",
        b"[1]",
        b"[" * 100_000,
        b'[{"session": "x"}]',
        b'[{"session": "x", "state": "odd"}]',
        b'[{"session": "x", "state": "running", "exit_code": 1e999}]',
        b'[{"session": "x", "state": "running", "command": "sh"}]',
        b'[{"session": "\xff", "state": "running"}]',
    ],
)
def test_what_is_no_list(answer: bytes) -> None:
    with pytest.raises(DataError):
        parse_list(answer)


def test_texts_are_short_and_plain() -> None:
    assert plain("a\x1b[2J\u202eb") == "a\ufffd[2J\ufffdb"
    assert len(plain("x" * 10_000)) == 200


def test_messages_of_a_terminal() -> None:
    check_message({"status": {"rows": 24, "cols": 80, "offset": 1 << 40}, "lease": None})
    check_message({"from": 1, "to": 2})
    check_message({"status": {"labels": {"rows": "x"}}, "progress": {"state": [{"to": "a b"}]}})
    check_message({"event": "moved", "to": "ssh://root@gamma:22/work"})
    lease = {"operator": "o1", "name": "ann", "kind": "human"}
    check_message({"event": "lease", "lease": lease, "to": lease})
    wrongs: list[dict[str, Any]] = [
        {"rows": True},
        {"status": {"cols": 10**6}},
        {"status": {"modes": {"cleared_at": "x"}}},
        {"offset": -1},
        {"lease": lease | {"name": 1}},
        {"to": "x; y"},
        {"modes": []},
    ]
    for wrong in wrongs:
        with pytest.raises(DataError):
            check_message(wrong)
    deep: Any = 1
    for _ in range(20):
        deep = [deep]
    with pytest.raises(DataError, match="too deep"):
        check_message({"x": deep})


def test_hosts_by_address_and_by_name() -> None:
    config = Config(hosts={"web2": {"url": "ssh://root@web2", "options": ["ProxyJump=bastion"]}})
    found = parse_hosts(["ssh://root@gamma:2222", "web2", "ssh://root@gamma:2222"], config)
    assert [host.name for host in found] == ["root@gamma:2222", "web2"]
    for host in found:
        assert host.options[0] == "BatchMode=yes" and "ForwardAgent=no" in host.options
    assert "ProxyJump=bastion" in found[1].options
    for text in ("gamma", "ssh://-oProxyCommand=x", "ssh://gamma/work"):
        with pytest.raises(UsageError):
            parse_hosts([text], config)
    with pytest.raises(UsageError, match="two hosts"):
        parse_hosts(["ssh://web2", "web2"], config)
    assert careful(config).ssh_command.startswith("prlimit --fsize=")
