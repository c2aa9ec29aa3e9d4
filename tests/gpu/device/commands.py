"""criuctl as a user runs it, with folders of one case's own; and what a case may ask of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .place import Place

TAIL = 4000
DROPPED = ("CRIUCTL_", "PYTHONPATH", "AWS_")


class Failed(Exception):
    """A case failed; the text says in what."""


@dataclass
class Answer:
    """One command: its exit code, JSON, standard error and seconds."""

    words: tuple[str, ...]
    code: int
    json: dict[str, Any]
    stderr: str
    seconds: float

    def error(self) -> str:
        """What it said was wrong, on one line."""
        error = self.json.get("error") or {}
        text = str(error.get("message") or self.stderr.strip().rpartition("\n")[2])
        hint = f" ({error['hint']})" if error.get("hint") else ""
        return f"exit {self.code}: {text}{hint}"


@dataclass
class Home:
    """The folders of one case, on tmpfs; `token` marks every process that belongs to it."""

    path: Path
    place: Place
    token: str
    logs: list[str] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        """The caller's environment without its own criuctl settings, and this case's folders."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(DROPPED)}
        device = os.environ.get("CRIUCTL_GPU_DEVICE")
        return env | {
            "GPU_TEST_TOKEN": self.token,
            "CRIUCTL_STORE": str(self.path / "store"),
            "CRIUCTL_STATE_DIR": str(self.path / "state"),
            "CRIUCTL_CACHE_DIR": str(self.path / "cache"),
            "CRIUCTL_KEY_DIR": str(self.path / "keys"),
            "CRIUCTL_RUN_DIR": str(self.path / "run"),
            "CRIUCTL_HOOK_DIRS": str(self.path / "hooks"),
            "CRIUCTL_EVENTS": "none",
            "TORCHINDUCTOR_CACHE_DIR": str(self.path / "inductor"),
            "TRITON_CACHE_DIR": str(self.path / "triton"),
            "CUPY_CACHE_DIR": str(self.path / "cupy"),
            "PYTHONUNBUFFERED": "1",
            **({"CRIUCTL_GPU_DEVICE": device} if device else {}),
        }

    def criuctl(
        self, *words: str | Path, timeout: float = 90, env: dict[str, str] | None = None
    ) -> Answer:
        """Run a command to its end, whatever its exit code is."""
        argv = [*self.place.criuctl, "-v", *map(str, words)]
        if "--" in argv:
            argv.insert(argv.index("--"), "--json")
        else:
            argv.append("--json")
        begun = time.monotonic()
        process = subprocess.Popen(
            argv,
            env=self.environment() | (env or {}),
            cwd=self.path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            err = b""
            with contextlib.suppress(subprocess.TimeoutExpired):  # a call of the driver may not end
                _out, err = process.communicate(timeout=5)
            self._log(words, "no end", b"", err)
            raise Failed(f"criuctl {words[0]} did not end in {timeout:.0f} s") from None
        try:
            parsed = json.loads(out)
        except ValueError:
            parsed = {}
        if isinstance(parsed, list):
            parsed = {"list": parsed}
        self._log(words, str(process.returncode), out, err)
        plain = tuple(map(str, words))
        text = err.decode(errors="replace")
        return Answer(plain, process.returncode, parsed, text, time.monotonic() - begun)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """A command that the case ends itself."""
        return subprocess.Popen(
            [*self.place.criuctl, *words],
            env=self.environment(),
            cwd=self.path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def must(
        self, *words: str | Path, timeout: float = 90, env: dict[str, str] | None = None
    ) -> Answer:
        """Run a command that must succeed; 11 (done, with a warning) counts."""
        answer = self.criuctl(*words, timeout=timeout, env=env)
        if answer.code not in {0, 11}:
            raise Failed(f"criuctl {words[0]}: {answer.error()}")
        return answer

    def _log(self, words: tuple[str | Path, ...], code: str, out: bytes, err: bytes) -> None:
        shown = out.decode(errors="replace")[:TAIL], err.decode(errors="replace")[-TAIL:]
        self.logs.append(f"$ criuctl {' '.join(map(str, words))}\n[{code}] {shown[0]}\n{shown[1]}")

    def processes(self) -> list[int]:
        """The processes of this case, sessions and holders included."""
        mark = f"GPU_TEST_TOKEN={self.token}".encode()
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and mark in Path(f"/proc/{name}/environ").read_bytes().split(
                    b"\0"
                ):
                    found.append(int(name))
        return [pid for pid in found if pid != os.getpid()]

    def clear(self) -> None:
        """End what is left of the case, and remove its folders."""
        end = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        shutil.rmtree(self.path, ignore_errors=True)
