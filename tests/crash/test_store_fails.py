"""The store dies, fills up, or answers wrongly: the tree runs on, and no wrong byte ever becomes a
process.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers.radosgw import RadosGateway
from support import oracle
from support.aftermath import Aftermath
from support.command import Criuctl, Home
from support.pauses import paused
from support.trip import Trip
from support.zoo import Zoo

pytestmark = pytest.mark.crash

REBUILT = (".cache", "index")  # folders of a local store whose contents follow from the rest


@pytest.fixture
def small_disk(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A disk of 24 MiB.

    Its folder outlives the test: trees of other tests may have a copy of the mount.
    """
    place = tmp_path_factory.mktemp("small")
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", home.token, place], check=True
    )
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("options", [(), ("--leave-running",)], ids=["ends", "left running"])
def test_the_disk_fills_up(
    options: tuple[str, ...], small_disk: Path, zoo: Zoo, criuctl: Criuctl, aftermath: Aftermath
) -> None:
    """No room for the memory: exit 7, the tree runs on, and the room that was taken is given back
    or can be.
    """
    criuctl.extra["CRIUCTL_STORE"] = str(small_disk / "store")
    criuctl("store", "init")
    animal = zoo.launch("memory.py", "64")
    animal.remember()
    answer = criuctl("dump", animal.pid, *options, check=False)
    assert answer["exit_code"] == 7
    assert answer["error"]["code"] == "store-full"
    assert criuctl("list") == []
    assert animal.differences(animal) == []
    del criuctl.extra["CRIUCTL_STORE"]
    assert aftermath.of_dump(animal) == "alive"


@pytest.mark.parametrize("step", ["freeze", "frozen", "store"])
def test_the_gateway_is_killed(
    step: str,
    radosgw_server: RadosGateway,
    home: Home,
    zoo: Zoo,
    criuctl: Criuctl,
    aftermath: Aftermath,
) -> None:
    """kill -9 of the S3 gateway in the middle: exit 7, the tree runs on; the gateway comes back,
    the next dump succeeds.
    """
    local = dict(criuctl.extra)
    radosgw_server.make_bucket(home.token)
    criuctl.extra |= {
        **radosgw_server.env,
        "CRIUCTL_STORE": f"s3://{home.token}/killed",
        "CRIUCTL_S3_RETRIES": "2",
    }
    criuctl("store", "init")
    animal = zoo.launch("memory.py", "32")
    animal.remember()
    with paused(criuctl, step, "dump", animal.pid) as held:
        radosgw_server.kill_gateway()
        try:
            held.go_on()
            assert held.command.process.wait(120) == 7
        finally:
            radosgw_server.start_gateway()
    assert held.command.json()["error"]["code"] == "store-unreachable"
    assert animal.differences(animal) == []
    assert criuctl("list") == []
    assert aftermath.of_dump(animal) == "alive"
    criuctl.extra = local


def _objects(store: Path) -> list[Path]:
    return sorted(path for path in store.rglob("*") if path.is_file())


def _kinds(store: Path) -> dict[str, list[Path]]:
    """The store's objects by the folder that they lie in."""
    kinds: dict[str, list[Path]] = {}
    for path in _objects(store):
        kinds.setdefault(path.relative_to(store).parts[0], []).append(path)
    return kinds


@pytest.mark.parametrize("encryption", [True, False], ids=["sealed", "plain"])
@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "gone", "foreign"])
def test_a_wrong_byte_in_any_kind_of_object(
    harm: str, encryption: bool, zoo: Zoo, trip: Trip, criuctl: Criuctl, home: Home
) -> None:
    """One object of each kind is harmed in turn: the restore is refused before any process starts,
    and verify finds it.
    """
    store = home.path / "harmed"
    criuctl.extra["CRIUCTL_STORE"] = str(store)
    criuctl("store", "init", *(["--encrypt"] if encryption else ["--no-encrypt"]))
    animal = zoo.launch("counter.py", "2")
    report = trip.dump(animal, "--name", "victim")
    kinds = _kinds(store)
    assert len(kinds) >= 3, kinds
    for kind, paths in kinds.items():
        path = max(paths, key=lambda path: path.stat().st_size)
        original = path.read_bytes()
        _harm(path, original, harm)
        shutil.rmtree(home.path / "cache", ignore_errors=True)
        answer = criuctl("restore", report["checkpoint"], check=False)
        verified = criuctl("verify", "--all", check=False)
        what = f"{kind}/{path.name} {harm}"
        if answer["exit_code"] == 0:  # what can be made again from the rest may be missing or wrong
            assert kind in REBUILT, what
            zoo.adopt(answer["pid"], animal).end()
        else:
            assert zoo_processes(home) == [], what
            assert answer["exit_code"] in (
                (8,) if harm in ("flip", "cut", "foreign") else (3, 7, 8)
            ), f"{what}: {answer}"
            assert answer["error"]["message"]
            # its existence is the checkpoint's existence
            if kind == "checkpoints" and harm == "gone":
                assert (answer["exit_code"], verified["exit_code"]) == (3, 0), what
            else:
                assert verified["exit_code"] in (3, 7, 8), f"{what}: verify saw nothing: {verified}"
        path.write_bytes(original)
    restored = trip.restore(report, animal)
    restored.ask()


