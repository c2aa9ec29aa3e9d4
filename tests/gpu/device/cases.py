"""The cases: a program each, and what is done to it; the order is that of importance."""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .commands import Answer, Failed, Home
from .records import PAUSE, Program, Session, Twin, Wait, facts, lines

Check = Callable[["Run"], None]
KEPT = ("elapsed_ms", "frozen_ms", "total_ms", "gpu", "timings", "bytes", "warnings", "tracking")
TRACER = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(0x4206, int(sys.argv[1]), None, None):  # PTRACE_SEIZE, which does not stop it
    sys.exit(f"ptrace: errno {ctypes.get_errno()}")
time.sleep(600)
"""
START = 60.0  # seconds for the first steps, imports included
COMPILING = 100.0
CACHED_MIB = 1024
KILLED_AT = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # parts of the time that a snapshot takes


@dataclass
class Run:
    """One case while it runs, and what came of it."""

    home: Home
    cycles: int
    host_pids: bool
    program: Program
    operations: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def keep(self, answer: Answer) -> Answer:
        """Record the parts of a dump's, snapshot's or restore's answer that the report shows."""
        kept = {key: answer.json[key] for key in KEPT if key in answer.json}
        if "list" in answer.json:  # snapshot answers with one object per session
            kept = {
                key: answer.json["list"][0][key] for key in KEPT if key in answer.json["list"][0]
            }
        kept |= {"command": answer.words[0], "exit_code": answer.code}
        self.operations.append(kept | {"seconds": round(answer.seconds, 3)})
        return answer

    def session(self) -> Session:
        """The program, started and at work."""
        session = Session(self.home, self.program, "gpu", host_pids=self.host_pids)
        session.go_on(3, START)
        return session

    def snapshot(self, session: Session) -> Answer:
        """A checkpoint; the program runs on."""
        return self.keep(self.home.must("snapshot", session.name))

    def dump(self, session: Session) -> Answer:
        """A checkpoint; the program ends."""
        return self.keep(self.home.must("dump", session.name))

    def restore(self, session: Session, *more: str) -> Answer:
        """Bring the newest checkpoint back."""
        return self.keep(self.home.must("restore", session.name, "--detach", *more))


@dataclass(frozen=True)
class Case:
    """A case by name."""

    name: str
    about: str
    program: Program
    check: Check
    cycles: int = 3
    host_pids: bool = False
    device: bool = True  # needs a device
    modules: tuple[str, ...] = ()  # that the programs' Python must have
    timeout: float = 100.0


def cycle(run: Run) -> None:
    """Dump and restore, again and again, with a snapshot before each; then compare with the
    undisturbed twin.
    """
    twin = Twin(run.home, run.program)
    try:
        if run.program.environment:  # they share compiled kernels: the twin makes them
            twin.reach(5, COMPILING)
        session = run.session()
        for _ in range(run.cycles):
            run.snapshot(session)
            session.go_on(2)
            run.dump(session)
            run.restore(session)
            session.go_on(3)
        session.stop()
        run.notes["steps_equal"] = twin.compare(session)
    finally:
        twin.stop()


def lazily(run: Run) -> None:
    """Restored lazily, after a dump in rounds."""
    twin = Twin(run.home, run.program)
    try:
        session = run.session()
        for _ in range(run.cycles):
            run.keep(run.home.must("dump", session.name, "--pre-copy"))
            run.restore(session, "--lazy")
            session.go_on(3)
        session.stop()
        run.notes["steps_equal"] = twin.compare(session)
    finally:
        twin.stop()


def killed(run: Run) -> None:
    """criuctl is killed at many moments of a snapshot: the program goes on each time, with its
    device.
    """
    twin = Twin(run.home, run.program)
    try:
        session = run.session()
        whole = run.snapshot(session).seconds
        for part in KILLED_AT:
            command = run.home.start("snapshot", session.name)
            time.sleep(whole * part)
            command.kill()
            command.wait()
            session.go_on(3)
        run.notes["killed"] = len(KILLED_AT)
        run.dump(session)
        run.restore(session)
        session.go_on(3)
        session.stop()
        run.notes["steps_equal"] = twin.compare(session)
    finally:
        twin.stop()


