"""The environment that a session inherits: its caller's, without criuctl's own secrets and without
the variables of the terminal that criuctl was started in.

The environment of a process is in its memory, so a session's environment is in every checkpoint of
it, readable for each holder of the store's key and for each process that runs as the session's
user. Of the variables ``CRIUCTL_*`` a session therefore gets an allow-list: numbers and choices,
and the texts in `_PLAIN`, which name places. A criuctl that runs inside finds its sessions and
stores by them. Passphrases, keys, commands, rules, and any variable that this list does not
contain, for example a hook's, stay outside.

``AWS_*`` is inherited: the program may use S3 itself, and criuctl cannot know. Where criuctl's own
store is on S3, `credentials` names those that will be in checkpoints, for a warning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..config import Config
from ..redact import has_credentials

_PREFIX = "CRIUCTL_"
_OWN = f"{_PREFIX}SESSION"  # names a session: each session gets its own
_PLAIN = frozenset(
    {
        *("store", "state_dir", "run_dir", "cache_dir", "key_dir", "hook_dirs", "host_id"),
        *("s3_endpoint", "s3_region", "criu", "files", "file_conflicts", "connections", "events"),
        *("detach_key", "gc_grace", "hook_failure", "retention"),
    }
)
# Kind and name of an operator; what runs in a session is not the person that has started it.
_OPERATOR, _KIND = f"{_PREFIX}OPERATOR", f"{_PREFIX}KIND"
_AWS_SECRET = re.compile(r"AWS_\w*(SECRET|TOKEN)\w*(?<!_FILE)")
# Where criuctl was started: a window or a pane that is not the session's terminal.
_ELSEWHERE = re.compile(
    r"TMUX(_PANE)?|STY|WINDOW(ID)?|SSH_TTY|TERMCAP|LINES|COLUMNS|TERM_SESSION_ID|WT_SESSION|"
    r"(GNOME_TERMINAL|ITERM|KITTY|KONSOLE|WEZTERM|ZELLIJ)(_\w+)?"
)
_TERMINAL = "xterm-256color"  # what `session.screen` understands
_NO_TERMINAL = frozenset(("", "dumb", "unknown"))  # as cron, units and editors have it


def for_terminal(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a session that is started without a terminal to show it on: with a
    TERM, if there is none that a program could use.
    """
    unusable = variables.get("TERM", "") in _NO_TERMINAL
    return {**variables, "TERM": _TERMINAL} if unusable else dict(variables)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of `environ` that a session may have."""
    return {name: value for name, value in environ.items() if _may_have(name, value)}


def _may_have(name: str, value: str) -> bool:
    if not name.startswith(_PREFIX):
        return not _ELSEWHERE.fullmatch(name)
    field = name.removeprefix(_PREFIX).lower()
    default = getattr(_DEFAULTS, field, None)
    plain = field in _PLAIN or isinstance(default, int | float) or name == _OPERATOR
    plain = plain or (name == _KIND and value != "human")
    return plain and not has_credentials(value) and not name.startswith(_OWN)


def credentials(environ: Mapping[str, str], config: Config) -> list[str]:
    """Return the variables in `environ` with which criuctl opens its store, if that is on S3."""
    if not config.store.lower().startswith("s3:"):
        return []
    return sorted(name for name, value in environ.items() if value and _AWS_SECRET.fullmatch(name))


_DEFAULTS = Config()
