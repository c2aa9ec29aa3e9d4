"""To see what criuctl does on a host: its events and metrics over a session's life, and a page for
a bug report.
"""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.command import Home
from support.keeper import Keeper, wait_until
from support.operating import Operators

pytestmark = pytest.mark.integration

PATIENCE = 60.0


@pytest.fixture
def host(keeper: Keeper, home: Home) -> Iterator[Operators]:
    """criuctl with sessions, which are ended before the leak guard looks."""
    operators = Operators(keeper, home)
    yield operators
    for command in operators.running:
        command.kill(signal.SIGTERM)  # those that serve and follow
    operators.close()


def _lines(path: Path) -> list[Any]:
    """The values on the lines that are complete."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def test_a_session_s_life_in_events_and_metrics(host: Operators) -> None:
    follower = host.start("events", "--follow", "--since", 0)
    server = host.start("metrics", "--listen", "127.0.0.1:0", json_output=False)
    started = host("run", "-d", "--name", "web", "--", "sleep", "1000")
    first = host("dump", "web", "--leave-running")
    host("dump", "web")
    restored = host("restore", "web", "--detach")
    host("dump", "web", "--with-files", "/proc/nonexistent", check=False)
    host("pin", "web@1")
    host("rm", "web@1", "web@2", check=False)
    host("prune", "--keep-last", 1, "--newest-too")
    host("gc")
    # what changes nothing is no event
    for words in ("pause web", "pause web", "halt web", "resume web", "resume web"):
        host(*words.split())
    host("kill", "web", "--timeout", 0)
    found = host("events")
    # Who only looks, or only plans, writes nothing.
    for words in ("list", "metrics", "restore web --dry-run", "gc --dry-run"):
        host(*words.split())
    assert host("events") == found
    assert [event["seq"] for event in found] == list(range(1, len(found) + 1))
    assert [(e["operation"], e["exit_code"], e.get("error")) for e in found] == [
        ("run", 0, None),
        ("snapshot", 0, None),
        ("dump", 0, None),
        ("restore", 0, None),
        ("dump", 4, "preflight"),
        ("pin", 0, None),
        ("rm", 9, "conflict"),
        ("rm", 0, None),
        ("prune", 0, None),
        ("gc", 0, None),
        ("pause", 0, None),
        ("halt", 0, None),
        ("resume", 0, None),
        ("kill", 0, None),
    ]
    about = [e for e in found if e["operation"] not in ("prune", "gc")]
    assert {(e["session"], e["session_id"]) for e in about} == {("web", started["id"])}
    assert [e["incarnation"] for e in about] == [1, 1, 1, 2, 2, 1, 1, 1, 2, 2, 2, 2]
    assert (found[1]["checkpoint"], found[1]["bytes"], found[1]["frozen_ms"]) == (
        first["checkpoint"],
        first["bytes"],
        first["frozen_ms"],
    )
    assert found[3]["total_ms"] == restored["elapsed_ms"]
    assert host("events", "--since", 8, "--session", "web") == found[10:]
    table = host.text("events", "--session", "web").splitlines()
    assert len(table) == 1 + len(about) and "failed 4 (preflight)" in table[5]

    wait_until(
        lambda: len(_lines(follower.out)) >= len(found), PATIENCE, "who follows has seen all"
    )
    assert _lines(follower.out) == found
    wait_until(
        lambda: server.err.read_text().endswith("/metrics\n"), PATIENCE, "the address is printed"
    )
    url = re.findall(r"http://127\.0\.0\.1:\d+/metrics", server.err.read_text())
    with urllib.request.urlopen(url[0], timeout=PATIENCE) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    values = {
        (s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples
    }
    assert values["criuctl_store_up",] == 1 and values["criuctl_session_checkpoints", "web"] == 1
    assert (
        values["criuctl_operations_total", "0", "dump"],
        values["criuctl_operations_total", "4", "dump"],
    ) == (1, 1)
    assert values["criuctl_events_last_sequence",] == len(found)
    assert 0 < values["criuctl_session_last_frozen_seconds", "web"] < PATIENCE
    for looking in (follower, server):
        looking.process.kill(signal.SIGTERM)
        assert looking.process.wait(PATIENCE) == 128 + signal.SIGTERM


def test_a_page_for_a_bug_report_has_no_secret(host: Operators) -> None:
    folder = host.home.path
    word = "canary-{}-4711".format
    (folder / "config.yaml").write_text(
        json.dumps(
            {
                "passphrase_command": f"echo {word('command')}",
                "ssh_command": f"ssh -o ProxyCommand={word('proxy')}",
                "hosts": {
                    "gamma": {
                        "url": "ssh://root@gamma",
                        "command": f"env TOKEN={word('host')} criuctl",
                    }
                },
                "connection_rules": [
                    {
                        "match": {"port": 1},
                        "policy": "reconnect",
                        "application": "tcp",
                        "options": {"preamble": word("preamble")},
                    }
                ],
                "criu_timeout": 31,
            }
        )
    )
    (folder / "passphrase").write_text(word("file"))
    (folder / "passphrase").chmod(0o600)
    host.extra |= {
        "CRIUCTL_PASSPHRASE": word("passphrase"),
        "CRIUCTL_S3_ENDPOINT": f"http://user:{word('login')}@127.0.0.1:9/{word('path')}",
        "AWS_SECRET_ACCESS_KEY": word("aws"),
        "API_TOKEN": word("token"),
        "SOMETHING": word("else"),
    }
    host("store", "init", "--passphrase")
    host.extra["CRIUCTL_PASSPHRASE_FILE"] = str(folder / "passphrase")
    argv = ("sh", "-c", "sleep 1000", word("argv"))
    host("run", "-d", "--name", "web", "--label", f"note={word('label')}", "--", *argv)
    host("dump", word("name") + "/x", check=False)
    host("dump", "web", "--config", folder / "config.yaml", check=False)
    logs = folder / "state" / "logs"
    logs.mkdir(mode=0o700, exist_ok=True)
    (logs / "20260101T000000Z-dump.log").write_text(
        f"(0.1)  7: Error (criu/files.c:1): Can't open {word('token')}/x: No such file\n"
    )

    config = ("--config", folder / "config.yaml")
    page = folder / "page.md"
    body = host("doctor", "--report", page, *config)
    text = page.read_text()
    assert page.stat().st_mode & 0o777 == 0o600
    everything = (
        text
        + json.dumps(body)
        + (folder / "state" / "events.jsonl").read_text()
        + host.text("metrics")
    )
    assert re.findall(r"canary-\w+-4711", everything) == []
    # What help needs is there.
    assert (
        body["versions"]["criuctl"]
        and body["kernel"]["namespaces"]
        and body["host"]["memory"]["MemTotal"] > 0
    )
    assert body["configuration"]["set"]["criu_timeout"] == 31 and body["configuration"]["set"][
        "hosts"
    ].startswith("1 set")
    assert body["configuration"]["set"]["s3_endpoint"] == "127.0.0.1"
    assert [log["error"] for log in body["criu_logs"]] == ["Can't open [not shown]/x: No such file"]
    assert body["sessions"]["states"] == {"running": 1}
    assert [e["operation"] for e in body["events"]] == ["store-init", "run", "dump", "dump"]
    assert all(
        f"## {title}" in text
        for title in ("Versions", "Findings", "Store", "Sessions", "Newest events")
    )
    assert host("doctor", "--report", page, check=False)["exit_code"] == 9, "nothing is overwritten"
