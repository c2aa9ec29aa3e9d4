"""The program that makes the calls of NVIDIA's driver: ``helper.py FD``.

Standard library only. Requests come as lines of JSON over the socket FD and are answered in the
order in which they end, each in a separate thread: a call on one process takes as long as its
device memory is large, and calls on several processes run in parallel.

    {"id": 1, "call": "lock", "pid": 4711, "timeout_ms": 10000}
    {"id": 1, "result": 0, "name": "CUDA_SUCCESS", "ms": 0.4}

Calls: hello, devices, use, state, thread, lock, checkpoint, restore, unlock, keep. `keep` says that
the named processes must not be given back any more: they were ended, or run.

**When the socket closes, every process that was locked or checkpointed here is restored and
unlocked**, so that a criuctl that is killed leaves no process without its device. A process that
CRIU still holds is waited for: the driver's call returns when it runs.
"""

import ctypes
import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable

RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
NOT_FOUND = -1  # the driver does not exist, or lacks the call
LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_CALLS = {
    "state": "cuCheckpointProcessGetState",
    "thread": "cuCheckpointProcessGetRestoreThreadId",
    "lock": "cuCheckpointProcessLock",
    "checkpoint": "cuCheckpointProcessCheckpoint",
    "restore": "cuCheckpointProcessRestore",
    "unlock": "cuCheckpointProcessUnlock",
}
_RETRY = 0.2  # seconds between two attempts to give a process back
_PATIENCE = 600.0  # seconds that a process may take to take its device back


class _Uuid(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 16)]


class _Pair(ctypes.Structure):
    """CUcheckpointGpuPair."""

    _fields_ = [("old", _Uuid), ("new", _Uuid)]


class _Lock(ctypes.Structure):
    """CUcheckpointLockArgs."""

    _fields_ = [
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    ]


class _Restore(ctypes.Structure):
    """CUcheckpointRestoreArgs."""

    _fields_ = [
        ("pairs", ctypes.POINTER(_Pair)),
        ("count", ctypes.c_uint),
        ("reserved", ctypes.c_char * (52 - ctypes.sizeof(ctypes.c_void_p))),
        ("reserved1", ctypes.c_uint64),
    ]


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Running(ctypes.Structure):
    """nvmlProcessInfo_t, as in nvmlDeviceGetComputeRunningProcesses_v3."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Driver:
    """The driver's library, initialised once; `error` says why it is not available."""

    def __init__(self) -> None:
        self.error = ""
        self.version = 0
        try:
            self._cuda = ctypes.CDLL(LIBRARIES[0])
        except OSError as error:
            self.error = str(error)
            return
        result = self._cuda.cuInit(0)
        if result:
            self.error = f"cuInit: {self.name(result)}"
            return
        number = ctypes.c_int()
        self._cuda.cuDriverGetVersion(ctypes.byref(number))
        self.version = number.value

    def name(self, result: int) -> str:
        """Return the driver's name of a result."""
        if result == NOT_FOUND:
            return "not found"
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorName(result, ctypes.byref(text))
        return (text.value or b"unknown").decode()

    def call(self, what: str, pid: int, pairs: list[list[str]], timeout_ms: int) -> tuple[int, int]:
        """Make one call on one process; return its result, and its number (-1 for none)."""
        function = getattr(self._cuda, _CALLS[what], None)
        if function is None:
            return NOT_FOUND, -1
        number = ctypes.c_int(-1)
        if what in ("state", "thread"):
            return function(pid, ctypes.byref(number)), number.value
        if what == "lock":
            return function(pid, ctypes.byref(_Lock(timeout_ms=timeout_ms))), -1
        if what == "restore" and pairs:
            made = (_Pair * len(pairs))()
            for one, (old, new) in zip(made, pairs, strict=True):
                one.old.bytes[:] = _uuid_bytes(old)
                one.new.bytes[:] = _uuid_bytes(new)
            return function(pid, ctypes.byref(_Restore(pairs=made, count=len(pairs)))), -1
        return function(pid, None), -1

    def devices(self) -> list[dict[str, object]]:
        """Return every device of this host."""
        count = ctypes.c_int()
        self._cuda.cuDeviceGetCount(ctypes.byref(count))
        found: list[dict[str, object]] = []
        for index in range(count.value):
            device = ctypes.c_int()
            self._cuda.cuDeviceGet(ctypes.byref(device), index)
            uuid, name = _Uuid(), ctypes.create_string_buffer(128)
            get_uuid = getattr(self._cuda, "cuDeviceGetUuid_v2", None) or self._cuda.cuDeviceGetUuid
            get_uuid(ctypes.byref(uuid), device)
            self._cuda.cuDeviceGetName(name, len(name), device)
            memory = ctypes.c_size_t()
            self._cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
            major, minor = (self._attribute(which, device) for which in _CAPABILITY)
            found.append(
                {
                    "uuid": _uuid_text(bytes(uuid.bytes)),
                    "name": name.value.decode(errors="replace"),
                    "memory": memory.value,
                    "capability": f"{major}.{minor}",
                }
            )
        return found

    def _attribute(self, which: int, device: ctypes.c_int) -> int:
        number = ctypes.c_int()
        self._cuda.cuDeviceGetAttribute(ctypes.byref(number), which, device)
        return number.value


