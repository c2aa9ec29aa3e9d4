"""criuctl is killed while it makes copies of a group: of each set all runs, or nothing."""

from __future__ import annotations

import pytest
from support.asking import Asked, Team
from support.keeper import wait_until
from support.operating import TIMEOUT
from support.pauses import paused, steps_of

pytestmark = [pytest.mark.crash, pytest.mark.slow]

FORK = ("fork", "--group", "team", "-n", 2)


def test_a_fork_of_a_group(asked: Asked) -> None:
    team = Team(asked)
    steps = [step for step in steps_of(asked, *FORK) if step.startswith("group-")]
    first = steps.index("group-placed")
    assert steps[first:] == [
        *("group-placed", "group-running", "group-decided", "group-done#2"),
        *("group-placed#2", "group-running#2", "group-decided#2", "group-done#3"),
    ]
    for group in ("team-1", "team-2"):
        asked("kill", "--group", group, "--timeout", 0)
    expected = {"group-placed": 0, "group-decided": 1, "group-running#2": 1, "group-decided#2": 2}
    for step, sets in expected.items():
        with paused(asked, step, *FORK) as held:
            held.kill()
            held.command.process.wait(TIMEOUT * 2)

        def whole(sets: int = sets) -> bool:
            found = team.groups()
            return len(found) == sets + 1 and {len(names) for names in found.values()} == {3}

        wait_until(whole, TIMEOUT, f"{sets} whole sets run after {step}")
        team.talk(step)
        for group in team.groups().keys() - {"team"}:
            team.talk(step, group.removeprefix("team"))
            asked("kill", "--group", group, "--timeout", 0)
        wait_until(lambda: not asked.keepers(), TIMEOUT, f"no keeper is left after {step}")
        assert asked.names() == set(Team.NAMES), step
