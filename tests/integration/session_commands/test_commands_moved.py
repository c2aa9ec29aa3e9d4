"""Sessions that go on on another host: who is attached follows, and who comes later is shown the
way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import PROJECT, Home
from support.keeper import Keeper, wait_until
from support.operating import TIMEOUT, Operators, ended

from criuctl.config import Config
from criuctl.errors import WrongState
from criuctl.session.client.session import Session

pytestmark = pytest.mark.integration


@pytest.fixture
def far(keeper: Keeper, home: Home, operators: Operators) -> Iterator[Operators]:
    """Another host: folders of its own, the same store, and an ssh that leads there and nowhere
    else.
    """
    there = Home(home.token, home.path / "far", home.run / "far")
    for folder in (there.path, there.run):
        folder.mkdir()
    far = Operators(keeper, there)
    far.store = operators.store
    far.extra |= {"CRIUCTL_KEY_DIR": str(home.path / "keys")}
    program, ssh = there.path / "criuctl", there.path / "ssh"
    lines = [
        f"export {key}={value!r}"
        for key, value in far.environment().items()
        if key.startswith("CRIUCTL_")
    ]
    program.write_text(
        "\n".join(
            ["#!/bin/sh", *lines, f'PYTHONPATH={PROJECT} exec {sys.executable} -m criuctl "$@"', ""]
        )
    )
    ssh.write_text(
        f'#!/bin/sh\necho "$@" >> {there.path}/calls\nPATH={there.path}:$PATH\nfor last; do :; '
        'done\nexec sh -c "$last"\n'
    )
    for path in (program, ssh):
        path.chmod(0o755)
    operators.extra["CRIUCTL_SSH_COMMAND"] = str(ssh)
    yield far
    far.close()


def test_who_is_attached_follows_to_another_host(
    home: Home, operators: Operators, far: Operators
) -> None:
    operators.shell("work")
    operators("exec", "work", "--", "X=41")
    window = operators.window("attach", "work")
    window.expect(rb"\$")
    window.send(b"echo half-ty")
    window.expect(rb"half-ty")
    config = Config(run_dir=str(home.run), state_dir=str(home.path / "state"))
    with Session.connect("work", config=config, kind="human", role="admin") as mover:
        with pytest.raises(WrongState):
            mover.request("moved", to="ssh://far.example/work", host="far")
        operators("dump", "work")
        window.expect(rb"work is checkpointed")
        far("restore", "work")
        mover.request("moved", to="ssh://me@far.example/work", host="far", incarnation=2)
        status = operators("status", "work")
        assert (status["state"], status["home"], status["moved_to"]) == (
            "checkpointed",
            "far",
            "ssh://me@far.example/work",
        )
    window.expect(rb"criuctl: moved to far, work is incarnation 2")
    window.send(b"\x15echo $((X + 1))\r")
    window.expect(rb"42\r\n")
    # The holder here has no tree left, and a client that comes now is sent on.
    wait_until(lambda: not operators("status", "work")["holder"], TIMEOUT, "the holder has left")
    (listed,) = operators("ls")
    assert (listed["home"], listed["moved_to"], listed["pid"]) == (
        "far",
        "ssh://me@far.example/work",
        None,
    )
    late = operators.window("attach", "work")
    late.expect(rb"criuctl: moved to far")
    late.expect(rb"42")
    late.send(b"\x1d")
    assert ended(late) == 0
    assert (
        "-- me@far.example criuctl attach --stdio work"
        in Path(home.path / "far" / "calls").read_text()
    )
    window.send(b"exit 7\r")
    assert ended(window) == 7
