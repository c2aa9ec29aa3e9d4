"""Who writes into a session: leases that outlast a command, roles, and agents that stay out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.operating import TIMEOUT, Operators

from criuctl.config import Config
from criuctl.errors import TimedOut
from criuctl.session.client.session import Session

pytestmark = pytest.mark.integration

HUMAN = {"CRIUCTL_KIND": "human"}
FORBIDDEN = 10
BOT = {"CRIUCTL_KIND": "agent", "CRIUCTL_OPERATOR": "bot"}
WAITS = "while read line; do until [ -e {go} ]; do sleep 0.02; done; printf '{said}\\n'; done"


def code(operators: Operators, env: dict[str, str], *arguments: str) -> int:
    """The exit code of a command as this operator."""
    return int(operators(*arguments, env=env, check=False)["exit_code"])


def typing(operators: Operators, env: dict[str, str]) -> int:
    """The exit code of typing a letter as this operator."""
    return code(operators, env, "send", "work", "--text", "x")


def lease_of(operators: Operators) -> dict[str, Any]:
    """The lease of the session, with no fact that differs from run to run."""
    lease = operators("status", "work")["lease"]
    return {key: lease[key] for key in ("kind", "name", "held")}


def test_a_lease_is_held_after_the_command_that_took_it(operators: Operators) -> None:
    operators("run", "-d", "--name", "work", "--", "cat")
    got = operators("lease", "request", "work", "--hold", "1h", env=BOT)
    assert (got["lease"]["name"], got["lease"]["held"], got["from"]) == ("bot", True, None)
    assert typing(operators, BOT) == 0 and typing(operators, {}) == 9
    assert code(operators, {}, "lease", "request", "work") == 9
    assert code(operators, {}, "lease", "take", "work") == 10  # a script, from an agent
    assert code(operators, HUMAN, "lease", "yield", "work") == 9
    taken = operators("lease", "take", "work", env=HUMAN)
    assert (taken["lease"]["name"], taken["from"]["name"]) == ("tester", "bot")
    assert typing(operators, HUMAN) == 0 and typing(operators, BOT) == 9
    assert code(operators, BOT, "lease", "take", "work") == 10
    assert code(operators, BOT, "send", "work", "--take", "--text", "x") == 10
    assert lease_of(operators) == {"kind": "human", "name": "tester", "held": True}
    expires = operators("status", "work")["lease"]["expires"]
    operators("send", "work", "--take", "--text", "x", env=HUMAN)  # it does not shorten it
    assert operators("status", "work")["lease"]["expires"] == pytest.approx(expires, abs=0.1)
    assert operators("lease", "yield", "work", env=HUMAN)["lease"] is None
    assert typing(operators, BOT) == 0
    assert code(operators, HUMAN, "lease", "take", "work", "--hold", "0") == 2
    assert code(operators, HUMAN, "lease", "take", "work", "--hold", "2d") == 2
    whats = [(entry["what"], entry.get("name")) for entry in operators("log", "work")]
    held = [what for what in whats if what[0] in ("lease-hold", "lease-yield")]
    assert held == [("lease-hold", "bot"), ("lease-hold", "tester"), ("lease-yield", "tester")]


def test_what_a_person_takes_for_a_command_is_not_taken_back_at_once(operators: Operators) -> None:
    operators("run", "-d", "--name", "work", "--", "cat")
    operators("lease", "request", "work", env=BOT)
    assert typing(operators, HUMAN) == 9
    operators("send", "work", "--take", "--text", "stop", "--enter", env=HUMAN)
    assert typing(operators, BOT) == 9
    assert lease_of(operators) == {"kind": "human", "name": "tester", "held": True}
    assert typing(operators, HUMAN) == 0


def test_a_halt_stops_what_does_not_say_that_it_is_a_human(operators: Operators) -> None:
    operators("run", "-d", "--name", "work", "--", "cat")
    operators("halt", "work")
    assert typing(operators, {}) == 9 and typing(operators, BOT) == 9
    assert typing(operators, HUMAN) == 0
    assert code(operators, BOT, "resume", "work") == 10
    operators("resume", "work")
    assert typing(operators, BOT) == 0
    assert code(operators, {"CRIUCTL_KIND": "robot"}, "halt", "work") == 2


def test_agents_stay_out_until_a_human_says_otherwise(operators: Operators) -> None:
    operators("run", "-d", "--name", "work", "--", "cat")
    operators("role", "work", "bot", "admin", env=HUMAN)
    operators("halt", "work", env=HUMAN)
    resumed = operators("resume", "work", "--agent-stays-out", env=HUMAN)
    assert (resumed["state"], resumed["agents_stay_out"]) == ("running", True)
    for env in (BOT, {}):
        refused = operators("send", "work", "--text", "x", env=env, check=False)
        assert refused["exit_code"] == 10 and "criuctl role" in refused["error"]["hint"]
        assert code(operators, env, "role", "work", "bot", "admin") == 10
    assert typing(operators, HUMAN) == 0
    operators("lease", "yield", "work", env=HUMAN)
    assert operators("dump", "work", check=False)["exit_code"] == FORBIDDEN  # a script, too
    operators("dump", "work", env=HUMAN)
    operators("kill", "work", env=HUMAN)  # its holder ends: the roles are in the checkpoint
    operators("restore", "work", env=HUMAN)
    assert typing(operators, BOT) == 10
    given = operators("role", "work", "bot", "write", env=HUMAN)
    assert [one["kind"] for one in given["operators"]] == ["agent", "service"]
    assert typing(operators, BOT) == 0 and typing(operators, {}) == 10
    operators("role", "work", "*", "admin", env=HUMAN)
    assert typing(operators, {}) == 0
    assert code(operators, HUMAN, "role", "work", "op-999", "write") == 3
    assert code(operators, HUMAN, "role", "work", "agent:", "write") == 2


def test_the_echo_of_what_was_typed_is_no_answer(operators: Operators, tmp_path: Path) -> None:
    """The command and the Python method search the same text."""
    go, said = tmp_path / "go", r"Build \033[32mOK\033[0m"
    script = WAITS.format(go=go, said=said)
    operators("run", "-d", "--name", "work", "--", "sh", "-c", script)
    at = operators("send", "work", "--text", "Build OK", "--enter")["offset"]
    operators("wait", "work", "--idle", "0.2", "--timeout", TIMEOUT)
    config = Config(run_dir=str(operators.home.run))
    with Session.connect("work", config=config, kind="service", role="observe") as session:
        for since in ((), ("--since", at)):
            late = operators(
                "wait", "work", "--match", "OK", *since, "--timeout", "0.2", check=False
            )
            assert late["exit_code"] == 12
        with pytest.raises(TimedOut):
            session.wait_match("OK", timeout=0.2)
        go.touch()
        assert session.wait_match("^Build OK$", timeout=TIMEOUT)[0] == "Build OK"
    found = operators("wait", "work", "--match", "^Build OK$", "--since", at, "--timeout", TIMEOUT)
    assert found["match"] == "Build OK"
    operators("send", "work", "--keys", "C-d")
    operators("wait", "work", "--exit", "--timeout", TIMEOUT)
    ended = operators("wait", "work", "--match", ".*Build.*", "--since", at)
    assert ended["match"] == "Build OK"


def test_a_shell_s_echo_is_no_answer_even_if_it_was_typed_too_early(operators: Operators) -> None:
    operators("run", "-d", "--name", "work", "--", "bash", "--norc", "--noprofile")
    operators("send", "work", "--text", "kill -STOP $$ # DONE", "--enter")
    late = operators("wait", "work", "--match", "DONE", "--timeout", "2", check=False)
    assert late["exit_code"] == 12
    assert "DONE" in operators.text("capture", "work")


def test_a_detached_session_has_a_terminal_type(operators: Operators) -> None:
    shows = ("sh", "-c", "echo type=$TERM.; read x")
    for options, wanted in (((), "xterm-256color"), (("--env", "TERM=dumb"), "dumb")):
        operators("run", "-d", *options, "--name", wanted, "--", *shows, env={"TERM": "dumb"})
        operators(
            "wait", wanted, "--match", f"type={wanted}\\.", "--since", 0, "--timeout", TIMEOUT
        )
