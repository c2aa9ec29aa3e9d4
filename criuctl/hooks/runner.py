"""Running hooks: one executable at a time, under a watcher that ends all its processes; see
`criuctl.proc.hookwatch`.

`Hooks` belongs to one operation. It has the facts for hooks, runs the hooks of a phase in order,
puts their warnings into the operation's report, and turns a veto, or a failure where the phase's
policy says so, into `Vetoed`. All answers of hooks are kept in `results`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from ..config import Config
from ..errors import CommandFailed, ConfigError, CriuctlError, TimedOut, Vetoed
from ..proc import command, hookwatch
from ..quoting import quoted
from ..report import Reporter
from .contract import (
    MAX_OUTPUT,
    PHASES,
    STDERR_TAIL,
    VERSION,
    VETO_EXIT,
    Answer,
    BadAnswer,
    HookResult,
    decode,
    policies,
    understand,
)
from .find import Hook, executables

_LONGEST = 86400  # seconds
_SPARE = 30.0  # seconds beyond a hook's own time in which its watcher must have ended it


class Ended(Struct, frozen=True):
    """The end of a hook's process, and its output."""

    error: str  # why that is a failure; "" if it is not
    vetoed: bool
    stdout: bytes
    stderr: str
    seconds: float


def check(config: Config) -> None:
    """Raise `ConfigError` for an impossible configuration of hooks."""
    policies(config)
    for key in ("hook_timeout", "hook_timeout_frozen"):
        if not 0 < getattr(config, key) < _LONGEST:
            raise ConfigError(
                f"{key} must be a number of seconds from 0 to {_LONGEST}, not "
                f"{getattr(config, key)}"
            )
    for folder in config.hook_dirs:
        if not os.path.isabs(folder):
            raise ConfigError(f"hook_dirs: {folder!r} is no absolute path")


def phase_timeout(config: Config, phase: str) -> float:
    """Return the seconds that one hook of `phase` may take."""
    return config.hook_timeout_frozen if phase == "frozen" else config.hook_timeout


