"""criuctl or CRIU is killed at each step of a dump or restore of a process that uses a device: it
is never lost.
"""

from __future__ import annotations

import pytest
from support.command import Criuctl
from support.gpu_standin import Board, DeviceProgram, Programs
from support.keeper import wait_until
from support.pauses import paused, steps_of

pytestmark = [pytest.mark.integration, pytest.mark.crash, pytest.mark.slow]


def take_stock(
    criuctl: Criuctl, gpu: Programs, program: DeviceProgram, board: Board, step: str
) -> DeviceProgram:
    """What was to be dumped goes on with its device, or comes back from a complete checkpoint."""
    if program.animal.alive():
        program.goes_on()
        assert len(board.held(program.pid)) == 3, step
        return program
    board.sweep()
    report = criuctl("restore", "run")
    again = gpu.restored(report["pid"], program)
    again.goes_on()
    return again


@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["criuctl", "criu"])
def test_a_dump_is_killed_at_each_step(
    gpu: Programs, gpu_criuctl: Criuctl, board: Board, victim: str
) -> None:
    program = gpu.start("threads", 2, name="run")
    gpu_criuctl("dump", program.pid, "--name", "run")
    program = take_stock(gpu_criuctl, gpu, program, board, "")
    steps = steps_of(gpu_criuctl, "dump", program.pid, "--name", "run")
    assert {"gpu-lock", "gpu-checkpoint"} <= set(steps)
    for step in [step for step in steps if step != "done"]:
        program = take_stock(gpu_criuctl, gpu, program, board, step)
        with paused(gpu_criuctl, step, "dump", program.pid, "--name", "run") as held:
            if victim == "criuctl":
                held.kill()
            else:
                held.kill_criu()
            held.go_on()
            held.wait_settled(program.animal)
    take_stock(gpu_criuctl, gpu, program, board, "the last")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["criuctl", "criu"])
def test_a_restore_is_killed_at_each_step(
    gpu: Programs, gpu_criuctl: Criuctl, board: Board, victim: str
) -> None:
    program = gpu.start("threads", 2, name="run")
    gpu_criuctl("dump", program.pid, "--name", "run")
    steps = steps_of(gpu_criuctl, "restore", "run")
    assert {"gpu-restore", "gpu-unlock"} <= set(steps)
    for step in [step for step in steps if step != "done"]:
        with paused(gpu_criuctl, step, "restore", "run", "--files", "keep") as held:
            if victim == "criuctl":
                held.kill()
            else:
                held.kill_criu()
            held.go_on()
            held.wait_settled(restoring=program.animal)
        wait_until(
            lambda: not gpu.living(program) or not program.stands(),
            60,
            f"after {step} it is gone, or goes on",
        )
        for pid in gpu.living(program):
            gpu.restored(pid, program).animal.end()
        board.sweep()
    report = gpu_criuctl("restore", "run", "--files", "keep")
    again = gpu.restored(report["pid"], program)
    again.goes_on()
    wait_until(lambda: len(board.held(again.pid)) == 3, 30, "it has its device")
