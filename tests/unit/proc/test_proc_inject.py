"""A system call run inside another process leaves no trace."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from criuctl.proc import inject
from criuctl.proc.procfs import read_status

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="only known for x86-64")

GETPID = 39
HEAD = "import ctypes, signal, time\nsay = lambda word: print(word, flush=True)\n"
COMPUTE = (
    "def compute(seconds):\n    until = time.monotonic() + seconds\n    while time.monotonic() < "
    "until: pass\n"
)

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program that says ``up``."""
    with ExitStack() as stack:

        def run(code: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", HEAD + code], stdout=subprocess.PIPE, text=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            assert said(process) == "up"
            return process

        yield run


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ask(pid: int) -> int:
    with inject.stopped(pid):
        return inject.call(pid, GETPID)


def test_who_is_about_to_enter_its_wait_again(start: Start) -> None:
    """It is there for a moment after each time: of thousands of next times some meet it so."""
    waiting = start("say('up'); time.sleep(1000)")
    assert {ask(waiting.pid) for _ in range(5000)} == {waiting.pid}


def test_who_computes_before_it_waits(start: Start) -> None:
    restless = start(COMPUTE + "say('up')\nwhile True: time.sleep(0.001); compute(0.001)")
    assert ask_slowly(restless.pid, 20) == {restless.pid}


def test_who_never_waits(start: Start) -> None:
    busy = start("say('up')\nwhile True: pass")
    with pytest.raises(BlockingIOError):
        ask_slowly(busy.pid, 1000)  # it may still be saying that it is up


def ask_slowly(pid: int, times: int) -> set[int]:
    found = set()
    for number in range(times):
        time.sleep(number * 0.0003)
        found.add(ask(pid))
    return found


def test_a_wait_goes_on(start: Start) -> None:
    """This one ends with an error if its registers are put back where the kernel does not look at
    them any more.
    """
    waiting = start("poll = ctypes.CDLL(None).poll\nsay('up'); say(poll(None, 0, 500))")
    for _ in range(5):
        assert ask(waiting.pid) == waiting.pid
    assert said(waiting) == "0"


def test_a_signal_that_comes_meanwhile(start: Start) -> None:
    waiting = start(
        "signal.signal(signal.SIGUSR1, lambda *_: say('came'))\nsay('up')\nwhile True: "
        "time.sleep(1000)"
    )
    with inject.stopped(waiting.pid):
        os.kill(waiting.pid, signal.SIGUSR1)
        assert inject.call(waiting.pid, GETPID) == waiting.pid
    assert said(waiting) == "came"


def test_a_signal_of_ours_waits_until_the_process_is_let_go(start: Start) -> None:
    """``^C``: raised while it is about to stop it would leave it so, or with our registers."""
    waiting = start("say('up'); time.sleep(1000)")
    found = []

    def interrupted() -> None:
        with inject.stopped(waiting.pid):
            os.kill(os.getpid(), signal.SIGINT)
            found.append(inject.call(waiting.pid, GETPID))

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert found == [waiting.pid]
    assert int(read_status(waiting.pid)["TracerPid"]) == 0


@pytest.mark.parametrize("handler", ["signal.SIG_IGN", "lambda *_: say('came')"])
def test_what_a_program_does_about_traps(start: Start, handler: str) -> None:
    """As while CRIU restores it: all signals are blocked."""
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"
    waiting = start(
        f"signal.signal(signal.SIGTRAP, {handler})\n{block}\nsay('up'); time.sleep(1000)"
    )
    before = _signals(waiting.pid)
    assert ask(waiting.pid) == waiting.pid
    assert _signals(waiting.pid) == before


def _signals(pid: int) -> list[str]:
    return [read_status(pid)[key] for key in ("SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")]
