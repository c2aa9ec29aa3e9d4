"""CRIU itself fails: it ends with an error, it is killed, it cannot do what it is asked."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from support import leaks, oracle
from support.aftermath import Aftermath, stopped
from support.command import Criuctl
from support.keeper import wait_until
from support.pauses import Paused, paused, steps_of
from support.trip import RECORDED, Trip
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.crash


def test_kill_9_of_criu_at_every_step_of_a_dump(
    zoo: Zoo, criuctl: Criuctl, aftermath: Aftermath
) -> None:
    """CRIU dies with the tree in its hands: the tree runs on, and criuctl says so with exit 5."""
    first = zoo.launch("counter.py", "1", name="first")
    steps = steps_of(criuctl, "dump", first.pid)
    dumps: list[tuple[str, Animal, Paused]] = []
    for step in steps[steps.index("frozen") : steps.index("commit") + 1]:
        animal = zoo.launch("counter.py", "1", name=f"dump-{step}".replace("#", "-"))
        animal.remember()
        with paused(criuctl, step, "dump", animal.pid, "--name", animal.folder.name) as held:
            held.kill_criu()
        # it may take a while to be sure that its tree is not about to end
        dumps.append((step, animal, held))
    for step, animal, held in dumps:
        code = held.command.process.wait(120)
        if step == "commit":  # the manifest may have been written before anybody noticed
            assert code in (0, 5, 11), held.command.output()
        else:
            assert code == 5, held.command.output()
            assert held.command.json()["error"]["message"]
        held.wait_settled(animal)
        wait_until(lambda animal=animal: not stopped(animal), 60, f"{animal!r} runs on")
        aftermath.of_dump(animal, again=step == "collect")


@pytest.mark.parametrize("step", ["collect", "commit"])
def test_connections_of_a_tree_whose_criu_was_killed(
    step: str, zoo: Zoo, criuctl: Criuctl, trip: Trip
) -> None:
    """CRIU had its TCP sockets in repair mode, in which no call of the program works: they are as
    before.
    """
    animal = zoo.launch("sockets.py")
    animal.remember()
    before = leaks.nft_tables()
    with paused(criuctl, step, "dump", animal.pid) as held:
        held.kill_criu()
    assert held.command.process.wait(120) == 5, held.command.output()
    wait_until(lambda: not stopped(animal), 60, f"{animal!r} runs on")
    assert animal.differences(animal) == []
    wait_until(lambda: leaks.nft_tables() <= before, 60, "the lock on its connections is gone")
    animal.ask()
    trip.restore(trip.dump(animal), animal, equal=False).ask()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGXFSZ], ids=lambda number: number.name
)
def test_what_may_be_ignored_does_not_end_a_criu_that_dumps(
    number: signal.Signals, zoo: Zoo, criuctl: Criuctl, trip: Trip
) -> None:
    """As when its unit is stopped: the tree would be left as it was just then, its connections in
    repair mode.
    """
    animal = zoo.launch("sockets.py")
    animal.remember()
    with paused(criuctl, "frozen", "dump", animal.pid) as held:
        held.kill_criu(number)
    assert held.command.process.wait(120) == 0, held.command.output()
    restored = trip.restore(held.command.json(), animal, equal=False)
    assert animal.differences(restored) == []
    restored.ask()


@pytest.mark.parametrize("who", ["criu", "criuctl"])
def test_a_session_whose_dump_is_killed_at_its_end_runs_on(who: str, criuctl: Criuctl) -> None:
    """Its checkpoint exists, and it runs on: its holder serves it at once, as ever."""
    run = criuctl.start("run", "-d", "--name", "web", "--", "sleep", "1000", json_output=False)
    assert run.process.wait(120) == 0, run.output()
    with paused(criuctl, "kill", "dump", "web") as held:
        held.kill_criu() if who == "criu" else held.kill()
    assert held.command.process.wait(120) == {"criu": 5, "criuctl": -signal.SIGKILL}[who]
    held.wait_settled()
    assert criuctl("status", "web")["state"] == "running"
    criuctl("snapshot", "web")
    assert criuctl("kill", "web")["killed"] > 0


def test_kill_9_of_criu_at_every_step_of_a_restore(
    zoo: Zoo, trip: Trip, criuctl: Criuctl, aftermath: Aftermath
) -> None:
    """Nothing half-restored stays."""
    animal = zoo.launch("counter.py", "1")
    checkpoint = trip.dump(animal)["checkpoint"]
    steps = steps_of(criuctl, "restore", checkpoint)
    for running in zoo.find(animal):
        running.end()
    for step in steps[steps.index("restore") + 1 : -1]:
        with paused(criuctl, step, "restore", checkpoint) as held:
            held.kill_criu()
            held.go_on()
            code = held.command.process.wait(120)
        assert code == 6, f"{step}: {held.command.output()}"
        held.wait_settled()
        assert aftermath.of_restore(animal, checkpoint) == "nothing"
        for running in zoo.animals:
            running.end()


# A deleted file that takes CRIU a moment to write.
DELETED = """
import os, sys, time
file = open(sys.argv[1], "wb")
file.write(b"xyz" * (20 << 20))
file.flush()
os.unlink(sys.argv[1])
while True:
    time.sleep(1)
