"""The net namespace of a dump is known again, and no other one taken for it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping

import pytest
from support.command import Home
from support.keeper import wait_until
from support.zoo import Zoo

from criuctl.checkpoint.connection_record import ConnectionRecord
from criuctl.checkpoint.manifest import HostInfo, Manifest, SessionRef
from criuctl.errors import RestoreFailed
from criuctl.host.registry import boot_id
from criuctl.namespaces import network_choice
from criuctl.namespaces.network_choice import Place
from criuctl.namespaces.plan import plan_entry
from criuctl.proc.namespace_sockets import net_cookie


def _manifest(net: Mapping[str, object], boot: str | None = None) -> Manifest:
    host = HostInfo(boot_id=boot or boot_id())
    return Manifest(
        id="0" * 32,
        session=SessionRef("crunch", "1" * 32),
        host=host,
        namespaces={"net": dict(net)},
    )


@pytest.fixture
def pid(zoo: Zoo) -> int:
    """Of a program in a network of its own, in which others live, too."""
    animal = zoo.launch(["sleep", "600"], prefix=["unshare", "--net"])
    wait_until(
        lambda: os.readlink(f"/proc/{animal.pid}/ns/net") != os.readlink("/proc/self/ns/net"),
        60,
        "it has one",
    )
    other = zoo.launch(
        ["sleep", "600"], prefix=["nsenter", "-t", str(animal.pid), "-n"], name="other"
    )
    net = os.readlink(f"/proc/{animal.pid}/ns/net")
    wait_until(
        lambda: os.readlink(f"/proc/{other.pid}/ns/net") == net, 60, "the other one is there"
    )
    return animal.pid


@pytest.fixture
def known(pid: int) -> dict[str, object]:
    """What a dump notes of it."""
    noted: dict[str, object] = plan_entry(pid).to_dict()["net"]
    return noted


def test_what_is_known_of_one(pid: int, known: dict[str, object]) -> None:
    assert (known["mode"], known["inode"]) == ("entered", os.stat(f"/proc/{pid}/ns/net").st_ino)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        assert net_cookie(own) not in (0, known["cookie"])
    finally:
        os.close(own)
    assert "cookie" not in plan_entry(os.getpid()).to_dict()["net"]


def test_it_is_found_again(pid: int, known: dict[str, object]) -> None:
    assert network_choice.find(_manifest(known), copy=False) == Place(
        "existing", f"/proc/{pid}/ns/net"
    )
    assert network_choice.find(_manifest(known), copy=True) == Place("private")
    assert network_choice.find(_manifest(known, "another boot"), copy=False) == Place("private")


def test_one_that_was_made_for_several_trees_is_taken(known: dict[str, object]) -> None:
    shared = Place("shared", "/proc/7/ns/net")
    assert network_choice.find(_manifest(known), copy=True, shared=shared.path) == shared


def test_one_that_criu_has_saved_is_made_again_if_it_is_gone(known: dict[str, object]) -> None:
    saved = known | {"mode": "dumped"}
    assert network_choice.find(_manifest(saved), copy=False).mode == "existing"
    assert network_choice.find(_manifest(saved), copy=True) == Place("dumped")
    assert network_choice.find(_manifest(saved, "another boot"), copy=False) == Place("dumped")
    assert network_choice.find(_manifest(saved | {"cookie": 1 << 60}), copy=False) == Place(
        "dumped"
    )


def test_another_one_of_its_number_is_not_taken_for_it(known: dict[str, object]) -> None:
    assert network_choice.find(_manifest(known | {"cookie": 1 << 60}), copy=False) == Place(
        "private"
    )
    assert network_choice.find(_manifest(known | {"inode": 1}), copy=False) == Place("private")


@pytest.mark.parametrize("where", ["in the checkpoint", "here"])
def test_without_a_cookie_nothing_tells(
    where: str, known: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an older criuctl, or on an older kernel."""
    if where == "here":
        monkeypatch.setattr(network_choice, "net_cookie", lambda namespace: 0)
    else:
        del known["cookie"]
    assert network_choice.find(_manifest(known), copy=False) == Place("private", unsure=True)
    assert network_choice.find(_manifest(known | {"inode": 1}), copy=False) == Place("private")


@pytest.fixture
def name(home: Home) -> Iterator[str]:
    """A net namespace that ``ip netns`` has made."""
    subprocess.run(["ip", "netns", "add", home.token], check=True)
    try:
        yield home.token
    finally:
        subprocess.run(["ip", "netns", "del", home.token], check=True)


def test_a_name_means_what_it_means_now(name: str, known: dict[str, object]) -> None:
    assert network_choice.find(_manifest(known | {"name": name}), copy=False) == Place(
        "named", f"/run/netns/{name}"
    )


def test_it_is_entered_as_what_it_was_found_as(pid: int, known: dict[str, object]) -> None:
    """Its process may have ended since, and another process may have both its numbers."""
    path = f"/proc/{pid}/ns/net"
    namespace, place = network_choice.enter(_manifest(known), "existing", path)
    try:
        assert os.stat(place).st_ino == os.fstat(namespace).st_ino == known["inode"]
    finally:
        os.close(namespace)
    for wrong in ({"cookie": 1 << 60}, {"inode": 1}):
        with pytest.raises(RestoreFailed, match="has just ended"):
            network_choice.enter(_manifest(known | wrong), "existing", path)
    with pytest.raises(RestoreFailed, match="No such file"):
        network_choice.enter(_manifest(known), "existing", "/proc/0/ns/net")


def test_it_is_looked_into_while_it_is_there(pid: int, known: dict[str, object]) -> None:
    with network_choice.opened(Place("existing", f"/proc/{pid}/ns/net")) as namespace:
        assert namespace is not None and os.fstat(namespace).st_ino == known["inode"]
    for mode in ("host", "private"):
        with network_choice.opened(Place(mode)) as namespace:
            assert namespace is None
    with (
        pytest.raises(RestoreFailed, match="has just ended"),
        network_choice.opened(Place("existing", "/proc/0/ns/net")),
    ):
        pass


def test_the_addresses_that_a_new_network_has_to_have() -> None:
    """Those that sockets of the tree will be bound to, and that are not everywhere."""
    ends = {
        "192.0.2.1:1": "listen",
        "192.0.2.2:1": "bound",
        "[2001:db8::1]:1": "listen",
        "[::ffff:192.0.2.3]:1": "listen",
    }
    ends |= {
        "0.0.0.0:1": "listen",
        "127.0.0.2:1": "listen",
        "[::1]:1": "bound",
        "224.0.0.5:1": "bound",
        "[fe80::1%2]:1": "listen",
    }
    found = [
        ConnectionRecord(1, 3, family="inet", local=local, state=state)
        for local, state in ends.items()
    ]
    found += [
        ConnectionRecord(
            1, 4, family="inet", local="192.0.2.4:1", peer="192.0.2.4:2", state="established"
        ),
        ConnectionRecord(
            1,
            5,
            family="inet",
            local="192.0.2.5:1",
            peer="192.0.2.9:2",
            state="established",
            external=True,
        ),
        ConnectionRecord(1, 6, family="unix", local="/run/192.0.2.6:1", state="listen"),
    ]
    manifest = Manifest(
        id="0" * 32, session=SessionRef("crunch", "1" * 32), connections=tuple(found)
    )
    addresses = network_choice.addresses(manifest)
    assert {str(ip) for ip in addresses} == {
        "192.0.2.1",
        "192.0.2.2",
        "192.0.2.3",
        "192.0.2.4",
        "2001:db8::1",
    }
