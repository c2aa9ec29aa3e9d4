"""The one error boundary: exit codes, streams, signals."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.program import ROOT, run_program

from criuctl import errors

Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Folders of this test's own, should what is to be refused be done."""
    return {
        f"CRIUCTL_{name}": str(tmp_path / name.lower())
        for name in ("STORE", "STATE_DIR", "RUN_DIR", "CACHE_DIR", "KEY_DIR")
    }


CLASSES = sorted(
    n for n, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.CriuctlError)
)


@pytest.mark.parametrize(
    "name", ["StoreDenied", "NoSuchCheckpoint", "Damaged", "Vetoed", "PlatformError", "TimedOut"]
)
def test_an_error_is_its_message_hint_and_exit_code(provoke: Run, name: str) -> None:
    done = provoke("fail", name)
    assert done.returncode == getattr(errors, name).exit_code
    assert done.stdout == ""
    # The message's escape sequence must not reach the terminal.
    assert done.stderr == "criuctl: what happened\\x1b[2J\n  hint: what to do\n"


def test_every_error_class_has_an_exit_code_that_the_contract_names() -> None:
    for name in CLASSES:
        assert getattr(errors, name).exit_code in errors.EXIT_CODES


def test_json_errors_are_on_stdout_alone_and_carry_details(provoke: Run) -> None:
    done = provoke("fail", "StoreDenied", "--json")
    assert done.returncode == 7
    assert done.stderr == ""
    assert json.loads(done.stdout) == {
        "error": {
            "code": "store-denied",
            "exit_code": 7,
            "message": "what happened\x1b[2J",
            "hint": "what to do",
            "object": "packs/1",
        }
    }


def test_verbose_tells_the_cause_and_more_verbose_where(provoke: Run) -> None:
    once, twice = provoke("fail", "StoreDenied", "-v"), provoke("-v", "fail", "StoreDenied", "-v")
    assert "caused by: OSError: [Errno 5] the cause" in once.stderr
    assert "Traceback" not in once.stderr
    assert "Traceback" in twice.stderr


def test_a_refused_preflight_lists_its_obstacles(provoke: Run) -> None:
    done = provoke("fail", "findings")
    assert done.returncode == 4
    assert "PID 12 fd 3: is traced" in done.stderr
    assert "Stop the tracer." in done.stderr
    assert "unimportant" not in done.stderr
    assert "not now" not in done.stderr
    found = json.loads(provoke("fail", "findings", "--json").stdout)["error"]["findings"]
    assert found[0] == {
        "level": "error",
        "code": "traced",
        "text": "is traced",
        "hint": "Stop the tracer.",
        "pid": 12,
        "fd": 3,
    }


