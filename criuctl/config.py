"""Typed configuration: files, then ``CRIUCTL_*`` variables, then command-line options.

Later sources win key by key.  Files are YAML mappings with exactly the keys of `Config`; an unknown
key or a value of the wrong kind is a `ConfigError` that names file, key and the accepted kind.
Secrets are never values here: they are references (a file, an environment variable, a command).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from msgspec import Struct, field
from msgspec.structs import replace

from .errors import ConfigError, UntrustedPath

SYSTEM_FILE = Path("/etc/criuctl/config.yaml")
DEFAULT_STORE = "/var/lib/criuctl/store"

FilePolicy = Literal["record", "carry"]
FileConflictPolicy = Literal["refuse", "restore"]
ConnectionPolicy = Literal["keep", "reconnect", "hangup", "refuse"]
ClipboardPolicy = Literal["writers", "all", "none"]
EventSink = Literal["none", "journald", "syslog"]
MAX_FREEZE = {"snapshot": 300.0, "dump": 3600.0, "migrate": 3600.0}
"""Seconds a tree may be frozen if it continues afterwards, ends, or moves to another host.

The defaults limit operations that hang, not large trees.  A snapshot of 24 GiB is frozen for 8 to
12 s, one of a GPU with 140 GiB for about three minutes; a program that has stood still for longer
has most likely lost its peers anyway.  A dump that ends its tree waits for the checkpoint, however
large that is and however slow the store.
"""

# (where it stands, the rule as it was written)
ConnectionRules = tuple[tuple[str, Mapping[str, Any]], ...]


class Config(Struct, frozen=True):
    """Everything an operator can set; the field comments are the reference."""

    store: str = DEFAULT_STORE  # URL of the default store
    state_dir: str = "/var/lib/criuctl"  # criuctl's records of this host's sessions
    # this host's name in leases; "" is its machine id, which cloned machines share
    host_id: str = ""
    cache_dir: str = "/var/cache/criuctl"  # index caches; may be deleted at any time
    run_dir: str = ""  # tmpfs for sockets of sessions, and locks; "" is /run/criuctl
    key_dir: str = "/etc/criuctl/keys"  # key files, one per encrypted store, mode 0600
    key_file: str = ""  # key file to use instead of the one in key_dir
    passphrase_file: str = ""  # file with the store's passphrase
    passphrase_command: str = ""  # command that prints the store's passphrase
    s3_endpoint: str = ""  # endpoint URL; "" leaves it to boto3 (AWS_ENDPOINT_URL, ~/.aws/config)
    s3_region: str = ""  # region; "" leaves it to boto3
    s3_retries: int = 6  # attempts per request on transient errors
    # seconds for one connect or read; one attempt may take twice as long
    s3_timeout: float = 30.0
    # seconds for a request, all attempts and pauses together, plus one per 32 KiB of contents
    s3_deadline: float = 120.0
    criu: str = ""  # CRIU binary or prefix folder; "" picks the one that scripts/setup chose
    criu_timeout: int = 30  # seconds CRIU may take to freeze a tree
    verify_writes: bool = False  # read back what was written, before a checkpoint relies on it
    max_freeze: Mapping[str, float] = field(
        default_factory=dict
        # seconds a tree may be frozen, 0: any time; a number, or by snapshot (300), dump, migrate
        # (3600)
    )
    compression: int = 1  # zstd level, -7..19
    buffers_mib: int = 128  # memory for pages on their way to the store
    # of a tree of so many MiB the memory is read ahead, and when it is frozen only what was written
    # to since (Linux 6.7, x86-64); 0 is none
    track_writes_mib: int = 32
    workers: int = 0  # threads that compress and seal; 0 is one per core
    uploads: int = 4  # objects in flight to the store
    files: FilePolicy = "record"  # open writable files: record size and hash, or carry contents too
    files_small_mib: int = (
        # contents of open files that are always carried, the smallest first; as much again of
        # scripts and data
        16
    )
    # a file larger than this is never carried by policy, only by --with-files
    files_max_mib: int = 1024
    # a larger workspace, or one of more files, is not taken along (snapshot --with-workspace)
    workspace_max_mib: int = 10240
    workspace_max_files: int = 100_000
    # contents of a larger shared mapping of a file in memory (tmpfs) are not carried
    shared_memory_max_mib: int = 4096
    # changed files at restore: refuse, or put back (a newer copy is kept under another name)
    file_conflicts: FileConflictPolicy = "restore"
    # external connections when no rule and no option decides
    connections: ConnectionPolicy = "hangup"
    # first match wins: mappings with match, policy, ... (see connections/rules.py)
    connection_rules: ConnectionRules = ()
    hook_dirs: tuple[str, ...] = ("/etc/criuctl/hooks",)  # folders of hook executables
    # seconds one hook may take, or the session's programs before a checkpoint, all together
    hook_timeout: float = 30.0
    hook_timeout_frozen: float = 5.0  # the same while the tree is frozen
    # names of environment variables that hooks get, besides PATH, HOME, LANG and similar ones
    hook_env: tuple[str, ...] = ()
    # by phase, what a failed hook causes: veto, warn, ignore
    hook_failure: dict[str, str] = field(default_factory=dict)
    # where events go besides the event log: the journal (or else syslog), syslog, nowhere
    events: EventSink = "none"
    detach_key: str = "C-]"  # leaves an attached session
    # whose terminals a session's output may give a clipboard: of clients that may write, all, none
    clipboard: ClipboardPolicy = "writers"
    # names of variables that `attach --update-env` brings to a session
    update_environment: tuple[str, ...] = (
        *("DISPLAY", "KRB5CCNAME", "SSH_AGENT_PID", "SSH_AUTH_SOCK", "SSH_CONNECTION"),
        *("WAYLAND_DISPLAY", "XAUTHORITY"),
    )
    # session pattern: keep rules; first match wins
    retention: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    trees: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
        # by name: process trees that are dumped under it (unit, cgroup, pid_file or command;
        # labels, order)
    )
    # seconds for a GPU to finish its work before a dump gives up
    gpu_lock_timeout: float = 10.0
    # how long `gc` keeps unneeded packs; must be longer than any dump or restore takes
    gc_grace: str = "1d"
    # seconds that another host may be silent in a migration before the link counts as lost
    link_timeout: float = 20.0
    scrollback_mib: int = 16  # MiB of a session's output that are kept on disk
    predicates: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
        # session pattern: what its checkpoints require (file:PATH, command:CMD, output:CMD,
        # age:SPAN); first match wins
    )
    probes: Mapping[str, str] = field(
        default_factory=dict
        # session pattern: command of `verify --restore`, run next to the restored tree; first match
        # wins
    )
    # by name: url, command, options
    hosts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ssh_command: str = "ssh"  # the ssh program, with options if needed; as GIT_SSH_COMMAND

    sources: tuple[str, ...] = ()  # the files that were read, for doctor
    # the store was named by --store: a dump does not make it, the name may be mistyped
    store_named: bool = False
    plain_store: bool = False  # --no-encrypt: a store that is made in passing is not encrypted

    def with_options(self, **options: Any) -> Config:
        """Return a copy in which every option that is not None replaces the field of its name."""
        return replace(self, **{k: v for k, v in options.items() if v is not None})


_INTERNAL = ("sources", "store_named", "plain_store")
KEYS = tuple(name for name in Config.__struct_fields__ if name not in _INTERNAL)
_DEFAULTS = Config()
_NESTED = {
    "retention": "session patterns to mappings such as {keep_daily: 7}",
    "hosts": "names to mappings such as {url: ssh://root@host}",
    "trees": "names to mappings such as {unit: nginx}",
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "files": get_args(FilePolicy),
    "file_conflicts": get_args(FileConflictPolicy),
    "connections": get_args(ConnectionPolicy),
    "events": get_args(EventSink),
    "clipboard": get_args(ClipboardPolicy),
}


_BOOLS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
# limits of other numbers; the kernel waits no longer
_SECONDS, _COUNT = (0, 2_000_000), (0, (1 << 31) - 1)
_RANGES: dict[str, tuple[float, float]] = {
    "compression": (-7, 19),
    "workers": (0, 1024),
    "criu_timeout": _SECONDS,
    "s3_deadline": (1, 2_000_000),
}
# No variable by which a shell, an interpreter or the loader takes code from elsewhere.
_UPDATED = re.compile(
    r"(?!(?:LD_|BASH|PYTHON|PERL|RUBY|NODE_|GIT_|GLIBC_|GCONV_|CRIUCTL_|PROMPT_COMMAND|ZDOTDIR)"
    r"|(?:PATH|ENV|IFS|SHELL|SHELLOPTS|HOME|FPATH|EDITOR|VISUAL|PAGER|PS[0-4])$)"
    r"[A-Z][A-Z0-9_]{0,63}"
)
_KINDS = {int: "whole number", float: "number", tuple: "list of text", dict: "mapping"}
_ODD_KINDS = {"max_freeze": "number, or mapping", "connection_rules": "list of mappings"}
_FOLDERS = ("state_dir", "cache_dir", "run_dir", "key_dir")


def kind_of(key: str) -> str:
    """Return the kind of value that a key takes, in words."""
    default = getattr(_DEFAULTS, key)
    low, high = _RANGES.get(key, (0, 0))
    if key in _CHOICES:
        return " or ".join(_CHOICES[key])
    if isinstance(default, bool):
        return "true or false"
    if isinstance(default, int) and high:
        return f"whole number from {low} to {high}"
    for kind, words in _KINDS.items():
        if isinstance(default, kind):
            return _ODD_KINDS.get(key, words)
    return "absolute path" if key in _FOLDERS else "text"


def value_of(key: str, value: Any, where: str) -> Any:
    """Return the value with the type of the `Config` field; raise `ConfigError` naming `where`."""
    wanted = _typed(key, value, where)
    if isinstance(wanted, int | float) and not isinstance(wanted, bool):
        low, high = _RANGES.get(key, _SECONDS if isinstance(wanted, float) else _COUNT)
        if not low <= wanted <= high:
            raise ConfigError(f"{where}: {key} must be from {low} to {high}, not {value!r}")
    elif key == "update_environment":
        for name in wanted:
            if not _UPDATED.fullmatch(name):
                raise ConfigError(
                    f"{where}: {key}: a client may not set {name!r}: it decides what programs run"
                )
    elif key in _FOLDERS and not os.path.isabs(wanted) and wanted != getattr(_DEFAULTS, key):
        raise ConfigError(f"{where}: {key} must be an absolute path, not {value!r}")
    return wanted


def _typed(key: str, value: Any, where: str) -> Any:
    default = getattr(_DEFAULTS, key)
    if key == "max_freeze":
        return _max_freeze(value, where)
    if key == "connection_rules":
        return _rules(value, where)
    if key in _NESTED:
        return _mappings(value, key, where)
    if key == "predicates":
        return {
            name: tuple(texts)
            for name, texts in _by_pattern(value, key, where, "lists of text", _are_texts).items()
        }
    if key == "probes":
        return _by_pattern(value, key, where, "commands", lambda probe: isinstance(probe, str))
    if key in _CHOICES and value not in _CHOICES[key]:
        raise ConfigError(
            f"{where}: {key} must be one of {', '.join(_CHOICES[key])}, not {value!r}"
        )
    try:
        if isinstance(default, bool):
            return _BOOLS[str(value).lower()]
        if isinstance(default, tuple):
            items = value.split(":") if isinstance(value, str) else value
            if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
                raise ValueError
            return tuple(items)
        if isinstance(default, dict):
            pairs = (
                dict(item.split("=") for item in value.split(":"))
                if isinstance(value, str)
                else value
            )
            if not isinstance(pairs, dict) or not all(
                isinstance(text, str) for pair in pairs.items() for text in pair
            ):
                raise ValueError
            return dict(pairs)
        if isinstance(default, int) and isinstance(value, bool | float):
            raise ValueError
        if isinstance(default, str) and not isinstance(value, str):
            raise ValueError
        return type(default)(value)
    except (KeyError, TypeError, ValueError, OverflowError):
        kind = "list of text" if isinstance(default, tuple) else type(default).__name__
        kind = "mapping of text" if isinstance(default, dict) else kind
        raise ConfigError(f"{where}: {key} must be {kind}, not {value!r}") from None


def _yaml(text: str, where: str) -> Any:
    import yaml  # slow to import: only for a host with a configuration file

    try:
        return yaml.safe_load(text)
    # ValueError: for example 2026-02-30, which YAML takes for a day
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from error


def _rules(value: Any, where: str) -> ConnectionRules:
    """Return the list of rules, each with its place; the modules that use them check their
    contents.
    """
    if isinstance(value, str):  # the value of a variable
        value = _yaml(value, where)
    if not isinstance(value, list) or not all(isinstance(rule, dict) for rule in value):
        raise ConfigError(
            f"{where}: connection_rules must be a list of mappings, each with match and policy"
        )
    return tuple(
        (f"{where}: connection_rules[{number}]", rule) for number, rule in enumerate(value, 1)
    )


def _max_freeze(value: Any, where: str) -> dict[str, float]:
    """Return the seconds by operation, from one number for all of them or from a mapping."""
    if isinstance(value, str):  # the value of a variable
        value = _yaml(value, where)
    by_kind = value if isinstance(value, dict) else dict.fromkeys(MAX_FREEZE, value)
    for kind, seconds in by_kind.items():
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if kind not in MAX_FREEZE or not number or not _SECONDS[0] <= seconds <= _SECONDS[1]:
            kinds = ", ".join(MAX_FREEZE)
            raise ConfigError(
                f"{where}: max_freeze must be seconds from 0 to {_SECONDS[1]}, or a mapping of "
                f"{kinds} to them"
            )
    return {kind: float(seconds) for kind, seconds in by_kind.items()}


def _mappings(value: Any, key: str, where: str) -> dict[str, dict[str, Any]]:
    """Return mappings by name; the modules that use them check their contents."""
    if isinstance(value, str):  # the value of a variable
        value = _yaml(value, where)
    if not isinstance(value, dict) or not all(isinstance(inner, dict) for inner in value.values()):
        raise ConfigError(f"{where}: {key} must be a mapping of {_NESTED[key]}")
    return {str(name): inner for name, inner in value.items()}


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _by_pattern(
    value: Any, key: str, where: str, what: str, fits: Callable[[Any], bool]
) -> dict[str, Any]:
    """Return `what` by patterns of sessions' names."""
    if isinstance(value, str):  # the value of a variable
        value = _yaml(value, where)
    if not isinstance(value, dict) or not all(map(fits, value.values())):
        raise ConfigError(f"{where}: {key} must be a mapping of session patterns to {what}")
    return {str(pattern): one for pattern, one in value.items()}