"""


def test_kill_9_of_criu_while_it_makes_a_deleted_file(
    zoo: Zoo, trip: Trip, criuctl: Criuctl
) -> None:
    """What it has made of it goes, and does not stand in the way of the next restore; what another
    restore has made stays.
    """
    folder = zoo.home / "deleted"
    folder.mkdir()
    animal = zoo.launch([sys.executable, "-S", "-c", DELETED, str(folder / "file")], name="deletes")
    links = Path(f"/proc/{animal.pid}/fd")
    wait_until(
        lambda: any("deleted/file (deleted)" in os.readlink(fd) for fd in links.iterdir()),
        60,
        "it is deleted",
    )
    report = trip.dump(animal)
    (folder / "file.cr.1.ghost").write_text("another one's")
    restore = criuctl.start("restore", report["checkpoint"])
    wait_until(
        lambda: len(os.listdir(folder)) > 1 or restore.process.poll() is not None,
        60,
        "CRIU makes the file",
    )
    made = [name for name in os.listdir(folder) if name != "file.cr.1.ghost"]
    for pid in oracle.tree(restore.process.pid)[1:]:
        if "criu" in (line := oracle.read(f"/proc/{pid}/cmdline")) and ".py" not in line:
            os.kill(pid, signal.SIGKILL)
    assert restore.process.wait(120) == 6, restore.output()
    assert os.listdir(folder) == ["file.cr.1.ghost"]
    for name in made:
        (folder / name).write_text("of a CRIU that was killed together with its criuctl")
    restored = criuctl("restore", report["checkpoint"])
    zoo.adopt(restored["pid"], animal)
    assert os.listdir(folder) == ["file.cr.1.ghost"]


@pytest.mark.parametrize("step", ["restore", "post-restore"])
def test_a_criu_that_hangs_in_a_restore(
    step: str, zoo: Zoo, trip: Trip, criuctl: Criuctl, aftermath: Aftermath
) -> None:
    """An interrupt of criuctl does not wait for it for ever, and nothing stays."""
    animal = zoo.launch("counter.py", "1")
    checkpoint = trip.dump(animal)["checkpoint"]
    if step == "restore":  # before CRIU is started: a program that never answers is in its place
        wrapper = zoo.home / "criu-that-hangs"
        wrapper.write_text("#!/bin/sh\nsleep 1000 & wait\n")
        wrapper.chmod(0o700)
        criuctl.extra["CRIUCTL_CRIU"] = str(wrapper)
    with paused(criuctl, step, "restore", checkpoint) as held:
        held.kill_criu(signal.SIGSTOP)
        held.kill(signal.SIGTERM) if step != "restore" else None
        held.go_on()
        if step == "restore":
            wait_until(lambda: len(oracle.tree(held.command.process.pid)) > 2, 60, "it is asked")
            held.kill(signal.SIGTERM)
        code = held.command.process.wait(120)
    assert code == 143, held.command.output()
    held.wait_settled()
    criuctl.extra.pop("CRIUCTL_CRIU", None)
    assert aftermath.of_restore(animal, checkpoint) == "nothing"


@pytest.mark.parametrize(
    "body",
    ["exit 1", "kill -9 $$", "echo nonsense >&2; exit 127"],
    ids=["exits", "is killed", "speaks nonsense"],
)
def test_a_criu_that_ends_at_once(
    body: str, zoo: Zoo, criuctl: Criuctl, aftermath: Aftermath, real_criu: str
) -> None:
    animal = zoo.launch("counter.py", "1")
    animal.remember()
    wrapper = zoo.home / "criu-that-fails"
    wrapper.write_text(
        f'#!/bin/sh\ncase " $* " in *" swrk "*) {body} ;; *) exec {real_criu} "$@" ;; esac\n'
    )
    wrapper.chmod(0o700)
    criuctl.extra["CRIUCTL_CRIU"] = str(wrapper)
    answer = criuctl("dump", animal.pid, check=False)
    assert answer["exit_code"] == 5, answer
    assert "errno 0" not in answer["error"]["message"]
    del criuctl.extra["CRIUCTL_CRIU"]
    assert aftermath.of_dump(animal) == "alive"


def test_its_first_error_is_reported(zoo: Zoo, trip: Trip, criuctl: Criuctl) -> None:
    """What CRIU would stumble over is named, before it does; the log of one that did is kept, see
    `test_needs`.
    """
    animal = zoo.launch("nowhere.py")
    # else its output is put back, and the folder for it is made again
    report = trip.dump(animal, env=RECORDED)
    (animal.folder / "ready").unlink()
    os.rename(animal.folder, animal.folder.with_name("moved-away"))
    answer = criuctl("restore", report["checkpoint"], check=False)
    assert answer["exit_code"] == 4, answer
    assert str(animal.folder) in answer["error"]["message"]
    os.rename(animal.folder.with_name("moved-away"), animal.folder)
    trip.restore(report, animal, equal=False).ask()


def test_a_tree_that_cannot_be_frozen(compiled: Path, zoo: Zoo, criuctl: Criuctl) -> None:
    """A thread that sleeps in vfork cannot be stopped: found before the freeze, and the tree runs
    on.
    """
    animal = zoo.launch([str(compiled / "vfork")])
    wait_until(lambda: oracle.stat_of(animal.pid)[:1] == ["D"], 60, "vfork has begun")
    answer = criuctl("dump", animal.pid, check=False, timeout=120)
    assert answer["exit_code"] == 4, answer
    (finding,) = answer["error"]["findings"]
    (child,) = oracle.tree(animal.pid)[1:]
    assert finding["code"] == "vfork" and f"`kill {child}`" in finding["hint"]
    assert animal.alive()
    assert stopped(animal) == []