def plain(run: Run) -> None:
    """Dump and restore a program that has no undisturbed twin: its steps must only go on."""
    session = run.session()
    for _ in range(run.cycles):
        run.snapshot(session)
        session.go_on(2)
        run.dump(session)
        run.restore(session)
        session.go_on(3)
    session.stop()
    numbers = [line[0] for line in lines(session.folder)]
    if numbers != list(range(len(numbers))):
        raise Failed("steps are missing or were done twice")


def used_by_others(run: Run) -> None:
    """Between dump and restore another program takes much of the device's memory and writes to
    it.
    """
    twin = Twin(run.home, run.program)
    try:
        session = run.session()
        run.dump(session)
        code = (
            "import torch\nfree, _ = torch.cuda.mem_get_info()\n"
            "x = torch.empty(int(free * 0.6), dtype=torch.uint8, device='cuda').fill_(165)\n"
            "torch.cuda.synchronize()\nprint(int(x[-1]))\n"
        )
        argv = [run.home.place.python, "-c", code]
        done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
        if done.stdout.strip() != "165":
            raise Failed(f"the other program failed: {done.stderr[-500:]}")
        run.restore(session)
        session.go_on(3)
        session.stop()
        run.notes["steps_equal"] = twin.compare(session)
    finally:
        twin.stop()


def copied_store(run: Run) -> None:
    """The checkpoint is restored by a host that knows only a copy of the store and its key."""
    twin = Twin(run.home, run.program)
    try:
        session = run.session()
        run.dump(session)
        other = run.home.path / "elsewhere"
        other.mkdir()
        for name in ("store", "keys"):
            if (run.home.path / name).exists():
                shutil.move(run.home.path / name, other / name)
        folders = {
            f"CRIUCTL_{key}": str(other / name)
            for key, name in (
                ("STORE", "store"),
                ("KEY_DIR", "keys"),
                ("STATE_DIR", "state"),
                ("CACHE_DIR", "cache"),
                ("RUN_DIR", "run"),
            )
        }
        run.keep(run.home.must("restore", session.name, "--detach", env=folders))
        session.go_on(3)
        session.stop()
        run.notes["steps_equal"] = twin.compare(session)
    finally:
        twin.stop()


def shown(run: Run) -> None:
    """`show` tells devices, memory and driver of a checkpoint; `check` has nothing against the
    program.
    """
    session = run.session()
    answer = run.home.must("check", session.name).json
    errors = [finding for finding in answer.get("findings", []) if finding.get("level") == "error"]
    if errors:
        raise Failed(f"check finds {errors}")
    run.snapshot(session)
    answer = run.home.must("show", session.name).json
    gpu = answer.get("gpu")
    if not gpu:
        raise Failed(f"show says nothing of a GPU; its keys are {sorted(answer)}")
    run.notes["show"] = gpu
    text = str(gpu)
    for part in ("driver", "GPU-"):
        if part not in text:
            raise Failed(f"show has no {part} in {text[:500]}")
    session.go_on(3)
    session.stop()


def unchanged(run: Run) -> None:
    """A second snapshot of a large tensor that has not changed stores little."""
    session = run.session()
    first = run.snapshot(session)
    session.go_on(2)
    second = run.snapshot(session)
    session.go_on(2)
    new = [_part(answer, "new") for answer in (first, second)]
    run.notes["new_bytes"] = new
    session.stop()
    if new[1] > new[0] / 20:
        raise Failed(f"the second snapshot stores {new[1]:,} bytes, the first {new[0]:,}")


def cache_hook(run: Run) -> None:
    """With the shipped hook, device memory that the allocator only keeps does not travel."""
    session = run.session()
    before = run.snapshot(session)
    folder = run.home.path / "hooks/pre-dump"
    folder.mkdir(mode=0o700)
    shutil.copy2(run.home.place.checkout / "hooks/examples/pre-dump/release-gpu-cache", folder)
    (folder / "release-gpu-cache").chmod(0o755)
    after = run.snapshot(session)
    session.go_on(3)
    session.stop()
    memory = [_part(answer, "memory") for answer in (before, after)]
    run.notes["memory"] = memory
    if memory[0] - memory[1] < CACHED_MIB << 19:
        raise Failed(f"with the hook {memory[1]:,} bytes travel, without it {memory[0]:,}")


