"""The units that ship, under a real systemd: a session that is kept alive, and the page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.booted import Booted, available
from support.command import PROJECT, Home
from support.keeper import Keeper, wait_until
from support.operating import TIMEOUT, Operators

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not available(), reason="no systemd or no cgroup2 here"),
]


class Host(Operators):
    """criuctl on a host where systemd runs; units see its configuration, not its variables."""

    booted: Booted

    def unit(self, *words: str) -> Any:
        """Run `criuctl unit` with that configuration."""
        return self("--config", self.home.path / "config.yaml", "unit", *words)


@pytest.fixture
def host(keeper: Keeper, home: Home) -> Iterator[Host]:
    """A host that ends with the test."""
    host = Host(keeper, home)
    booted = host.booted = Booted(keeper, home)
    host.prefix = booted.prefix
    units = home.path / "units"
    booted.run(
        "sh",
        "-ec",
        f"mkdir -p /etc/systemd/system; mount --bind {units} /etc/systemd/system; "
        "ip link set lo up",
    )
    for target in ("network", "network-online", "remote-fs", "time-sync"):
        (units / f"{target}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    settings = [
        f"{key.removeprefix('CRIUCTL_').lower()}: {json.dumps(value)}\n"
        for key, value in host.environment().items()
        if key.startswith("CRIUCTL_") and key != "CRIUCTL_OPERATOR"
    ]
    (home.path / "config.yaml").write_text("".join(settings))
    yield host
    host.close()
    booted.close()
    host.prefix = []


def test_a_session_is_kept_alive(host: Host) -> None:
    host.shell("work")
    host.unit("install", "supervise@work", "--now")
    (row,) = [one for one in host.unit("list") if one["name"] == "supervise"]
    assert row["active"] == row["enabled"] == ["criuctl-supervise@work.service"]
    wait_until(
        lambda: "error" not in host("list", "work", check=False), TIMEOUT, "the first snapshot"
    )

    before = host("status", "work")
    # the PIDs are those of its own namespace
    host.booted.run("sh", "-c", f"kill -KILL {before['holder_pid']} {before['pid']}")

    def back() -> bool:
        status = host("status", "work")
        return bool(status["state"] == "running" and status["incarnation"] == 2)

    wait_until(back, TIMEOUT, "it was brought back")
    host.unit("remove", "supervise")
    assert host("status", "work")["state"] == "running", "the session outlives its supervisor"
    assert not [*(host.home.path / "units").rglob("criuctl-*")]


@pytest.mark.parametrize("name", ["ui", "ui-read-only"])
def test_the_page_is_served(host: Host, name: str) -> None:
    """The sandbox of the one to look at still lets it see sessions."""
    host.shell("work")
    host.unit("install", name, "--now")
    address = f"/run/criuctl-{name}/url"
    assert host.booted.run("stat", "--format=%a", str(Path(address).parent)) == "700"
    host.booted.run("sh", "-c", f"until grep -q . {address}; do sleep 0.05; done")
    url = host.booted.run("cat", address)
    program = (
        "import sys, urllib.request as r; url, token = sys.argv[1].split('/#token='); "
        "q = r.Request(url + '/api/sessions/work/tree'); "
        "q.add_header('Authorization', 'Bearer ' + token); "
        "print(r.urlopen(q, timeout=30).read().decode())"
    )
    tree = json.loads(host.booted.run(sys.executable, "-c", program, url))
    assert "bash" in json.dumps(tree)
    of_unit = ["systemctl", "show", "--property=MainPID", "--value", f"criuctl-{name}.service"]
    status = host.booted.run("cat", f"/proc/{host.booted.run(*of_unit)}/status")
    sandboxed = "NoNewPrivs:\t1" in status
    assert sandboxed == (name == "ui-read-only"), "what the other restores would live in it"
    host.unit("remove", name)
    assert host("status", "work")["state"] == "running"


def test_a_spot_machine_is_taken_away(host: Host, keeper: Keeper) -> None:
    """The watch is ready when it watches, and stores what runs when the cloud says so."""
    server = PROJECT / "tests" / "servers" / "metadata.py"
    service = keeper.spawn(
        [*host.prefix, sys.executable, str(server), "aws", "1338"],
        env={"CZOO_TOKEN": host.home.token},
    )
    try:
        host.shell("work")
        options = "--cloud aws --metadata http://127.0.0.1:1338"
        folder = host.home.path / "units" / "criuctl-spot.service.d"
        folder.mkdir()
        settings = f'Environment="SPOT_OPTIONS={options}" "PYTHONPATH={PROJECT}"'
        (folder / "options.conf").write_text(f"[Service]\n{settings}\n")
        host.unit("install", "spot", "--now")
        (row,) = [one for one in host.unit("list") if one["name"] == "spot"]
        assert row["active"] == row["enabled"] == ["criuctl-spot.service"]
        ask = "import socket; socket.create_connection(('127.0.0.1', 1338)).sendall(b'GET {}')"
        ask = ask.replace("{}", "/interrupt HTTP/1.0\\r\\n\\r\\n")
        wait_until(
            lambda: not host.booted.run(sys.executable, "-c", ask, check=False),
            TIMEOUT,
            "the service has taken it",
        )
        wait_until(
            lambda: host("status", "work")["state"] == "checkpointed", TIMEOUT, "it is stored"
        )
        host.unit("remove", "spot")
        assert host("maintenance", "status")["phase"] == "stored"
    finally:
        service.kill()
        service.wait(TIMEOUT)
    host("maintenance", "end", "--abandon")
