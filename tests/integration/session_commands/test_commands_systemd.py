"""Sessions where systemd runs: each in a scope of its own, which outlives the service or the login
that started it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

import pytest
from support.booted import Booted, available
from support.command import Home
from support.keeper import Keeper, wait_until
from support.operating import TIMEOUT, Operators

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not available(), reason="no systemd or no cgroup2 here"),
]


@pytest.fixture
def booted(keeper: Keeper, home: Home, operators: Operators) -> Iterator[Booted]:
    """A systemd that ends with the test, and every command under it."""
    booted = Booted(keeper, home)
    operators.prefix = booted.prefix
    yield booted
    booted.close()
    operators.prefix = []


def _scopes(booted: Booted) -> list[str]:
    return re.findall(
        r"^criuctl-work-\S+\.scope",
        booted.run("systemctl", "list-units", "--type=scope", "--plain"),
        re.MULTILINE,
    )


def _members(booted: Booted, scope: str) -> str:
    group = booted.run("systemctl", "show", "--property=ControlGroup", "--value", scope)
    return booted.run("sh", "-c", f"cat $(find /sys/fs/cgroup{group} -name cgroup.procs)")


def test_what_started_a_session_ends_without_it(booted: Booted, operators: Operators) -> None:
    criuctl = [sys.executable, "-m", "criuctl", "run", "-d", "--name", "work", "--"]
    command = [
        *criuctl,
        "sh",
        "-c",
        "i=0; while :; do i=$$((i+1)); echo tick $$i; sleep 0.05; done",
    ]
    variables = [
        f"--setenv={k}={v}"
        for k, v in operators.environment().items()
        if k.startswith(("CRIUCTL_", "PYTHON", "CZOO"))
    ]
    oneshot = [
        "--property=Type=oneshot",
        "--property=RemainAfterExit=yes",
        "--property=DefaultDependencies=no",
    ]
    booted.run("systemd-run", "--quiet", "--unit=starter", *oneshot, *variables, *command)
    (scope,) = _scopes(booted)
    assert booted.run("systemctl", "is-active", "starter.service") == "active"
    booted.run("systemctl", "stop", "starter.service")
    operators("wait", "work", "--match", "tick 5", "--timeout", TIMEOUT)
    status = operators("status", "work")
    assert status["state"] == "running"
    assert {str(status["pid"]), str(status["holder_pid"])} <= set(_members(booted, scope).split())
    operators("dump", "work")
    restored = operators("restore", "work")
    assert str(restored["pid"]) in _members(booted, scope).split()
    operators("kill", "work")
    wait_until(lambda: not _scopes(booted), TIMEOUT, "the scope is gone")


def test_a_schedule_is_a_timer_and_its_service(booted: Booted, operators: Operators) -> None:
    folder = operators.home.path
    booted.run(
        "sh",
        "-c",
        f"mkdir -p /etc/systemd/system && mount --bind {folder}/units /etc/systemd/system",
    )
    (folder / "units" / "timers.target").write_text("[Unit]\nDefaultDependencies=no\n")
    variables = {
        k: v
        for k, v in operators.environment().items()
        if k.startswith("CRIUCTL_") and k != "CRIUCTL_OPERATOR"
    }
    settings = [
        f"{key.removeprefix('CRIUCTL_').lower()}: {json.dumps(value)}\n"
        for key, value in variables.items()
    ]
    (folder / "config.yaml").write_text("".join(settings))
    operators.shell("work")
    when = ["--at", "daily", "--deadline", "2m", "--keep-last", "1"]
    operators("schedule", "add", "nightly", "work", *when, "--config", folder / "config.yaml")
    assert booted.run("systemctl", "is-active", "criuctl-schedule-nightly.timer") == "active"
    # what the timer does; it returns at the end of the run
    booted.run("systemctl", "start", "criuctl-schedule-nightly.service")
    (row,) = operators("schedule", "list")
    assert (row["last"]["result"], row["last"]["stored"], row["missing"]) == ("ok", 1, []), row
    assert row["next"] is not None
    operators("schedule", "remove", "nightly")
    assert not list((folder / "units").rglob("criuctl-schedule-*"))
    operators("kill", "work")
