"""What programs in a session ask for: a checkpoint, what invalidates one, and to be called around
one. With real CRIU.
"""

from __future__ import annotations

from itertools import count

import pytest
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators
from support.stepping import run_program, wait_for
from support.supervising import Supervised

pytestmark = pytest.mark.integration

ASKS = """
say("ready")
for number in range(1000):
    while not os.path.exists(f"{sys.argv[1]}{number}"):
        time.sleep(0.01)
    try:
        cp = inside.checkpoint(label=f"before {number}")
    except inside.StepError as error:
        say("refused", number, error.code, error)
    else:
        say("made", number, cp.restored, cp.id)
    say("on", number)
"""


def ask(operators: Operators, number: int) -> str:
    """Let the program ask for its checkpoint; return what it has printed when it goes on."""
    (operators.home.path / f"go{number}").touch()
    return wait_for(operators, "work", f"on {number}\\b")


def test_a_program_asks_for_a_checkpoint(operators: Operators) -> None:
    run_program(operators, "work", ASKS, str(operators.home.path / "go"))
    wait_for(operators, "work", "ready")
    text = ask(operators, 0)
    (made,) = operators("list", "work")
    assert f"made 0 False {made['id']}" in text.replace("\n", "")
    assert made["labels"] == {"label": "before 0"}
    entries = [one for one in operators("log", "work") if one["what"] == "checkpoint-asked"]
    assert [(one["label"], one["uid"]) for one in entries] == [("before 0", 0)]
    operators("kill", "work")
    operators("restore", "work", "--detach")
    wait_for(operators, "work", f"made 0 True {made['id'][:8]}")
    text = ask(operators, 1)
    assert "made 1 False" in text
    assert [one["labels"]["label"] for one in operators("list", "work")] == ["before 0", "before 1"]
    operators("kill", "work")
    operators("restore", "work@1", "--as", "copy", "--detach")
    wait_for(operators, "copy", f"made 0 True {made['id'][:8]}")


def test_a_refused_checkpoint_is_an_exception_and_the_program_goes_on(
    operators: Operators,
) -> None:
    hooks = operators.home.path / "hooks" / "pre-dump"
    hooks.mkdir(parents=True, mode=0o700)
    hook = hooks / "no"
    hook.write_text("#!/bin/sh\necho 'not today' >&2; exit 10\n")
    hook.chmod(0o700)
    run_program(operators, "work", ASKS, str(operators.home.path / "go"))
    wait_for(operators, "work", "ready")
    text = ask(operators, 0).replace("\n", "")
    assert "refused 0 failed the checkpoint failed:" in text and "not today" in text
    assert operators("status", "work")["state"] == "running"
    hook.unlink()
    assert "made 1 False" in ask(operators, 1)


def test_a_supervisor_takes_the_checkpoint(operators: Operators) -> None:
    run_program(operators, "work", ASKS, str(operators.home.path / "go"))
    wait_for(operators, "work", "ready")
    elsewhere = operators.home.path / "elsewhere"
    operators("store", "init", "--store", elsewhere)
    watch = Supervised(
        operators.start("supervise", "work", "--every", "1h", "--store", str(elsewhere))
    )
    watch.wait("snapshot")
    run = ("step", "run", "--session", "work")
    numbers = count()  # it takes a moment until it stores steps, and takes requests with them
    wait_until(
        lambda: (
            operators(*run, f"n{next(numbers)}", "--", "true") and (elsewhere / "steps").exists()
        ),
        TIMEOUT,
        "the supervisor stores steps",
    )
    text = ask(operators, 0)
    taken = watch.wait("snapshot", where=lambda event: event["reason"] == "asked")
    assert f"made 0 False {taken['checkpoint']}" in text.replace("\n", "")
    found = operators("list", "work", "--store", elsewhere)
    assert found[-1]["labels"] == {"label": "before 0"}
    # one that is killed leaves it to criuctl snapshot
    watch.command.process.kill()
    watch.command.process.wait(TIMEOUT)
    assert "made 1 False" in ask(operators, 1)
    assert operators("list", "work")[-1]["labels"] == {"label": "before 1"}


CALLED = """
def told(event):
    open(sys.argv[1], "a").write(event + "\\n")

@inside.before_checkpoint
def before():
    told("before")
    how = open(sys.argv[2]).read()
    if how == "veto":
        raise inside.Veto("in the middle of a payment")
    if how == "raise":
        raise ValueError("broken")
    while os.path.exists(sys.argv[2] + ".hang"):  # nothing open, which a restore would put back
        time.sleep(0.01)

inside.after_restore(lambda: told("restored"))
inside.after_fork(lambda: told("forked"))
say("ready")
time.sleep(100000)
"""


