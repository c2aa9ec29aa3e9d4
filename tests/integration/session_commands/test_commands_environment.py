"""`attach --update-env`: what still can, gets the variables of the terminal that attaches."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from support.operating import TIMEOUT, Operators, ended

from criuctl.config import Config
from criuctl.errors import CriuctlError, Forbidden
from criuctl.session.client.session import Session

pytestmark = pytest.mark.integration

LOGIN = {"SSH_AUTH_SOCK": "/tmp/old/agent", "DISPLAY": ":1", "XAUTHORITY": "/old"}
SHELLS = {
    "bash": ("bash", "--norc", "--noprofile"),
    "zsh": ("zsh", "-f"),
    "fish": ("fish", "--no-config"),
}


def brought(operators: Operators, name: str, **variables: str) -> None:
    """Attach with these variables and no others, and leave."""
    window = operators.window(
        "attach", name, "--update-env", env=dict.fromkeys(LOGIN, "") | variables
    )
    window.expect(rb"brought up to date: DISPLAY")
    window.send(b"\x1d")
    assert ended(window) == 0


def shown(operators: Operators, name: str, *more: str) -> list[str]:
    """The variables that a command of `exec` has."""
    text = 'echo "<$SSH_AUTH_SOCK|$DISPLAY|$XAUTHORITY|$LD_PRELOAD>"'
    words = ("--", "sh", "-c", text) if more else ("--", text)
    output = operators("exec", name, *more, "--timeout", TIMEOUT, *words)["output"]
    return str(output).strip().strip("<>").split("|")


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_and_the_shell_get_the_variables_of_a_new_login(
    operators: Operators, shell: str, tmp_path: Path
) -> None:
    operators.extra |= LOGIN
    operators.shell("work", command=SHELLS[shell])
    link, *others = shown(operators, "work")
    assert others == [":1", "/old", ""]
    assert os.path.basename(link) == "ssh-agent"
    agent = tmp_path / "agent"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(agent))
        brought(operators, "work", SSH_AUTH_SOCK=str(agent), DISPLAY=":2 of b", XAUTHORITY="")
        for more in ((), ("--new",)):
            assert shown(operators, "work", *more)[:2] == [link, ":2 of b"]
        ask = 'readlink "$SSH_AUTH_SOCK"'
        output = operators("exec", "work", "--new", "--", "sh", "-c", ask)["output"]
        assert str(output).strip() == str(agent)
    # What the user sets afterwards stays.
    operators("exec", "work", "--", "export DISPLAY=:3")
    assert shown(operators, "work")[1] == ":3"


def test_a_variable_that_is_gone_is_removed(operators: Operators) -> None:
    operators.extra |= LOGIN
    operators.shell("work")
    brought(operators, "work", XAUTHORITY="/new")
    for more in ((), ("--new",)):
        assert shown(operators, "work", *more)[:3] == ["", "", "/new"]


def test_no_variable_decides_what_the_session_runs(operators: Operators) -> None:
    """Whatever a client asks for; and the configuration cannot allow it."""
    operators.shell("work")
    config = Config(run_dir=str(operators.home.run))
    with Session.connect("work", config=config, kind="human", role="write") as client:
        wrong = {"LD_PRELOAD": "/x.so", "PATH": "/x", "DISPLAY": ":5"}
        answer = client.request("update-environment", variables=wrong)
        assert (answer["taken"], answer["refused"]) == (["DISPLAY"], ["LD_PRELOAD", "PATH"])
        for value in ("a\nPATH=/x", "\x1b[m", 7, "x" * 5000):
            with pytest.raises(CriuctlError):
                client.request("update-environment", variables={"DISPLAY": value})
    for more in ((), ("--new",)):
        assert shown(operators, "work", *more)[1::2] == [":5", ""]
    with (
        Session.connect("work", config=config, kind="human", role="observe") as client,
        pytest.raises(Forbidden),
    ):
        client.request("update-environment", variables={"DISPLAY": ":6"})
    env = {"CRIUCTL_UPDATE_ENVIRONMENT": "DISPLAY:LD_PRELOAD"}
    refused = operators("ls", check=False, env=env)
    assert refused["exit_code"] == 2 and "'LD_PRELOAD'" in refused["error"]["message"]
