"""Restores of processes that use a device: elsewhere, and where this host or its driver refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.command import Criuctl
from support.gpu_standin import Board, Device, DeviceProgram, Driver, Programs
from support.keeper import wait_until

from criuctl.checkpoint.gpu_records import GpuDescriptor, GpuRecord
from criuctl.proc.credentials import CAP_DAC_OVERRIDE, Credentials
from criuctl.report import Reporter
from criuctl.restore.devices import RestoredDevices

pytestmark = pytest.mark.integration

MIB = 1 << 20


@pytest.fixture
def dumped(gpu: Programs, gpu_criuctl: Criuctl, board: Board) -> DeviceProgram:
    """A counter whose checkpoint is run@1, and which has ended."""
    program = gpu.start("threads", 8, name="run")
    gpu_criuctl("dump", program.pid, "--name", "run")
    wait_until(lambda: not program.animal.alive(), 30, "what was dumped has ended")
    return program


def comes_back(
    criuctl: Criuctl, gpu: Programs, program: DeviceProgram, *options: str
) -> dict[str, Any]:
    """It is restored and goes on from where it was: what `restore` said."""
    before = program.count()
    report: dict[str, Any] = criuctl("restore", "run", *options)
    again = gpu.restored(report["pid"], program)
    again.goes_on()
    assert again.count() > before
    return report


def refused(gpu: Programs, criuctl: Criuctl, program: DeviceProgram, code: int, *said: str) -> None:
    """The restore fails with this exit code and these words; nothing is left of it."""
    report = criuctl("restore", "run", check=False)
    assert report["exit_code"] == code, report
    text = report["error"]["message"] + str(report["error"]["hint"])
    assert [word for word in said if word not in text] == [], text
    assert gpu.living(program) == []


def test_show_tells_devices_memory_and_driver(
    dumped: DeviceProgram, gpu_criuctl: Criuctl, board: Board
) -> None:
    shown = gpu_criuctl("show", "run")["gpu"]
    assert shown["driver"] == "580.159.03"
    assert [(d["uuid"], d["name"]) for d in shown["devices"]] == [
        (board.devices[0].label, "NVIDIA H200")
    ]
    assert [p["memory"] for p in shown["processes"]] == [8 * MIB]


def test_on_another_device_of_the_kind(
    dumped: DeviceProgram, gpu: Programs, gpu_criuctl: Criuctl, board: Board
) -> None:
    old = board.devices[0]
    board.remove(old)
    new = board.add(Device())
    report = comes_back(gpu_criuctl, gpu, dumped)
    assert report["gpu"]["processes"] == 1
    assert (board.used(new), list((board.folder / old.uuid).iterdir())) == (8 * MIB, [])


def test_one_of_two_devices_is_replaced(gpu: Programs, gpu_criuctl: Criuctl, board: Board) -> None:
    kept, gone = board.devices[0], board.add(Device())
    program = gpu.start("threads", 8, name="run")
    gpu_criuctl("dump", program.pid, "--name", "run")
    wait_until(lambda: not program.animal.alive(), 30, "what was dumped has ended")
    board.remove(gone)
    board.add(Device())
    comes_back(gpu_criuctl, gpu, program)
    assert board.used(kept) == 8 * MIB


def test_after_others_have_used_the_device(
    dumped: DeviceProgram, gpu: Programs, gpu_criuctl: Criuctl
) -> None:
    other = gpu.start("counter", 16, name="other")
    comes_back(gpu_criuctl, gpu, dumped)
    other.goes_on()


def test_another_architecture_is_refused(
    dumped: DeviceProgram, gpu: Programs, gpu_criuctl: Criuctl, board: Board
) -> None:
    board.remove(board.devices[0])
    board.add(Device(name="NVIDIA A100-SXM4-80GB", capability="8.0"))
    refused(gpu, gpu_criuctl, dumped, 4, "NVIDIA H200", "9.0", "NVIDIA A100-SXM4-80GB", "8.0")
    assert "restore" not in [verb for verb, _ in board.calls()]


def test_an_older_driver_is_refused(
    dumped: DeviceProgram, gpu: Programs, gpu_criuctl: Criuctl, board: Board
) -> None:
    board.release, board.driver = "570.86.10", 12080
    board.write()
    refused(gpu, gpu_criuctl, dumped, 4, "580.159.03", "570.86.10", "older")
    assert "restore" not in [verb for verb, _ in board.calls()]


def test_a_host_without_the_driver_is_refused(
    dumped: DeviceProgram, gpu: Programs, gpu_criuctl: Criuctl
) -> None:
    gpu_criuctl.extra["LD_LIBRARY_PATH"] = ""
    refused(gpu, gpu_criuctl, dumped, 4, "580.159.03", "libcuda.so.1")


def test_a_device_that_others_fill_is_refused(
    dumped: DeviceProgram, gpu: Programs, gpu_criuctl: Criuctl, board: Board
) -> None:
    board.devices[0].memory = 20 * MIB
    board.write()
    other = gpu.start("counter", 16, name="other")
    refused(gpu, gpu_criuctl, dumped, 4, "GiB")
    other.animal.end()
    board.sweep()
    comes_back(gpu_criuctl, gpu, dumped)


@pytest.mark.parametrize("fault", ["oom", "fail-before", "half-done", "notsupported", "die"])
def test_a_restore_that_the_driver_fails_leaves_nothing(
    dumped: DeviceProgram, gpu: Programs, gpu_criuctl: Criuctl, board: Board, fault: str
) -> None:
    board.faults(f"restore {fault}")
    refused(gpu, gpu_criuctl, dumped, 6, "PID")
    board.faults()
    board.sweep()
    comes_back(gpu_criuctl, gpu, dumped)


def test_an_unlock_that_the_driver_fails_leaves_nothing(
    dumped: DeviceProgram, gpu: Programs, gpu_criuctl: Criuctl, board: Board
) -> None:
    board.faults("unlock fail-before")
    refused(gpu, gpu_criuctl, dumped, 6, "unlock")
    board.faults()
    board.sweep()
    comes_back(gpu_criuctl, gpu, dumped)


def test_one_of_two_processes_fails(gpu: Programs, gpu_criuctl: Criuctl, board: Board) -> None:
    program = gpu.start("two", 4, name="run")
    child = int(Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()[1])
    gpu_criuctl("dump", program.pid, "--name", "run")
    wait_until(lambda: not program.animal.alive(), 30, "what was dumped has ended")
    board.faults(f"restore oom pid={child}")
    refused(gpu, gpu_criuctl, program, 6, "OUT_OF_MEMORY")
    board.faults()
    board.sweep()
    comes_back(gpu_criuctl, gpu, program)


def test_a_restore_that_is_killed_leaves_nothing_or_a_program_that_runs(
    dumped: DeviceProgram, gpu_criuctl: Criuctl, board: Board, gpu: Programs
) -> None:
    board.faults("restore slow=1500")
    command = gpu_criuctl.start("restore", "run")
    wait_until(lambda: "restore" in [verb for verb, _ in board.calls()], 60, "the driver restores")
    command.process.kill()
    command.process.wait(60)
    board.faults()
    wait_until(lambda: gone_or_counting(gpu, dumped), 60, "it is gone, or counts")
    for pid in gpu.living(dumped)[:1]:
        gpu.restored(pid, dumped).animal.end()
    board.sweep()
    comes_back(gpu_criuctl, gpu, dumped)


def gone_or_counting(gpu: Programs, program: DeviceProgram) -> bool:
    """No process is left, or it makes progress."""
    return not gpu.living(program) or not program.stands()


def test_private_pids_a_copy_and_the_original(
    dumped: DeviceProgram, gpu: Programs, gpu_criuctl: Criuctl, driver: Driver, board: Board
) -> None:
    report = comes_back(gpu_criuctl, gpu, dumped, "--pids", "private")
    assert driver.state(report["pid"]) == 0
    assert board.calls()[-2:] == [("restore", report["inner_pid"]), ("unlock", report["inner_pid"])]


def test_a_lazy_restore(gpu: Programs, gpu_criuctl: Criuctl) -> None:
    program = gpu.start("threads", 32, name="run")
    gpu_criuctl("dump", program.pid, "--name", "run")
    wait_until(lambda: not program.animal.alive(), 30, "what was dumped has ended")
    comes_back(gpu_criuctl, gpu, program, "--lazy")


def test_a_device_is_opened_only_for_a_user_that_may(gpu: Programs, board: Board) -> None:
    """In post-restore a process still has root's rights: a record must not lend them to its
    user.
    """
    node = board.devices[0].node  # mode 0600, root's
    program = gpu.start("idle", "/dev/null")
    record = GpuRecord("580.1", 13000, opened=(GpuDescriptor(7, 0, node, os.O_RDWR),))
    for uid, there, warnings in ((1001, "/dev/null", 1), (0, node, 0)):
        reporter = Reporter()
        capabilities = 0 if uid else 1 << CAP_DAC_OVERRIDE
        users = {7: Credentials(uid=uid, gid=uid, capabilities=capabilities)}
        RestoredDevices(record, reporter).reopen({7: program.pid}, users)
        assert os.readlink(f"/proc/{program.pid}/fd/0") == there
        assert len(reporter.warnings) == warnings
    program.goes_on()
