"""Groups by the API: sessions that are stored and brought back as one."""

from __future__ import annotations

import pytest
from support.api import BASH
from support.operating import TIMEOUT, Operators

from criuctl import Group, Session
from criuctl.errors import Conflict, NoSuchCheckpoint, NotFound, UsageError

pytestmark = pytest.mark.integration


def test_a_group_comes_back(operators: Operators) -> None:
    team = Group("team")
    with pytest.raises(NotFound):
        team.snapshot()
    with pytest.raises(UsageError):
        Session.run(BASH, group="team", labels={"group": "other"})
    members = [Session.run(BASH, name=name, group="team") for name in ("one", "two")]
    for session in members:
        session.wait_prompt(timeout=TIMEOUT)
        session.exec("x=1")
    assert list(team.sessions()) == ["one", "two"]
    first = team.snapshot()
    assert (first.group, first.number) == ("team", 1) and first.frozen_ms > 0
    assert [member["session"] for member in first.members] == ["one", "two"]
    with pytest.raises(Conflict):
        team.restore()
    for session in members:
        session.exec("x=2")
    second = team.dump()
    assert [one.id for one in team.checkpoints()] == [first.id, second.id]
    for number, value in ((None, "2\n"), (1, "1\n")):
        back = team.restore(number)
        assert [member["session"] for member in back["members"]] == ["one", "two"]
        for name in ("one", "two"):
            with Session.connect(name, kind="agent") as session:
                assert session.exec("echo $x").output == value
        team.kill(0)
    with pytest.raises(NoSuchCheckpoint):
        Group("other").checkpoints()
    copies = team.fork(2, prefix="try", ttl=3600)
    assert [copy.name for copy in copies] == ["try-1", "try-2"]
    assert list(copies[1].sessions()) == ["try-one-2", "try-two-2"]
    with Session.connect("try-two-2", kind="agent") as session:
        assert session.exec("echo $x").output == "2\n"
    for copy in copies:
        copy.kill(0)
    for session in members:
        session.close()
