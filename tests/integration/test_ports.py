"""Ports that are free for a tree's listeners again, and what others have on the same ports."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.keeper import wait_until
from support.trip import Runs, Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration


def _waits(port: int) -> list[str]:
    """The states of the connections of that port over IPv4 that their server has closed, as the
    kernel numbers them.
    """
    words = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [w[3] for w in words if w[1].endswith(f":{port:04X}") and w[3] in ("05", "06")]


def test_what_a_stranger_has_of_the_same_port_over_ipv4_stays(zoo: Zoo, trip: Trip) -> None:
    """His listener, and a connection that he has closed and his client has not."""
    animal = zoo.launch("six.py")
    port = animal.ask()["port"]
    with socket.socket() as stranger, socket.socket() as client:
        stranger.bind(("0.0.0.0", port))
        stranger.listen()
        client.connect(("127.0.0.1", port))
        stranger.accept()[0].close()
        wait_until(lambda: _waits(port) == ["05"], 60, "his client has heard")
        restored = trip.restore(trip.dump(animal), animal)
        assert _waits(port) == ["05"]
        restored.ask()
        with socket.create_connection(("127.0.0.1", port)):
            stranger.accept()[0].close()


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ("127.0.0.1", "0.0.0.0"),
        ("127.0.0.1", "::"),
        ("0.0.0.0", "127.0.0.1"),
        ("0.0.0.0", "::"),
        ("::", "::1"),
    ],
)
def test_a_port_taken_at_more_or_fewer_addresses_is_reported_before(
    own: str, other: str, zoo: Zoo, trip: Trip, criuctl: Runs
) -> None:
    animal = zoo.launch("port.py", own)
    port = animal.ask()["port"]
    dumped = trip.dump(animal)
    with socket.socket(socket.AF_INET6 if ":" in other else socket.AF_INET) as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind((other, port))
        stranger.listen()
        refused = criuctl("restore", dumped["checkpoint"], check=False)
        assert (refused["exit_code"], refused["error"]["code"]) == (4, "preflight")
        assert f"{port} is taken" in refused["error"]["message"]
    trip.restore(dumped, animal).ask()


@pytest.fixture(params=["203.0.113.77", "2001:db8::77"])
def own_address(request: pytest.FixtureRequest) -> Iterator[str]:
    """An address of this host that no other one and no new network has."""
    address = [f"{request.param}/{128 if ':' in request.param else 32}", "dev", "lo"]
    subprocess.run(["ip", "address", "replace", *address], check=True)
    yield request.param
    subprocess.run(["ip", "address", "del", *address], check=True)


def test_a_copy_in_a_network_of_its_own_has_the_addresses_that_it_listens_at(
    own_address: str, zoo: Zoo, trip: Trip, criuctl: Runs
) -> None:
    animal = zoo.launch("port.py", own_address)
    port = animal.ask()["port"]
    report = trip.snapshot(animal)
    copy = trip.restore(report, animal, "--as", "copy", equal=False)
    assert any("network of its own" in text for text in copy.answer["warnings"])
    copy.ask()
    listed = ["nsenter", "-t", str(copy.pid), "-n", "ss", "-Hltn", f"src [{own_address}]"]
    assert str(port) in subprocess.run(listed, check=True, capture_output=True, text=True).stdout
    assert criuctl("verify", report["checkpoint"], "--restore")["restored"]


def test_a_port_that_a_stranger_has_in_the_net_namespace_of_the_tree(
    zoo: Zoo, trip: Trip, criuctl: Runs
) -> None:
    held = zoo.launch(
        ["sleep", "600"],
        prefix=["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"],
        name="held",
    )
    wait_until(
        lambda: Path(f"/proc/{held.pid}/comm").read_text() == "sleep\n", 60, "its network is there"
    )
    inside = ["nsenter", f"--net=/proc/{held.pid}/ns/net", "--"]
    animal = zoo.launch("port.py", "127.0.0.1", prefix=inside)
    port = animal.ask()["port"]
    dumped = trip.dump(animal)
    serve = (
        f"import socket, time; s = socket.socket(); s.bind(('0.0.0.0', {port})); s.listen(); "
        "open('up', 'w'); time.sleep(600)"
    )
    stranger = zoo.launch(
        [sys.executable, "-c", serve], prefix=inside, name="stranger", quiet=False
    )
    wait_until((stranger.folder / "up").exists, 60, "the stranger listens")
    refused = criuctl("restore", dumped["checkpoint"], check=False)
    assert (refused["exit_code"], refused["error"]["code"]) == (4, "preflight")
    assert f"{port} is taken" in refused["error"]["message"]
    stranger.end()
    trip.restore(dumped, animal).ask()