class Management:
    """NVML: what the driver knows about all processes. Without it, the answers are empty."""

    def __init__(self) -> None:
        self._nvml: ctypes.CDLL | None = None
        try:
            nvml = ctypes.CDLL(LIBRARIES[1])
            self._nvml = nvml if nvml.nvmlInit_v2() == 0 else None
        except (OSError, AttributeError):
            pass

    def driver_version(self) -> str:
        """Return the driver's version as nvidia-smi shows it: "580.159.04"."""
        text = ctypes.create_string_buffer(96)
        if self._nvml is None or self._nvml.nvmlSystemGetDriverVersion(text, len(text)):
            return ""
        return text.value.decode(errors="replace")

    def use(self) -> list[dict[str, object]]:
        """Return each device: UUID, free bytes, whether MIG is on, and processes with their
        bytes.
        """
        if self._nvml is None:
            return []
        count = ctypes.c_uint()
        if self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        return [self._device(index) for index in range(count.value)]

    def _device(self, index: int) -> dict[str, object]:
        assert self._nvml is not None
        handle = ctypes.c_void_p()
        self._nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        uuid, memory = ctypes.create_string_buffer(96), _Memory()
        self._nvml.nvmlDeviceGetUUID(handle, uuid, len(uuid))
        self._nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        mode, pending = ctypes.c_uint(), ctypes.c_uint()
        refused = self._nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(mode), ctypes.byref(pending))
        return {
            "uuid": uuid.value.decode(errors="replace"),
            "free": memory.free,
            "mig": not refused and mode.value == 1,
            "processes": self._processes(handle, "nvmlDeviceGetComputeRunningProcesses_v3"),
            "mps": self._processes(handle, "nvmlDeviceGetMPSComputeRunningProcesses_v3"),
        }

    def _processes(self, handle: ctypes.c_void_p, name: str) -> dict[int, int]:
        function = getattr(self._nvml, name, None)
        running, count = (_Running * 1024)(), ctypes.c_uint(1024)
        if function is None or function(handle, ctypes.byref(count), running):
            return {}
        unknown = (1 << 64) - 1
        return {p.pid: 0 if p.used == unknown else p.used for p in running[: count.value]}


def _started(function: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def _uuid_bytes(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix("GPU-").replace("-", ""))


def _uuid_text(raw: bytes) -> str:
    digits = raw.hex()
    parts = digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]
    return "GPU-" + "-".join(parts)


class Server:
    """Serves one criuctl; remembers which processes it must give back."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._driver = Driver()
        self._management = Management()
        self._taken: dict[int, int] = {}  # PID -> its pidfd

    def run(self) -> None:
        """Serve until the socket closes, then give back what is left."""
        calls: list[threading.Thread] = []
        for line in self._sock.makefile("rb"):
            calls = [thread for thread in calls if thread.is_alive()]
            calls.append(_started(self._serve, json.loads(line)))
        until = time.monotonic() + _PATIENCE
        for thread in calls:  # a running call may still take a device
            thread.join(max(0.0, until - time.monotonic()))
        for thread in [_started(self._give_back, *item) for item in list(self._taken.items())]:
            thread.join(max(0.0, until - time.monotonic()))

    def _serve(self, request: dict[str, object]) -> None:
        began = time.monotonic()
        what, pid = str(request["call"]), int(str(request.get("pid", 0)))
        answer: dict[str, object] = {"id": request["id"], "result": 0}
        if what == "hello":
            answer |= {"error": self._driver.error, "api": self._driver.version}
            answer |= {"driver": self._management.driver_version()}
        elif what == "devices":
            answer["devices"] = [] if self._driver.error else self._driver.devices()
        elif what == "use":
            answer["use"] = self._management.use()
        elif what == "keep":
            for one in request["pids"]:  # type: ignore[attr-defined]
                self._forget(int(one))
        else:
            if what == "lock":
                self._remember(pid)
            pairs, timeout = request.get("pairs") or [], int(str(request.get("timeout_ms", 0)))
            result, number = self._driver.call(what, pid, pairs, timeout)  # type: ignore[arg-type]
            answer |= {"result": result, "number": number, "name": self._driver.name(result)}
            if (what == "unlock" and not result) or (what == "lock" and result):
                self._forget(pid)
        answer["ms"] = round((time.monotonic() - began) * 1000, 1)
        with self._sending:
            try:
                self._sock.sendall(json.dumps(answer).encode() + b"\n")
            except OSError:
                pass  # the caller is gone: `run` notices that too

    def _remember(self, pid: int) -> None:
        try:
            self._taken[pid] = os.pidfd_open(pid)
        except OSError:
            pass  # it has ended: the driver will report it

    def _forget(self, pid: int) -> None:
        if (pidfd := self._taken.pop(pid, None)) is not None:
            os.close(pidfd)

    def _give_back(self, pid: int, pidfd: int) -> None:
        deadline = time.monotonic() + _PATIENCE
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        while time.monotonic() < deadline and not ended.poll(_RETRY * 1000):
            _, state = self._driver.call("state", pid, [], 0)
            if state == CHECKPOINTED:
                self._driver.call("restore", pid, [], 0)
            elif state == LOCKED:
                self._driver.call("unlock", pid, [], 0)
            else:
                return


if __name__ == "__main__":
    Server(socket.socket(fileno=int(sys.argv[1]))).run()
    # skip the driver's own clean-up, which may wait for a stopped process
    os._exit(0)
