"""Stores, hooks and holders that hang must not keep a tree frozen: max_freeze undoes the dump, and
the tree runs on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import FaultProxy, RadosGateway
from support.aftermath import stopped
from support.command import Criuctl, Home
from support.echo import Echo
from support.hooking import HookFolder
from support.keeper import wait_until
from support.pauses import paused
from support.zoo import PROGRAMS, Animal, Zoo

from criuctl.config import Config
from criuctl.session.sessions import state_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]

BOUND = 3.0
MARGIN = 4.0  # the grace of the watchdog, and what CRIU takes to roll back on a busy machine


@pytest.fixture
def echo() -> Iterator[Echo]:
    """A peer outside the tree."""
    server = Echo("tcp")
    yield server
    server.stop()


@pytest.fixture
def standing(zoo: Zoo, echo: Echo, criuctl: Criuctl) -> Animal:
    """A tree of 24 MiB that compress to nothing less, with a connection to outside; it knows for
    how long it stood still.
    """
    criuctl.extra["CRIUCTL_TRACK_WRITES_MIB"] = "0"  # its memory is read while it is frozen
    animal = zoo.launch("standing.py", "24", echo.address, quiet=False)
    animal.ask()
    return animal


def _judge(
    answer: dict[str, Any], report: dict[str, Any], animal: Animal, echo: Echo, *, step: str = ""
) -> None:
    """Exit 12, and the error says what took the time; the tree stood still for about the bound,
    runs on, and has its connection.
    """
    assert answer["exit_code"] == 12, answer
    error = answer["error"]
    assert error["code"] == "frozen-too-long", error
    assert "; the dump was undone; the tree runs on" in error["message"]
    assert error["frozen_ms"] >= 1000 * BOUND
    assert step in error["message"], error
    assert BOUND * 0.9 <= report["longest"] <= BOUND + MARGIN, (
        f"stood still for {report['longest']} s"
    )
    animal.ask()
    assert echo.accepted == 1
    assert not stopped(animal)


def _nothing_is_left(criuctl: Criuctl, animal: Animal) -> None:
    """No checkpoint is listed, and the very same tree can be dumped; the leak guard looks for all
    else.
    """
    assert criuctl("list") == []
    report = criuctl("dump", animal.pid, "--leave-running", "--connections", "keep")
    assert report["frozen_ms"] < 1000 * MARGIN
    animal.ask()


@pytest.fixture
def dripping(radosgw_server: RadosGateway, home: Home, criuctl: Criuctl) -> Iterator[FaultProxy]:
    """The reference server behind a proxy that passes everything, until the test switches it."""
    radosgw_server.make_bucket(home.token)
    before = dict(criuctl.extra)
    with FaultProxy(radosgw_server.port, pause=2.0) as proxy:
        criuctl.extra |= {
            **radosgw_server.env,
            "CRIUCTL_STORE": f"s3://{home.token}/p",
            "CRIUCTL_S3_ENDPOINT": proxy.endpoint,
        }
        criuctl("store", "init")
        yield proxy
        criuctl.extra = before


@pytest.mark.parametrize("options", [(), ("--leave-running",)], ids=["ends", "left running"])
def test_a_server_that_drips(
    options: tuple[str, ...],
    dripping: FaultProxy,
    zoo: Zoo,
    echo: Echo,
    criuctl: Criuctl,
    home: Home,
) -> None:
    """Its answers come byte by byte, each of them in time, while the tree waits for its packs, or
    its pages for room.
    """
    standing = zoo.launch("standing.py", "128" if options else "24", echo.address, quiet=False)
    standing.ask()
    # so that the pages of a snapshot wait, too
    small = {"CRIUCTL_BUFFERS_MIB": "24", "CRIUCTL_UPLOADS": "1", "CRIUCTL_TRACK_WRITES_MIB": "0"}
    hooks = HookFolder(home.path / "hooks")
    started = hooks.path / "frozen-now"
    hooks.sh("frozen", "tell", f"touch {started}; sleep 0.5")
    command = criuctl.start(
        "dump",
        standing.pid,
        "--max-freeze",
        str(BOUND),
        "--connections",
        "keep",
        *options,
        env=small,
    )
    wait_until(started.exists, 60, "the tree is frozen")
    dripping.faults = {"PUT": "d" * 1000}
    answer = standing.ask()  # it runs while criuctl still waits for the store
    dripping.faults = {}
    code = command.process.wait(180)
    _judge({"exit_code": code, **command.json()}, answer, standing, echo, step="MiB are stored")
    (hooks.path / "frozen" / "tell").unlink()
    _nothing_is_left(criuctl, standing)


def test_a_hook_that_hangs(standing: Animal, echo: Echo, criuctl: Criuctl, home: Home) -> None:
    """One that does not even end when it is asked to."""
    hooks = HookFolder(home.path / "hooks")
    hooks.sh("frozen", "hang", "trap '' TERM; sleep 60 & wait; sleep 60")
    patient = {"CRIUCTL_HOOK_TIMEOUT_FROZEN": "50", "CRIUCTL_MAX_FREEZE": str(BOUND)}
    answer = criuctl("dump", standing.pid, "--connections", "keep", check=False, env=patient)
    _judge(answer, standing.ask(), standing, echo, step="hooks of the phase frozen")
    (hooks.path / "frozen" / "hang").unlink()
    _nothing_is_left(criuctl, standing)


@pytest.fixture
def frozen_disk(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system that `fsfreeze` can stop: who writes to it then sleeps where no signal wakes
    it.

    Its folder outlives the test: trees of other tests may have a copy of the mount.
    """
    image, place = home.path / "disk", tmp_path_factory.mktemp("mounted")
    image.write_bytes(b"")
    os.truncate(image, 256 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    yield place
    subprocess.run(["fsfreeze", "-u", place], check=False, capture_output=True)
    subprocess.run(["umount", place], check=True)


def test_a_folder_whose_disk_hangs(
    frozen_disk: Path, standing: Animal, echo: Echo, criuctl: Criuctl, home: Home
) -> None:
    """Nothing can interrupt the writes; the tree does not wait for them, and neither does what
    criuctl has to say.
    """
    criuctl.extra["CRIUCTL_STORE"] = str(frozen_disk / "store")
    criuctl("store", "init")
    hooks = HookFolder(home.path / "hooks")
    hooks.sh("frozen", "stall", f"fsfreeze -f {frozen_disk}")
    command = criuctl.start(
        "dump", standing.pid, "--max-freeze", str(BOUND), "--connections", "keep"
    )
    wait_until(lambda: command.out.stat().st_size, 60, "its answer")
    error = command.json()
    _judge({"exit_code": error["error"]["exit_code"], **error}, standing.ask(), standing, echo)
    subprocess.run(["fsfreeze", "-u", frozen_disk], check=True)
    assert command.process.wait(60) == 12
    (hooks.path / "frozen" / "stall").unlink()
    _nothing_is_left(criuctl, standing)


def test_the_main_thread_hangs_where_nothing_interrupts_it(
    frozen_disk: Path, standing: Animal, echo: Echo, criuctl: Criuctl, home: Home
) -> None:
    """What this host knows lies on the disk that hangs: the watchdog itself lets the tree go on,
    long before criuctl ends.
    """
    criuctl.extra["CRIUCTL_STATE_DIR"] = str(frozen_disk / "state")
    hooks = HookFolder(home.path / "hooks")
    hooks.sh("post-dump", "stall", f"fsfreeze -f {frozen_disk}")
    command = criuctl.start(
        "dump", standing.pid, "--max-freeze", str(BOUND), "--connections", "keep"
    )
    wait_until(lambda: stopped(standing), 60, "it is frozen")
    wait_until(lambda: not stopped(standing), 60, "it runs again")
    answer = standing.ask()
    assert answer["longest"] > 1
    assert command.process.poll() is None
    assert not stopped(standing)
    subprocess.run(["fsfreeze", "-u", frozen_disk], check=True)
    code = command.process.wait(60)
    _judge(
        {"exit_code": code, **command.json()}, answer, standing, echo, step="storing the checkpoint"
    )
    assert len(criuctl("list")) == 1  # the checkpoint was complete, and the tree was not ended
    (hooks.path / "post-dump" / "stall").unlink()
    criuctl("dump", standing.pid, "--leave-running", "--connections", "keep")
    standing.ask()


@pytest.mark.parametrize("step", ["frozen", "collect", "kill"])
def test_a_holder_that_hangs(step: str, echo: Echo, zoo: Zoo, criuctl: Criuctl, home: Home) -> None:
    """It is stopped when it is needed: to let the tree be seized, to tell what it knows, to note
    that the tree ends.
    """
    folder = home.path / "standing"
    folder.mkdir()
    program = [str(PROGRAMS / "standing.py"), str(folder), "8", echo.address]
    command: list[str | int | Path] = [
        "run",
        "--name",
        "held",
        "-d",
        "--",
        "python3",
        "-S",
        *program,
    ]
    assert criuctl.start(*command, json_output=False).process.wait(60) == 0
    wait_until((folder / "ready").exists, 60, "standing.py is ready")
    status = criuctl("status", "held")
    animal = Animal(status["pid"], folder, quiet=False)
    zoo.animals.append(animal)
    animal.ask()
    holder = _holder_of(criuctl, "held")
    try:
        with paused(
            criuctl, step, "dump", "held", "--max-freeze", str(BOUND), "--connections", "keep"
        ) as held:
            os.kill(holder, signal.SIGSTOP)
            held.go_on()
            answer = animal.ask()
            code = held.command.process.wait(120)
            _judge({"exit_code": code, **held.command.json()}, answer, animal, echo)
    finally:
        os.kill(holder, signal.SIGCONT)
    wait_until(lambda: criuctl("status", "held")["state"] == "running", 60, "the session runs")
    rows = criuctl("list")
    # a checkpoint that is whole may exist, and the tree as well
    assert len(rows) == (1 if step == "kill" else 0)
    criuctl("dump", "held", "--leave-running", "--connections", "keep")
    animal.ask()
    criuctl("kill", "held")


def _holder_of(criuctl: Criuctl, name: str) -> int:
    state = state_of(
        Config(run_dir=str(criuctl.home.run), state_dir=str(criuctl.home.path / "state")), name
    )
    assert state is not None
    return int(state["holder"]["pid"])


def test_no_bound_if_none_is_wished(standing: Animal, criuctl: Criuctl, home: Home) -> None:
    hooks = HookFolder(home.path / "hooks")
    hooks.sh("frozen", "slow", "sleep 2")
    report = criuctl(
        "dump",
        standing.pid,
        "--max-freeze",
        "0",
        "--leave-running",
        env={"CRIUCTL_MAX_FREEZE": "0.5"},
    )
    assert report["frozen_ms"] > 2000
    answer = criuctl(
        "dump",
        standing.pid,
        "--leave-running",
        check=False,
        env={"CRIUCTL_MAX_FREEZE": "snapshot: 0.5"},
    )
    assert answer["exit_code"] == 12
    criuctl("dump", standing.pid, "--leave-running", env={"CRIUCTL_MAX_FREEZE": "dump: 0.5"})
    time.sleep(0.1)
    standing.ask()
