"""Start the helper program that makes the driver's calls, and send it requests.

`DriverProcess.each` makes one call on several processes in parallel and waits for all of them, up
to a deadline. The driver's calls cannot be interrupted: one that is not answered in time raises
`TimedOut` here, and goes on there. Closing the connection makes the helper give back every process
that it still holds (see `criuctl.gpu.helper`); `wait_given_back` waits for that.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from msgspec import Struct

from ..errors import CommandFailed, CriuctlError, TimedOut
from ..proc import command
from . import helper
from .devices import Device, DeviceUse

OLDEST_API = 12080  # CUDA 12.8: driver 570, the first with the calls
NOT_INITIALISED, ILLEGAL_STATE, NOT_READY, NOT_SUPPORTED = 3, 401, 600, 801  # CUDA_ERROR_*
RUNNING, LOCKED, CHECKPOINTED, FAILED = (
    helper.RUNNING,
    helper.LOCKED,
    helper.CHECKPOINTED,
    helper.FAILED,
)

_START = 60.0  # seconds for the driver's initialisation: a sleeping device takes some
_LOOK = 10.0  # seconds for a request that needs no work on a device
_PASSED_ON = ("LD_LIBRARY_PATH",)  # where the operator points to the driver's library
_GIVEN_BACK = 60.0


class Answer(Struct, frozen=True):
    """The driver's answer for one process."""

    result: int  # CUresult
    name: str  # the result's name
    number: int = -1  # a state, a thread
    ms: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it is CUDA_SUCCESS."""
        return self.result == 0


class DriverFailed(CriuctlError):
    """The driver refused a call on a process."""

    exit_code = 5
    code = "gpu-driver"


class DriverProcess:
    """One helper; a context manager."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        argv = [sys.executable, "-I", "-S", helper.__file__, str(theirs.fileno())]
        with theirs:
            self._child = command.spawn(
                argv, pass_fds=[theirs.fileno()], env=environment, new_session=True
            )
        self._sock = ours
        self._buffer = b""
        self._next = 0
        self._under_way: set[int] = set()  # requests not answered yet
        try:
            reply = self._ask([{"call": "hello"}], _START)[0]
        except BaseException:
            self.close()
            raise
        self.error: str = reply["error"]  # why there is no driver, or ""
        self.api: int = reply["api"]  # the version of the driver's interface: 13000 is CUDA 13.0
        self.driver: str = reply["driver"]  # as nvidia-smi shows it, "" if unknown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection: the helper gives back what it holds, and ends."""
        self._sock.close()

    def wait_given_back(self) -> None:
        """After `close`: wait until it has given back what it held; `TimedOut`."""
        self._child.wait(_GIVEN_BACK)
        self._child.close()

    def devices(self) -> tuple[Device, ...]:
        """Return the devices of this host."""
        replies = self._ask([{"call": "devices"}], _LOOK)[0]["devices"]
        return tuple(Device(**one) for one in replies)

    def use(self) -> tuple[DeviceUse, ...]:
        """Return the use of this host's devices; empty where NVML is not installed."""
        return tuple(
            DeviceUse(
                uuid=one["uuid"],
                free=one["free"],
                mig=one["mig"],
                processes={int(pid): used for pid, used in one["processes"].items()},
                mps=frozenset(map(int, one["mps"])),
            )
            for one in self._ask([{"call": "use"}], _LOOK)[0]["use"]
        )

    def state(self, pid: int) -> Answer:
        """Return the state of a process; `TimedOut` for one that does not run."""
        return self.each("state", [pid], _LOOK)[pid]

    def thread(self, pid: int) -> Answer:
        """Return the thread of a process that restores its device, by its number as we see it."""
        return self.each("thread", [pid], _LOOK)[pid]

    def keep(self, pids: Iterable[int]) -> None:
        """Exempt these from being given back: they have ended."""
        self._ask([{"call": "keep", "pids": list(pids)}], _LOOK)

    def each(
        self,
        what: str,
        pids: Sequence[int],
        deadline: float,
        *,
        timeout_ms: int = 0,
        pairs: Mapping[str, str] | None = None,
    ) -> dict[int, Answer]:
        """Make one call on each process, in parallel.

        `TimedOut` when one takes longer than `deadline` seconds. `timeout_ms` is the driver's own
        limit for a lock. `pairs` maps the UUIDs of a checkpoint's devices to those of this host
        that are to be used instead.
        """
        extra = {"timeout_ms": timeout_ms, "pairs": [list(pair) for pair in (pairs or {}).items()]}
        replies = self._ask([{"call": what, "pid": pid, **extra} for pid in pids], deadline)
        return {
            pid: Answer(one["result"], one["name"], one["number"], one["ms"])
            for pid, one in zip(pids, replies, strict=True)
        }

    def _ask(self, requests: Sequence[dict[str, Any]], deadline: float) -> list[dict[str, Any]]:
        numbered = [{"id": self._next + i, **request} for i, request in enumerate(requests)]
        self._next += len(requests)
        self._under_way |= {one["id"] for one in numbered}
        self._send(b"".join(json.dumps(one).encode() + b"\n" for one in numbered))
        answers: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + deadline
        while any(one["id"] not in answers for one in numbered):
            answer = self._receive(until)
            if answer is None:
                late = [one.get("pid", one["call"]) for one in numbered if one["id"] not in answers]
                raise TimedOut(
                    f"NVIDIA's driver has not answered the call {numbered[0]['call']} within "
                    f"{deadline:g} s (PID {', '.join(map(str, late))})"
                )
            answers[answer["id"]] = answer
        return [answers[one["id"]] for one in numbered]

    def _send(self, data: bytes) -> None:
        with suppress(OSError):  # `_receive` reports a helper that has ended
            self._sock.sendall(data)

    def _receive(self, until: float) -> dict[str, Any] | None:
        """Return the next answer; None at the deadline."""
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0:
                return None
            self._sock.settimeout(left)
            try:
                piece = self._sock.recv(1 << 16)
            except TimeoutError:
                return None
            except OSError:
                piece = b""
            if not piece:
                raise CommandFailed(
                    "the helper that speaks to NVIDIA's driver has ended"
                    + (f": {tail}" if (tail := self._child.stderr_tail(400).strip()) else "")
                )
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        self._under_way.discard(answer["id"])
        return answer

    def settle(self, deadline: float) -> bool:
        """Wait until interrupted calls that still run have ended.

        Returns whether they have within `deadline` seconds.
        """
        until = time.monotonic() + deadline
        while self._under_way and self._receive(until) is not None:
            pass
        return not self._under_way
