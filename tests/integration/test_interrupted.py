"""A freeze is not noticed by what waits: no system call ends with EINTR for it, in a copy or in a
tree that runs on.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest
from support import oracle
from support.command import Criuctl
from support.hooking import HookFolder
from support.keeper import wait_until
from support.trip import Trip
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration


def finishes(animal: Animal) -> None:
    """Every call returns what it waited for."""
    (animal.folder / "finish").touch()
    animal.ask()


@pytest.mark.parametrize("pids", ["same", "private"])
def test_there_and_back(pids: str, zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    animal = zoo.launch("waiting.py")
    for _ in range(2):
        # Not the same to the byte: the kernel has stored what was left of a sleep.
        animal = trip.restore(trip.dump(animal), animal, "--pids", pids, equal=False)
        animal.ask()
        criuctl("dump", animal.pid, "--leave-running")
        animal.ask()
    finishes(animal)


def test_left_running(zoo: Zoo, criuctl: Criuctl) -> None:
    animal = zoo.launch("waiting.py")
    for _ in range(3):
        criuctl("dump", animal.pid, "--leave-running")
        animal.ask()
    finishes(animal)


@pytest.mark.parametrize("pids", ["same", "private"])
def test_what_was_stopped_before(pids: str, zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """To the kernel, poll, sleeps and waits with a limit are restart_syscall then, and neither CRIU
    nor the images tell which.
    """
    animal = zoo.launch("waiting.py", "poll", "nanosleep", "futex", "futex until")

    def stop_and_go_on() -> None:
        os.kill(animal.pid, signal.SIGSTOP)
        wait_until(lambda: oracle.stat_of(animal.pid)[0] == "T", 60, "it is stopped")
        os.kill(animal.pid, signal.SIGCONT)
        wait_until(lambda: calls(animal).count("219") == 4, 60, "its calls are entered again")

    stop_and_go_on()
    for _ in range(2):
        criuctl("dump", animal.pid, "--leave-running")
        animal.ask()
    stop_and_go_on()
    animal = trip.restore(trip.dump(animal), animal, "--pids", pids, equal=False)
    animal.ask()
    finishes(animal)


def calls(animal: Animal) -> list[str]:
    """Of its threads, the numbers of the system calls that they wait in."""
    return sorted(words[0] for words in calls_with_arguments(animal))


def calls_with_arguments(animal: Animal) -> list[list[str]]:
    return [path.read_text().split() for path in Path(f"/proc/{animal.pid}/task").glob("*/syscall")]


@pytest.mark.parametrize("leave_running", [True, False])
@pytest.mark.parametrize("phase", ["frozen", "post-dump"])
def test_a_dump_that_is_refused(
    phase: str, leave_running: bool, zoo: Zoo, criuctl: Criuctl
) -> None:
    """CRIU has only stopped the tree; or it has done its work there."""
    HookFolder(criuctl.home.path / "hooks").sh(phase, "no", "exit 10")
    animal = zoo.launch("waiting.py")
    refused = criuctl(
        "dump", animal.pid, *(["--leave-running"] if leave_running else []), check=False
    )
    assert refused["exit_code"] == 10
    animal.ask()
    finishes(animal)


def test_a_signal_that_waits_interrupts_all_the_same(zoo: Zoo, trip: Trip) -> None:
    """It came while the process was stopped: its handler may be what ends the wait."""
    animal = zoo.launch("interruptible.py")
    returns = animal.folder / "returns"
    os.kill(animal.pid, signal.SIGSTOP)
    wait_until(lambda: oracle.stat_of(animal.pid)[0] == "T", 60, "it is stopped")
    os.kill(animal.pid, signal.SIGUSR2)
    copy = trip.restore(trip.dump(animal), animal, equal=False)
    assert returns.read_text() == ""
    os.kill(copy.pid, signal.SIGCONT)
    wait_until(returns.read_text, 60, "poll has returned")
    assert returns.read_text() == f"-1 {errno.EINTR}\n"


# Every child of the tree gets a signal; this runs as a hook.
SIGNALS = """import json, os, sys
from pathlib import Path
root = json.load(sys.stdin)["pid"]
for child in Path(f"/proc/{root}/task/{root}/children").read_text().split():
    os.kill(int(child), 12)"""
ARM = """import json, os, sys
os.kill(json.load(sys.stdin)["pid"], 12)"""
INTERRUPTED = [
    "accept",
    "epoll_wait",
    "flock",
    "futex",
    "pause",
    "poll",
    "read",
    "select",
    "sigsuspend",
    "sleep until",
]


@pytest.mark.parametrize("pids", ["same", "private"])
@pytest.mark.parametrize("phase", ["frozen", "post-restore"])
def test_a_signal_that_comes_meanwhile_interrupts_as_ever(
    phase: str, pids: str, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """Its handler runs when the tree does: the call must end, for nothing else may ever wake it;
    one with SA_RESTART goes on.
    """
    HookFolder(criuctl.home.path / "hooks").python(phase, "signals", SIGNALS)
    animal = zoo.launch("interruptible_calls.py")
    trip.restore(trip.dump(animal), animal, "--pids", pids, equal=False)
    _all_returned(animal)


def test_an_unhandled_signal_interrupts_nothing(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """It waits all the same while the process is traced: the window has another size, say."""
    HookFolder(criuctl.home.path / "hooks").python("frozen", "resize", ARM.replace("12", "28"))
    log = zoo.home / "followed"
    log.write_text("0\n")
    animal = zoo.launch(["tail", "-n", "+1", "-F", str(log)], name="tail", quiet=False)
    wait_until(lambda: animal.output() == "0\n", 60, "tail has seen it")
    trip.restore(trip.dump(animal), animal, equal=False)
    with log.open("a") as file:
        file.write("1\n")
    wait_until(lambda: animal.output() == "0\n1\n", 60, "tail goes on")


@pytest.mark.parametrize("phase", ["frozen", "post-dump"])
def test_a_signal_that_comes_during_a_snapshot_interrupts_as_ever(
    phase: str, zoo: Zoo, criuctl: Criuctl
) -> None:
    HookFolder(criuctl.home.path / "hooks").python(phase, "signals", SIGNALS)
    animal = zoo.launch("interruptible_calls.py")
    criuctl("dump", animal.pid, "--leave-running")
    _all_returned(animal)


def test_no_timer_that_runs_out_meanwhile_is_forgotten(
    zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """CRIU looks at the timers long after it has looked at the signals."""
    HookFolder(criuctl.home.path / "hooks").python("pre-dump", "arm", ARM)
    animal = zoo.launch("oneshot_timers.py", quiet=False)
    fired = animal.folder / "fired"
    trip.restore(trip.dump(animal), animal, equal=False)
    wanted = sorted(["alarm", *(str(signal.SIGRTMIN + at) for at in range(24))])
    wait_until(
        lambda: len(fired.read_text().splitlines()) >= len(wanted), 60, "all timers have run out"
    )
    assert sorted(fired.read_text().splitlines()) == wanted


def test_none_of_many_timers_that_send_one_signal_is_forgotten(
    zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    HookFolder(criuctl.home.path / "hooks").python("pre-dump", "arm", ARM)
    animal = zoo.launch("shared_signal.py", quiet=False)
    fired = animal.folder / "fired"
    for times in (1, 2):  # the second time CRIU has other numbers for them than we
        animal = trip.restore(trip.dump(animal), animal, "--pids", "private", equal=False)
        wait_until(
            lambda wanted=24 * times: len(fired.read_text().splitlines()) >= wanted,
            60,
            "all timers have run out",
        )
        assert sorted(map(int, fired.read_text().splitlines())) == sorted([*range(24)] * times)


def _all_returned(animal: Animal) -> None:
    returns = animal.folder / "returns"
    wait_until(
        lambda: len(returns.read_text().splitlines()) >= len(INTERRUPTED),
        60,
        "the calls have returned",
    )
    assert sorted(returns.read_text().splitlines()) == [
        f"{name}: -1 {errno.EINTR}" for name in INTERRUPTED
    ]


def test_tail_follows_through_snapshots(zoo: Zoo, criuctl: Criuctl) -> None:
    """``tail -F`` ends when its wait for inotify is interrupted."""
    log = zoo.home / "followed"
    log.write_text("0\n")
    animal = zoo.launch(["tail", "-n", "+1", "-F", str(log)], name="tail", quiet=False)
    for number in range(3):
        wait_until(
            lambda number=number: animal.output().endswith(f"{number}\n"), 60, "tail has seen it"
        )
        criuctl("dump", animal.pid, "--leave-running")
        with log.open("a") as file:
            file.write(f"{number + 1}\n")
    wait_until(lambda: animal.output() == "0\n1\n2\n3\n", 60, "tail goes on")


# poll, epoll_wait, epoll_pwait: which word of /proc/PID/syscall is the limit
LIMITED = {7: 3, 232: 4, 281: 4}


def limits(animal: Animal) -> dict[int, int]:
    """Call -> the milliseconds that a thread waits in it for."""
    found = {}
    for task in Path(f"/proc/{animal.pid}/task").iterdir():
        words = (task / "syscall").read_text().split()
        if words[0].isdigit() and int(words[0]) in LIMITED:
            found[int(words[0])] = int(words[LIMITED[int(words[0])]], 16)
    return found


def after_a_while(animal: Animal) -> dict[int, int]:
    """The limits, when the threads have slept for longer than the scheduler's clock is inexact."""
    wait_until(lambda: len(limits(animal)) == len(LIMITED), 60, "all wait")
    time.sleep(0.1)
    return limits(animal)