def test_a_bug_is_reported_as_one_with_a_traceback_only_under_v(provoke: Run) -> None:
    plain, verbose, machine = (
        provoke("fail", "bug"),
        provoke("fail", "bug", "-v"),
        provoke("fail", "bug", "--json"),
    )
    assert plain.returncode == verbose.returncode == machine.returncode == 1
    assert plain.stderr.startswith(
        "criuctl: this is a bug in criuctl, sorry: ValueError: boom\n  hint: Run it again with -v"
    )
    assert "Traceback" not in plain.stderr
    assert "Traceback" in verbose.stderr
    assert json.loads(machine.stdout)["error"]["code"] == "bug"


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("memory", "there is not enough memory for criuctl itself", "ulimit -v"),
        ("thread", "criuctl cannot start another thread", "pids.max"),
        ("descriptors", "pagemap-1.img: Too many open files", "ulimit -Hn"),
    ],
)
def test_a_limit_of_the_host_is_no_bug(provoke: Run, name: str, text: str, hint: str) -> None:
    """Also where an error that came of it has hidden it."""
    done = provoke("fail", name)
    assert done.returncode == 13
    assert done.stderr.startswith(f"criuctl: {text}\n  hint: ")
    assert hint in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "no command given"),
        (["lisst"], "Did you mean 'list'?"),
        (["list", "--jsn"], "Did you mean '--json'?"),
        (["dump"], "Missing argument 'TARGET'"),
        (["dump", "1", "--label", "novalue"], "not of the form KEY=VALUE"),
        (["dump", "1", "--label", "a=1", "--label", "a=2"], "given twice"),
        (["dump", "1", "--connections", "maybe"], "'maybe' is not one of"),
        (["restore", "x", "--pids", "none"], "'none' is not one of"),
        (["verify"], "either a REF or --all"),
        (["verify", "x", "--all"], "either a REF or --all"),
        (["snapshot"], "either TARGETs, or --all, or --label"),
        (["rm"], "Missing argument 'REF...'"),
        (["store"], "no command given"),
        (["store", "inti"], "Did you mean 'init'?"),
        (["store", "init", "--no-encrypt", "--passphrase"], "excludes"),
        (["store", "init", "--key-file", "k", "--passphrase"], "exclude each other"),
        (["store", "init", "--passphrase", "--store", "/proc/nonexistent/s"], "asks on a terminal"),
        (["help", "nothing"], "there is no command 'nothing'"),
        (["list", "--config", "/proc/nonexistent/c.yaml"], "no such configuration file"),
        (["list", "--config", "x" * 5000], "File name too long"),
        (["list", "--config", ""], "'--config': it is empty"),
        (["rm", "web", "--store", ""], "'--store': it is empty"),
        (["--store", "", "gc"], "'--store': it is empty"),
        (["dump", "1", "--drain", "nan"], "'nan' is not a valid number of seconds"),
        (["wait", "web", "--timeout", "5x"], "'5x' is not a valid number of seconds"),
        (["metrics", "--listen", "9" * 5000], "is not ADDR:PORT"),
        (["ui", "--listen", "9" * 5000], "is no address to listen on"),
        (
            ["hooks", "run", "reconnect", "x", "--target", "1", "--fd", "9" * 5000],
            "is not of the form FD or PID:FD",
        ),
        (["check", "9" * 5000], "cannot be a session's name"),
        (["snapshot", "--all", "--deadline", ""], "'' is not a span of time"),
        (["maintenance", "begin", "--deadline", "300y"], "longer than 366 days"),
        (["migrate", "--resolve", "--dry-run"], "contradict each other"),
        (
            ["schedule", "add", "x", "web", "--every", "0h"],
            "a period must be between 1m and 366d, not 0h",
        ),
    ],
)
def test_usage_errors_exit_2_and_say_what_is_meant(
    criuctl: Run, env: dict[str, str], args: list[str], words: str
) -> None:
    done = criuctl(*args, env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    machine = criuctl(*args, "--json", env=env)
    assert machine.returncode == 2
    assert machine.stderr == ""
    assert words in json.loads(machine.stdout)["error"]["message"] or not args or args == ["store"]


def test_json_as_the_value_of_another_option_asks_for_nothing(provoke: Run) -> None:
    done = provoke("late", "Conflict", "--store", "--json")
    assert (done.returncode, done.stdout) == (9, "done\n")


def test_what_goes_wrong_after_the_result_is_not_a_second_json_value(provoke: Run) -> None:
    for name, code, said in (
        ("Conflict", 9, "what happened"),
        ("bug", 1, "sorry"),
        ("interrupt", 143, "stopped by SIGTERM"),
    ):
        done = provoke("late", name, "--json")
        assert done.returncode == code
        assert json.loads(done.stdout) == {"done": True}
        assert said in done.stderr


def test_an_interrupt_while_it_is_imported_is_quiet(criuctl: Run, tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text(
        "import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(60)\n"
    )
    done = criuctl("--help", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_no_folder_to_be_in(tmp_path: Path, env: dict[str, str]) -> None:
    gone = 'cd "$1"; rmdir "$1"; shift; exec "$@"'
    program = ("sh", "-c", gone, "sh", str(tmp_path / "gone"), sys.executable, "-m", "criuctl")
    for args in (("run", "-d", "--", "true"), ("list", "--store", "here")):
        (tmp_path / "gone").mkdir()
        done = run_program(program, *args, env=env)
        assert (done.returncode, "the current folder is gone" in done.stderr) == (2, True), (
            done.stderr
        )


def test_a_command_that_is_empty(criuctl: Run, env: dict[str, str]) -> None:
    done = criuctl("run", "-d", "--", "", env=env)
    assert (done.returncode, "an empty command" in done.stderr) == (2, True), done.stderr


def test_a_workspace_that_is_not_said_is_not_the_current_folder(
    criuctl: Run, env: dict[str, str]
) -> None:
    done = criuctl("run", "-d", "--workspace", "", "--", "true", env=env)
    assert (done.returncode, "'' is no folder" in done.stderr) == (2, True), done.stderr


def test_global_options_stand_before_and_after_the_command(provoke: Run) -> None:
    for args in (["--json", "tell"], ["tell", "--json"]):
        done = provoke(*args)
        assert json.loads(done.stdout) == {"done": True}
        assert done.stderr == ""


def test_degraded_is_11(provoke: Run) -> None:
    assert provoke("degraded").returncode == 11


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_lets_the_operation_clean_up_and_a_second_one_does_not_stop_that(
    provoking: Start, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    gate = tmp_path / "gate"
    with provoking("wait") as child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        child.stdin.write(f"{gate}\n")
        child.stdin.flush()
        assert child.stdout.readline() == "ready\n"
        child.send_signal(number)
        assert child.stdout.readline() == "cleaning\n"
        child.send_signal(signal.SIGTERM)
        assert child.stderr.readline() == "criuctl: already stopping; cleaning up first\n"
        gate.touch()
        assert child.stdout.readline() == "clean\n"
        assert child.wait(120) == code
        assert child.stderr.read() == f"criuctl: stopped by {number.name}\n"


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(
    provoking: Start, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with provoking("wait", env={"PROVOKE_IGNORE_HUP": "1"}) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(f"{gate}\n")
        child.stdin.flush()
        assert child.stdout.readline() == "ready\n"
        gate.touch()
        child.send_signal(signal.SIGHUP)
        child.send_signal(signal.SIGINT)
        assert child.wait(120) == 130  # of SIGINT: SIGHUP, sent first, did nothing


def test_a_reader_that_goes_away_ends_it_quietly(provoking: Start) -> None:
    with provoking("flood") as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.read(10) == "x" * 10
        child.stdout.close()
        assert child.wait(120) == 141
        assert child.stderr.read() == ""


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize(("closed", "code"), [(True, 141), (False, 1)], ids=["closed", "full"])
def test_what_must_be_done_to_the_end_is_done_though_stdout_is_closed(
    provoke: Run, tmp_path: Path, options: tuple[str, ...], closed: bool, code: int
) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe, open("/dev/full", "w") as full:
        done = provoke(
            "each",
            str(tmp_path / "done"),
            *options,
            stdout=pipe if closed else full,
            stderr=subprocess.PIPE,
        )
    assert (done.returncode, (tmp_path / "done").read_text()) == (code, "012")
    assert done.stderr == (
        "" if closed else "criuctl: the result could not be printed: No space left on device\n"
    )


def test_help_into_a_closed_pipe_is_quiet(criuctl: Run) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = criuctl("--help", stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_broken_pipe_inside_an_operation_is_not_taken_for_the_reader_of_stdout(
    provoke: Run,
) -> None:
    done = provoke("fail", "pipe")
    assert done.returncode == 1
    assert "BrokenPipeError" in done.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("denied", "/var/lib/criuctl/sessions: Permission denied\n  hint: "),
        ("full", "No space left on device\n  hint: Free space"),
        ("file", "/etc/passwd/holders: Not a directory\n  hint: A file is where a folder"),
    ],
)
def test_what_the_host_does_not_allow_is_no_bug(provoke: Run, name: str, said: str) -> None:
    done = provoke("fail", name)
    assert done.returncode == 13
    assert said in done.stderr


@pytest.mark.parametrize(("closing", "code"), [("2>&-", 0), (">&-", 1), ("<&- >&- 2>&-", 1)])
def test_closed_streams_are_not_given_to_files(tmp_path: Path, closing: str, code: int) -> None:
    """The first file that is opened would be standard output, or error, and have messages written
    into it.
    """
    program = (
        sys.executable,
        str(Path(__file__).with_name("provoke.py")),
        "opens",
        str(tmp_path / "file"),
    )
    done = run_program(("sh", "-c", f'exec "$@" {closing}', "sh"), *program)
    assert done.returncode == code  # the result is lost where there is no standard output
    assert (tmp_path / "file").read_text() == "True"


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_a_result_that_cannot_be_written_is_reported(
    provoke: Run, options: tuple[str, ...]
) -> None:
    with open("/dev/full", "w") as full:
        done = provoke("tell", *options, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert "the result could not be printed: No space left on device" in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("args", [("--help",), ("list", "--help"), ("--version",)])
def test_help_that_cannot_be_written_is_reported(criuctl: Run, args: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = criuctl(*args, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (
        1,
        "criuctl: the result could not be printed: No space left on device\n",
    )


def test_a_key_is_not_written_to_standard_output(criuctl: Run) -> None:
    assert "never printed" in criuctl("store", "key", "--export", "-").stderr


def test_a_closed_stderr_does_not_fail_an_operation(provoke: Run) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = provoke("tell", "-v", stdout=subprocess.PIPE, stderr=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stdout) == (0, "done\n")
