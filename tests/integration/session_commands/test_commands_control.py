"""Sessions without a terminal of one's own: starting, looking, typing, waiting, running things in
shells, ending.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.keeper import wait_until
from support.operating import TIMEOUT, Operators
from support.zoo import Zoo

pytestmark = pytest.mark.integration


def test_a_session_from_its_start_to_its_end(operators: Operators, tmp_path: Path) -> None:
    started = operators.shell(
        "work", "--label", "team=a", "--workspace", str(tmp_path), "--size", "100x30"
    )
    assert started["session"] == "work" and started["state"] == "running"
    status = operators("status", "work")
    assert list(status)[:8] == [
        "session",
        "state",
        "home",
        "pid",
        "incarnation",
        "exit_code",
        "since",
        "operators",
    ]
    assert (status["id"], status["pid"], status["rows"], status["cols"]) == (
        started["id"],
        started["pid"],
        30,
        100,
    )
    assert status["incarnation"] == 1 and status["exit_code"] is None
    (listed,) = operators("ls")
    assert (listed["session"], listed["state"], listed["labels"]) == (
        "work",
        "running",
        {"team": "a"},
    )
    assert operators.text("exec", "work", "--", "pwd") == f"{tmp_path}\n"

    taken = operators("run", "-d", "--name", "work", "--", "true", check=False)
    assert taken["exit_code"] == 9 and "exists" in taken["error"]["message"]
    assert operators("pause", "work")["state"] == "paused"
    assert operators("status", "work")["state"] == "paused"
    assert operators("exec", "work", "--", "true", check=False)["exit_code"] == 9
    operators("resume", "work")
    killed = operators("kill", "work", "--timeout", 0)
    assert killed["state"] == "exited" and killed["killed"] >= 2
    wait_until(lambda: not Path(f"/proc/{started['pid']}").exists(), TIMEOUT, "it is reaped")
    after = operators("status", "work")
    assert (after["state"], after["pid"], after["exit_code"]) == ("exited", None, 137)
    for command in (
        ("kill", "work"),
        ("send", "work", "--enter"),
        ("status", "nobody"),
        ("attach", "--stdio", "nobody"),
    ):
        assert operators(*command, check=False)["exit_code"] in (2, 3)
    # the name is free again
    assert operators("run", "-d", "--name", "work", "--", "true")["session"] == "work"


def test_kill_hangs_up_a_shell_and_lets_others_end_in_their_own_way(operators: Operators) -> None:
    """An interactive shell ignores SIGTERM; a program that handles it is not disturbed."""
    operators.shell("shell")
    operators("wait", "shell", "--prompt", "--timeout", TIMEOUT)
    operators("kill", "shell", "--timeout", 3600)
    assert operators("status", "shell")["exit_code"] == 128 + signal.SIGHUP
    handler = "import signal, sys, time\ndef end(*_):\n time.sleep(0.3)\n sys.exit(7)\n"
    waiting = "signal.signal(signal.SIGTERM, end)\nprint('ready')\nsignal.pause()"
    operators("run", "-d", "--name", "own", "--", sys.executable, "-c", handler + waiting)
    operators("wait", "own", "--match", "ready", "--since", 0, "--timeout", TIMEOUT)
    operators("kill", "own", "--timeout", 3600)
    assert operators("status", "own")["exit_code"] == 7
    assert operators("ps") == [] and operators.text("ps", "-a", "ow", "-q") == "own\n"


def test_a_host_without_a_terminal_left_says_so(operators: Operators) -> None:
    """Its file systems have room."""
    room = (
        "mount -t devpts -o newinstance,ptmxmode=0666,max=1 devpts /dev/pts; mount --bind "
        "/dev/pts/ptmx /dev/ptmx"
    )
    operators.prefix = ["unshare", "--mount", "sh", "-ec", f'{room}; exec 9<>/dev/ptmx "$@"', "sh"]
    refused = operators("run", "-d", "--", "sleep", "600", check=False)
    operators.prefix = []
    assert refused["exit_code"] == 13
    assert refused["error"]["message"].endswith(
        "/dev/ptmx: no pseudo-terminal is left on this host"
    )
    assert "kernel.pty.max" in refused["error"]["hint"]


def test_sessions_that_are_started_at_the_same_moment_have_names_of_their_own(
    operators: Operators,
) -> None:
    """Otherwise all would report a start, and only one of them could be reached."""
    at_once = 5
    with ThreadPoolExecutor(at_once) as pool:
        started = list(
            pool.map(lambda _: operators("run", "-d", "--", "sleep", "600"), range(at_once))
        )
        answers = list(
            pool.map(
                lambda _: operators(
                    "run", "-d", "--name", "one", "--", "sleep", "600", check=False
                ),
                range(at_once),
            )
        )
    assert {body["session"] for body in started} == {
        "sleep",
        *(f"sleep-{n}" for n in range(2, at_once + 1)),
    }
    (one,) = [body for body in answers if "session" in body]
    assert [body["exit_code"] for body in answers if "error" in body] == [9] * (at_once - 1)
    listed = {body["session"]: body["pid"] for body in operators("ls")}
    assert listed == {body["session"]: body["pid"] for body in (*started, one)}


def test_what_cannot_be_started_says_why(operators: Operators) -> None:
    absent = operators("run", "-d", "--", "no-such-command", check=False)
    assert absent["exit_code"] == 3 and "no-such-command" in absent["error"]["message"]
    # no program: nothing that criuctl has done wrong
    for wrong in ("/etc/passwd", "/tmp", "x" * 5000):
        assert operators("run", "-d", "--", wrong, check=False)["exit_code"] == 2
    assert (
        operators("run", "-d", "--workspace", "/none", "--", "true", check=False)["exit_code"] == 2
    )
    assert operators("run", "-d", "--name", "-x", "--", "true", check=False)["exit_code"] == 2
    assert operators("run", "--", "true", check=False)["exit_code"] == 2  # attached, and --json
    assert operators("ls") == []
    names = [operators("run", "-d", "--", "sleep", "1000")["session"] for _ in range(2)]
    assert names == ["sleep", "sleep-2"]


RING = """\
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
parameters = ctypes.create_string_buffer(120)
for number, _ in enumerate(sys.stdin):
    ring = libc.syscall(425, 4, parameters)
    print("answer", number, "ring" if ring >= 0 else os.strerror(ctypes.get_errno()), flush=True)
