"""Sessions, snapshots and trial restores of programs that use a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.command import Criuctl, Home
from support.gpu_standin import PROGRAM, Board, DeviceProgram, Programs
from support.keeper import Keeper, wait_until
from support.operating import Operators
from support.zoo import Animal

pytestmark = pytest.mark.integration


@pytest.fixture
def operators(keeper: Keeper, home: Home, board: Board) -> Iterator[Operators]:
    """criuctl with sessions, which end with the test."""
    operators = Operators(keeper, home)
    operators.extra.update(board.environment())
    yield operators
    operators.close()


def test_a_session_is_snapshotted_dumped_and_restored(
    gpu: Programs, operators: Operators, board: Board
) -> None:
    folder = gpu.zoo.home / "work"
    folder.mkdir()
    operators("run", "-d", "--name", "work", "--", board.built / PROGRAM, "threads", folder, "4")
    wait_until((folder / "ready").exists, 60, "the session counts")
    program = DeviceProgram(Animal(operators("status", "work")["pid"], folder, quiet=False))
    program.goes_on()
    operators("snapshot", "work")
    program.goes_on()
    operators("dump", "work")
    wait_until(lambda: not gpu.living(program), 30, "what was dumped has ended")
    counted = program.count()
    operators("restore", "work", "--detach")
    program.goes_on()
    assert program.count() > counted
    # the init of its namespace names it, too
    assert 3 in [len(board.held(pid)) for pid in gpu.living(program)]


def test_a_trial_restore_leaves_the_living_one_alone(
    gpu: Programs, gpu_criuctl: Criuctl, board: Board
) -> None:
    program = gpu.start("threads", 4, name="run")
    outputs = [
        word for name in program.outputs() for word in ("--with-files", program.folder / name)
    ]
    gpu_criuctl("dump", program.pid, "--leave-running", "--name", "run", *outputs)
    program.goes_on()
    tried = gpu_criuctl("verify", "run", "--restore")
    assert (tried["ok"], tried["alive"]) == (True, True)
    program.goes_on()
    assert gpu.living(program) == [program.pid]