class Called:
    """A session whose program has functions around checkpoints, and sleeps."""

    def __init__(self, operators: Operators) -> None:
        self.operators = operators
        self.heard, self.how = operators.home.path / "heard", operators.home.path / "how"
        self.heard.touch()
        self.now("fine")
        run_program(operators, "work", CALLED, str(self.heard), str(self.how))
        wait_for(operators, "work", "ready")

    def now(self, how: str) -> None:
        """From now on its function behaves so."""
        self.how.write_text(how)

    def hears(self, *events: str) -> None:
        """Wait until its functions were called so."""
        wait_until(
            lambda: self.heard.read_text().split() == list(events), TIMEOUT, f"it hears {events}"
        )


@pytest.fixture
def called(operators: Operators) -> Called:
    operators.extra["CRIUCTL_HOOK_TIMEOUT"] = str(TIMEOUT)
    return Called(operators)


def test_functions_are_called_around_checkpoints(operators: Operators, called: Called) -> None:
    assert operators("snapshot", "work")[0]["warnings"] == []
    called.hears("before")
    assert operators("dump", "work")["warnings"] == []
    called.hears("before", "before")
    operators("restore", "work", "--detach")
    called.hears("before", "before", "restored")
    assert operators("snapshot", "work")[0]["warnings"] == []
    called.hears("before", "before", "restored", "before")
    operators("kill", "work")
    operators("restore", "work@1", "--detach", "--as", "copy")
    called.hears("before", "before", "restored", "before", "forked")


def test_a_veto_and_functions_that_fail_lose_nothing(operators: Operators, called: Called) -> None:
    called.now("veto")
    vetoed = operators("dump", "work", check=False)
    assert vetoed["exit_code"] == 10
    assert "in the middle of a payment" in vetoed["error"]["message"]
    assert operators("list", "work", check=False)["exit_code"] != 0 or not operators("list", "work")
    called.now("raise")
    raised = operators("snapshot", "work")[0]
    assert any("ValueError: broken" in str(one) for one in raised["warnings"])
    called.now("fine")
    hangs = operators.home.path / "how.hang"
    hangs.touch()
    hung = operators("dump", "work", env={"CRIUCTL_HOOK_TIMEOUT": "5"})
    assert any("has not returned within 5 s" in str(one) for one in hung["warnings"])
    hangs.unlink()
    operators("restore", "work", "--detach")
    assert operators("status", "work")["state"] == "running"
    # the function goes on where it was, in the restored program
    called.hears("before", "before", "before", "restored")


CONDITIONS = """
def condition(**asked):
    try:
        inside.invalidate_if(**asked)
    except inside.StepError as error:
        say("no", *asked, error.code)

if len(sys.argv) > 3:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
condition(file=sys.argv[1], age="7d")
condition(age="soon")
condition(file="/no/such/file")
condition(file="/dev/zero")
condition(output=f"cat {sys.argv[2]}")
say("ready")
time.sleep(100000)
"""


def refusals(operators: Operators, ref: str) -> list[str]:
    """What a restore of the checkpoint would find."""
    planned = operators("restore", ref, "--as", "other", "--dry-run", check=False)
    return [one["text"] for one in planned["findings"] if one["level"] == "error"]


def test_what_a_program_says_makes_a_checkpoint_stale(operators: Operators) -> None:
    conf, schema = (operators.home.path / name for name in ("app.conf", "schema"))
    conf.write_text("a = 1")
    schema.write_text("create table a")
    run_program(operators, "work", CONDITIONS, str(conf), str(schema))
    text = wait_for(operators, "work", "ready")
    assert [line for line in text.splitlines() if line.startswith("no")] == [
        "no age bad-request",
        "no file not-found",
        "no file bad-request",
    ]
    operators("dump", "work")
    assert refusals(operators, "work") == []
    conf.write_text("a = 22")
    assert refusals(operators, "work") == [
        f"stale: it requires file:{conf}: it was 5 bytes at the dump and is 6 now"
    ]
    assert operators("restore", "work", "--detach", check=False)["exit_code"] == 4
    operators("restore", "work", "--detach", "--force")
    # all of it came back with the program, the command too: this very host had noted it
    made = operators("snapshot", "work")[0]
    assert made["requires"] == [f"file:{conf}", "age:7d", f"output:cat {schema}"]
    assert refusals(operators, "work") == []
    schema.write_text("create table b")
    assert ["prints something else" in text for text in refusals(operators, "work")] == [True]
    # what cannot be noted keeps no dump from being made
    conf.unlink()
    made = operators("snapshot", "work")[0]
    assert any("stale already" in str(one) for one in made["warnings"])
    conf.write_text("a = 22")
    assert ["could not be noted" in text for text in refusals(operators, "work")] == [True]


def test_root_runs_no_words_of_a_user_and_reads_no_file_for_it(operators: Operators) -> None:
    home = operators.home.path
    home.chmod(0o755)
    operators.home.run.chmod(0o755)
    secret, ran = home / "secret", home / "ran"
    secret.write_text("s")
    secret.chmod(0o600)
    run_program(operators, "work", CONDITIONS, str(secret), f"x; touch {ran}", "user")
    text = wait_for(operators, "work", "ready")
    assert "no output forbidden" in text
    assert not ran.exists()
