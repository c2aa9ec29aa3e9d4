"""One hook at a time: what it sees, how its answers are judged, and that nothing of it is left
running.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import jsonschema
import pytest
from msgspec.structs import replace
from support.hooking import HookFolder
from support.keeper import start_time, wait_until

from criuctl.config import Config, load
from criuctl.errors import ConfigError, Vetoed
from criuctl.hooks import PHASES, Hooks
from criuctl.hooks.contract import HookResult
from criuctl.hooks.runner import check
from criuctl.proc.tree import children
from criuctl.report import Reporter


def run(config: Config, phase: str = "post-commit", **facts: object) -> HookResult:
    """The result of the one hook of a phase that cannot be stopped by it."""
    hooks = Hooks(config, Reporter(), dict(facts))
    hooks.run(phase)
    (result,) = hooks.results
    return result


def test_a_hook_sees_its_input_and_nothing_of_ours(
    hooks: HookFolder, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("CRIUCTL_STORE", "x")
    monkeypatch.setenv("PASSED", "on")
    monkeypatch.setenv("PYTHONPATH", "x")
    leak = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(leak, True)
    program = """
import json, os, signal, sys
request = json.load(sys.stdin)
links = {int(n): f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")}
fds = {n: os.readlink(link) for n, link in links.items() if os.path.exists(link)}
ignored = [n for n in (1, 2, 13, 15) if signal.getsignal(n) == signal.SIG_IGN and n != 13]
data = {"request": request, "fds": sorted(fds), "env": dict(os.environ), "cwd": os.getcwd()}
data["ignored"] = ignored
data["leader"] = os.getsid(0) == os.getpid() == os.getpgid(0)
data["blocked"] = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
print(json.dumps({"data": data}))
"""
    hooks.python("post-commit", "look", program)
    try:
        data = run(replace(config, hook_env=("PASSED", "UNSET")), session="web", pid=7).data
    finally:
        os.close(leak)
    assert data["request"] == {"version": 1, "phase": "post-commit", "session": "web", "pid": 7}
    assert data["fds"] == [0, 1, 2]
    assert (data["cwd"], data["leader"], data["ignored"], data["blocked"]) == ("/", True, [], [])
    own = {
        "CRIUCTL_HOOK_PHASE": "post-commit",
        "CRIUCTL_HOOK_NAME": "look",
        "CRIUCTL_HOOK_SESSION": "web",
        "CRIUCTL_HOOK_PID": "7",
    }
    assert data["env"].items() >= {"PASSED": "on", **own}.items()
    assert (
        not {"AWS_SECRET_ACCESS_KEY", "CRIUCTL_STORE", "PYTHONPATH", "UNSET"} & data["env"].keys()
    )


ENDS = {
    "nothing": ("true", True, "", ""),
    "an empty object": ("echo '{}'", True, "", ""),
    "exit 10": ("echo first >&2; echo busy >&2; exit 10", False, "", "busy"),
    "exit 10 with a reason": ('echo \'{"veto": "full"}\'; exit 10', False, "", "full"),
    "exit 10 in silence": ("exit 10", False, "", "no reason given"),
    "veto": ('echo \'{"veto": "full"}\'', False, "", "full"),
    "not ok": ('echo \'{"ok": false, "reason": "no disk"}\'', False, "no disk", ""),
    "exit 3": ("echo broken >&2; exit 3", False, "exit code 3: broken", ""),
    "a crash": ("kill -SEGV $$", False, "signal 11", ""),
    "garbage": ("echo hello", False, "not JSON: 'hello", ""),
    "no object": ("echo '[1]'", False, "no object", ""),
    "binary": ("head -c 1000 /dev/urandom", False, "not JSON", ""),
    "two objects": ("echo '{} {}'", False, "not JSON", ""),
    "wrong kinds": ('echo \'{"warnings": "x"}\'', False, "wrong kind", ""),
    "huge numbers": ('echo \'{"data": {"n": 1e999}}\'', False, "too large", ""),
    "cut short": ("printf '{\"a\":'", False, "not JSON", ""),
    "too deep": (
        'printf \'{"data":{"a":[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]}}\'',
        False,
        "nested too deeply",
        "",
    ),
    "huge output": ("yes", False, "more than 1 MiB", ""),
}


@pytest.mark.parametrize("script", ENDS.values(), ids=list(ENDS))
def test_how_ends_and_answers_are_judged(
    script: tuple[str, bool, str, str], hooks: HookFolder, config: Config
) -> None:
    text, ok, error, veto = script
    hooks.sh("post-commit", "hook", text)
    result = run(config)
    assert (result.ok, result.veto) == (ok, veto)
    assert error in result.error
    assert bool(error) == bool(result.error)


def test_a_file_that_is_no_program(hooks: HookFolder, config: Config) -> None:
    hooks.file("post-commit", "hook", "echo hello\n")
    assert "#! line" in run(config).error
    hooks.file("post-commit", "hook", "#!/nonesuch\n")
    assert "could not be run" in run(config).error


def test_results_are_what_the_manifest_s_schema_says(hooks: HookFolder, config: Config) -> None:
    schema = json.loads((Path(__file__).parents[3] / "images" / "manifest.schema.json").read_text())
    for name, script in {
        "1": "true",
        "2": "echo e >&2; exit 3",
        "3": "exit 10",
        "4": 'echo \'{"warnings": ["w"]}\'',
    }.items():
        hooks.sh("frozen", name, script)
        asked = Hooks(config, Reporter())
        with contextlib.suppress(Vetoed):
            asked.run("frozen")
        for record in asked.records():
            assert set(record) <= set(schema["$defs"]["hook"]["properties"])
            jsonschema.validate(record, schema["$defs"]["hook"])
        (hooks.path / "frozen" / name).unlink()


def test_output_is_kept_in_bounds(hooks: HookFolder, config: Config) -> None:
    hooks.sh(
        "post-commit", "hook", 'seq 100000 >&2; echo \'{"warnings": ["w"], "data": {"a": [1]}}\''
    )
    result = run(config)
    assert result.ok
    assert len(result.stderr) == 4096
    assert result.stderr.endswith("100000")
    assert result.to_dict()["data"] == {"a": [1]}


# $STRAY notes its PID and sleeps; `noted` waits until it has.
STRAYS = {
    "hangs": "$STRAY & sleep 1000",
    "ignores SIGTERM": "trap '' TERM; $STRAY & while :; do sleep 1000; done",
    "is stopped": "$STRAY & noted; kill -STOP $$",
    "ends, its children do not": "$STRAY & noted; exit 0",
    "daemonises": "(setsid $STRAY > /dev/null 2>&1 < /dev/null &); noted; exit 0",
    "daemonises and hangs": "(setsid $STRAY &); sleep 1000",
}


def _with_stray(hooks: HookFolder, script: str) -> tuple[str, Path]:
    """The script with $STRAY set, and the file in which the stray notes its PID."""
    noted = hooks.path / "pid"
    stray = hooks.sh(
        "strays", "stray", f"echo $$ > {noted}.new; mv {noted}.new {noted}; exec sleep 1000"
    )
    return (
        f"STRAY={stray}; noted() {{ while [ ! -e {noted} ]; do sleep 0.01; done; }}\n{script}",
        noted,
    )


@pytest.mark.parametrize("how", STRAYS)
def test_nothing_of_a_hook_is_left(how: str, hooks: HookFolder, config: Config) -> None:
    before = children(os.getpid())  # servers of the test run
    script, noted = _with_stray(hooks, STRAYS[how])
    hooks.sh("post-commit", "hook", script)
    hangs = "exit 0" not in STRAYS[how]
    began = time.monotonic()
    result = run(replace(config, hook_timeout=3.0 if hangs else 60.0))
    assert time.monotonic() - began < 40
    assert ("ended after 3 s" in result.error) == hangs
    assert start_time(int(noted.read_text())) is None
    assert set(children(os.getpid())) <= set(before)


def test_policies_by_phase(hooks: HookFolder, config: Config) -> None:
    for phase in PHASES:
        hooks.sh(phase, "fails", "exit 1")
        hooks.sh(phase, "warns", 'echo \'{"warnings": ["mind"]}\'')
    stopped = []
    for phase in PHASES:
        asked = Hooks(config, Reporter())
        try:
            asked.run(phase)
        except Vetoed:
            stopped.append(phase)
            continue
        assert asked.degraded
        assert [r.name for r in asked.results] == ["fails", "warns"]
        assert any("exit code 1" in w for w in asked.reporter.warnings)
        assert any("mind" in w for w in asked.reporter.warnings)
    with pytest.raises(Vetoed) as caught:
        Hooks(config, Reporter()).run("pre-dump")
    assert caught.value.details["hook"]["name"] == "fails"
    assert str(hooks.path) in caught.value.hint
    assert stopped == ["pre-dump", "pre-restore", "post-restore"]
    other = replace(config, hook_failure={"pre-dump": "ignore", "frozen": "veto"})
    asked = Hooks(other, Reporter())
    asked.run("pre-dump")
    assert (asked.degraded, len(asked.reporter.warnings)) == (False, 1)
    with pytest.raises(Vetoed):
        asked.run("frozen")


def test_what_is_forgotten_has_no_consequences(hooks: HookFolder, config: Config) -> None:
    """The hooks of a phase that comes again: only their last answer counts."""
    hooks.sh("frozen", "fails-once", '[ -e "$0.done" ] && exit 0; touch "$0.done"; exit 1')
    asked = Hooks(config, Reporter())
    asked.run("pre-dump")
    asked.run("frozen")
    assert asked.degraded
    asked.forget("frozen")
    asked.run("frozen")
    assert not asked.degraded and [result.ok for result in asked.results] == [True]


@pytest.mark.parametrize(
    "bad",
    [{"nonesuch": "veto"}, {"pre-dump": "maybe"}, {"post-commit": "veto"}, {"reconnect": "warn"}],
)
def test_policies_that_make_no_sense(bad: dict[str, str], config: Config) -> None:
    with pytest.raises(ConfigError, match="hook_failure"):
        Hooks(replace(config, hook_failure=bad), Reporter())


def test_a_veto_stops_the_hooks_after_it(hooks: HookFolder, config: Config) -> None:
    hooks.sh("pre-dump", "1", "true")
    hooks.sh("pre-dump", "2", "exit 10")
    hooks.noting("pre-dump", "3")
    with pytest.raises(Vetoed, match="'2' says no"):
        Hooks(config, Reporter()).run("pre-dump")
    assert hooks.requests("pre-dump", "3") == []


def test_a_refused_hook_is_not_run_and_vetoes(
    hooks: HookFolder, config: Config, tmp_path: Path
) -> None:
    hooks.sh("pre-dump", "hook", f"touch {tmp_path}/ran").chmod(0o777)
    with pytest.raises(Vetoed, match="can be written by others") as caught:
        Hooks(config, Reporter()).run("pre-dump")
    assert "chmod go-w" in caught.value.hint
    assert not (tmp_path / "ran").exists()


def test_hooks_of_a_failure_run_once(hooks: HookFolder, config: Config) -> None:
    hooks.noting("dump-failed")
    asked = Hooks(config, Reporter())
    with pytest.raises(Vetoed, match="the reason"), asked.on_failure("dump-failed"):
        raise Vetoed("the reason", hint="do this")
    (request,) = hooks.requests("dump-failed")
    assert request["error"] == {
        "code": "vetoed",
        "exit_code": 10,
        "message": "the reason",
        "hint": "do this",
    }
    asked.done = True
    with pytest.raises(ValueError), asked.on_failure("dump-failed"):
        raise ValueError
    assert len(hooks.requests("dump-failed")) == 1


def test_recorded_results_go_to_the_hook_of_the_same_name(
    hooks: HookFolder, config: Config
) -> None:
    hooks.noting("post-restore", "mine")
    recorded = [
        {"name": "mine", "phase": "frozen", "data": {"a": 1}},
        {"name": "other", "phase": "frozen", "data": {}},
    ]
    Hooks(config, Reporter(), {"recorded": recorded}).run("post-restore")
    assert hooks.requests("post-restore", "mine")[0]["recorded"] == recorded[:1]


def test_an_interrupt_ends_the_hook(hooks: HookFolder, config: Config) -> None:
    before = children(os.getpid())
    script, noted = _with_stray(hooks, "(setsid $STRAY &); sleep 1000")
    hooks.sh("post-commit", "hook", script)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        wait_until(noted.exists, 60, "the hook runs")
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(config)
    thread.join()
    assert start_time(int(noted.read_text())) is None
    assert set(children(os.getpid())) <= set(before)


def test_a_hook_that_kills_its_watcher_goes_with_it(hooks: HookFolder, config: Config) -> None:
    noted = hooks.path / "pid"
    hooks.sh(
        "post-commit", "hook", f"echo $$ > {noted}; kill -9 $PPID; while :; do sleep 0.1; done"
    )
    result = run(config)
    assert "watcher" in result.error
    wait_until(lambda: start_time(int(noted.read_text())) is None, 60, "the hook is gone")


def test_the_configuration_s_keys(hooks: HookFolder, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("hook_timeout: 7\nhook_env: [A, B]\nhook_failure: {frozen: veto}\n")
    config = load(
        str(file),
        {
            "HOME": str(tmp_path),
            "CRIUCTL_HOOK_DIRS": f"{hooks.path}:/etc/more",
            "CRIUCTL_HOOK_TIMEOUT_FROZEN": "2",
        },
    )
    assert (config.hook_timeout, config.hook_timeout_frozen, config.hook_env) == (
        7.0,
        2.0,
        ("A", "B"),
    )
    assert (config.hook_failure, config.hook_dirs) == (
        {"frozen": "veto"},
        (str(hooks.path), "/etc/more"),
    )
    check(config)
    for bad in (
        "hook_failure: [frozen]",
        "hook_failure: {frozen: 1}",
        "hook_failure: frozen",
        "hook_timeout: soon",
    ):
        file.write_text(bad)
        with pytest.raises(ConfigError, match="hook_"):
            load(str(file), {"HOME": str(tmp_path)})
    for wrong in (
        {"hook_timeout": 0.0},
        {"hook_timeout_frozen": float("nan")},
        {"hook_dirs": ("hooks",)},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            check(Config(**wrong))
