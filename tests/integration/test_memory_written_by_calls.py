"""Memory that calls write to while it is tracked: what is restored is what the program has."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from support.command import Criuctl, Home
from support.keeper import wait_until
from support.memory_writer import written
from support.zoo import PROGRAMS, Zoo

from criuctl.proc import written_pages

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not written_pages.supported(), reason="the kernel does not track writes"),
]
SLOW = ("slow-pread", "slow-pread-2", "store")
EVERYTHING = (  # as in scripts/memory-campaign
    *("store", "restless", "huge", "shared", "merged", "swap", "mapping", "fork", "read", "readv"),
    *("vmsplice", "recv", "recvmsg", "recvmmsg", "slow-pread", "slow-preadv", "sibling", "other"),
)


def memory(criuctl: Criuctl, report: dict[str, Any]) -> dict[str, Any]:
    """How the memory was read."""
    return dict(criuctl("show", report["checkpoint"])["criu"]["memory"])


@pytest.mark.parametrize(
    "ways",
    [SLOW, ("slow-preadv", "store"), EVERYTHING],
    ids=["reads", "reads into vectors", "everything"],
)
def test_what_a_call_was_writing_to_comes_back(
    ways: tuple[str, ...], zoo: Zoo, criuctl: Criuctl, home: Home
) -> None:
    criuctl.extra["CRIUCTL_TRACK_WRITES_MIB"] = "1"
    with written(zoo, home.path, ways) as subject:
        for _ in range(2):
            (report,) = criuctl("snapshot", subject.animal.pid)
        subject.end()
        how = memory(criuctl, report)
        answer = criuctl("restore", report["checkpoint"])
        subject.animal = zoo.adopt(answer["pid"], subject.animal)
        subject.checks(1)
        if ways is SLOW:
            assert how["way"] == "tracked" and how["pages"]["read_running"], how
            assert "read frozen" in how["why"]


def test_a_program_registers_its_memory_as_if_nothing_tracked_it(
    zoo: Zoo, criuctl: Criuctl, home: Home
) -> None:
    """A page fault handler of the program's own comes first."""
    criuctl.extra["CRIUCTL_TRACK_WRITES_MIB"] = "1"
    program, answers = home.path / "own", home.path / "memory" / "answers"
    source = PROGRAMS / "own_userfaultfd.c"
    subprocess.run(["gcc", "-O2", "-o", str(program), str(source)], check=True, timeout=60)
    animal = zoo.launch([str(program)], name="memory", quiet=False)
    for _ in range(2):
        (report,) = criuctl("snapshot", animal.pid)
        assert "a userfaultfd of its own" in memory(criuctl, report)["why"]
        after = len(answers.read_text().splitlines()) + 10
        wait_until(lambda after=after: len(answers.read_text().split()) > after, 60, "it goes on")
    assert set(answers.read_text().split()) == {"0"}
