"""The stand-in for the driver with CRIU alone: what it promises to the tests that use it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.command import Home
from support.gpu_standin import Board, Device, Driver, Programs
from support.keeper import Keeper, wait_until

from criuctl.proc import inject

pytestmark = pytest.mark.integration

MIB = 1 << 20


class Criu:
    """CRIU by hand: dump to a folder, restore from it."""

    def __init__(self, command: str, home: Home, keeper: Keeper) -> None:
        self.argv = shlex.split(command)
        self.images = home.path / "images"
        self.images.mkdir(mode=0o700)
        self.keeper = keeper
        self.env = {key: value for key, value in os.environ.items() if not key.startswith("LD_")}

    def dump(self, pid: int, *options: str) -> str:
        """Dump: "" or CRIU's error lines."""
        done = self._run(
            "dump", "-t", str(pid), "-D", str(self.images), "-o", "dump.log", "-v4", *options
        )
        if done.returncode == 0:
            wait_until(
                lambda: "--leave-running" in options or not _alive(pid),
                30,
                "what was dumped is reaped",
            )
        return "" if done.returncode == 0 else self._errors("dump.log")

    def restore(self, *options: str, lives: bool = True) -> int:
        """Restore under the keeper, who reaps it: the PID of the root.  CRIU may fail where it does
        not live.
        """
        pidfile = self.images / "pid"
        pidfile.unlink(missing_ok=True)
        argv = [
            *self.argv,
            "restore",
            "-D",
            str(self.images),
            "-o",
            "restore.log",
            "-v4",
            "-d",
            "--pidfile",
            str(pidfile),
        ]
        launched = self.keeper.spawn([*argv, *options], env=self.env)
        assert launched.wait(60) == 0 or not lives, self._errors("restore.log")
        return int(pidfile.read_text())

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*self.argv, *arguments], capture_output=True, timeout=120, check=False, env=self.env
        )

    def _errors(self, log: str) -> str:
        lines = (self.images / log).read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if "Error" in line)


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture
def criu(real_criu: str, home: Home, keeper: Keeper) -> Criu:
    """CRIU without criuctl."""
    return Criu(real_criu, home, keeper)


@contextmanager
def held(tids: Sequence[int]) -> Iterator[None]:
    """Threads that are traced and stand still."""
    for tid in tids:
        inject.seize(tid)
        inject.interrupt(tid)
        os.waitpid(tid, inject.WALL)
    yield
    for tid in tids:
        inject.let_go(tid)


TELL = """
import ctypes
nvml = ctypes.CDLL("libnvidia-ml.so.1")
count, text = ctypes.c_uint(), ctypes.create_string_buffer(96)
assert nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
class Process(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("of", ctypes.c_uint * 2)]
for index in range(count.value):
    device, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    number, processes = ctypes.c_uint(8), (Process * 8)()
    assert nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0
    states = []
    for ask in (nvml.nvmlDeviceGetUUID, nvml.nvmlDeviceGetName):
        assert ask(device, text, 96) == 0
        states.append(text.value.decode())
    assert nvml.nvmlDeviceGetMemoryInfo(device, memory) == 0
    running = nvml.nvmlDeviceGetComputeRunningProcesses_v3
    assert running(device, ctypes.byref(number), processes) == 0
    print(*states, memory[2], [process.pid for process in processes[: number.value]])
"""


