"""A spot machine is taken away: its sessions are stored in time, the most valuable first, and
another machine brings them back from the store.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from servers.metadata import CloudMetadata, metadata_service
from support.command import Command
from support.homes import Homes
from support.keeper import wait_until
from support.operating import Operators

from criuctl.ops.spot.plan import SPARE

pytestmark = pytest.mark.integration

PATIENCE = 120.0
Watching = Callable[..., tuple[Command, CloudMetadata]]


def events(command: Command) -> list[dict[str, Any]]:
    """What a watch has told so far; a line that is being written is left for later."""
    return [
        json.loads(line) for line in command.out.read_text().splitlines(True) if line[-1] == "\n"
    ]


def told(command: Command, event: str) -> dict[str, Any]:
    """Wait for the first event of this kind."""
    found: list[dict[str, Any]] = wait_until(
        lambda: (
            [one for one in events(command) if one["event"] == event]
            or (command.process.poll() is not None and pytest.fail(command.output()))
        ),
        PATIENCE,
        f"the event {event}",
    )
    return found[0]


@pytest.fixture
def watching() -> Iterator[Watching]:
    """Starts watches of a cloud's service."""
    with ExitStack() as stack:

        def start(home: Operators, cloud: str, *options: str) -> tuple[Command, CloudMetadata]:
            service = stack.enter_context(metadata_service(cloud))
            command = home.start(
                "maintenance", "watch", "--cloud", "auto", "--metadata", service.url, *options
            )
            stack.callback(command.process.wait, PATIENCE)
            stack.callback(command.process.kill, signal.SIGTERM)
            told(command, "started")
            return command, service

        yield start


def test_another_machine_takes_its_place(homes: Homes, watching: Watching) -> None:
    """Everything is dumped and ended; sessions of the label come back elsewhere, with what they
    knew, and each on one of two machines.
    """
    alpha, beta = homes("alpha"), homes("beta")
    for name, pool in (("one", "web"), ("two", "web"), ("other", "batch")):
        alpha.shell(name, "--label", f"pool={pool}")
        alpha("exec", name, "--", f"remembered={name}")
    alpha.shell("killed", "--label", "pool=web")
    alpha("snapshot", "killed", "two")
    alpha("kill", "killed")
    command, service = watching(alpha, "azure")
    service.interrupt(100)
    done = told(command, "done")
    assert (done["stored"], done["not_stored"]) == (3, []), command.output()
    assert 0 < done["left_s"] < 100
    told(command, "acknowledged")
    assert service.started == ["event-1"]
    assert alpha("run", "-d", "--", "true", check=False)["exit_code"] == 9
    assert {one["state"] for one in alpha("ls")} == {"checkpointed", "exited"}  # what was killed
    others = [beta, homes("gamma")]
    recover = ("recover", "--from-store", "--label", "pool=web", "--retry-after", "0s")
    racing = [home.start(*recover) for home in others]
    found: dict[str, Operators] = {}
    for home, command in zip(others, racing, strict=True):
        assert command.process.wait(PATIENCE) == 0, command.output()
        for item in command.json():
            if item["state"] == "back":
                assert item["session"] not in found, "it runs twice"
                found[item["session"]] = home
            else:
                assert item["state"] == "moved", item
    assert sorted(found) == ["one", "two"]
    for name, home in found.items():
        assert home("exec", name, "--", "echo $remembered")["output"].strip() == name
    assert [home(*recover) for home in others] == [[], []], "they live"
    for words in (("--from-store",), ("--label", "pool=web")):
        assert beta("recover", *words, check=False)["exit_code"] == 2


def test_the_most_valuable_first_within_the_time(homes: Homes, watching: Watching) -> None:
    """By their last dumps not all fit: it is told before any notice, and the label decides."""
    alpha = homes("alpha")
    names = ("plain", "precious", "worthless")
    for name, priority in zip(names, ("0", "5", "-5"), strict=True):
        alpha.shell(name, "--label", f"priority={priority}", "--label", f"order={priority}")
    alpha("snapshot", *names)
    # by what they took, which is in the log, this window has no room for the last of them, also
    # if they take much less this time
    took = sum(one["seconds"] for one in alpha("events") if one["operation"] == "snapshot")
    window = f"{took * SPARE / 8:.3f}s"
    command, service = watching(alpha, "aws", "--jobs", "1", "--window", window)
    late = told(command, "does-not-fit")
    assert "worthless" in late["sessions"]
    service.interrupt(110)
    told(command, "done")
    seen = [one for one in events(command) if one["event"] in ("stored", "failed")]
    first = list(dict.fromkeys(one["session"] for one in seen))
    stored = [one["session"] for one in seen if one["event"] == "stored"]
    assert first[-1] == "worthless" and stored in ([], ["precious"], ["precious", "plain"])
    assert alpha("status", "worthless")["state"] == "running", "what was not stored runs on"


def test_a_recommendation_and_then_the_interruption(homes: Homes, watching: Watching) -> None:
    """First everything is stored and left running; then it is ended, with what it did meanwhile."""
    alpha = homes("alpha")
    alpha.shell("work")
    command, service = watching(alpha, "aws")
    service.recommend()
    assert told(command, "done")["stored"] == 1
    assert alpha("status", "work")["state"] == "running"
    alpha("exec", "work", "--", "meanwhile=1")
    service.interrupt(110)
    wait_until(
        lambda: len([one for one in events(command) if one["event"] == "done"]) == 2,
        PATIENCE,
        "the interruption was acted upon",
    )
    assert alpha("status", "work")["state"] == "checkpointed"
    service.withdraw()
    told(command, "withdrawn")
    assert [item["state"] for item in alpha("maintenance", "end")] == ["back"]
    assert alpha("exec", "work", "--", "echo $meanwhile")["output"].strip() == "1"


def test_a_service_that_comes_and_goes(homes: Homes, watching: Watching) -> None:
    alpha = homes("alpha")
    command, service = watching(alpha, "aws")
    service.harm = "error"
    told(command, "metadata-failed")
    service.harm = ""
    told(command, "metadata-back")
    assert [one["sequence"] for one in events(command)] == list(range(1, len(events(command)) + 1))
    second = alpha("maintenance", "watch", "--cloud", "aws", "--metadata", service.url, check=False)
    assert second["exit_code"] == 9
    command.process.kill(signal.SIGTERM)
    assert command.process.wait(PATIENCE) == 0
    assert events(command)[-1]["event"] == "stopped"
