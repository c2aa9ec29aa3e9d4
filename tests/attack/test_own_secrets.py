"""What only criuctl may know stays with criuctl: no session, holder, hook or helper is given its
secrets.

Each test plants canaries where an operator puts secrets, and then looks for them where they must
not be.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import oracle
from support.command import Home
from support.hooking import HookFolder
from support.keeper import Keeper, wait_until
from support.operating import TIMEOUT, Operators
from support.stored import plain

pytestmark = pytest.mark.integration

CANARY = "canary-4f9e2b71"
KNOWN = "control-4f9e2b71"  # which has to be found: else the search would prove nothing

# Whatever tells of a secret, or might: values are canaries.
SECRETS = {
    "CRIUCTL_PASSPHRASE": CANARY,
    "CRIUCTL_RECOVERY_KEY": CANARY,
    "CRIUCTL_PASSPHRASE_FILE": f"/nonexistent/{CANARY}",
    "CRIUCTL_PASSPHRASE_COMMAND": f"echo {CANARY}",
    "CRIUCTL_KEY_FILE": f"/nonexistent/{CANARY}",
    "CRIUCTL_S3_ENDPOINT": f"https://user:{CANARY}@127.0.0.1:9",
    "CRIUCTL_HOSTS": f"{{there: {{url: ssh://root@there, command: env TOKEN={CANARY} criuctl}}}}",
    "CRIUCTL_CONNECTION_RULES": f"[{{match: {{port: 1}}, secret: {{command: [echo, {CANARY}]}}}}]",
    "CRIUCTL_SSH_COMMAND": f"sshpass -p {CANARY} ssh",
    "CRIUCTL_WEBHOOK_TOKEN": CANARY,
}


@pytest.fixture
def hooks(home: Home) -> HookFolder:
    return HookFolder(home.path / "hooks")


@pytest.fixture
def operators(keeper: Keeper, home: Home) -> Iterator[Operators]:
    """criuctl; every session is ended before the leak guard looks."""
    operators = Operators(keeper, home)
    yield operators
    operators.close()


def environ(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.parametrize("options", [(), ("--host-pids",)], ids=["namespaces", "host-pids"])
def test_a_session_is_not_given_criuctl_s_secrets(
    options: tuple[str, ...], operators: Operators
) -> None:
    """Neither its processes nor its holder have them, and so no checkpoint has."""
    ours = {**SECRETS, "CZOO_KNOWN": KNOWN}
    body = operators("run", "-d", "--name", "work", *options, "--", "sleep", "1000", env=ours)
    tree = oracle.tree(body["pid"])
    assert any(KNOWN.encode() in environ(pid) for pid in tree)
    for pid in (*tree, body["holder_pid"]):
        assert CANARY.encode() not in environ(pid), f"PID {pid}"
    operators("dump", "work")
    stored = plain(operators.store, operators.home.path)
    assert KNOWN.encode() in stored
    assert CANARY.encode() not in stored


def test_a_criuctl_inside_a_session_still_finds_its_places(operators: Operators) -> None:
    """What is no secret goes on: there, too, `criuctl ls` shows the sessions of this host."""
    operators.shell("work")
    body = operators(
        "exec", "work", "--", "sh", "-c", "echo $CRIUCTL_RUN_DIR $CRIUCTL_STATE_DIR $CRIUCTL_STORE"
    )
    places = [operators.home.run, operators.home.path / "state", operators.store]
    assert body["output"].split() == list(map(str, places))


def test_credentials_of_the_store_in_a_session_are_told(operators: Operators) -> None:
    """AWS_* may be wanted by the program, so it is inherited; where the store is opened by it, that
    is said.
    """
    ours = {
        "AWS_SECRET_ACCESS_KEY": CANARY,
        "AWS_SESSION_TOKEN": CANARY,
        "CRIUCTL_STORE": "s3://bucket/x",
    }
    (warning,) = operators("run", "-d", "--name", "a", "--", "sleep", "1000", env=ours)["warnings"]
    assert "AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN" in warning and "env -u" in warning
    assert CANARY not in warning
    here = {**ours, "CRIUCTL_STORE": str(operators.store)}
    assert operators("run", "-d", "--name", "b", "--", "sleep", "1000", env=here)["warnings"] == []


def secretive(operators: Operators) -> dict[str, str]:
    """The environment of one who opens an encrypted store of that run."""
    given = {"CRIUCTL_PASSPHRASE": CANARY}
    made = operators("store", "init", "--passphrase", "--recovery-key", env=given)
    return {
        **given,
        "CRIUCTL_RECOVERY_KEY": made["recovery_key"],
        "AWS_SECRET_ACCESS_KEY": CANARY,
        "CZOO_KNOWN": KNOWN,
    }


def started(words: str, parent: int = 0) -> list[int]:
    """The processes with these words in their command, of this parent if one is given."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        line = oracle.read(f"/proc/{pid}/cmdline").replace("\0", " ")
        above = oracle.read(f"/proc/{pid}/stat").rpartition(")")[2].split()[1:2]
        if words in line and above and (not parent or above == [str(parent)]):
            found.append(pid)
    return found


