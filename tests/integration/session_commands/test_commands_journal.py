"""Services under systemd: what is printed after a restore is in the journal; a warning says that
systemd starts it again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.booted import Booted, available
from support.command import Home
from support.keeper import Keeper, wait_until
from support.operating import TIMEOUT, Operators

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not available(), reason="no systemd or no cgroup2 here"),
]

_SOCKET = """[Unit]
DefaultDependencies=no
[Socket]
ListenStream=/run/systemd/journal/stdout
ListenDatagram=/run/systemd/journal/socket
PassCredentials=yes
"""
_SERVICE = """[Unit]
DefaultDependencies=no
[Service]
Type=notify
ExecStart=/usr/lib/systemd/systemd-journald
Sockets=systemd-journald.socket
StandardOutput=null
"""
_PROGRAM = """
import itertools, sys, time
for number in itertools.count():
    print("out", number, flush=True)
    print("err", number, file=sys.stderr, flush=True)
    time.sleep(0.05)
"""


class Service:
    """A service that prints, under a systemd with a journal."""

    def __init__(self, booted: Booted, operators: Operators, restart: str) -> None:
        self.booted, self.operators = booted, operators
        units = operators.home.path / "units"
        (units / "systemd-journald.socket").write_text(_SOCKET)
        (units / "systemd-journald.service").write_text(_SERVICE)
        booted.run("systemctl", "daemon-reload")
        booted.run("systemctl", "start", "systemd-journald.socket", "systemd-journald.service")
        program = [sys.executable, "-c", _PROGRAM]
        booted.run(
            "systemd-run",
            "--quiet",
            "--unit=web",
            "--property=DefaultDependencies=no",
            f"--property=Restart={restart}",
            *program,
        )
        self.pid = int(booted.run("systemctl", "show", "--property=MainPID", "--value", "web"))

    def lines(self) -> list[dict[str, Any]]:
        """What the journal has of the unit."""
        output = self.booted.run(
            "journalctl", "--no-pager", "-o", "json", "-u", "web", "_TRANSPORT=stdout", check=False
        )
        return [json.loads(line) for line in output.splitlines() if line.startswith("{")]

    def group(self) -> bool:
        """Whether the service has a control group."""
        found = self.booted.run("find", "/sys/fs/cgroup/system.slice", "-name", "web.service")
        return bool(found.strip())

    def prints(self, pid: int) -> list[dict[str, Any]]:
        """The lines since now, when there are some of both streams."""
        before = len(self.lines())

        def some() -> list[dict[str, Any]]:
            new = [line for line in self.lines()[before:] if line["_PID"] == str(pid)]
            return new if {line["MESSAGE"][:3] for line in new} >= {"out", "err"} else []

        found: list[dict[str, Any]] = wait_until(some, TIMEOUT, "it is in the journal")
        return found


@pytest.fixture
def service(
    request: pytest.FixtureRequest, keeper: Keeper, home: Home, operators: Operators
) -> Iterator[Service]:
    booted = Booted(keeper, home)
    operators.prefix = booted.prefix
    yield Service(booted, operators, getattr(request, "param", "no"))
    booted.close()
    operators.prefix = []


def _numbers(lines: list[dict[str, Any]], stream: str) -> list[int]:
    return [int(line["MESSAGE"][4:]) for line in lines if line["MESSAGE"].startswith(stream)]


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("options", [[], ["--connections", "keep"]], ids=["plain", "keep"])
def test_it_goes_on_where_it_was(options: list[str], late: bool, service: Service) -> None:
    """Also once systemd has removed the group of the ended service, by which journald tells whose
    lines they are.
    """
    before = service.prints(service.pid)[0]
    report = service.operators("dump", str(service.pid), "--name", "web", *options)
    assert report["warnings"] == []
    if late:
        wait_until(lambda: not service.group(), TIMEOUT, "systemd has removed the service's group")
    restored = service.operators("restore", "web")
    (connection,) = [c for c in restored["connections"] if c["application"] == "journal"]
    assert (connection["policy"], connection["outcome"], connection["reason"]) == (
        "reconnect",
        "reconnected",
        "",
    ), connection
    after = service.prints(restored["pid"])[-1]
    for key in ("SYSLOG_IDENTIFIER", "PRIORITY", "SYSLOG_FACILITY", "_SYSTEMD_UNIT", "_COMM"):
        assert after.get(key) == before.get(key), (key, before, after)
    lines = service.lines()
    for stream in ("out", "err"):  # not a line is missing, none is there twice
        assert _numbers(lines, stream) == list(range(len(_numbers(lines, stream))))
    service.operators("kill", "web")


def test_hung_up_if_so_wished(service: Service) -> None:
    service.operators("dump", str(service.pid), "--name", "web", "--connections", "hangup")
    restored = service.operators("restore", "web")
    assert [c["outcome"] for c in restored["connections"]] == ["hangup"]


def test_where_there_is_no_journal(service: Service) -> None:
    """Found and reported before anything is started."""
    service.operators("dump", str(service.pid), "--name", "web")
    service.booted.run("systemctl", "stop", "systemd-journald.socket", "systemd-journald.service")
    restored = service.operators("restore", "web")
    assert [(c["outcome"], c["reason"]) for c in restored["connections"]] == [
        ("hangup", "there is no journal here")
    ]
    assert any("there is no journal here" in warning for warning in restored["warnings"])


@pytest.mark.parametrize("service", ["on-failure"], indirect=True)
def test_a_service_that_systemd_starts_again(service: Service) -> None:
    """Two of it would run after the restore; a snapshot ends nothing."""
    checked = service.operators("check", str(service.pid))
    (finding,) = [f for f in checked["findings"] if f["code"] == "started-again"]
    assert (
        finding["level"] == "warning" and "web.service has Restart=on-failure" in finding["text"]
    ), finding
    assert service.operators("dump", str(service.pid), "--leave-running")["warnings"] == []
    (warning,) = service.operators("dump", str(service.pid))["warnings"]
    assert "Restart=on-failure" in warning
