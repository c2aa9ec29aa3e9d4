"""The contract of hooks: phases, the input of a hook and its possible answers (``hooks/README.md``
explains it to users).

A hook reads one JSON object from its standard input and writes one, or nothing, to its standard
output: ``{"ok": bool, "veto": reason, "warnings": [text], "data": {...}}``. Exit 0 is success, exit
10 a veto, every other exit a failure. Output that violates this (no JSON, values of the wrong kind,
too much of it) is a failure too.

The phase decides what a failure causes: ``veto`` (like a veto of the hook), ``warn`` (reported,
exit 11) or ``ignore`` (only recorded). A phase after the fact cannot veto.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, cast

from msgspec import Struct, field

from ..checkpoint.records import check_any
from ..config import Config
from ..errors import ConfigError, CriuctlError, Damaged

VERSION = 1  # of the JSON on a hook's standard input
VETO_EXIT = 10
MAX_OUTPUT = 1 << 20  # bytes a hook may print
STDERR_TAIL = 4096  # characters of its standard error that are kept
RECONNECT = "reconnect"

Policy = Literal["veto", "warn", "ignore"]


class Phase(Struct, frozen=True):
    """One moment at which hooks run."""

    name: str
    when: str
    policy: Policy  # the effect of a failure unless the configuration sets another
    vetoes: bool  # whether the phase can still stop the operation


PHASES = {
    p.name: p
    for p in (
        Phase(
            "pre-dump", "everything is checked, the tree runs, nothing was touched", "veto", True
        ),
        Phase("frozen", "the tree is frozen: be quick", "warn", True),
        Phase(
            "post-dump", "all bytes are in the store, only the manifest is missing", "warn", True
        ),
        Phase("post-commit", "the checkpoint exists and the dump is over", "warn", False),
        Phase("dump-failed", "a dump failed or was vetoed; the tree runs on", "warn", False),
        Phase("pre-restore", "everything is checked, nothing was started", "veto", True),
        Phase(
            RECONNECT,
            "one connection is to be connected again (by name, not in turn)",
            "warn",
            False,
        ),
        Phase("post-restore", "the tree is back and has not run yet", "veto", True),
        Phase("post-resume", "the tree runs and the restore is over", "warn", False),
        Phase(
            "restore-failed", "a restore failed or was vetoed; nothing is left of it", "warn", False
        ),
        Phase("snapshot-failed", "one dump of `criuctl snapshot` failed", "warn", False),
        Phase(
            "loss-exceeded",
            "`criuctl supervise`: more would be lost by now than may be",
            "warn",
            False,
        ),
        Phase(
            "recovered",
            "`criuctl supervise` has brought a session back that had died",
            "warn",
            False,
        ),
        Phase("gave-up", "`criuctl supervise` could not keep a session alive", "warn", False),
    )
}


def policies(config: Config) -> dict[str, Policy]:
    """Return the effect of a failed hook, by phase; raise `ConfigError` for an impossible
    configuration.
    """
    found: dict[str, Policy] = {name: phase.policy for name, phase in PHASES.items()}
    for name, policy in config.hook_failure.items():
        phase = PHASES.get(name)
        if phase is None or name == RECONNECT:
            allowed = ", ".join(p for p in PHASES if p != RECONNECT)
            raise ConfigError(
                f"hook_failure: there is no phase {name!r}", hint=f"Phases: {allowed}."
            )
        choices = ("veto", "warn", "ignore") if phase.vetoes else ("warn", "ignore")
        if policy not in choices:
            raise ConfigError(
                f"hook_failure: {name} must be one of {', '.join(choices)}, not {policy!r}"
            )
        found[name] = cast("Policy", policy)
    return found


class BadAnswer(CriuctlError):
    """A hook's answer violates the contract."""

    code = "bad-answer"


class Answer(Struct, frozen=True):
    """The answer of a hook on its standard output."""

    ok: bool = True
    veto: str = ""
    reason: str = ""  # of a failure that the hook reports itself
    warnings: tuple[str, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)


def decode(output: bytes) -> dict[str, Any]:
    """Return the JSON object that a hook has printed, {} for nothing; raise `BadAnswer`."""
    if not output.strip():
        return {}
    try:
        value = json.loads(output)
        value = check_any(value, "answer")
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"it printed something that is not JSON: {_excerpt(output)}") from error
    except Damaged as error:
        raise BadAnswer(
            "it printed JSON with values that are too large or nested too deeply"
        ) from error
    if not isinstance(value, dict):
        raise BadAnswer(f"it printed JSON that is no object: {_excerpt(output)}")
    return value


def understand(body: Mapping[str, Any]) -> Answer:
    """Return the answer in a decoded object; unknown keys are left for later versions."""
    kinds: dict[str, tuple[type, ...]] = {
        "ok": (bool,),
        "veto": (str, bool, type(None)),
        "reason": (str,),
        "warnings": (list,),
        "data": (dict,),
    }
    for key, kind in kinds.items():
        if key in body and not isinstance(body[key], kind):
            raise BadAnswer(
                f"its answer has the wrong kind of value for {key!r}: "
                f"{_excerpt(json.dumps(body[key]).encode())}"
            )
    warnings = body.get("warnings", [])
    if not all(isinstance(text, str) for text in warnings):
        raise BadAnswer("its answer has warnings that are no text")
    veto = body.get("veto") or ""
    return Answer(
        ok=body.get("ok", True),
        veto="no reason given" if veto is True else veto,
        reason=body.get("reason", ""),
        warnings=tuple(warnings),
        data=body.get("data", {}),
    )


def _excerpt(output: bytes) -> str:
    text = output[:60].decode(errors="replace")
    return repr(text) + ("..." if len(output) > 60 else "")


class HookResult(Struct, frozen=True):
    """The result of one hook, for reports and manifests."""

    name: str
    phase: str
    origin: str  # built-in | shipped | configured
    seconds: float = 0.0
    ok: bool = True
    veto: str = ""
    error: str = ""  # why it counts as failed
    warnings: tuple[str, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)
    stderr: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON without empty values."""
        body: dict[str, Any] = {
            "name": self.name,
            "phase": self.phase,
            "origin": self.origin,
            "seconds": round(self.seconds, 3),
            "ok": self.ok,
        }
        more = {
            "veto": self.veto,
            "error": self.error,
            "warnings": list(self.warnings),
            "data": self.data,
            "stderr": self.stderr,
        }
        return body | {key: value for key, value in more.items() if value}
