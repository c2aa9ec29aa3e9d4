"""A stand-in for NVIDIA's driver and devices: builds it, describes the board, starts programs that
use it.

`Board` is one test's set of devices.  Everything that is to see it, a program and criuctl alike,
runs with `Board.environment`.  What can go wrong and how is described in
``tests/gpu/standin/README.md``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from .command import Criuctl, Home
from .keeper import wait_until
from .zoo import Animal, Zoo

GPU = Path(__file__).parent.parent / "gpu"
STANDIN = GPU / "standin"
PROGRAM = "device_program"
OUTPUTS = ("out", "out.0", "out.1")
COMPILER = ("cc", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread")
# fuse, autofs, loop-control: to open one does nothing, and CRIU refuses its descriptors as it does
# a real device's.
HARMLESS = (os.makedev(10, 229), os.makedev(10, 235), os.makedev(10, 237))
ZERO = os.makedev(1, 5)


def build(folder: Path) -> Path:
    """Compile libcuda.so.1, libnvidia-ml.so.1 and the programs into `folder`; ``old`` has a driver
    before 570.
    """

    def library(name: str, into: Path, *sources: str) -> None:
        into.mkdir(exist_ok=True)
        shared = (
            "-shared",
            "-fPIC",
            "-Wl,-Bsymbolic",
            f"-Wl,-soname,{name}",
            "-o",
            str(into / name),
        )
        paths = [str(STANDIN / source) for source in sources]
        subprocess.run([*COMPILER, *shared, *paths], check=True, timeout=120)

    for into, more in ((folder, ["checkpoint.c"]), (folder / "old", [])):
        library("libcuda.so.1", into, "cuda.c", "board.c", *more)
        library("libnvidia-ml.so.1", into, "nvml.c", "board.c")
    source = str(GPU / "programs" / f"{PROGRAM}.c")
    link = ["-o", str(folder / PROGRAM), source, f"-L{folder}", "-l:libcuda.so.1"]
    subprocess.run([*COMPILER, *link], check=True, timeout=120)
    return folder


@dataclass
class Device:
    """One device of a board; changing it and `Board.write` change what the driver says."""

    name: str = "NVIDIA H200"
    capability: str = "9.0"
    memory: int = 1 << 30
    mig: bool = False
    uuid: str = field(default_factory=lambda: secrets.token_hex(16))
    node: str = ""

    @property
    def label(self) -> str:
        """The UUID as NVML and nvidia-smi write it."""
        u = self.uuid
        return f"GPU-{u[:8]}-{u[8:12]}-{u[12:16]}-{u[16:20]}-{u[20:]}"


class Board:
    """The driver and the devices of one test, and the nodes in /dev that play them."""

    def __init__(self, folder: Path, built: Path, devices: Sequence[Device] = ()) -> None:
        self.folder = folder
        self.built = built
        self.driver = 13000
        self.release = "580.159.03"
        self.devices: list[Device] = []
        self.nodes: list[Path] = []
        self._added = 0
        self._locks: list[int] = []
        folder.mkdir()
        # the library finds the board next to where it was found
        (folder / "driver").symlink_to(built)
        (folder / "old").symlink_to(built / "old")
        self.number = self._free_number()
        self.control = self._node(f"nvidiactl{self.number}")
        self.memory = self._shared("nvidia-uvm") or self._node(f"nvidia-uvm{self.number}", ZERO)
        for device in devices or [Device()]:
            self.add(device)

    def environment(self, *, old: bool = False) -> dict[str, str]:
        """What a process needs in order to use this board; with `old`, by a driver without
        checkpoints.
        """
        return {"LD_LIBRARY_PATH": str(self.folder / ("old" if old else "driver"))}

    def add(self, device: Device) -> Device:
        """Put one more device on the board."""
        self._added += 1
        device.node = self._node(f"nvidia{self.number + self._added}", HARMLESS[self._added % 3])
        self.devices.append(device)
        self.write()
        return device

    def remove(self, device: Device) -> None:
        """Take a device off the board; its node stays."""
        self.devices.remove(device)
        self.write()

    def write(self) -> None:
        """Have the driver see driver version and devices as they are now."""
        lines = [
            f"driver {self.driver} {self.release}",
            f"control {self.control}",
            f"memory {self.memory}",
        ]
        for d in self.devices:
            (self.folder / d.uuid).mkdir(exist_ok=True)
            lines.append(
                f"device {d.uuid} {d.capability} {d.memory} {int(d.mig)} {d.node} {d.name}"
            )
        self._replace("board", lines)

    def faults(self, *lines: str) -> None:
        """Have calls go wrong from now on; without lines, none does: a call that hangs goes on."""
        self._replace("faults", lines)

    def calls(self) -> list[tuple[str, int]]:
        """Verb and PID, as the process sees it, of each call in the right state that was begun so
        far.
        """
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(line.split()[0], int(line.split()[1])) for line in lines]

    def used(self, device: Device) -> int:
        """Bytes of all buffers on a device."""
        return sum(path.stat().st_size for path in (self.folder / device.uuid).iterdir())

    def sweep(self) -> None:
        """Forget buffers whose process was killed, as a device does."""
        for device in self.devices:
            for path in (self.folder / device.uuid).iterdir():
                path.unlink()

    def held(self, pid: int) -> list[str]:
        """Nodes of this board that a process has open or mapped."""
        nodes = {self.memory, *map(str, self.nodes)}
        found = []
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(f"/proc/{pid}/fd/{entry}"))
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        found += [line.split(maxsplit=5)[5] for line in maps if line.count("/")]
        return sorted(nodes.intersection(found))

    def close(self) -> None:
        """Remove the nodes and all buffers."""
        for node in self.nodes:
            node.unlink()
        for fd in self._locks:
            self._release(fd)
        shutil.rmtree(self.folder)

    def _replace(self, name: str, lines: Sequence[str]) -> None:
        new = self.folder / f"{name}.new"
        new.write_text("".join(f"{line}\n" for line in lines))
        new.rename(self.folder / name)

    def _free_number(self) -> int:
        """Claim a range of ten device numbers that no other board has."""
        for number in range(900, 1000, 10):
            if self._shared(f"nvidia-cap{number}", fcntl.LOCK_EX):
                return number
        raise RuntimeError("there are too many boards in /dev: look for /dev/nvidia-cap9*")

    def _node(self, name: str, device: int = HARMLESS[0]) -> str:
        """Make a node of this board's own; a test that was killed may have left it."""
        path = Path("/dev") / name
        path.unlink(missing_ok=True)
        os.mknod(path, stat.S_IFCHR | 0o600, device)
        self.nodes.append(path)
        return str(path)

    def _shared(self, name: str, how: int = fcntl.LOCK_SH) -> str:
        """Make or use a node that boards share by locks on it, and the last removes; "" if it is
        not to be had.
        """
        path = Path("/dev") / name
        while True:
            with contextlib.suppress(FileExistsError):
                os.mknod(path, stat.S_IFCHR | 0o600, ZERO)
            if path.lstat().st_rdev != ZERO:
                return ""  # a real one
            try:
                fd = os.open(path, os.O_RDWR)
                self._locks.append(fd)
                fcntl.flock(fd, how | fcntl.LOCK_NB)
                if path.lstat().st_ino == os.fstat(fd).st_ino:
                    return str(path)
            except BlockingIOError:
                if how == fcntl.LOCK_EX:
                    os.close(self._locks.pop())
                    return ""
            except FileNotFoundError:
                pass  # its last user has just removed it
            os.close(self._locks.pop())

    @staticmethod
    def _release(fd: int) -> None:
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(os.readlink(f"/proc/self/fd/{fd}"))
        os.close(fd)


