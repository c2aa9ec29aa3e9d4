"""Checks whether this host is ready: CRIU, kernel, rights, folders, configuration, clock and store,
each with a remedy.

`doctor` tries the parts themselves: it starts CRIU, makes a private tmpfs, writes and removes a
probe in the store. It leaves nothing behind and shows no secrets: of keys and credentials only
whether they work. A finding's code is that of the error with which a command would end.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..checkpoint.manifest import MANIFEST_VERSION
from ..checkpoint.repository import Repository
from ..config import Config
from ..connections.rule_parsing import UNKNOWN_USER, parse
from ..criu import binary
from ..errors import CriuctlError, NoSuchBucket, PlatformError, StoreError, StoreNotInitialised
from ..hooks.find import all_hooks
from ..proc import netfilter, written_pages
from ..proc.memory import soft_dirty
from ..proc.namespaces import KINDS
from ..quoting import quoted
from ..report import Finding
from ..store import open_store
from . import host_checks
from .config_check import late_readers
from .host_checks import dotted, has_pidfd_getfd, probe_folder

_EARLIEST = 1_735_689_600  # 2025-01-01: criuctl is younger


def doctor(config: Config) -> list[Finding]:
    """Return all findings about this host, errors first."""
    return _ask(
        config,
        (
            host_checks.rights,
            host_checks.seccomp,
            host_checks.criu,
            _hooks,
            host_checks.kernel,
            host_checks.programs,
            host_checks.memory,
            host_checks.folders,
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
    return _ask(
        config,
        (
            host_checks.rights,
            host_checks.criu,
            host_checks.kernel,
            host_checks.programs,
            host_checks.folders,
        ),
    )


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
            "version": dotted(found.version()),
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
        "pidfd_getfd": has_pidfd_getfd(),
        "nftables": nftables,
        "userfaultfd": os.path.exists("/proc/sys/vm/unprivileged_userfaultfd"),
        "soft_dirty": soft_dirty(),
        "written_pages": written_pages.supported(),
    }


def _hooks(config: Config) -> Iterator[Finding]:
    from ..hooks.runner import check

    check(config)  # raises for an impossible configuration
    for hook in all_hooks(config):
        if hook.refused:
            text = f"the {hook.phase} hook {hook.name!r} will not be run: {hook.refused}"
            yield Finding("warning", "hook-refused", text, hook.hint)


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
    for key, read in late_readers(config):
        try:
            read()
        except CriuctlError as error:
            message = error.message if error.message.startswith(key) else f"{key}: {error.message}"
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
    store = open_store(config.store, config)
    try:
        repository = Repository.open(store, config)
        repository.preflight_write()
        others = sum(slot.get("type") != "writer" for slot in repository.about.slots) - 1
        more = f", as {others} more would" if others > 0 else ""
        sealed = (
            f"encrypted, the key in {repository.opened.source} opens it{more}"
            if repository.opened is not None
            else "not encrypted"
        )
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
        for what, key, folder in (
            (f"the store {store.url}", "store", Path(store.url)),
            (
                f"the key of the store {store.url}, in {config.key_dir},",
                "key_dir",
                Path(config.key_dir),
            ),
        ):
            try:
                probe_folder(folder)
            except OSError as cause:
                raise StoreError(
                    f"{what} cannot be made: {cause.strerror}",
                    hint=f"Name a folder on a writable file system: {key} in the configuration.",
                ) from cause
        yield Finding(
            "info",
            error.code,
            error.message,
            f"It is made at the first dump, encrypted by a key in {config.key_dir}.",
        )
    finally:
        store.close()