def nvml(board: Board) -> list[str]:
    """What NVML says of each device: UUID, name, bytes used, PIDs."""
    argv, env = [sys.executable, "-S", "-c", TELL], {**os.environ, **board.environment()}
    return subprocess.run(
        argv, env=env, capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()


def checkpointed(driver: Driver, *pids: int) -> None:
    """Lock all, then checkpoint all."""
    for pid in pids:
        assert driver("lock", pid, 10000) == "SUCCESS"
    for pid in pids:
        assert driver("checkpoint", pid) == "SUCCESS"


def running(driver: Driver, *pids: int, pairs: tuple[str, ...] = ()) -> None:
    """Restore all, then unlock all."""
    for pid in pids:
        assert driver("restore", pid, *pairs) == "SUCCESS"
    for pid in pids:
        assert driver("unlock", pid) == "SUCCESS"


# -- with CRIU
# ------------------------------------------------------------------------------------------


def test_a_counter_is_dumped_and_comes_back_with_its_device_memory(
    gpu: Programs, driver: Driver, board: Board, criu: Criu
) -> None:
    program = gpu.start("counter", 8)
    device = board.devices[0]
    assert len(board.held(program.pid)) == 3
    assert "Can't dump file" in criu.dump(program.pid)  # its devices are in the way
    program.goes_on()
    checkpointed(driver, program.pid)
    assert (board.held(program.pid), board.used(device)) == ([], 0)
    assert criu.dump(program.pid) == ""
    before = program.count()
    again = gpu.restored(criu.restore(), program)
    assert driver.state(again.pid) == 2
    assert again.stands()
    assert again.count() == before
    running(driver, again.pid)
    again.goes_on()
    assert (len(board.held(again.pid)), board.used(device)) == (3, 8 * MIB)


def test_a_dump_that_leaves_it_running(gpu: Programs, driver: Driver, criu: Criu) -> None:
    program = gpu.start("counter", 8)
    checkpointed(driver, program.pid)
    assert criu.dump(program.pid, "--leave-running") == ""
    running(driver, program.pid)
    program.goes_on()


def test_children_of_fork_are_refused_until_they_let_go(
    gpu: Programs, driver: Driver, board: Board, criu: Criu
) -> None:
    program = gpu.start("forked")
    children = [
        int(pid)
        for pid in Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
    ]
    assert [driver.state(pid) for pid in children] == ["ERROR_NOT_INITIALIZED"] * 2
    assert driver("lock", children[0], 1000) == "ERROR_NOT_INITIALIZED"
    checkpointed(driver, program.pid)
    assert [len(board.held(pid)) for pid in children] == [3, 3]
    assert "Can't dump file" in criu.dump(program.pid)
    running(driver, program.pid)
    program.goes_on()


def test_two_contexts_in_one_tree(gpu: Programs, driver: Driver, criu: Criu) -> None:
    program = gpu.start("two")
    children = [
        int(pid)
        for pid in Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
    ]
    assert [driver.state(pid) for pid in (program.pid, *children)] == [
        "ERROR_NOT_INITIALIZED",
        0,
        0,
    ]
    checkpointed(driver, *children)
    assert criu.dump(program.pid) == ""
    again = gpu.restored(criu.restore(), program)
    running(driver, *children)
    again.goes_on()


def test_threads_that_run_before_the_device_is_back_die(
    gpu: Programs, driver: Driver, criu: Criu
) -> None:
    program = gpu.start("threads")
    checkpointed(driver, program.pid)
    assert criu.dump(program.pid) == ""
    pid = criu.restore(lives=False)
    wait_until(lambda: not _alive(pid), 30, "a thread without its device dies")


def test_threads_that_are_held_until_the_device_is_back_live(
    gpu: Programs, driver: Driver, criu: Criu
) -> None:
    program = gpu.start("threads")
    thread = driver.thread(program.pid)
    checkpointed(driver, program.pid)
    assert criu.dump(program.pid) == ""
    again = gpu.restored(criu.restore("--leave-stopped"), program)
    tids = [int(tid) for tid in os.listdir(f"/proc/{again.pid}/task")]
    with held([tid for tid in tids if tid != thread]):
        os.kill(again.pid, signal.SIGCONT)
        running(driver, again.pid)
    again.goes_on()
    assert again.said("out.0").endswith("touched 1")


def test_another_device_of_the_kind_and_another_pid(
    gpu: Programs, driver: Driver, board: Board, criu: Criu
) -> None:
    old, new, other = (
        board.devices[0],
        board.add(Device()),
        board.add(Device(name="NVIDIA H100 80GB HBM3")),
    )
    program = gpu.start("counter", prefix=("unshare", "--pid", "--fork", "setsid"))
    assert driver.state(program.pid) == 0
    checkpointed(driver, program.pid)
    assert criu.dump(program.pid) == ""
    again = gpu.restored(criu.restore(), program)
    assert driver.state(again.pid) == 2
    # not every device is named
    assert driver("restore", again.pid, f"{old.uuid}={new.uuid}") == "ERROR_INVALID_VALUE"
    rest = (f"{new.uuid}={old.uuid}", f"{other.uuid}={other.uuid}")
    # another chip
    assert driver("restore", again.pid, f"{old.uuid}={other.uuid}", *rest) == "ERROR_NOT_SUPPORTED"
    assert driver("restore", again.pid, f"{old.uuid}={'0' * 32}", *rest) == "ERROR_INVALID_VALUE"
    assert driver.state(again.pid) == 2
    running(driver, again.pid, pairs=(f"{old.uuid}={new.uuid}", *rest))
    again.goes_on()
    assert (board.used(old), board.used(new)) == (0, 4 * MIB)


# -- without CRIU
# -----------------------------------------------------------------------------------------


def test_a_lock_waits_for_kernels_or_gives_up(gpu: Programs, driver: Driver) -> None:
    program = gpu.start("kernel", 1500)
    assert driver("lock", program.pid, 100) == "ERROR_NOT_READY"
    assert driver.state(program.pid) == 0
    program.goes_on()
    assert driver("lock", program.pid, 10000) == "SUCCESS"
    assert driver("lock", program.pid, 100) == "ERROR_ILLEGAL_STATE"
    assert driver("restore", program.pid) == "ERROR_ILLEGAL_STATE"
    assert driver("unlock", program.pid) == "SUCCESS"
    program.goes_on()


@pytest.mark.parametrize("mode", ["managed", "exported"])
def test_memory_that_cannot_be_checkpointed(gpu: Programs, driver: Driver, mode: str) -> None:
    program = gpu.start(mode)
    assert driver("lock", program.pid, 1000) == "SUCCESS"
    assert driver("checkpoint", program.pid) == "ERROR_NOT_SUPPORTED"
    assert driver.state(program.pid) == 1
    assert driver("unlock", program.pid) == "SUCCESS"
    program.goes_on()


def test_a_device_that_is_full(gpu: Programs, driver: Driver, board: Board) -> None:
    board.devices[0].memory = 8 * MIB
    board.write()
    first = gpu.start("counter", 6, name="first")
    checkpointed(driver, first.pid)
    second = gpu.start("counter", 6, name="second")
    assert driver("restore", first.pid) == "ERROR_OUT_OF_MEMORY"
    assert driver.state(first.pid) == 2
    second.animal.end()
    board.sweep()
    running(driver, first.pid)
    first.goes_on()


def test_faults_leave_it_as_they_say(gpu: Programs, driver: Driver, board: Board) -> None:
    program = gpu.start("counter")
    board.faults(
        "lock fail-before", "checkpoint fail-before n=1", "restore oom", "unlock notsupported pid=1"
    )
    assert driver("lock", program.pid, 1000) == "ERROR_UNKNOWN"
    assert driver.state(program.pid) == 0
    board.faults("checkpoint fail-before n=1", "restore oom n=1", "unlock notsupported pid=1")
    assert driver("lock", program.pid, 1000) == "SUCCESS"
    assert driver("checkpoint", program.pid) == "ERROR_UNKNOWN"
    assert driver.state(program.pid) == 1
    assert driver("checkpoint", program.pid) == "SUCCESS"
    assert driver("restore", program.pid) == "ERROR_OUT_OF_MEMORY"
    assert driver.state(program.pid) == 2
    running(driver, program.pid)
    program.goes_on()
    board.faults("checkpoint half-done")
    assert driver("lock", program.pid, 1000) == "SUCCESS"
    assert driver("checkpoint", program.pid) == "ERROR_UNKNOWN"
    assert driver.state(program.pid) == 3
    launched = program.animal.launched
    assert launched is not None and launched.wait(30) == 2
    assert program.said().endswith("wrong CUDA_ERROR_UNKNOWN")


def test_a_call_that_hangs_until_the_fault_is_gone(
    gpu: Programs, driver: Driver, board: Board
) -> None:
    program = gpu.start("counter")
    board.faults("lock hang")
    hanging = Driver(board)
    hanging.send("lock", program.pid, 1000)
    wait_until(board.calls, 30, "the call is under way")
    program.goes_on()  # nothing has been done
    hanging.close()
    board.faults()
    wait_until(lambda: driver.state(program.pid) == 1, 30, "the command that was given up is done")
    assert driver("unlock", program.pid) == "SUCCESS"
    program.goes_on()
    board.faults("unlock die")
    assert driver("lock", program.pid, 1000) == "SUCCESS"
    assert driver("unlock", program.pid) == "ERROR_OPERATING_SYSTEM"
    assert not _alive(program.pid) or not program.animal.alive()


def test_drivers_too_old_and_none(
    gpu: Programs, driver: Driver, board: Board, standin: Path
) -> None:
    program = gpu.start("counter")
    board.driver = 12070
    board.write()
    assert driver("lock", program.pid, 1000) == "ERROR_NOT_SUPPORTED"
    assert driver.state(program.pid) == 0
    program.goes_on()
    assert b"cuCheckpointProcessLock" in (standin / "libcuda.so.1").read_bytes()
    assert b"cuCheckpointProcessLock" not in (standin / "old" / "libcuda.so.1").read_bytes()
    (board.folder / "board").unlink()
    nothing = Driver(board)
    assert nothing.state(program.pid) == "ERROR_NO_DEVICE"
    nothing.close()


def test_nvml_tells_devices_and_who_uses_them(gpu: Programs, board: Board) -> None:
    device = board.devices[0]
    program = gpu.start("counter", 8)
    gpu.start("initialised")
    assert nvml(board) == [f"{device.label} NVIDIA H200 {8 * MIB} [{program.pid}]"]
