"""A bug report: what a helper must see of a host, on one page, without secrets.

The page is made only of data that is known to be harmless. Of the configuration, numbers, choices
and folders are shown, and of any other key only that it is set; of S3 the endpoint's host, of
sessions names and states, of events codes. Command lines, environments, labels and messages of
programs are not read. The rest, texts of findings and CRIU's own errors, might quote a secret: so
the values of variables that sound like secrets, and the configured passphrase, are removed from the
whole page at the end.

Each part is made separately: a part that fails is replaced by its error, because the page is needed
on broken hosts.
"""

from __future__ import annotations

import os
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from msgspec.structs import asdict

from ..checkpoint.key_files import read_secret
from ..checkpoint.keys import PASSPHRASE_VARIABLE, RECOVERY_VARIABLE
from ..checkpoint.repository import Repository
from ..config import Config, ConnectionPolicy, EventSink, FileConflictPolicy, FilePolicy
from ..errors import CriuctlError
from ..host.failures import diagnosis
from ..host.journal.event_log import EventLog
from ..proc.procfs import memory_info, read_raw
from ..redact import redacted
from ..store import open_store
from .doctor import doctor, features, versions
from .sessions import sessions

EVENTS = 20
LOGS = 10
_SESSIONS = 100
_LOG_BYTES = 4 << 20
_LINE = 300
STRUCK = "[not shown]"
# shown as they are
_FOLDERS = (
    "state_dir",
    "cache_dir",
    "run_dir",
    "key_dir",
    "criu",
    "hook_dirs",
    "gc_grace",
    "detach_key",
)
_CHOICES = frozenset(
    get_args(FilePolicy)
    + get_args(FileConflictPolicy)
    + get_args(ConnectionPolicy)
    + get_args(EventSink)
)
_SOUNDS_SECRET = re.compile(
    r"PASS|SECRET|TOKEN|KEY|CREDENTIAL|AUTH|COOKIE|PRIVATE|_PWD$", re.IGNORECASE
)
_MAY_HOLD_ONE = frozenset({"preamble", "command"})  # of a connection rule, of a host
_SHORTEST = 4  # shorter secrets are not removed: they would match everywhere

Part = Callable[[Config], Any]


def report(config: Config) -> dict[str, Any]:
    """Return the page as a JSON object; each part that could not be made is ``{"error": ...}``."""
    parts: dict[str, Part] = {
        "versions": _versions,
        "host": _host,
        "kernel": lambda _config: features(),
        "findings": lambda config: [f.to_dict() for f in doctor(config)],
        "store": _store,
        "configuration": _configuration,
        "sessions": _sessions,
        "events": lambda config: list(deque(EventLog(config.state_dir).read(), EVENTS)),
        "criu_logs": _logs,
    }
    body: dict[str, Any] = {
        "made": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    }
    for name, make in parts.items():
        try:
            body[name] = make(config)
        # on a broken host anything may fail; the other parts are needed all the more
        except Exception as error:
            body[name] = {"error": str(error)}
    struck: dict[str, Any] = _strike(body, _secrets(config))
    return struck


def _versions(config: Config) -> dict[str, Any]:
    found = versions(config)
    libraries = {}
    for name in ("boto3", "click", "cryptography", "protobuf", "zstandard"):
        with suppress(metadata.PackageNotFoundError):
            libraries[name] = metadata.version(name)
    return found | {"libraries": libraries}


def _host(config: Config) -> dict[str, Any]:
    memory = memory_info()
    amounts = {
        key: int(memory[key].split()[0]) * 1024
        for key in ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree")
    }
    places = {
        key: str(getattr(config, key))
        for key in ("state_dir", "cache_dir", "run_dir")
        if getattr(config, key)
    }
    local = not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", config.store)
    disks = {
        key: _room(path)
        for key, path in (places | ({"store": config.store} if local else {})).items()
    }
    return {
        "system": _system(),
        "processors": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "memory": amounts,
        "disks": disks,
        "cgroups": 2 if os.path.exists("/sys/fs/cgroup/cgroup.controllers") else 1,
        "init": read_raw("/proc/1/comm").decode(errors="replace").strip(),
        "root": os.geteuid() == 0,
    }


def _system() -> str:
    with suppress(OSError):
        for line in Path("/etc/os-release").read_text().splitlines():
            if line.startswith("PRETTY_NAME="):
                return line.partition("=")[2].strip('"')
    return "unknown"


def _room(path: str) -> dict[str, Any]:
    nearest = next(parent for parent in (Path(path), *Path(path).parents) if parent.exists())
    found = os.statvfs(nearest)
    return {
        "path": path,
        "exists": nearest == Path(path),
        "free_bytes": found.f_bavail * found.f_frsize,
        "bytes": found.f_blocks * found.f_frsize,
        "free_inodes": found.f_favail,
    }