"""


@pytest.mark.parametrize("options", [(), ("--host-pids",)], ids=["private", "host-pids"])
def test_who_takes_io_uring_where_it_can_does_without(
    operators: Operators, options: tuple[str, ...]
) -> None:
    """As newer Node.js and uvloop do, whatever their settings are. A restored one is refused it,
    too.
    """

    def asked(name: str) -> str:
        operators("send", name, "--text", "ask", "--enter")
        return str(
            operators("wait", name, "--match", r"answer \d .+", "--timeout", TIMEOUT)["match"]
        )

    operators("run", "-d", "--name", "takes", *options, "--", sys.executable, "-c", RING)
    assert asked("takes").strip() == "answer 0 ring"
    refused = operators("dump", "takes", check=False)
    assert refused["exit_code"] == 4 and "--no-io-uring" in refused["error"]["hint"]
    operators(
        "run",
        "-d",
        "--name",
        "without",
        "--no-io-uring",
        *options,
        "--",
        sys.executable,
        "-c",
        RING,
    )
    for number in range(3):
        assert asked("without").strip() == f"answer {number} Function not implemented"
        operators("dump", "without")
        operators("restore", "without")


LISTENER = """\
import socket, sys
def listener():
    for protocol in (262, 0):  # IPPROTO_MPTCP, then TCP, as Go's net.Listen since 1.24
        try:
            made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol)
            break
        except OSError as error:
            print("refused", error.strerror, flush=True)
    made.bind(("127.0.0.1", 0))
    made.listen()
    print("listens", "mptcp" if protocol else "tcp", made.getsockname()[1], flush=True)
    return made
