"""A GPU process moves to another host, whose device of the same kind takes the place of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_lab.host import Host
from support.command import Home
from support.gpu_standin import PROGRAM, Board
from support.hosts import Hosts
from support.keeper import wait_until

pytestmark = pytest.mark.integration

PLACE, WORK = "/srv/gpu", "/srv/work"
DRIVER = {"LD_LIBRARY_PATH": f"{PLACE}/driver"}


def install(host: Host, board: Board) -> None:
    """Give the host a driver and the devices of this board."""
    place = host.path(PLACE)
    shutil.copytree(board.built, place / "driver", ignore=shutil.ignore_patterns("old"))
    for device in board.devices:
        (place / device.uuid).mkdir()
    shutil.copy(board.folder / "board", place / "board")
    host.path(WORK).mkdir(parents=True)
    for command in ("migrate", "receive"):
        host.set_command_environment(command, DRIVER)


@pytest.fixture
def elsewhere(home: Home, standin: Path) -> Iterator[Board]:
    """The board of the other host."""
    board = Board(home.path / "elsewhere", standin)
    yield board
    board.close()


def count(host: Host) -> int:
    number, verdict, *more = host.path(f"{WORK}/out").read_text().split()
    assert verdict == "ok", more
    return int(number)


def start(host: Host) -> None:
    argv = [f"{PLACE}/driver/{PROGRAM}", "threads", WORK, "8"]
    host.criuctl(
        "run", "--name", "train", "--detach", "--", "env", f"LD_LIBRARY_PATH={PLACE}/driver", *argv
    )
    wait_until(host.path(f"{WORK}/ready").exists, 60, "it counts")


def test_it_goes_on_with_the_device_of_the_other_host(
    hosts: Hosts, board: Board, elsewhere: Board
) -> None:
    a, b = hosts.a, hosts.b
    install(a, board)
    install(b, elsewhere)
    start(a)
    report = a.criuctl("migrate", "train", b.ssh_url, "--connections", "hangup")
    assert report["host"] == "host-b"
    there = count(b)
    wait_until(lambda: count(b) > there + 1, 60, "it goes on there")
    assert not a.processes(PROGRAM)
    kept = [
        path.name for device in board.devices for path in a.path(f"{PLACE}/{device.uuid}").iterdir()
    ]
    assert kept == [], "the device there is free"


def test_where_it_cannot_come_it_stays(hosts: Hosts, board: Board, elsewhere: Board) -> None:
    a, b = hosts.a, hosts.b
    elsewhere.devices[0].name, elsewhere.devices[0].capability = "NVIDIA A100", "8.0"
    elsewhere.write()
    install(a, board)
    install(b, elsewhere)
    start(a)
    report = a.criuctl("migrate", "train", b.ssh_url, check=False)
    assert report["exit_code"] != 0
    assert "A100" in str(report["error"]) and "H200" in str(report["error"])
    here = count(a)
    wait_until(lambda: count(a) > here + 1, 60, "it goes on here")
    assert not b.processes(PROGRAM)