def _store(config: Config) -> dict[str, Any]:
    with open_store(config.store, config) as store:
        url = store.url
        endpoint = (
            config.s3_endpoint
            or os.environ.get("AWS_ENDPOINT_URL_S3")
            or os.environ.get("AWS_ENDPOINT_URL")
            or ""
        )
        body: dict[str, Any] = {"url": url}
        if url.startswith("s3:"):
            body["endpoint"] = (
                (urlsplit(endpoint).hostname or "unreadable") if endpoint else "boto3's"
            )
        try:
            with Repository.open(store, config) as repository:
                unreadable: list[Any] = []
                found = repository.list(unreadable=unreadable)
                body |= {
                    "format": repository.about.version,
                    "encrypted": repository.encrypted,
                    "capabilities": asdict(repository.capabilities),
                    "sessions": len({one.session for one in found}),
                    "checkpoints": len(found),
                    "unreadable": len(unreadable),
                }
        except CriuctlError as error:
            body |= {"error": error.message, "code": error.code}
        return body


def _configuration(config: Config) -> dict[str, Any]:
    default = Config()
    known = ((name, value) for name, value in asdict(config).items() if name != "sources")
    return {
        "files": list(config.sources),
        "variables": sorted(name for name in os.environ if name.startswith("CRIUCTL_")),
        "set": {
            name: shown(name, value) for name, value in known if value != getattr(default, name)
        },
    }


def shown(name: str, value: Any) -> Any:
    """Return what may be shown of a key of the configuration."""
    if isinstance(value, bool | int | float) or (isinstance(value, str) and value in _CHOICES):
        return value
    if name in _FOLDERS:
        return list(value) if isinstance(value, tuple) else value
    if name == "store":
        parts = urlsplit(value)
        return redacted(
            f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
            if parts.scheme
            else value
        )
    if name == "s3_endpoint":
        return urlsplit(value).hostname or STRUCK
    if isinstance(value, tuple | dict):
        return f"{len(value)} set, {STRUCK}"
    return f"set, {STRUCK}"


def _sessions(config: Config) -> dict[str, Any]:
    found = sessions(config)
    keys = ("session", "state", "incarnation", "since", "holder", "exit_code")
    return {
        "states": dict(Counter(body["state"] for body in found)),
        "sessions": [{key: body[key] for key in keys} for body in found[:_SESSIONS]],
    }


def _logs(config: Config) -> list[dict[str, Any]]:
    """Return the logs that failed runs of CRIU have left, newest first, each with its first
    error.
    """
    try:
        paths = sorted((Path(config.state_dir) / "logs").glob("*.log"), reverse=True)[:LOGS]
    except FileNotFoundError:
        return []
    logs = []
    for path in paths:
        with suppress(OSError), path.open("rb") as file:
            found = diagnosis.diagnose(
                file.read(_LOG_BYTES).decode(errors="replace"), "no error in it"
            )
            logs.append(
                {"log": path.name, "code": found.code, "error": (found.line or found.text)[:_LINE]}
            )
    return logs


# -- secrets


def _secrets(config: Config) -> list[str]:
    """Return the texts to remove, the longest first."""
    own = {f"CRIUCTL_{name.upper()}" for name in Config.__struct_fields__} - {
        "CRIUCTL_PASSPHRASE_COMMAND"
    }
    found = {
        value
        for name, value in os.environ.items()
        if _SOUNDS_SECRET.search(name) and name not in own
    }
    found |= {
        os.environ.get(PASSPHRASE_VARIABLE, ""),
        os.environ.get(RECOVERY_VARIABLE, ""),
        config.passphrase_command,
    }
    if config.passphrase_file:
        with suppress(CriuctlError, OSError):
            found.add(
                read_secret(Path(config.passphrase_file)).decode(errors="replace").rstrip("\r\n")
            )
    for _where, rule in config.connection_rules:
        found |= set(_texts(rule))
    for host in config.hosts.values():
        found |= set(_texts(host))
    return sorted((text for text in found if len(text) >= _SHORTEST), key=len, reverse=True)


def _texts(value: Any, suspect: bool = False) -> Iterator[str]:
    """Return the texts in a nested value under names that sound like secrets."""
    if isinstance(value, str) and suspect:
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(
                inner, suspect or key in _MAY_HOLD_ONE or bool(_SOUNDS_SECRET.search(str(key)))
            )
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, suspect)


def _strike(value: Any, secrets: Iterable[str]) -> Any:
    """Return `value` with every secret removed from every text in it."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, STRUCK)
        return redacted(value)
    if isinstance(value, Mapping):
        return {_strike(key, secrets): _strike(inner, secrets) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strike(inner, secrets) for inner in value]
    return value