made = listener()
while True:
    client, _ = made.accept()
    client.sendall(b"hello")
    client.close()
"""


@pytest.mark.parametrize(
    "options",
    [(), ("--host-pids",), ("--no-io-uring",)],
    ids=["private", "host-pids", "no-io-uring"],
)
def test_a_listener_that_takes_mptcp_where_it_can_takes_tcp(
    operators: Operators, options: tuple[str, ...]
) -> None:
    """Multipath TCP cannot be dumped: a session is refused it as by a kernel that has none, unless
    it is asked for.
    """

    def listens(name: str) -> tuple[str, int]:
        said = operators(
            "wait", name, "--match", r"listens (\w+) (\d+)", "--since", 0, "--timeout", TIMEOUT
        )
        _, protocol, port = str(said["match"]).split()
        return protocol, int(port)

    def greeted(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            return client.recv(100)

    operators(
        "run", "-d", "--name", "takes", "--mptcp", *options, "--", sys.executable, "-c", LISTENER
    )
    assert listens("takes")[0] == "mptcp"
    refused = operators("dump", "takes", check=False)
    assert refused["exit_code"] == 4 and "GODEBUG=multipathtcp=0" in refused["error"]["hint"], (
        refused
    )
    operators("run", "-d", "--name", "without", *options, "--", sys.executable, "-c", LISTENER)
    protocol, port = listens("without")
    assert protocol == "tcp"
    assert any(
        "Protocol not supported" in line
        for line in operators("capture", "without", "--since", 0)["lines"]
    )
    assert greeted(port) == b"hello"
    operators("dump", "without")
    operators("restore", "without")
    assert greeted(port) == b"hello"


@pytest.mark.parametrize(
    ("closing", "said"), [(">&-", "standard output is closed"), (">/dev/full", "No space left")]
)
def test_output_that_goes_nowhere_is_reported(
    operators: Operators, closing: str, said: str
) -> None:
    operators.shell("work")
    operators.prefix = ["sh", "-c", f'exec "$@" {closing}', "sh"]
    for words in (
        "log work --export cast",
        "capture work --follow --since 0",
        "exec work -- echo hi",
    ):
        command = operators.start(*words.split(), json_output=False)
        assert command.process.wait(60) == 1
        assert said in command.output()
    operators.prefix = []


@pytest.mark.parametrize("options", [(), ("--host-pids",)], ids=["private", "host-pids"])
def test_a_session_does_not_start_in_a_session_nor_attach_to_itself(
    operators: Operators, options: tuple[str, ...]
) -> None:
    operators.shell("outer", *options)
    criuctl = f"{sys.executable} -m criuctl"
    nested = operators(
        "exec",
        "outer",
        "--timeout",
        60,
        "--",
        f"{criuctl} run -d --name inner -- sleep 1",
        check=False,
    )
    assert nested["exit_code"] == 9 and "'outer'" in nested["output"]
    itself = operators(
        "exec", "outer", "--timeout", 60, "--", f"{criuctl} attach outer", check=False
    )
    assert itself["exit_code"] == 2 and "inside session 'outer'" in itself["output"]
    assert [session["session"] for session in operators("ls")] == ["outer"]


def test_typing_is_in_order_and_answered_with_the_offset(
    operators: Operators, tmp_path: Path
) -> None:
    paste = tmp_path / "paste"
    paste.write_text("first\nsecond\x1b[201~\n")
    program = (
        "import sys, tty; tty.setraw(0); sys.stdout.write('\\x1b[?2004h\\x1b[?1hready'); "
        "sys.stdout.flush()\n"
    )
    program += (
        "while True: sys.stdout.write(repr(sys.stdin.buffer.raw.read(4096)) + '\\r\\n'); "
        "sys.stdout.flush()"
    )
    operators("run", "-d", "--name", "raw", "--", "python3", "-c", program)
    operators("wait", "raw", "--match", "ready", "--since", 0, "--timeout", TIMEOUT)
    order = (
        "--keys",
        "Up C-c",
        "--text",
        "a b",
        "--enter",
        "--paste",
        paste,
        "--keys",
        "M-x F5 S-Tab",
        "--text",
        "END",
    )
    sent = operators("send", "raw", *order)
    operators("wait", "raw", "--match", "END", "--since", sent["offset"], "--timeout", TIMEOUT)
    said = "".join(operators("capture", "raw", "--since", sent["offset"])["lines"])
    want = b"\x1bOA\x03a b\r\x1b[200~first\rsecond\r\x1b[201~\x1bx\x1b[15~\x1b[ZEND"
    assert said.replace("'b'", "") == repr(want)
    assert operators("send", "raw", check=False)["exit_code"] == 2
    assert operators("send", "raw", "--keys", "Nonsense", check=False)["exit_code"] == 2


def test_waiting(operators: Operators) -> None:
    operators.shell("work")
    at = operators(
        "send",
        "work",
        "--text",
        "sleep 0.3; printf '\\033[31mre\\033[0md %s\\n' 5; sleep 0.3",
        "--enter",
    )["offset"]
    match = operators("wait", "work", "--match", r"^red (\d)$", "--since", at, "--timeout", TIMEOUT)
    assert match["match"] == "red 5" and match["groups"] == ["5"]
    assert (
        operators("wait", "work", "--prompt", "--since", at, "--timeout", TIMEOUT)["shell"]
        == "bash"
    )
    assert (
        operators("wait", "work", "--idle", "0.2", "--timeout", TIMEOUT)["offset"]
        >= match["offset"]
    )
    for what in (("--exit",), ("--match", "never"), ("--idle", "100")):
        late = operators("wait", "work", *what, "--timeout", "0.2", check=False)
        assert late["exit_code"] == 12, what
    operators("send", "work", "--text", "sleep 100", "--enter")
    operators.runs("work", "sleep")
    assert operators("wait", "work", "--prompt", "--timeout", "0.5", check=False)["exit_code"] == 12
    assert operators("signal", "work", "INT")["signalled"] == 1
    operators("wait", "work", "--prompt", "--timeout", TIMEOUT)
    waiting = operators.start("wait", "work", "--match", "never")
    operators("send", "work", "--text", "exit 5", "--enter")
    assert waiting.process.wait(TIMEOUT) == 3
    assert operators("wait", "work", "--exit", "--timeout", TIMEOUT)["exit_code"] == 5
    # the holder has ended; it is still known
    assert operators("wait", "work", "--exit")["exit_code"] == 5


def test_an_ended_session_is_looked_at_as_before_its_exit_code_was_asked_for(
    operators: Operators,
) -> None:
    operators(
        "run", "-d", "--name", "past", "--", "sh", "-c", r"printf 'on\033[1me\n'; echo two; exit 3"
    )
    assert operators("wait", "past", "--exit", "--timeout", TIMEOUT)["exit_code"] == 3
    wait_until(lambda: not operators("status", "past")["holder"], TIMEOUT, "its holder has ended")
    assert operators.text("capture", "past", "--scrollback", "--follow") == "one\ntwo\n"
    end = operators("capture", "past", "--scrollback")["offset"]
    assert operators.text("capture", "past", "--since", end - 5, "--follow") == "two\n"
    assert operators("capture", "past", "--scrollback", "--since", end - 5)["lines"] == ["two"]
    assert operators.text("capture", "past", "--follow") == ""
    found = operators("wait", "past", "--match", r"^(\w)ne$")
    assert (found["match"], found["groups"], found["offset"]) == ("one", ["o"], end)
    never = operators("wait", "past", "--match", "never", check=False)
    assert never["exit_code"] == 3 and "ended before" in never["error"]["message"]
    assert (
        operators("wait", "past", "--match", "one", "--since", end - 5, check=False)["exit_code"]
        == 3
    )
    assert operators("wait", "past", "--idle", "100")["offset"] == end
    late = operators("kill", "past", "--timeout", 7200, check=False)
    assert late["exit_code"] == 2 and "3600" in late["error"]["message"]


def test_a_session_that_runs_without_a_holder(operators: Operators, zoo: Zoo) -> None:
    """It is there: what needs a terminal says what is missing, and its end can be waited for."""
    animal = zoo.launch("counter.py", "1")
    operators("dump", animal.pid, "--name", "plain", "--leave-running")
    for words in (
        ("pause",),
        ("send", "--enter"),
        ("capture",),
        ("wait", "--idle", 0),
        ("exec", "--", "true"),
    ):
        refused = operators(words[0], "plain", *words[1:], check=False)
        assert (refused["exit_code"], refused["error"]["code"]) == (9, "not-held"), words
        assert "criuctl run" in refused["error"]["hint"]
    assert operators("wait", "plain", "--exit", "--timeout", "0.2", check=False)["exit_code"] == 12
    waiting = operators.start("wait", "plain", "--exit")
    operators("dump", "plain")
    assert waiting.process.wait(TIMEOUT) == 3 and "criuctl restore plain" in waiting.output()
    pid = operators("restore", "plain")["pid"]
    waiting = operators.start("wait", "plain", "--exit")
    wait_until(lambda: _waits_for_a_process(waiting.process.pid), TIMEOUT, "it waits")
    os.kill(pid, signal.SIGKILL)
    assert waiting.process.wait(TIMEOUT) == 0
    assert (waiting.json()["state"], waiting.json()["exit_code"]) == ("lost", None)


def _waits_for_a_process(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return any("pidfd" in os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd"))
    return False


@pytest.mark.parametrize(
    "shell",
    [("bash", "--norc", "--noprofile"), ("zsh", "-f"), ("dash",)],
    ids=lambda words: words[0],
)
def test_commands_in_a_live_shell(
    operators: Operators, shell: tuple[str, ...], tmp_path: Path
) -> None:
    if shutil.which(shell[0]) is None:
        pytest.skip(f"{shell[0]} is not installed")
    operators.shell("work", command=shell)
    operators("send", "work", "--text", "half a li")  # it is dropped
    assert (
        operators(
            "exec", "work", "--", f"cd {tmp_path}; value='a  \"b\" $HOME é !x'; false", check=False
        )["exit_code"]
        == 1
    )
    assert operators("exec", "work", "--", "pwd")["output"] == f"{tmp_path}\n"
    assert (
        operators("exec", "work", "--", 'printf "%s\\n" "$value"')["output"]
        == 'a  "b" $HOME é !x\n'
    )
    quoted = operators("exec", "work", "--", "printf", "%s|", "it's", "a\tb", "two\nlines", "\\x")
    assert (quoted["output"], quoted["exit_code"]) == ("it's|a\tb|two\nlines|\\x|", 0)
    assert (
        operators.text("exec", "work", "--", "echo out; echo err >&2; (exit 3)", code=3)
        == "out\nerr\n"
    )
    lines = operators(
        "exec", "work", "--", "i=0; while [ $i -lt 5000 ]; do echo line $i; i=$((i+1)); done"
    )["output"]
    assert lines == "".join(f"line {n}\n" for n in range(5000))
    late = operators("exec", "work", "--timeout", "0.3", "--", "sleep 1000", check=False)
    assert late["error"]["exit_code"] == 12 and late["state"] == "timed-out"
    operators.runs("work", "sleep")
    busy = operators("exec", "work", "--", "true", check=False)
    assert busy["exit_code"] == 9 and "sleep" in busy["error"]["message"]
    operators("signal", "work", "INT")
    operators("wait", "work", "--prompt", "--timeout", TIMEOUT)
    assert operators("exec", "work", "--", "exit 4", check=False)["error"]["exit_code"] == 3
    assert operators("status", "work")["exit_code"] == 4


def test_an_agent_types_while_a_person_only_looks(operators: Operators) -> None:
    operators.shell("work")
    window = operators.window("attach", "work")
    window.expect(rb"\$")
    operators("send", "work", "--text", "echo from an agent | tr a-z A-Z", "--enter")
    window.expect(rb"FROM AN AGENT\r\n")
    window.send(b"echo mine | tr a-z A-Z\r")
    window.expect(rb"MINE\r\n")
    # it waits for the person to pause
    operators("send", "work", "--text", "echo at once | tr a-z A-Z", "--enter")
    window.expect(rb"AT ONCE\r\n")


def test_an_agent_does_not_type_into_what_a_person_writes(operators: Operators) -> None:
    operators.shell("work")
    window = operators.window("attach", "work", "--take")
    window.expect(rb"\$")
    held = operators("send", "work", "--text", "x", check=False)
    assert held["exit_code"] == 9 and held["error"]["code"] == "lease-held"
    assert operators("exec", "work", "--", "true", check=False)["exit_code"] == 9
    assert operators("exec", "work", "--take", "--", "echo took")["output"] == "took\n"
    window.expect(rb"took\r\n")
    window.send(b"echo mine | tr a-z A-Z\r")
    window.expect(rb"MINE\r\n")


def test_halting_an_agent_that_ignores_everything(operators: Operators) -> None:
    program = "trap '' INT TERM; echo on; while :; do :; done"
    operators("run", "-d", "--name", "agent", "--", "sh", "-c", program)
    operators("wait", "agent", "--match", "on", "--since", 0, "--timeout", TIMEOUT)
    halted = operators("halt", "agent")
    assert halted["processes"] >= 1 and operators("status", "agent")["state"] == "paused"
    operators("resume", "agent")
    assert operators("kill", "agent", "--timeout", "0.2")["killed"] >= 1


def test_the_log_and_the_recording(operators: Operators, tmp_path: Path) -> None:
    late = tmp_path / "late"
    script = f"read a; echo got $a; until [ -e {late} ]; do sleep 0.02; done; echo later; exit 2"
    operators("run", "-d", "--name", "talk", "--", "sh", "-c", script)
    at = operators("send", "talk", "--text", "hello", "--enter")["offset"]
    operators("wait", "talk", "--match", "got hello\n", "--since", at, "--timeout", TIMEOUT)
    time.sleep(0.3)  # the pause that is recorded
    late.touch()
    operators("wait", "talk", "--exit", "--timeout", TIMEOUT)
    entries = operators("log", "talk")
    (typed,) = [entry for entry in entries if entry["what"] == "input"]
    assert (typed["text"], typed["kind"], typed["name"]) == ("hello\r", "service", "tester")
    assert [entry["sequence"] for entry in entries] == sorted(
        entry["sequence"] for entry in entries
    )
    header, *events = (
        json.loads(line) for line in operators.text("log", "talk", "--export", "cast").splitlines()
    )
    assert (header["version"], header["term"]["cols"], header["term"]["rows"]) == (3, 80, 24)
    assert (
        "".join(data for _, code, data in events if code == "o")
        == "hello\r\ngot hello\r\nlater\r\n"
    )
    (pause,) = [
        interval for interval, code, data in events if code == "o" and data.startswith("later")
    ]
    assert 0.2 < pause < 60
    assert events[-1][1:] == ["x", "2"]
    assert operators("log", "talk", "--export", "cast") == [header, *events]


def test_following_the_output(operators: Operators) -> None:
    operators(
        "run",
        "-d",
        "--name",
        "talk",
        "--",
        "sh",
        "-c",
        "printf '\\033[1mone\\033[m\\n'; read x; echo two; exit 1",
    )
    follower = operators.start("capture", "talk", "--since", 0, "--follow", json_output=False)
    operators("wait", "talk", "--match", "one", "--since", 0, "--timeout", TIMEOUT)
    operators("send", "talk", "--enter")
    assert follower.process.wait(TIMEOUT) == 0
    assert follower.out.read_text() == "one\n\ntwo\n"
    assert operators("capture", "talk", "--scrollback")["lines"] == ["one", "", "two"]
    assert operators("capture", "talk", "--ansi")["lines"][0] == "\x1b[0;1mone\x1b[m"


def test_what_is_kept_of_ended_sessions_is_forgotten(operators: Operators) -> None:
    """Output and audit logs of sessions with names of their own would fill the disk in the end."""
    folders = operators.home.path / "state" / "holders"
    for name in ("first", "second", "lives", "stored"):
        operators.shell(name)
    for name in ("first", "second"):
        operators("send", name, "--text", "exit 3", "--enter")
        operators("wait", name, "--exit", check=False)
    operators("dump", "stored")
    assert operators("forget", check=False)["exit_code"] == 2
    refused = operators("forget", "lives", "first", "stored", "nobody", check=False)
    assert [(one["session"], one["ok"]) for one in refused["sessions"]] == [
        ("lives", False),
        ("first", True),
        ("stored", False),
        ("nobody", False),
    ]
    assert [one["error"]["code"] for one in refused["sessions"] if one["error"]] == [
        "conflict",
        "conflict",
        "not-found",
    ]
    assert refused["bytes"] > 0
    assert {path.name for path in folders.iterdir()} == {"second", "lives", "stored"}
    assert {body["session"] for body in operators("ls")} == {"second", "lives", "stored"}
    assert operators("capture", "first", check=False)["exit_code"] == 3

    (folders / "of-an-earlier-boot").mkdir()
    assert operators("forget", "--ended-before", "1h")["sessions"] == []
    would = operators("forget", "--ended-before", "0", "--dry-run")
    done = operators("forget", "--ended-before", "0")
    assert [one["session"] for one in would["sessions"]] == [
        one["session"] for one in done["sessions"]
    ]
    assert [one["session"] for one in done["sessions"]] == ["of-an-earlier-boot", "second"]
    assert {path.name for path in folders.iterdir()} == {"lives", "stored"}
    assert operators.text("exec", "lives", "--", "echo", "on") == "on\n"
    operators("restore", "stored")
    operators("dump", "stored")
    operators("kill", "stored")  # it is not waited for any more
    assert operators("forget", "stored")["sessions"][0]["ok"]
    assert operators("list")[0]["session"] == "stored"
    events = [event for event in operators("events") if event["operation"] == "forget"]
    assert {event.get("session") for event in events} >= {
        "first",
        "second",
        "stored",
        "of-an-earlier-boot",
    }


@pytest.mark.parametrize("where", [(), ("--host-pids",)], ids=["own PIDs", "host PIDs"])
def test_the_program_of_a_paused_session_is_killed(
    operators: Operators, where: tuple[str, ...]
) -> None:
    """PID 1 of its namespace stands still too: it must reap its program and end all the same."""
    operators("run", "-d", "--name", "work", *where, "--", "sh", "-c", "sleep 1000 & echo up; wait")
    operators("wait", "work", "--since", "0", "--match", "up", "--timeout", TIMEOUT)
    operators("pause", "work")
    os.kill(operators("status", "work")["pid"], signal.SIGKILL)
    wait_until(
        lambda: operators("status", "work")["state"] == "exited", TIMEOUT, "the session has ended"
    )
    assert operators("status", "work")["exit_code"] == 128 + signal.SIGKILL