def _part(answer: Answer, name: str) -> int:
    report = answer.json["list"][0] if "list" in answer.json else answer.json
    return int(report["bytes"][name])


def refused(run: Run) -> None:
    """`check` and `dump` refuse the program before anything is touched (exit 4), and it goes on."""
    session = run.session()
    checked = run.home.criuctl("check", session.name)
    dumped = run.keep(run.home.criuctl("dump", session.name))
    session.go_on(10)
    run.notes["check"] = [
        finding.get("text")
        for finding in checked.json.get("findings", [])
        if finding.get("level") == "error"
    ][:3]
    run.notes["dump"] = dumped.error()
    if dumped.code != 4:
        raise Failed(f"dump ends with {dumped.error()}, wanted exit 4")
    if not run.notes["check"]:
        raise Failed(f"check finds nothing: {checked.json}")
    session.stop()


def long_kernel(run: Run) -> None:
    """A kernel outlasts the lock's time-out: exit 12, and the program goes on."""
    session = run.session()
    wait = Wait(session, START, "no kernel was started")
    while not facts(session.folder).get("running"):
        wait.pause()
    done = int(facts(session.folder)["done"])
    short = {"CRIUCTL_GPU_LOCK_TIMEOUT": "3"}
    dumped = run.keep(run.home.criuctl("dump", session.name, timeout=80, env=short))
    run.notes["dump"] = dumped.error()
    session.go_on(10)
    wait = Wait(session, 60, "the kernel does not end")
    while int(facts(session.folder)["done"]) <= done:
        wait.pause()
    if dumped.code != 12:
        raise Failed(f"dump ends with {dumped.error()}, wanted exit 12")
    session.stop()


def debugged(run: Run) -> None:
    """A debugger is attached: refused before anything is touched, and the program goes on.

    Any process that traces the program stands for it: cuda-gdb stops the program while it is
    attached.
    """
    session = run.session()
    pid = _cuda_pid(run.home)
    debugger = subprocess.Popen([run.home.place.python, "-c", TRACER, str(pid)])
    try:
        end = time.monotonic() + 40
        while _status(pid, "TracerPid") == "0":
            if time.monotonic() > end:
                raise Failed("the debugger does not attach")
            time.sleep(PAUSE)
        session.go_on(3, 40)
        refused_now = run.keep(run.home.criuctl("dump", session.name))
        run.notes["dump"] = refused_now.error()
        session.go_on(3)
    finally:
        debugger.kill()
        debugger.wait()
    if refused_now.code != 4:
        raise Failed(f"dump ends with {refused_now.error()}, wanted exit 4")


def _status(pid: int, key: str) -> str:
    with open(f"/proc/{pid}/status") as file:
        return next(line.split()[1] for line in file if line.startswith(key + ":"))


def _cuda_pid(home: Home) -> int:
    for pid in home.processes():
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                if "/dev/nvidia" in os.readlink(f"/proc/{pid}/fd/{descriptor}"):
                    return pid
    raise Failed("no process of the program has the device open")


def conversations(run: Run) -> None:
    """Conversations whose cache lies on the device go on as one that was never interrupted."""
    port = int(run.program.arguments[0])
    session = run.session()
    prompt = "17 42 301 7 99"
    wanted = _ask(port, "reference", prompt, 60)
    got = _ask(port, "live", prompt, 10)
    for _ in range(run.cycles):
        run.snapshot(session)
        got += _ask(port, "live", "", 5)
        run.dump(session)
        run.restore(session)
        got += _ask(port, "live", "", 5)
    got += _ask(port, "live", "", 60 - len(got))
    if got != wanted:
        raise Failed(f"the conversation went on differently: {got}, wanted {wanted}")
    if _ask(port, "again", prompt, 60) != wanted:
        raise Failed("the model has changed")
    run.notes["tokens_equal"] = len(got)
    session.stop()


def _ask(port: int, name: str, prompt: str, count: int) -> list[int]:
    end = time.monotonic() + 30
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("POST", f"/{name}?{count}", prompt.encode())
            answer = connection.getresponse()
            body = answer.read()
            connection.close()
            break
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise Failed("the server does not answer") from None
            time.sleep(PAUSE)
    if answer.status != 200:
        raise Failed(f"the server answers {answer.status}")
    return [int(word) for word in body.split()]


