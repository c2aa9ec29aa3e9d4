"""Checks whether this host is ready: CRIU, kernel, rights, folders, configuration, clock and store,
each with a remedy.

`doctor` tries the parts themselves: it starts CRIU, makes a private tmpfs, writes and removes a
probe in the store. It leaves nothing behind and shows no secrets: of keys and credentials only
whether they work. A finding's code is that of the error with which a command would end.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..checkpoint.manifest import MANIFEST_VERSION
from ..config import Config
from ..criu import binary
from ..errors import (
    CriuctlError,
    NoSuchBucket,
    PlatformError,
    StoreError,
    StoreNotInitialised,
    UntrustedPath,
)
from ..proc import command, netfilter
from ..proc.limits import effective_capabilities
from ..proc.memory import soft_dirty
from ..proc.namespaces import KINDS
from ..proc.ownership import check_own, check_place
from ..proc.procfs import read_raw
from ..proc.scratch import Scratch
from ..proc.sockets import sockets
from ..proc.syscalls import pidfd_getfd
from ..quoting import quoted
from ..report import Finding

_CHECK_TIMEOUT = 60.0  # seconds for `criu check`
_NEEDED = {
    2: "CAP_DAC_READ_SEARCH",
    5: "CAP_KILL",
    6: "CAP_SETGID",
    7: "CAP_SETUID",
    12: "CAP_NET_ADMIN",
    19: "CAP_SYS_PTRACE",
    21: "CAP_SYS_ADMIN",
    24: "CAP_SYS_RESOURCE",
}
_OPTIONAL = {24: "trees of other users than root cannot be dumped"}
_PROGRAMS = {
    "nsenter": "to reach trees in other namespaces",
    "unshare": "to restore into a private PID namespace",
}
_EARLIEST = 1_735_689_600  # 2025-01-01: criuctl is younger
_LOW_MEMORY = 256 << 20


def doctor(config: Config) -> list[Finding]:
    """Return all findings about this host, errors first."""
    return _ask(
        config,
        (
            _rights,
            _criu,
            _hooks,
            _kernel,
            _programs,
            _memory,
            _folders,
            _configuration,
            _named,
            _clock,
            _store,
        ),
    )


def readiness(config: Config) -> list[Finding]:
    """Return the findings that matter for a restore of another host's checkpoint, errors first: no
    store, no space.
    """
    return _ask(config, (_rights, _criu, _kernel, _programs, _folders))


def store_readiness(config: Config) -> list[Finding]:
    """Return findings about storing into the configured store, errors first."""
    return _ask(config, (_store,))


def _ask(config: Config, checks: Sequence[Callable[[Config], Iterator[Finding]]]) -> list[Finding]:
    found: list[Finding] = []
    for check in checks:
        try:
            found += check(config)
        except CriuctlError as error:
            found.append(Finding("error", error.code, error.message, error.hint))
        except OSError as error:
            found.append(Finding("error", "platform", f"{check.__name__.strip('_')}: {error}"))
    return sorted(found, key=lambda f: ("error", "warning", "info").index(f.level))


def versions(config: Config) -> dict[str, Any]:
    """Return the versions that a bug report needs; ``criu`` is None where none is found."""
    try:
        found = binary.find(config)
        criu: dict[str, Any] | None = {
            "version": _dotted(found.version()),
            "argv": list(found.argv),
            "origin": found.origin,
        }
    except CriuctlError:
        criu = None
    return {
        "criuctl": __version__,
        "criu": criu,
        "kernel": platform.release(),
        "arch": platform.machine(),
        "python": platform.python_version(),
        "formats": {"reads": list(range(1, MANIFEST_VERSION + 1)), "writes": MANIFEST_VERSION},
    }


def features() -> dict[str, Any]:
    """Return the features of this kernel that criuctl and CRIU use."""
    try:
        netfilter.tables()
        nftables = True
    except PlatformError:
        nftables = False
    return {
        "namespaces": [kind for kind in KINDS if os.path.exists(f"/proc/self/ns/{kind}")],
        "proc_children": os.path.exists(f"/proc/self/task/{os.getpid()}/children"),
        "pidfd_getfd": _has_pidfd_getfd(),
        "nftables": nftables,
        "userfaultfd": os.path.exists("/proc/sys/vm/unprivileged_userfaultfd"),
        "soft_dirty": soft_dirty(),
    }


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _rights(_config: Config) -> Iterator[Finding]:
    if os.geteuid() != 0:
        yield Finding(
            "error",
            "platform",
            "criuctl does not run as root",
            "Dumping and restoring need root: use sudo.",
        )
        return
    have = effective_capabilities()
    missing = {number: name for number, name in _NEEDED.items() if not have >> number & 1}
    for number, name in missing.items():
        if number in _OPTIONAL:
            yield Finding(
                "warning",
                "capabilities",
                f"{name} is missing: {_OPTIONAL[number]}",
                "Ordinary hosts have it; a container must be given it.",
            )
        else:
            yield Finding(
                "error",
                "platform",
                f"{name} is missing",
                "Run criuctl as root on the host, or give the container this capability.",
            )


def _criu(config: Config) -> Iterator[Finding]:
    found = binary.find(config)
    version = found.version()
    yield Finding(
        "info", "criu", f"CRIU {_dotted(version)} ({found.origin}): {' '.join(found.argv)}"
    )
    if version[: len(binary.MINIMUM)] < binary.MINIMUM:
        yield Finding(
            "error",
            "platform",
            f"CRIU {_dotted(version)} is too old; criuctl needs {_dotted(binary.MINIMUM)}",
            "Run scripts/setup, which installs a newer one next to it.",
        )
    checked = command.run(
        [*found.argv, "--no-default-config", "check"], timeout=_CHECK_TIMEOUT, check=False
    )
    if checked.returncode != 0:
        lines = [
            line for line in (checked.text + checked.error_text).splitlines() if "Error" in line
        ]
        yield Finding(
            "error",
            "platform",
            "`criu check` fails on this kernel: "
            f"{lines[0].strip() if lines else 'no reason given'}",
            "Run scripts/setup for another CRIU, or use a kernel with CONFIG_CHECKPOINT_RESTORE.",
        )
    for path in binary.host_configs():
        yield Finding(
            "warning",
            "criu-config",
            f"{path} exists; criuctl makes CRIU ignore it, while criu on the command line obeys it",
            "No action is needed.",
        )


def _hooks(config: Config) -> Iterator[Finding]:
    from ..hooks.find import all_hooks
    from ..hooks.runner import check

    check(config)  # raises for an impossible configuration
    for hook in all_hooks(config):
        if hook.refused:
            text = f"the {hook.phase} hook {hook.name!r} will not be run: {hook.refused}"
            yield Finding("warning", "hook-refused", text, hook.hint)


def _kernel(_config: Config) -> Iterator[Finding]:
    yield Finding("info", "kernel", f"Linux {platform.release()} on {platform.machine()}")
    lacking = [kind for kind in KINDS if not os.path.exists(f"/proc/self/ns/{kind}")]
    if lacking:
        yield Finding(
            "warning",
            "namespaces",
            f"this kernel has no {', '.join(lacking)} namespaces",
            "Trees that need them cannot be restored here.",
        )
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        yield Finding(
            "error",
            "platform",
            "this kernel lacks CONFIG_PROC_CHILDREN, which CRIU needs",
            "Use a distribution's stock kernel.",
        )
    try:
        sockets()
    except PlatformError as error:
        yield Finding(
            "error",
            error.code,
            error.message,
            "The kernel needs CONFIG_INET_DIAG and CONFIG_UNIX_DIAG.",
        )
    if not _has_pidfd_getfd():
        yield Finding(
            "warning",
            "pidfd-getfd",
            "this kernel lacks pidfd_getfd(2) (Linux 5.6)",
            "Connections cannot be handed back.",
        )
    try:
        netfilter.tables()
    except PlatformError as error:
        yield Finding(
            "warning",
            "nftables",
            error.message,
            "Trees with TCP connections need nftables (CONFIG_NF_TABLES).",
        )
    if not os.path.exists("/proc/sys/vm/unprivileged_userfaultfd"):
        yield Finding(
            "warning",
            "userfaultfd",
            "this kernel lacks userfaultfd",
            "`restore --lazy` does not work here.",
        )
    if soft_dirty():
        yield Finding(
            "info",
            "soft-dirty",
            "this kernel tracks changed pages: later rounds of pre-copy read only those",
        )
    else:
        yield Finding(
            "info",
            "soft-dirty",
            "this kernel does not track changed pages (CONFIG_MEM_SOFT_DIRTY)",
            "Every round of pre-copy reads all memory; what is stored stays the same.",
        )


def _has_pidfd_getfd() -> bool:
    pidfd = os.pidfd_open(os.getpid())
    try:
        os.close(pidfd_getfd(pidfd, pidfd))
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def _programs(_config: Config) -> Iterator[Finding]:
    path = command.environment()["PATH"]
    for name, why in _PROGRAMS.items():
        if shutil.which(name, path=path) is None:
            yield Finding(
                "error",
                "platform",
                f"{name} is not installed; criuctl needs it {why}",
                "Install the package util-linux.",
            )


def _memory(_config: Config) -> Iterator[Finding]:
    with Scratch() as scratch:
        free = scratch.free_bytes()
        yield from scratch.findings()
    available = next(
        int(line.split()[1]) * 1024
        for line in read_raw("/proc/meminfo").splitlines()
        if line.startswith(b"MemAvailable:")
    )
    text = (
        f"plain images lie in a private tmpfs only ({free >> 20} MiB at most); {available >> 20} "
        "MiB of memory are available"
    )
    if min(free, available) < _LOW_MEMORY:
        yield Finding(
            "warning",
            "memory",
            text,
            "Restoring a tree needs about as much memory as it had, and room for its images.",
        )
    else:
        yield Finding("info", "memory", text)


def _folders(config: Config) -> Iterator[Finding]:
    for key in ("state_dir", "cache_dir", "run_dir"):
        path = getattr(config, key)
        if not path:
            continue
        try:
            nearest = _probe_folder(Path(path))
        except OSError as error:
            yield Finding(
                "error",
                "platform",
                f"{key} {path} cannot be written: {error.strerror}",
                f"Set {key} to a folder on a writable file system.",
            )
            continue
        try:
            check_own(path) if nearest == Path(path) else check_place(path)
        except UntrustedPath as error:
            yield Finding("error", "folder-mode", f"{key}: {error.message}", error.hint)


def _probe_folder(path: Path) -> Path:
    """Write a probe where `path` is, or will be made at first use; return the existing folder.
    Raise `OSError`.
    """
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    with tempfile.TemporaryFile(dir=nearest):
        return nearest


def _configuration(config: Config) -> Iterator[Finding]:
    read = ", ".join(config.sources) if config.sources else "none, the defaults apply"
    yield Finding("info", "config", f"configuration files read: {read}")
    for source in config.sources:
        if os.stat(source).st_mode & 0o022:
            yield Finding(
                "warning",
                "config-mode",
                f"{source} can be written by other users",
                f"chmod go-w {quoted(source)}",
            )
    from ..connections.rule_parsing import UNKNOWN_USER, parse

    rules = parse(config).rules
    if rules:
        yield Finding(
            "info",
            "connection-rules",
            f"{len(rules)} connection rules; else connections are: {config.connections}",
        )
    for rule in rules:
        if UNKNOWN_USER in rule.match.users:
            yield Finding(
                "warning",
                "rule-user",
                f"{rule.where}: its match names a user that this host does not have",
            )
        if rule.lends and not rule.match.users:
            text = f"{rule.where} has a secret and names no user: "
            text += (
                "a process of any user that connects to its peer is logged in with it"
                if rule.match.pinned
                else ("it matches by the processes' own claims, so only connections of root get it")
            )
            yield Finding(
                "warning",
                "rule-secret",
                text,
                "Name the users whose processes may have it: `user: NAME` in its match.",
            )


def _named(config: Config) -> Iterator[Finding]:
    """Check the parts of the configuration that are read only when they are needed, for example at
    night by cron.
    """
    from ..files import predicates
    from ..host import configured_trees, retention
    from ..session.client.keyboard import DetachKey
    from ..transport.ssh import Host

    readers: list[tuple[str, Callable[[], object]]] = [
        ("", lambda: configured_trees.trees(config)),
        ("", lambda: retention.policies(config.retention)),
        ("", lambda: predicates.configured(config)),
        ("gc_grace: ", lambda: retention.seconds(config.gc_grace)),
        ("detach_key: ", lambda: config.detach_key and DetachKey(config.detach_key)),
    ]
    readers += [("", lambda name=name: Host.parse(name, config)) for name in config.hosts]  # type: ignore[misc]
    for where, read in readers:
        try:
            read()
        except CriuctlError as error:
            message = error.message if error.message.startswith(where) else where + error.message
            yield Finding("error", error.code, message, error.hint)


def _clock(_config: Config) -> Iterator[Finding]:
    if time.time() < _EARLIEST:
        yield Finding(
            "warning",
            "clock",
            f"the clock says {time.strftime('%Y-%m-%d', time.gmtime())}; checkpoints would bear "
            "wrong dates",
            "Set the clock (timedatectl set-ntp true).",
        )


def _store(config: Config) -> Iterator[Finding]:
    from ..checkpoint.repository import Repository
    from ..store import open_store

    store = open_store(config.store, config)
    try:
        repository = Repository.open(store, config)
        repository.preflight_write()
        others = sum(slot.get("type") != "writer" for slot in repository.about.slots) - 1
        more = f", as {others} more would" if others > 0 else ""
        sealed = f"encrypted, the key opens it{more}" if repository.encrypted else "not encrypted"
        if repository.write_only:
            sealed = (
                "encrypted, and this host is write-only: it reads what it has stored itself, and "
                "nothing else"
            )
        yield Finding("info", "store", f"the store {store.url} can be written; it is {sealed}")
        if problem := repository.about.unpinned:
            text = (
                f"the store {store.url} is not pinned on this host ({problem}): criuctl does not "
                "notice a different store in its place"
            )
            yield Finding(
                "warning", "store-not-pinned", text, "Name a state_dir that may be written."
            )
    except (StoreNotInitialised, NoSuchBucket) as error:
        if config.store.lower().startswith("s3:"):
            raise
        try:
            _probe_folder(Path(store.url.removeprefix("file://")))
        except OSError as cause:
            raise StoreError(
                f"{store.url} cannot be made: {cause.strerror}",
                hint="Name a folder on a writable file system.",
            ) from cause
        yield Finding("info", error.code, error.message, "A local store is made at the first dump.")
    finally:
        store.close()