def environment(config: Config, hook: Hook, body: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of a hook beyond that of every helper: variables from the
    configuration, and the hook's identity.
    """
    passed = {name: os.environ[name] for name in config.hook_env if name in os.environ}
    variables = {
        "PHASE": hook.phase,
        "NAME": hook.name,
        "SESSION": body.get("session") or "",
        "PID": body.get("pid") or "",
    }
    # for hooks in sh
    return passed | {f"CRIUCTL_HOOK_{key}": str(value) for key, value in variables.items()}


def execute(
    config: Config,
    hook: Hook,
    body: Mapping[str, Any],
    timeout: float,
    fds: Mapping[int, int] | None = None,
) -> Ended:
    """Run the executable of `hook` with `body` as JSON; `fds` are additional descriptors, by the
    numbers it sees.
    """
    numbers = dict(fds or {})
    life, ours = os.pipe2(os.O_CLOEXEC)
    status = os.memfd_create("hook-status", os.MFD_CLOEXEC)
    began = time.monotonic()
    watcher = [
        sys.executable,
        "-I",
        "-S",
        str(Path(hookwatch.__file__)),
        str(life),
        str(status),
        str(timeout),
    ]
    mapped = [f"{number}={fd}" for number, fd in numbers.items()]
    try:
        done = command.run(
            [*watcher, *mapped, "--", hook.path],
            timeout=timeout + _SPARE,
            input=json.dumps(body).encode(),
            env=environment(config, hook, body),
            check=False,
            pass_fds=[life, status, *numbers.values()],
            cwd="/",
            max_stdout=MAX_OUTPUT,
        )
        data = os.pread(status, 4096, 0)
    except command.TooMuchOutput:
        return Ended(
            f"it printed more than {MAX_OUTPUT >> 20} MiB", False, b"", "", time.monotonic() - began
        )
    except (CommandFailed, TimedOut) as error:
        return Ended(
            f"it could not be watched: {error.message}", False, b"", "", time.monotonic() - began
        )
    finally:
        for fd in (life, ours, status):
            os.close(fd)
    seconds = time.monotonic() - began
    end = json.loads(data) if data else {"exec": done.error_text[-300:] or "its watcher was killed"}
    return Ended(
        _failure(end, timeout),
        end.get("exit") == VETO_EXIT,
        done.stdout,
        done.error_text[-STDERR_TAIL:],
        seconds,
    )


def _failure(end: Mapping[str, Any], timeout: float) -> str:
    if "exec" in end:
        more = " (has it a #! line?)" if end["exec"] == os.strerror(8) else ""
        return f"it could not be run: {end['exec']}{more}"
    if "timeout" in end:
        return f"it was ended after {timeout:.3g} s"
    if "signal" in end:
        return f"it was ended by signal {end['signal']}"
    return f"it ended with exit code {end['exit']}" if end["exit"] not in (0, VETO_EXIT) else ""


def run_hook(config: Config, hook: Hook, body: Mapping[str, Any]) -> HookResult:
    """Run one executable and judge its answer; every failure becomes a result."""
    if hook.refused:
        return HookResult(
            hook.name, hook.phase, hook.origin, ok=False, error=f"it was not run: {hook.refused}"
        )
    ended = execute(config, hook, body, phase_timeout(config, hook.phase))
    error, answer = ended.error, Answer()
    try:
        answer = understand(decode(ended.stdout))
    except BadAnswer as bad:
        error = error or bad.message
    veto = (
        answer.veto or answer.reason or _last_line(ended.stderr) or "no reason given"
        if ended.vetoed
        else answer.veto
    )
    if not error and not veto and not answer.ok:
        error = answer.reason or "it says that it failed"
    if error and not answer.reason and ended.stderr and not ended.stdout.strip():
        error += f": {_last_line(ended.stderr)}"
    return HookResult(
        name=hook.name,
        phase=hook.phase,
        origin=hook.origin,
        seconds=ended.seconds,
        ok=not error and not veto,
        veto=veto,
        error=error,
        warnings=answer.warnings,
        data=answer.data,
        stderr=ended.stderr,
    )


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2][:300]


class Hooks(Struct):
    """The hooks of one operation; see the module's docstring."""

    config: Config
    reporter: Reporter
    facts: dict[str, Any] = field(default_factory=dict)  # facts for every hook
    results: list[HookResult] = field(default_factory=list)
    degraded: bool = False  # something optional failed
    done: bool = False  # the operation has succeeded: `on_failure` runs no hooks from here on
    # phase -> `degraded` before its hooks were run
    before: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self.config)  # a wrong configuration is reported before anything is touched

    def run(self, phase: str, **facts: Any) -> None:
        """Run the hooks of `phase` with `facts` (which later phases get, too); raise `Vetoed`."""
        self.facts.update(facts)
        self.before[phase] = self.degraded
        try:
            found = executables(self.config, phase)
        except ConfigError as error:
            if PHASES[phase].vetoes:
                raise
            self.degraded = True
            self.reporter.warning(error.message, error.hint)
            return
        if not found:
            return
        self.reporter.step(f"hooks-{phase}")
        policy = policies(self.config)[phase]
        for hook in found:
            body = request(phase, self.facts, hook.name)
            result = run_hook(self.config, hook, body)
            self.results.append(result)
            self._judge(hook, result, policy)

    def _judge(self, hook: Hook, result: HookResult, policy: str) -> None:
        label = f"{hook.phase} hook {hook.name!r}"
        for text in result.warnings:
            self.reporter.warning(f"{label}: {text}")
        if result.ok:
            return
        said = (
            f"{label} says no: {result.veto}" if result.veto else f"{label} failed: {result.error}"
        )
        hint = hook.hint or (
            f"It is {hook.path}; try it with `criuctl hooks run {quoted(hook.phase)} "
            f"{quoted(hook.name)}`."
        )
        if PHASES[hook.phase].vetoes and (result.veto or policy == "veto"):
            raise Vetoed(said, hint=hint, hook=result.to_dict())
        if policy != "ignore":
            self.degraded = True
            self.reporter.warning(said, hook.hint)

    def forget(self, phase: str) -> None:
        """Forget the results of the hooks of `phase`: it comes again."""
        self.results[:] = [result for result in self.results if result.phase != phase]
        self.degraded = self.before.get(phase, self.degraded)

    @contextmanager
    def on_failure(self, phase: str) -> Iterator[None]:
        """When the block fails, run the hooks of `phase` with the error, and raise it again."""
        try:
            yield
        except BaseException as error:
            if not self.done:
                self.run(phase, error=error_body(error))
            raise

    def records(self) -> list[dict[str, Any]]:
        """Return all results so far, as JSON."""
        return [result.to_dict() for result in self.results]


def request(phase: str, facts: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the input of a hook: the contract's keys first; of ``recorded`` results only those of
    hooks of its own name.
    """
    body = {"version": VERSION, "phase": phase, **facts}
    if "recorded" in facts:
        body["recorded"] = [r for r in facts["recorded"] if r.get("name") == name]
    return body


def error_body(error: BaseException) -> dict[str, Any]:
    """Return an error as in the command line's JSON."""
    if isinstance(error, CriuctlError):
        return {
            key: value
            for key, value in error.to_dict().items()
            if key in ("code", "exit_code", "message", "hint")
        }
    if isinstance(error, KeyboardInterrupt):
        return {
            "code": "interrupted",
            "message": f"stopped by {error}" if str(error) else "stopped",
            "hint": "",
        }
    return {
        "code": "bug",
        "exit_code": 1,
        "message": f"{type(error).__name__}: {error}",
        "hint": "",
    }


def find_hook(config: Config, phase: str, name: str) -> Hook:
    """Return the executable of this phase and name; raise `ConfigError` if there is none."""
    for hook in executables(config, phase):
        if hook.name == name:
            return hook
    searched = ", ".join(os.path.join(folder, phase) for folder in config.hook_dirs)
    raise ConfigError(
        f"there is no {phase} hook {name!r}",
        hint=f"Hooks are executables in {searched} (`criuctl hooks list`).",
    )