@functools.cache
def _free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


CACHED = Program("torch_cached.py", (str(CACHED_MIB),), environment=(("GPU_CACHE_SIGNAL", "USR2"),))
COMPILE_ALONE = (("TORCHINDUCTOR_COMPILE_THREADS", "1"),)
COMPILE_POOL = (("TORCHINDUCTOR_COMPILE_THREADS", "4"),)


def _train(way: str, **more: Any) -> Program:
    return Program("torch_train.py", (way,), **more)


def _torch(name: str, about: str, program: Program, check: Check = cycle, **more: Any) -> Case:
    return Case(name, about, program, check, modules=("torch",), **more)


def cases() -> list[Case]:
    """All cases, the most important first."""
    train = Program("torch_train.py", ("eager",))
    return [
        Case("driver-api", "the driver's API alone", Program("driver_api.py"), cycle),
        _torch("torch-eager", "PyTorch, eager", train, cycles=20, host_pids=True, timeout=240),
        _torch(
            "torch-graph", "PyTorch, the step a CUDA graph", _train("graph"), cycles=20, timeout=240
        ),
        Case("jax", "JAX, jitted", Program("jax_train.py"), cycle, modules=("jax",)),
        _torch("torch-private", "PyTorch in a private PID namespace", train),
        _torch("torch-pinned", "PyTorch, pinned memory", _train("pinned")),
        _torch("torch-amp", "PyTorch, automatic mixed precision", _train("amp")),
        _torch("loader-fork", "DataLoader, forked workers", Program("torch_loader.py", ("fork",))),
        _torch("loader-spawn", "DataLoader, spawned", Program("torch_loader.py", ("spawn",))),
        _torch(
            "loader-forkserver",
            "DataLoader, fork server",
            Program("torch_loader.py", ("forkserver",)),
        ),
        Case("cupy", "CuPy", Program("cupy_steps.py"), cycle, modules=("cupy",)),
        Case(
            "managed",
            "managed memory is refused",
            Program("cupy_steps.py", ("managed",)),
            refused,
            modules=("cupy",),
        ),
        _torch(
            "several",
            "two processes on one device",
            Program("several.py", ("2",), children=("child-0", "child-1")),
        ),
        _torch("triton", "a Triton kernel", Program("triton_steps.py")),
        _torch(
            "torch-compile",
            "torch.compile",
            _train("compile", environment=COMPILE_ALONE),
            timeout=150,
        ),
        Case(
            "managed-api",
            "managed memory, by the driver's API",
            Program("driver_api.py", ("managed",)),
            refused,
        ),
        Case("open-nodes", "device files open", Program("open_device.py", ("nodes",)), plain),
        Case("open-init", "the driver started", Program("open_device.py", ("init",)), plain),
        _torch("server", "a server with its cache on the device", _server(), conversations),
        _torch(
            "long-kernel",
            "a kernel outlasts the lock's time-out",
            Program("long_kernel.py", ("15",)),
            long_kernel,
            timeout=150,
        ),
        Case("show", "what `check` and `show` tell", Program("driver_api.py"), shown),
        Case("lazy", "a dump in rounds, a lazy restore", Program("driver_api.py"), lazily),
        _torch("killed", "criuctl is killed in a snapshot", train, killed),
        _torch("cache-hook", "a hook releases cached memory", CACHED, cache_hook),
        _torch("used-by-others", "the device was used in between", train, used_by_others),
        _torch("copied-store", "a copy of the store, another host's state", train, copied_store),
        _torch("unchanged", "2 GiB unchanged", Program("tensor.py", ("2",)), unchanged),
        _torch(
            "torch-compile-pool",
            "torch.compile with compiler processes",
            _train("compile", environment=COMPILE_POOL),
            timeout=150,
        ),
        _torch("debugger", "a debugger is attached", train, debugged),
        Case("counter", "no device", Program("without_device.py"), cycle, device=False),
    ]


def _server() -> Program:
    return Program("token_server.py", (_free_port(),))