def _harm(path: Path, original: bytes, harm: str) -> None:
    path.chmod(0o600)
    if harm == "gone":
        path.unlink()
    elif harm == "foreign":
        path.write_bytes(b"#!/bin/sh\n" + b"echo this was never criuctl's\n" * 50)
    else:
        middle = len(original) // 2
        flipped = bytes([original[middle] ^ 0x10]) if original else b"x"
        path.write_bytes(
            {
                "flip": original[:middle] + flipped + original[middle + 1 :],
                "cut": original[:middle],
                "empty": b"",
            }[harm]
        )


def zoo_processes(home: Home) -> list[str]:
    """Command lines that mention this test's animals."""
    import os

    lines = (oracle.read(f"/proc/{name}/cmdline") for name in os.listdir("/proc") if name.isdigit())
    return [line for line in lines if f"{home.path}/counter" in line]


def test_the_cipher_text_of_one_object_under_the_name_of_another(
    zoo: Zoo, trip: Trip, criuctl: Criuctl, home: Home
) -> None:
    """All packs change places: each is genuine, none is where it belongs."""
    first, second = (
        zoo.launch("counter.py", "2", name="first"),
        zoo.launch("memory.py", "4", name="second"),
    )
    report = trip.dump(first)
    trip.snapshot(second)
    packs = next(paths for kind, paths in _kinds(criuctl.store).items() if kind.startswith("pack"))
    assert len(packs) >= 2
    contents = [path.read_bytes() for path in packs]
    for path, content in zip(packs, [*contents[1:], contents[0]], strict=True):
        path.chmod(0o600)
        path.write_bytes(content)
    shutil.rmtree(home.path / "cache", ignore_errors=True)
    assert criuctl("restore", report["checkpoint"], check=False)["exit_code"] == 8
    for path, content in zip(packs, contents, strict=True):
        path.write_bytes(content)
    trip.restore(report, first).ask()


def test_the_wrong_key_and_no_key(zoo: Zoo, criuctl: Criuctl, home: Home) -> None:
    """Found before the freeze at a dump, and before anything at a restore."""
    criuctl.extra["CRIUCTL_STORE"] = str(home.path / "sealed")
    criuctl("store", "init", "--encrypt")
    animal = zoo.launch("counter.py", "1")
    animal.remember()
    report = criuctl("dump", animal.pid, "--leave-running")
    keys = _objects(home.path / "keys")
    assert len(keys) == 1
    key = keys[0].read_bytes()
    keys[0].unlink()
    for arguments in (("dump", animal.pid), ("restore", report["checkpoint"], "--as", "x")):
        answer = criuctl(*arguments, check=False)
        assert (answer["exit_code"], answer["error"]["code"]) == (7, "key-missing")
    other = home.path / "other"
    criuctl("store", "init", "--encrypt", "--store", other)
    wrong = next(path for path in _objects(home.path / "keys"))
    keys[0].write_bytes(wrong.read_bytes())
    keys[0].chmod(0o600)
    for arguments in (("dump", animal.pid), ("restore", report["checkpoint"], "--as", "x")):
        answer = criuctl(*arguments, check=False)
        assert (answer["exit_code"], answer["error"]["code"]) == (8, "wrong-key")
    keys[0].write_bytes(key)
    criuctl("verify", report["checkpoint"])
    assert animal.differences(animal) == []
    animal.ask()
