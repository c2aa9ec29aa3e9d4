"""Commands that run next to a session's terminal, as processes of its tree."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from support import oracle
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators

from criuctl.config import Config
from criuctl.session.client.session import Session

pytestmark = pytest.mark.integration


def run(operators: Operators, *words: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """The JSON of an `exec --new` in `work`, with its exit status."""
    command = operators.start("exec", "work", "--new", *options, "--", *words)
    code = command.process.wait(120)
    body: dict[str, Any] = command.json()
    return body | {"status": code}


def detached(operators: Operators, *words: str) -> str:
    return str(operators("exec", "work", "--new", "--detach", "--", *words)["command_id"])


@pytest.mark.parametrize("busy", ["sleep 1000", "vim"])
def test_a_busy_terminal(operators: Operators, busy: str, tmp_path: Path) -> None:
    """It shows nothing of the command, which runs in the folder of what is in the foreground."""
    operators.shell("work")
    operators("send", "work", "--text", f"cd {tmp_path}; {busy}", "--enter")
    operators.runs("work", busy.split(maxsplit=1)[0])
    operators("wait", "work", "--idle", "0.5")
    at = operators("status", "work")["offset"]
    done = run(operators, "pwd; echo error >&2; exit 7")
    assert (done["stdout"], done["stderr"]) == (f"{tmp_path}\n", "error\n")
    assert (done["exit_code"], done["status"], done["state"]) == (7, 7, "done")
    assert (done["output"], done["encoding"], done["missing"]) == (done["stdout"], "utf-8", 0)
    assert operators("status", "work")["offset"] == at
    words = run(operators, "printf", "%s|", "it's", "two\nlines", "é")
    assert words["stdout"] == "it's|two\nlines|é|"
    binary = run(operators, r"printf 'a\377'")
    assert binary["encoding"] == "base64" and base64.b64decode(binary["stdout"]) == b"a\xff"
    assert run(operators, "no-such-command-1")["status"] == 127
    assert run(operators, "kill -9 $$")["exit_code"] == 137


def test_folder_environment_user_and_input(operators: Operators, tmp_path: Path) -> None:
    operators.shell("work")
    file = tmp_path / "input"
    file.write_bytes(b"some input\n" * 100_000)
    options = ("--cwd", "/usr", "--env", "A=1", "--env", "B=x=y", "--stdin", str(file))
    done = run(operators, 'pwd; echo "$A $B $PWD"; cat | wc -c', options=options)
    assert done["stdout"].split("\n")[:3] == ["/usr", "1 x=y /usr", "1100000"]
    user = run(operators, "id -un; id -G; echo $HOME; cat", options=("--user", "nobody"))
    assert user["stdout"].startswith("nobody\n") and user["exit_code"] == 0
    for wrong in (("--cwd", "/no/such"), ("--user", "no-such-user")):
        body = run(operators, "true", options=wrong)
        assert body["status"] == 126 and "No such" in body["stderr"].replace("no such", "No such")
    env = run(operators, "env")["stdout"]
    assert "CRIUCTL_SHELL" not in env and "PROMPT_COMMAND" not in env and "PS1=$ \n" in env
    usage = operators("exec", "work", "--cwd", "/", "--", "true", check=False)
    assert usage["exit_code"] == 2 and "--new" in usage["error"]["message"]
    assert operators.text("exec", "work", "--new", "--", "echo out; echo err >&2") == "out\n"


def test_it_is_a_process_of_the_session(operators: Operators) -> None:
    """In its namespaces and control group, below its init; kill and pause reach it."""
    operators.shell("work")
    status = operators("status", "work")
    command = detached(operators, "echo $$; exec sleep 1000")
    wait_until(
        lambda: operators("output", "work", "--command", command)["stdout"] != "",
        TIMEOUT,
        "it has begun",
    )
    operators.runs("work", "sleep")
    asleep = [p for p in oracle.tree(status["pid"]) if oracle.read(f"/proc/{p}/comm") == "sleep\n"]
    assert len(asleep) == 1
    for what in ("ns/pid", "ns/mnt", "ns/ipc"):
        assert (
            Path(f"/proc/{asleep[0]}/{what}").readlink()
            == Path(f"/proc/{status['pid']}/{what}").readlink()
        )
    groups = [oracle.read(f"/proc/{pid}/cgroup") for pid in (asleep[0], status["pid"])]
    assert groups[0] == groups[1]
    running = operators("output", "work", "--command", command)
    assert running["state"] == "running"
    late = operators("wait", "work", "--command", command, "--timeout", "0.3", check=False)
    assert late["state"] == "timed-out"
    ended = operators("kill", "work", "--command", command)
    assert (ended["state"], ended["exit_code"]) == ("done", 143)
    stubborn = detached(operators, "trap '' TERM; while :; do sleep 1; done")
    operators.runs("work", "sleep")
    ended = operators("kill", "work", "--command", stubborn, "--timeout", "0.5")
    assert (ended["state"], ended["exit_code"]) == ("done", 137)
    last = detached(operators, "sleep 1000")
    assert operators("kill", "work", "--timeout", 0)["killed"] >= 4
    assert last


def test_time_limits(operators: Operators) -> None:
    operators.shell("work")
    for action, code in (("leave", None), ("interrupt", 130), ("kill", 137)):
        options = ("--timeout", "0.5", "--on-timeout", action)
        late = run(operators, "echo before; echo err >&2; sleep 1000", options=options)
        assert (late["status"], late["state"], late["exit_code"]) == (12, "timed-out", None)
        assert late["stdout"] == "before\n" and late["stderr"].startswith("err\n")
        record = operators("output", "work", "--command", late["command_id"])
        assert record["state"] in ("running", "interrupted", "done"), code
        assert (record["state"] == "running") == (action == "leave")
    silent = run(operators, "sleep 1000", options=("--no-output-timeout", "0.3"))
    assert silent["status"] == 12 and "printed nothing" in silent["error"]["message"]


def test_much_output(operators: Operators) -> None:
    """More than is kept: what is missing is reported, and no memory holds it."""
    operators.shell("work")
    body = run(operators, "seq 1 6000000; echo end >&2")
    whole = sum(len(str(n)) + 1 for n in range(1, 6000001))
    assert len(body["stdout"]) + body["missing"] == whole
    assert body["stdout"].endswith("\n6000000\n") and body["stderr"] == "end\n"
    command = detached(operators, "head -c 300000000 /dev/zero; sleep 1000")
    wait_until(
        lambda: operators("output", "work", "--command", command, "--since", 10**9)["end"] > 0,
        TIMEOUT,
        "it prints",
    )


def test_dumped_and_restored(operators: Operators) -> None:
    """With what it had printed; its exit code comes after the restore."""
    operators.shell("work")
    code = "echo one; echo err >&2; i=0; while [ ! -e /tmp/go-$0 ]; do sleep 0.1; done; echo two"
    token = operators.home.token
    command = detached(operators, "sh", "-c", f"{code}; exit 7", token)
    wait_until(
        lambda: operators("output", "work", "--command", command)["stdout"] == "one\n",
        TIMEOUT,
        "it has begun",
    )
    go = Path(f"/tmp/go-{token}")
    try:
        operators("dump", "work")
        operators("restore", "work", "--detach")  # its holder has waited for it
        again = operators("output", "work", "--command", command)
        assert (again["state"], again["stdout"]) == ("running", "one\n")
        operators("dump", "work")
        operators("kill", "work", "--timeout", 0)
        operators("restore", "work", "--detach")  # under a new holder
        again = operators("output", "work", "--command", command)
        assert (again["state"], again["stdout"], again["stderr"]) == ("running", "one\n", "err\n")
        go.touch()
        ended = operators("wait", "work", "--command", command, "--timeout", TIMEOUT, check=False)
        assert (ended["state"], ended["exit_code"]) == ("done", 7)
        assert (ended["stdout"], ended["stderr"]) == ("one\ntwo\n", "err\n")
        operators("dump", "work", "--leave-running")
        after = operators("output", "work", "--command", command, check=False)
        assert (after["state"], after["exit_code"], after["stdout"]) == ("done", 7, "one\ntwo\n")
    finally:
        go.unlink(missing_ok=True)


def test_the_end_of_the_session_is_the_commands_end(operators: Operators) -> None:
    operators.shell("work")
    started = operators.start("exec", "work", "--new", "--", "echo on; sleep 1000")
    operators.runs("work", "sleep")
    operators("send", "work", "--text", "exit 3", "--enter")
    assert started.process.wait(TIMEOUT) == 130
    body = started.json()
    assert (body["state"], body["exit_code"], body["stdout"]) == ("interrupted", None, "on\n")


def test_a_new_program_of_the_holder(operators: Operators) -> None:
    """It has the files of commands that run, and of those that have ended."""
    operators.shell("work")
    ended = detached(operators, "echo first")
    operators("wait", "work", "--command", ended, "--timeout", TIMEOUT)
    running = detached(operators, "echo second; sleep 2; exit 5")
    shell = operators("exec", "work", "--detach", "--", "sleep 2; echo third")["command_id"]
    config = Config(run_dir=str(operators.home.run))
    with Session.connect("work", config=config, kind="human", role="admin") as session:
        session.reexec()
        assert session.request("commands")["commands"][0]["id"] == ended
    assert operators("output", "work", "--command", ended)["stdout"] == "first\n"
    done = operators("wait", "work", "--command", running, "--timeout", TIMEOUT, check=False)
    assert (done["state"], done["exit_code"], done["stdout"]) == ("done", 5, "second\n")
    done = operators("wait", "work", "--command", shell, "--timeout", TIMEOUT)
    assert (done["state"], done["output"]) == ("done", "third\n")
    assert run(operators, "echo fourth")["stdout"] == "fourth\n"