def text_of(path: Path) -> str:
    """Read a file that no other user could have written: it names programs that criuctl starts."""
    from .proc.ownership import opened_own

    try:
        with opened_own(path) as fd, open(fd, encoding="utf-8", closefd=False) as file:
            return file.read()
    except UntrustedPath as error:
        raise ConfigError(error.message, hint=_whose(path, error.hint)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _read_file(path: Path) -> dict[str, Any]:
    loaded = _yaml(text_of(path), str(path))
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values")
    values: dict[str, Any] = {}
    for key, value in loaded.items():
        if key not in KEYS:
            raise ConfigError(f"{path}: unknown key {key!r}", hint=_near(key))
        values[key] = value_of(key, value, str(path))
    return values


def _near(key: object) -> str:
    """Return the hint for an unknown key: the known ones that resemble it."""
    near = nearest(str(key))
    meant = f"Did you mean {' or '.join(near)}? " if near else ""
    return f"{meant}`criuctl config explain` lists all keys, `criuctl config check` all faults."


def nearest(key: str) -> list[str]:
    """Return known keys that resemble an unknown one, the nearest first."""
    import difflib

    return difflib.get_close_matches(key.lower().replace("-", "_"), KEYS, n=2, cutoff=0.7)


def _whose(path: Path, hint: str) -> str:
    """Return the hint for a file that other users could have written."""
    if os.geteuid() or path == SYSTEM_FILE:
        return hint or "Check that file."
    own = "`sudo -H`, which has root's own HOME, or --config with another file"
    return f"{hint} if you trust its contents; otherwise {own}." if hint else f"Use {own}."


class Setting(NamedTuple):
    """A value of a key, and the file or the variable that it is from."""

    value: Any
    where: str


def variable_of(key: str) -> str:
    """Return the name of the variable that sets a key."""
    return f"CRIUCTL_{key.upper()}"


def load(path: str | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """Read the configuration: system file, user file, `path`, then ``CRIUCTL_<FIELD>``
    variables.
    """
    found = settings(path, environ)
    sources = tuple(str(file) for file in files(path, environ))
    return Config(**{key: one.value for key, one in found.items()}, sources=sources)


def settings(
    path: str | None = None, environ: Mapping[str, str] = os.environ
) -> dict[str, Setting]:
    """Return what the same sources set, by key; the last source of a key counts."""
    found: dict[str, Setting] = {}
    for file in files(path, environ):
        found |= {key: Setting(value, str(file)) for key, value in _read_file(file).items()}
    for key in KEYS:
        if text := environ.get(variable := variable_of(key)):
            found[key] = Setting(value_of(key, text, variable), variable)
    return found


def places(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return where configuration files are looked for, whether they exist or not."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", "/"), ".config")
    candidates = [SYSTEM_FILE]
    if os.path.isabs(home):  # a relative HOME could lead to a folder of another user
        candidates.append(Path(home) / "criuctl" / "config.yaml")
    return candidates


def files(path: str | None = None, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the files to read: those that exist, and the named one; `ConfigError` without that."""
    if path is not None:
        try:
            there, folder = Path(path).exists(), Path(path).is_dir()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        if not there or folder:
            raise ConfigError(
                f"{path}: no such configuration file" if not there else f"{path} is a folder"
            )
    named = [] if path is None else [Path(path)]  # a pipe or /dev/null is allowed here
    return [*filter(Path.is_file, places(environ)), *named]
