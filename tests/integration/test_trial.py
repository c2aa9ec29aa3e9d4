"""A trial restore: it comes back and answers, next to the living session; nothing of that is
touched, and nothing of the trial stays.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from support.command import Criuctl, Home
from support.keeper import wait_until
from support.trip import RECORDED, Trip
from support.zoo import Zoo

pytestmark = pytest.mark.integration

# Has the program check itself: its report is written, and its book is torn, in there alone.
ASK = """
cat {0}/book; echo
kill -USR1 $CRIUCTL_PID; until ls {0}/report-*.json >/dev/null 2>&1; do :; done
cat {0}/report-*.json; echo
rm {0}/book
"""


def everything(home: Home) -> dict[str, tuple[int, int]]:
    """Each file of a test, and when it was changed; what criuctl remembers, and what it prints,
    apart.
    """
    found = {}
    for path in home.path.rglob("*"):
        if (
            path.is_file()
            and ".cache" not in path.parts
            and not path.name.startswith(("command-", "events"))
        ):
            found[str(path)] = (path.stat().st_size, path.stat().st_mtime_ns)
    return found


def test_it_comes_back_and_answers_and_the_living_one_is_not_touched(
    zoo: Zoo, trip: Trip, criuctl: Criuctl, home: Home
) -> None:
    criuctl.extra.update(RECORDED)  # its log does not travel
    animal = zoo.launch("counter.py")
    book = animal.folder / "book"
    book.write_bytes(b"then")
    (animal.folder / "log").write_text("not empty: it could be made anew\n")
    trip.snapshot(animal, "--name", "web", "--with-files", book)
    book.write_bytes(b"now another one")
    assert animal.ask()["counter"] == 1
    before, tree = everything(home), running(animal.folder)
    tried = criuctl("verify", "web", "--restore", "--probe", ASK.format(animal.folder))
    assert (tried["ok"], tried["alive"], tried["probe"]["exit_code"]) == (True, True, 0)
    then, report = tried["probe"]["output"].splitlines()[:2]
    assert then == "then"  # put back in there
    assert json.loads(report)["counter"] == 1  # the copy counts by itself
    assert everything(home) == before  # the store, too: no lease, no record
    assert running(animal.folder) == tree
    assert animal.ask()["counter"] == 2

    criuctl.extra["CRIUCTL_PROBES"] = json.dumps({"db*": "true", "w*": "echo sorry; exit 3"})
    failed = criuctl("verify", "web", "--restore", check=False)
    assert (failed["exit_code"], failed["ok"], failed["restored"]) == (10, False, True)
    assert failed["probe"] == {"command": "echo sorry; exit 3", "exit_code": 3, "output": "sorry\n"}
    animal.end()
    log = animal.folder / "log"
    log.rename(log.with_suffix(".away"))
    broken = criuctl("verify", "web", "--restore", check=False)
    assert (broken["exit_code"], broken["error"]["code"]) == (6, "restore-failed")
    assert str(log) in broken["error"]["message"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_it_nothing_stays(
    number: signal.Signals, zoo: Zoo, trip: Trip, criuctl: Criuctl, home: Home
) -> None:
    animal = zoo.launch("counter.py")
    trip.snapshot(animal, "--name", "web")
    seconds = f"{90000 + os.getpid()}.{int(number)}"
    before, tree = everything(home), running(animal.folder)
    command = criuctl.start("verify", "web", "--restore", "--probe", f"exec sleep {seconds}")
    # and nsenter, which waits for it
    wait_until(lambda: len(running(f"sleep {seconds}")) == 2, 60, "the probe runs")
    assert len(running(animal.folder)) == 2 * len(tree)
    command.process.kill(number)
    assert command.process.wait(60) == {signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    wait_until(
        lambda: not running(f"sleep {seconds}") and running(animal.folder) == tree,
        60,
        "all of it is gone",
    )
    assert everything(home) == before
    assert animal.ask()["counter"] == 1


def test_what_holds_it_is_killed(zoo: Zoo, trip: Trip, criuctl: Criuctl, home: Home) -> None:
    """It has failed, and nothing stays."""
    animal = zoo.launch("counter.py")
    trip.snapshot(animal, "--name", "web")
    seconds = f"{90000 + os.getpid()}.5"
    tree = running(animal.folder)
    command = criuctl.start("verify", "web", "--restore", "--probe", f"exec sleep {seconds}")
    wait_until(lambda: len(running(f"sleep {seconds}")) == 2, 60, "the probe runs")
    for child in (
        Path(f"/proc/{command.process.pid}/task/{command.process.pid}/children").read_text().split()
    ):
        os.kill(int(child), signal.SIGKILL)
    assert command.process.wait(60) == 6, command.output()
    assert command.json()["error"]["message"].endswith("was killed; nothing is left of it")
    wait_until(
        lambda: not running(f"sleep {seconds}") and running(animal.folder) == tree,
        60,
        "all of it is gone",
    )


def running(words: object) -> set[int]:
    """Who has these words in a row on its command line."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            found |= (
                {int(pid)}
                if f"{words} ".encode() in line and b" -m criuctl " not in line
                else set()
            )
    return found