def test_keeper_and_guardian_of_a_fork_have_no_secrets(operators: Operators) -> None:
    """They live as long as the copies, and any process of their user can read their environment."""
    ours = secretive(operators)
    operators.shell("work")
    operators("fork", "work", "--as", "copy-4f9e2b71", env=ours, timeout=2 * TIMEOUT)
    keeper, guardian = started("fork work --as copy-4f9e2b71")
    for pid in (keeper, guardian):
        content = environ(pid)
        assert CANARY.encode() not in content, f"PID {pid}"
        assert ours["CRIUCTL_RECOVERY_KEY"].encode() not in content, f"PID {pid}"


def test_the_agent_of_an_editor_is_not_given_criuctl_s_secrets(
    operators: Operators, home: Home
) -> None:
    """AWS_* stays: an agent may need it for its model."""
    ours = {**operators.environment(), **SECRETS, "AWS_SECRET_ACCESS_KEY": KNOWN}
    command = [sys.executable, "-m", "criuctl", "acp", "--", "sleep", "4392871"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=ours, cwd=home.path) as serving:
        try:
            wait_until(lambda: started("sleep 4392871", serving.pid), TIMEOUT, "the agent runs")
            (agent,) = started("sleep 4392871", serving.pid)
            assert KNOWN.encode() in environ(agent)
            assert CANARY.encode() not in environ(agent)
        finally:
            for pid in started("sleep 4392871", serving.pid):
                os.kill(pid, signal.SIGKILL)
            serving.kill()


def test_no_key_is_in_any_process_or_file_of_a_dump_and_a_restore(
    operators: Operators, hooks: HookFolder, home: Home
) -> None:
    """A passphrase and a recovery key in the environment open the store, and are given to nothing
    that criuctl starts.

    Hooks in every phase look at the environments of all processes that bear this test's token,
    criuctl's own aside.
    """
    made = operators(
        "store", "init", "--passphrase", "--recovery-key", env={"CRIUCTL_PASSPHRASE": CANARY}
    )
    ours = {
        "CRIUCTL_PASSPHRASE": CANARY,
        "CRIUCTL_RECOVERY_KEY": made["recovery_key"],
        "AWS_SECRET_ACCESS_KEY": CANARY,
    }
    wanted = [CANARY, made["recovery_key"]]
    for phase in (
        "pre-dump",
        "frozen",
        "post-commit",
        "pre-restore",
        "post-restore",
        "post-resume",
    ):
        hooks.python(
            phase,
            "look",
            LOOK.format(wanted=wanted, found=str(home.path / "found"), token=home.token),
        )
    operators("run", "-d", "--name", "work", "--", "sleep", "1000")
    operators("dump", "work", env=ours, timeout=2 * TIMEOUT)
    operators("restore", "work", env=ours, timeout=2 * TIMEOUT)
    seen = (home.path / "found").read_text().splitlines()
    assert {line.split()[0] for line in seen} >= {"pre-dump", "post-commit", "post-restore"}
    assert any(" sleep " in line for line in seen)
    assert [line for line in seen if line.endswith(" FOUND")] == []
    for file in (
        path for folder in (home.path, home.run) for path in folder.rglob("*") if path.is_file()
    ):
        # the answer of `store init`, which tells the recovery key once
        if not file.name.startswith("command-"):
            content = file.read_bytes()
            for one in wanted:
                assert one.encode() not in content or hooks.path in file.parents, file


# In a hook: the environments of this process's relatives and of every descendant of criuctl.
LOOK = """
import os
wanted, found = {wanted!r}, {found!r}
def stat(pid):
    with open(f"/proc/{{pid}}/stat") as file:
        return file.read().rpartition(")")[2].split()
def criuctl():
    pid = os.getpid()
    while b"-m\\0criuctl\\0" not in open(f"/proc/{{pid}}/cmdline", "rb").read():
        pid = int(stat(pid)[1])
    return pid
top, below = criuctl(), []
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        pid, chain = int(name), []
        while pid > 1:
            chain.append(pid)
            pid = int(stat(pid)[1])
        command = open(f"/proc/{{name}}/cmdline", "rb").read().replace(b"\\0", b" ")
        command = command.decode(errors="replace")[:80]
        environ = open(f"/proc/{{name}}/environ", "rb").read().decode(errors="replace")
        environ += open(f"/proc/{{name}}/cmdline", "rb").read().decode(errors="replace")
    except OSError:
        continue
    ours = "-m criuctl" in command
    if (top in chain and not ours) or {token!r} in environ and not ours:
        below.append((command, any(one in environ for one in wanted)))
with open(found, "a") as file:
    for command, leaked in below:
        print(os.environ["CRIUCTL_HOOK_PHASE"], command, "FOUND" if leaked else "-", file=file)
"""
