"""Dumps of processes that use a device: they come back with its memory, and no failure of the
driver loses them.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.command import Criuctl
from support.gpu_standin import Board, Device, DeviceProgram, Driver, Programs
from support.keeper import wait_until

pytestmark = pytest.mark.integration

MIB = 1 << 20
KEEP = ("--files", "keep")  # the output as it is: the program has counted on since
CALLS = ("lock", "checkpoint", "restore", "unlock")


def restored(
    criuctl: Criuctl, gpu: Programs, program: DeviceProgram, report: dict[str, Any], *options: str
) -> DeviceProgram:
    """Restore a checkpoint once its tree has ended."""
    wait_until(lambda: not program.animal.alive(), 30, "what was dumped has ended")
    return gpu.restored(criuctl("restore", report["checkpoint"], *options)["pid"], program)


def children(program: DeviceProgram) -> list[int]:
    return [
        int(pid)
        for pid in Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
    ]


def codes(report: dict[str, Any]) -> dict[str, str]:
    """Findings: code -> level."""
    return {finding["code"]: finding["level"] for finding in report["findings"]}


# -- there and back
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["counter", "forked", "two", "threads", "kernel"])
def test_a_program_is_dumped_and_comes_back(
    gpu: Programs, gpu_criuctl: Criuctl, board: Board, driver: Driver, mode: str
) -> None:
    program = gpu.start(mode, 8)
    assert gpu_criuctl("check", program.pid)["ok"]
    used = board.used(board.devices[0])
    report = gpu_criuctl("dump", program.pid)
    assert board.used(board.devices[0]) == 0
    before = {name: program.count(name) for name in program.outputs()}
    again = restored(gpu_criuctl, gpu, program, report)
    again.goes_on()
    assert all(again.count(name) > count for name, count in before.items())
    assert board.used(board.devices[0]) == used
    with_context = children(again) if mode == "two" else [again.pid]
    assert {driver.state(pid) for pid in with_context} == {0}
    assert [verb for verb, _ in board.calls()] == [verb for verb in CALLS for _ in with_context]


@pytest.mark.parametrize("mode", ["counter", "forked", "two", "threads"])
def test_a_snapshot_leaves_it_running(
    gpu: Programs, gpu_criuctl: Criuctl, board: Board, mode: str
) -> None:
    program = gpu.start(mode, 8)
    first = gpu_criuctl("dump", program.pid, "--leave-running", "--name", "run")
    program.goes_on()
    second = gpu_criuctl("dump", program.pid, "--leave-running", "--name", "run")
    assert second["bytes"]["stored"] < first["bytes"]["stored"]
    program.goes_on()
    counted = program.count()
    program.animal.end()
    board.sweep()
    again = restored(gpu_criuctl, gpu, program, second, *KEEP)
    wait_until(lambda: again.count() != counted, 30, "it counts from where the snapshot was")
    again.goes_on()


def test_twenty_cycles(gpu: Programs, gpu_criuctl: Criuctl) -> None:
    program = gpu.start("threads", 2)
    for _ in range(20):
        program = restored(
            gpu_criuctl, gpu, program, gpu_criuctl("dump", program.pid, "--name", "run")
        )
        program.goes_on()


def test_forked_children_lose_what_is_of_no_use_to_them(
    gpu: Programs, gpu_criuctl: Criuctl, board: Board
) -> None:
    program = gpu.start("forked")
    assert codes(gpu_criuctl("check", program.pid)) == {"gpu-inherited": "info"}
    report = gpu_criuctl("dump", program.pid, "--leave-running")
    assert "inherited" in str(report["warnings"])
    assert [board.held(pid) for pid in children(program)] == [[], []]
    assert len(board.held(program.pid)) == 3
    program.goes_on()


def test_in_a_pid_namespace(gpu: Programs, gpu_criuctl: Criuctl, board: Board) -> None:
    program = gpu.start("threads", prefix=("unshare", "--pid", "--fork", "--mount-proc", "setsid"))
    report = gpu_criuctl("dump", program.pid)
    again = restored(gpu_criuctl, gpu, program, report)
    again.goes_on()
    assert {pid for _, pid in board.calls()} == {1}


def test_private_pids_next_to_the_original(
    gpu: Programs, gpu_criuctl: Criuctl, board: Board
) -> None:
    program = gpu.start("threads", name="one")
    report = gpu_criuctl("dump", program.pid, "--leave-running", "--name", "one")
    program.goes_on()
    program.animal.end()
    board.sweep()
    again = restored(gpu_criuctl, gpu, program, report, "--pids", "private", *KEEP)
    again.goes_on()
    again.animal.end()
    board.sweep()


def test_a_device_that_is_open_without_use(
    gpu: Programs, gpu_criuctl: Criuctl, board: Board
) -> None:
    node = board.devices[0].node
    program = gpu.start("idle", node)
    assert codes(gpu_criuctl("check", program.pid)) == {"gpu-idle": "warning"}
    report = gpu_criuctl("dump", program.pid, "--leave-running")
    program.goes_on()
    assert board.held(program.pid) == [node]
    report = gpu_criuctl("dump", program.pid)
    again = restored(gpu_criuctl, gpu, program, report)
    again.goes_on()
    assert board.held(again.pid) == [node]
    assert board.calls() == []


def test_a_process_that_has_initialised_the_driver(
    gpu: Programs, gpu_criuctl: Criuctl, board: Board
) -> None:
    program = gpu.start("initialised")
    again = restored(gpu_criuctl, gpu, program, gpu_criuctl("dump", program.pid))
    again.goes_on()
    assert len(board.held(again.pid)) == 2


# -- what is refused before anything is touched
# ---------------------------------------------------------------


def refused(criuctl: Criuctl, program: DeviceProgram, board: Board, code: str) -> None:
    """`check` and `dump` say so; the program was not touched."""
    found = criuctl("check", program.pid, check=False)
    assert (found["exit_code"], codes(found).get(code)) == (4, "error")
    report = criuctl("dump", program.pid, check=False)
    assert report["exit_code"] == 4, report
    assert board.calls() == []
    program.goes_on()


def test_managed_memory_is_refused(gpu: Programs, gpu_criuctl: Criuctl, board: Board) -> None:
    if board.memory != "/dev/nvidia-uvm":
        pytest.skip("a real device is here: its test has managed memory, too")
    refused(gpu_criuctl, gpu.start("managed", 64), board, "gpu-managed-memory")


def test_an_instance_of_a_device_is_refused(
    gpu: Programs, gpu_criuctl: Criuctl, board: Board
) -> None:
    board.devices[0].mig = True
    board.write()
    refused(gpu_criuctl, gpu.start("counter"), board, "gpu-mig")


def test_a_driver_before_570_is_refused(gpu: Programs, gpu_criuctl: Criuctl, board: Board) -> None:
    program = gpu.start("counter")
    board.driver, board.release = 12070, "565.57.01"
    board.write()
    refused(gpu_criuctl, program, board, "gpu-driver-old")
    gpu_criuctl.extra.update(board.environment(old=True))  # which lacks the calls
    refused(gpu_criuctl, program, board, "gpu-driver-old")


def test_without_the_library_it_is_refused(
    gpu: Programs, gpu_criuctl: Criuctl, board: Board
) -> None:
    program = gpu.start("counter")
    gpu_criuctl.extra["LD_LIBRARY_PATH"] = ""
    refused(gpu_criuctl, program, board, "gpu-driver")


def test_a_stopped_process_is_refused(gpu: Programs, gpu_criuctl: Criuctl, board: Board) -> None:
    program = gpu.start("counter")
    os.kill(program.pid, signal.SIGSTOP)
    found = gpu_criuctl("check", program.pid, check=False)
    assert codes(found).get("gpu-stopped") == "error"
    assert gpu_criuctl("dump", program.pid, check=False)["exit_code"] == 4
    os.kill(program.pid, signal.SIGCONT)
    program.goes_on()
    assert board.calls() == []


def test_one_that_is_locked_already_is_refused(
    gpu: Programs, gpu_criuctl: Criuctl, driver: Driver, board: Board
) -> None:
    program = gpu.start("counter")
    assert driver("lock", program.pid, 1000) == "SUCCESS"
    found = gpu_criuctl("check", program.pid, check=False)
    assert codes(found).get("gpu-locked") == "error"
    assert gpu_criuctl("dump", program.pid, check=False)["exit_code"] == 4
    assert driver.state(program.pid) == 1
    assert driver("unlock", program.pid) == "SUCCESS"
    program.goes_on()


# -- the driver fails all the same
# -----------------------------------------------------------------------------


def failed(criuctl: Criuctl, program: DeviceProgram, code: int, *options: str) -> str:
    """The dump fails with this exit code, and there is no checkpoint: its message."""
    report = criuctl("dump", program.pid, *options, check=False)
    assert report["exit_code"] == code, report
    assert criuctl("list") == []
    return str(report["error"]["message"])


FAULTS = {
    "lock fail-before": 5,
    "lock notready": 12,
    "lock fail-after": 5,
    "checkpoint fail-before": 5,
    "checkpoint notsupported": 5,
    "checkpoint oom": 5,
    "checkpoint fail-after": 5,
}


@pytest.mark.parametrize("mode", ["counter", "two"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_call_that_fails_leaves_the_program_running(
    gpu: Programs, gpu_criuctl: Criuctl, board: Board, fault: str, mode: str
) -> None:
    gpu_criuctl("store", "init")
    program = gpu.start(mode)
    only = f" pid={children(program)[1]}" if mode == "two" else ""
    board.faults(fault + only)
    message = failed(gpu_criuctl, program, FAULTS[fault])
    assert "runs on" in message
    program.goes_on()
    board.faults()
    program = restored(gpu_criuctl, gpu, program, gpu_criuctl("dump", program.pid))
    program.goes_on()


def test_a_kernel_that_takes_minutes(gpu: Programs, gpu_criuctl: Criuctl) -> None:
    gpu_criuctl("store", "init")
    program = gpu.start("kernel", 3000)
    gpu_criuctl.extra["CRIUCTL_GPU_LOCK_TIMEOUT"] = "0.5"
    message = failed(gpu_criuctl, program, 12)
    assert "0.5 s" in message and str(program.pid) in message
    program.goes_on()


def test_a_driver_that_never_answers_a_lock(
    gpu: Programs, gpu_criuctl: Criuctl, board: Board, driver: Driver
) -> None:
    gpu_criuctl("store", "init")
    program = gpu.start("counter")
    gpu_criuctl.extra["CRIUCTL_GPU_LOCK_TIMEOUT"] = "0.5"
    board.faults("lock hang")
    failed(gpu_criuctl, program, 12)
    program.goes_on()
    board.faults()  # the lock is made after all, when no dump wants it any more
    wait_until(
        lambda: driver.state(program.pid) == 0 and not program.stands(),
        60,
        "the late lock is taken back",
    )
    program.goes_on()


def test_a_driver_that_never_answers_a_checkpoint(
    gpu: Programs, gpu_criuctl: Criuctl, board: Board, driver: Driver
) -> None:
    gpu_criuctl("store", "init")
    program = gpu.start("counter")
    board.faults("checkpoint hang")
    command = gpu_criuctl.start("dump", program.pid, "--max-freeze", "1")
    wait_until(
        lambda: ("checkpoint", program.pid) in board.calls(), 30, "the checkpoint is under way"
    )
    time.sleep(3)  # past the bound
    board.faults()  # it is done after all, when no dump wants it any more
    assert command.process.wait(60) == 12, command.output()
    wait_until(lambda: driver.state(program.pid) == 0, 60, "the late checkpoint is taken back")
    program.goes_on()
    assert gpu_criuctl("list") == []


def test_a_checkpoint_that_is_done_by_half(
    gpu: Programs, gpu_criuctl: Criuctl, board: Board
) -> None:
    program = gpu.start("counter")
    before = gpu_criuctl("dump", program.pid, "--leave-running", "--name", "run")
    counted = program.count()
    board.faults("checkpoint half-done")
    report = gpu_criuctl("dump", program.pid, "--leave-running", "--name", "run", check=False)
    assert report["exit_code"] == 5
    said = report["error"]["message"] + str(report["error"]["hint"])
    assert "runs on" not in said
    assert "run@1" in said  # what can be restored instead
    launched = program.animal.launched
    assert launched is not None and launched.wait(30) == 2
    board.faults()
    again = restored(gpu_criuctl, gpu, program, before, *KEEP)
    again.goes_on()
    assert again.count() >= 1 and counted >= 1


def test_a_process_that_the_driver_ends(gpu: Programs, gpu_criuctl: Criuctl, board: Board) -> None:
    gpu_criuctl("store", "init")
    program = gpu.start("two")
    victim = children(program)[0]
    board.faults(f"checkpoint die pid={victim}")
    message = failed(gpu_criuctl, program, 5)
    assert str(victim) in message
    before = program.count("out.1")
    wait_until(lambda: program.count("out.1") > before + 1, 30, "the other one goes on")
    board.sweep()


@pytest.mark.parametrize("verb", ["restore", "unlock"])
def test_a_device_that_does_not_come_back_after_the_dump(
    gpu: Programs, gpu_criuctl: Criuctl, board: Board, driver: Driver, verb: str
) -> None:
    program = gpu.start("counter")
    board.faults(f"{verb} fail-before")
    report = gpu_criuctl("dump", program.pid, "--leave-running", "--name", "run", check=False)
    assert report["exit_code"] == 11, report  # there is a checkpoint
    assert str(program.pid) in str(report["warnings"])
    assert driver.state(program.pid) in (1, 2)
    program.animal.end()
    board.faults()
    board.sweep()
    again = restored(gpu_criuctl, gpu, program, report, *KEEP)
    again.goes_on()


# -- criuctl is killed
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("verb", ["lock", "checkpoint"])
def test_a_dump_that_is_killed_gives_the_device_back(
    gpu: Programs, gpu_criuctl: Criuctl, board: Board, verb: str, number: int
) -> None:
    gpu_criuctl("store", "init")
    program = gpu.start("counter")
    board.faults(f"{verb} slow=1500")
    command = gpu_criuctl.start("dump", program.pid)
    wait_until(lambda: verb in [call for call, _ in board.calls()], 30, f"{verb} is under way")
    command.process.kill(number)
    command.process.wait(60)
    program.goes_on()
    board.faults()
    wait_until(lambda: board.calls()[-1][0] == "unlock", 30, "the helper has given it back")
    program = restored(gpu_criuctl, gpu, program, gpu_criuctl("dump", program.pid))
    program.goes_on()


def test_memory_of_other_processes_on_the_device_is_left_alone(
    gpu: Programs, gpu_criuctl: Criuctl, board: Board
) -> None:
    board.add(Device())
    mine, other = gpu.start("counter", name="mine"), gpu.start("counter", name="other")
    again = restored(gpu_criuctl, gpu, mine, gpu_criuctl("dump", mine.pid))
    other.goes_on()
    again.goes_on()
    assert {pid for _, pid in board.calls()} == {mine.pid}
