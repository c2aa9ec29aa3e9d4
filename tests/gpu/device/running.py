"""Run cases side by side, each with a limit of its own and all of them within one."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .cases import Case, Run, cases
from .commands import Failed, Home
from .place import Place
from .report import Report

WORK = Path("/dev/shm")
GRACE = 45.0  # seconds after the limit for a case to clean up
MODULES = ("torch", "jax", "cupy")


def available(place: Place) -> set[str]:
    """Which GPU libraries the programs' Python has."""
    code = f"import importlib.util as u; print(*[m for m in {MODULES} if u.find_spec(m)])"
    done = subprocess.run([place.python, "-c", code], check=False, capture_output=True, text=True)
    return set(done.stdout.split())


def chosen(names: Sequence[str], *, gpu: bool) -> list[Case]:
    """The cases of these names, or all; without a device, those that can do without."""
    known = {case.name: case for case in cases()}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"error: no case {unknown[0]}; there are: {' '.join(known)}")
    if names:
        return [known[name] for name in names]
    return [case for case in known.values() if gpu or not case.device]


def run_cases(
    place: Place,
    report: Report,
    some: Sequence[Case],
    *,
    jobs: int,
    cycles: int | None,
    limit: float,
) -> int:
    """Run them; return how many failed."""
    have = available(place)
    end = time.monotonic() + limit
    lock = threading.Lock()
    order = {case.name: number for number, case in enumerate(cases())}
    failed = 0

    def one(case: Case) -> None:
        nonlocal failed
        result: dict[str, Any] = {"name": case.name, "about": case.about}
        result["order"] = order[case.name]
        missing = [module for module in case.modules if module not in have]
        log = ""
        if missing:
            result |= {"result": "not run", "message": f"{missing[0]} is not installed"}
        elif time.monotonic() > end - 20:
            result |= {"result": "not run", "message": "no time was left"}
        else:
            most = min(case.timeout, end - time.monotonic())
            outcome, log = _run(place, case, cycles or case.cycles, most)
            result |= outcome
        with lock:
            failed += result["result"] == "failed"
            report.add(result, log)
            line = f"{result['result']:8}{case.name:20}{result.get('seconds', ''):>7}"
            print(f"{line}  {str(result.get('message', '')).partition(chr(10))[0]}", flush=True)

    watchdog = threading.Timer(limit + GRACE, _give_up, [limit])
    watchdog.daemon = True
    watchdog.start()
    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(one, case) for case in some]:
            future.result()
    watchdog.cancel()
    return failed


def _give_up(limit: float) -> None:
    print(f"error: a case does not end {GRACE:.0f} s after the limit of {limit:.0f} s", flush=True)
    os._exit(1)


def _run(place: Place, case: Case, cycles: int, limit: float) -> tuple[dict[str, Any], str]:
    token = secrets.token_hex(8)
    home = Home(WORK / f"criuctl-gpu-{case.name}-{token}", place, token)
    home.path.mkdir(mode=0o700)
    for name in ("run", "state", "cache", "hooks"):
        (home.path / name).mkdir(mode=0o700)
    (home.path / "keys").mkdir(mode=0o700)
    run = Run(home, cycles, case.host_pids, case.program)
    begun = time.monotonic()
    expired = threading.Event()

    def stop() -> None:
        # Whatever the case waits for ends when its processes do; it fails then.
        expired.set()
        for pid in home.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(limit, stop)
    timer.start()
    message, log = "", ""
    try:
        case.check(run)
    except Exception as error:
        message = str(error) if isinstance(error, Failed) else traceback.format_exc()
        if expired.is_set():
            message = f"more than {limit:.0f} s; then: {message}"
        log = _log(home)
    finally:
        timer.cancel()
        timer.join()
        with contextlib.suppress(Exception):
            home.criuctl("kill", "gpu", timeout=15)
        home.clear()
    return {
        "result": "failed" if message else "ok",
        "message": message,
        "cycles": cycles,
        "seconds": round(time.monotonic() - begun, 1),
        "operations": run.operations,
        "notes": run.notes,
    }, log


def _log(home: Home) -> str:
    parts = ["\n".join(home.logs[-8:])]
    for name in ("program/output", "twin/output"):
        with contextlib.suppress(OSError):
            parts.append(f"--- {name}\n{(home.path / name).read_text(errors='replace')[-3000:]}")
    for log in sorted((home.path / "state/logs").glob("*.log"))[-2:]:
        said = log.read_text(errors="replace").splitlines()
        errors = [line for line in said if "Error" in line or "Warn" in line][:15]
        parts.append(f"--- {log.name}\n" + "\n".join([*errors, "...", *said[-40:]]))
    kernel = subprocess.run(["dmesg"], check=False, capture_output=True, text=True)
    said = [
        line for line in kernel.stdout.splitlines() if any(w in line for w in ("NVRM", "segfault"))
    ]
    parts.append("--- kernel\n" + "\n".join(said[-10:]))
    for pid in home.processes()[:40]:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:150]
            state = [
                line
                for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                if line.startswith(("State", "PPid", "Threads", "TracerPid"))
            ]
            parts.append(f"{pid} {command} {state}")
    return "\n".join(parts)


def free_memory() -> None:
    """Refuse where tmpfs has too little room for the cases."""
    room = shutil.disk_usage(WORK).free
    if room < 4 << 30:
        print(f"warning: {WORK} has {room >> 20} MiB only", file=sys.stderr)