@pytest.mark.parametrize("pids", ["same", "private"])
def test_what_has_passed_of_a_time_limit_is_not_waited_for_again(
    pids: str, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """Or a timer that is longer than the time from one snapshot to the next would never come; and
    it never comes early.
    """
    began = time.monotonic()
    animal = zoo.launch("limited.py")
    seen = [after_a_while(animal)]
    for _ in range(2):
        criuctl("dump", animal.pid, "--leave-running")
        seen.append(after_a_while(animal))
    animal = trip.restore(trip.dump(animal), animal, "--pids", pids, equal=False)
    seen.append(after_a_while(animal))
    passed = (time.monotonic() - began) * 1000
    for call in LIMITED:
        left = [limits[call] for limits in seen]
        assert left == sorted(set(left), reverse=True) and left[0] - left[-1] <= passed, left
    assert (animal.folder / "returned").read_text() == ""


def slept(animal: Animal) -> dict[str, tuple[int, int]]:
    """Sleep -> what it has returned, and after how many milliseconds."""
    lines = (line.split() for line in (animal.folder / "returned").read_text().splitlines())
    return {name: (int(result), int(passed)) for name, result, passed in lines}


@pytest.mark.parametrize("pids", ["same", "private"])
def test_a_sleep_that_does_not_ask_what_is_left_takes_its_time(
    pids: str, zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """One of the C library goes on as poll; with another library it is unknown what it does with
    the registers, so it ends with EINTR.
    """
    limit = 3_000_000
    began = time.monotonic()
    animal = zoo.launch("sleeps.py", str(limit))
    wait_until(lambda: len(calls(animal)) == 5 and calls(animal).count("34") == 1, 60, "all sleep")
    time.sleep(0.2)
    for _ in range(2):
        criuctl("dump", animal.pid, "--leave-running")
        wait_until(lambda: calls(animal) == ["281", "34", "7", "7"], 60, "they sleep again")
        time.sleep(0.2)
    animal = trip.restore(trip.dump(animal), animal, "--pids", pids, equal=False)
    wait_until(lambda: calls(animal) == ["281", "34", "7", "7"], 60, "they sleep again")
    passed = (time.monotonic() - began) * 1000
    left = [
        int(words[LIMITED[int(words[0])]], 16)
        for words in calls_with_arguments(animal)
        if int(words[0]) in LIMITED
    ]
    assert all(limit - passed <= one <= limit - 500 for one in left), (left, passed)
    assert slept(animal).keys() == {"own"} and slept(animal)["own"][0] == -errno.EINTR


def test_a_sleep_ends_when_it_should(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    limit = 3000
    animal = zoo.launch("sleeps.py", str(limit))
    criuctl("dump", animal.pid, "--leave-running")
    animal = trip.restore(trip.dump(animal), animal, "--pids", "private", equal=False)
    wait_until(lambda: len(slept(animal)) == 4, 60, "all have returned")
    found = slept(animal)
    del found["own"]
    assert all(result == 0 and passed >= limit for result, passed in found.values()), found


def test_a_program_with_a_seccomp_filter_makes_no_other_calls_than_its_own(
    zoo: Zoo, trip: Trip
) -> None:
    animal = zoo.launch("sleeps.py", "3000000", "filter")
    wait_until(lambda: len(calls(animal)) == 5, 60, "all sleep")
    time.sleep(0.2)
    animal = trip.restore(trip.dump(animal), animal, equal=False)
    wait_until(lambda: len(slept(animal)) == 3, 60, "the sleeps have ended")
    assert {name: result for name, (result, _passed) in slept(animal).items()} == {
        "usleep": -1,
        "clock_nanosleep": errno.EINTR,
        "own": -errno.EINTR,
    }
    assert calls(animal) == ["34", "441"]