class Driver:
    """Calls of the driver on other processes, by a process of its own that has initialised it
    once.
    """

    def __init__(self, board: Board) -> None:
        self._process = subprocess.Popen(
            [board.built / PROGRAM, "controller"],
            env={**os.environ, **board.environment()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __call__(self, verb: str, pid: int, *arguments: object) -> str:
        """Make a call (lock, checkpoint, restore, unlock): the name of its result, without
        CUDA_.
        """
        return self._ask(verb, pid, *arguments)[0]

    def send(self, verb: str, pid: int, *arguments: object) -> None:
        """Make a call, and do not wait for its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, (verb, pid, *arguments))) + "\n")
        self._process.stdin.flush()

    def state(self, pid: int) -> int | str:
        """0 running, 1 locked, 2 checkpointed, 3 failed; or the name of an error."""
        name, value = self._ask("state", pid)
        return value if name == "SUCCESS" else name

    def thread(self, pid: int) -> int:
        """The TID of the restore thread."""
        name, value = self._ask("thread", pid)
        assert name == "SUCCESS", name
        return value

    def close(self) -> None:
        """End it, also when a call hangs."""
        self._process.kill()
        self._process.communicate()

    def _ask(self, verb: str, pid: int, *arguments: object) -> tuple[str, int]:
        self.send(verb, pid, *arguments)
        assert self._process.stdout is not None
        said = self._process.stdout.readline().split()
        assert said, f"the controller ended at {verb} {pid}"
        return said[1].removeprefix("CUDA_"), int(said[2])


class DeviceProgram:
    """A running program of ``tests/gpu/programs``, original or restored."""

    def __init__(self, animal: Animal) -> None:
        self.animal = animal
        self.folder = animal.folder

    @property
    def pid(self) -> int:
        """Of its root, as this host sees it."""
        return self.animal.pid

    def said(self, name: str = "out") -> str:
        """Its last line: COUNT ok, or COUNT wrong WHAT."""
        return (self.folder / name).read_text().strip()

    def count(self, name: str = "out") -> int:
        """How far it has counted; AssertionError when a value was wrong."""
        number, verdict, *_ = self.said(name).split()
        assert verdict == "ok", self.said(name)
        return int(number)

    def outputs(self) -> list[str]:
        """Names of its outputs: of the root, then of children or threads."""
        return [name for name in OUTPUTS if (self.folder / name).exists()]

    def goes_on(self, timeout: float = 60) -> None:
        """Wait until each part has counted on twice: right values, nothing held."""
        before = {name: self.count(name) for name in self.outputs()}
        wait_until(
            lambda: all(self.count(n) > before[n] + 1 for n in before),
            timeout,
            f"{self.animal!r} goes on",
        )

    def stands(self, seconds: float = 0.3) -> bool:
        """Whether the root makes no progress for a while: it is blocked, frozen or gone."""
        before = self.said()
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: self.said() != before, seconds, "")
            return False
        return True


class Programs:
    """Starts programs on a board."""

    def __init__(self, zoo: Zoo, board: Board) -> None:
        self.zoo = zoo
        self.board = board

    def start(
        self, mode: str, argument: object = 4, *, name: str = "", prefix: Sequence[str] = ()
    ) -> DeviceProgram:
        """Start one and wait until it counts; `prefix` is put before the command."""
        folder = self.zoo.home / (name or f"device-{mode}")
        animal = self.zoo.launch(
            [str(self.board.built / PROGRAM), mode, str(folder), str(argument)],
            name=folder.name,
            prefix=prefix,
            env=self.board.environment(),
            quiet=False,
        )
        launched = animal.launched
        assert launched is not None
        program = DeviceProgram(animal)

        def counts() -> bool:
            assert launched.poll() is None, f"{mode} ended: {program.said()} {animal.output()}"
            return (folder / "ready").exists() and all(map(program.said, program.outputs()))

        wait_until(counts, 60, f"{mode} counts")
        if prefix:  # the process that said ready is the root of the tree
            inner = int((folder / "ready").read_text())
            program = self.restored(self.zoo.host_pid(launched.pid, inner), program)
        return program

    def living(self, program: DeviceProgram) -> list[int]:
        """Processes of this program and folder, original or restored."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if str(program.folder).encode() in Path(f"/proc/{name}/cmdline").read_bytes().split(
                    b"\0"
                ):
                    found.append(int(name))
        return found

    def restored(self, pid: int, original: DeviceProgram) -> DeviceProgram:
        """Take over what a restore made."""
        return DeviceProgram(self.zoo.adopt(pid, original.animal))


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the stand-in's libraries and programs."""
    return build(tmp_path_factory.mktemp("gpu"))


@pytest.fixture
def board(home: Home, standin: Path) -> Iterator[Board]:
    """A board with one device; `Board.add` adds more."""
    board = Board(home.path / "board", standin)
    yield board
    board.faults()  # what hangs goes on, and can be ended
    board.close()


@pytest.fixture
def gpu(board: Board, zoo: Zoo) -> Programs:
    """Starts programs that use the board."""
    return Programs(zoo, board)


@pytest.fixture
def driver(board: Board) -> Iterator[Driver]:
    """The driver's calls on other processes."""
    driver = Driver(board)
    yield driver
    driver.close()


@pytest.fixture
def gpu_criuctl(criuctl: Criuctl, board: Board) -> Criuctl:
    """criuctl that finds the stand-in as its driver."""
    criuctl.extra.update(board.environment())
    return criuctl
