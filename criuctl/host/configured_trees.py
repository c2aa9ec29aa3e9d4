"""Configured trees: process trees that have a name in the configuration.

    trees:
      web: {unit: nginx}                                        # as unit:nginx
      jobs: {cgroup: /system.slice/jobs, labels: {tier: batch}}
      db: {pid_file: /run/postgresql/main.pid, command: postgres, order: 10}
      old: {command: '^/usr/bin/java .*Legacy'}                 # must match exactly one tree's
                                                                # command line

Such a name is a TARGET like a session's: after its first dump the tree is a session of that name.
While a session of that name runs, the name means it.  A PID file may be old and its number that of
another process now: if the entry has a `command`, too, that must match.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from ..config import Config
from ..errors import ConfigError, CriuctlError, InvalidName, NoSuchProcess, NotFound, UsageError
from ..proc.procfs import read_bytes
from ..proc.tree import ProcessIdentity
from ..session.names import check_name
from .target import resolve_target

ORDER = 50  # of a tree that configures none
_WAYS = ("unit", "cgroup", "pid_file", "command")
_KEYS = (*_WAYS, "labels", "order")


class Tree(Struct, frozen=True):
    """One tree as it is configured."""

    name: str
    unit: str = ""
    cgroup: str = ""
    pid_file: str = ""
    command: str = ""  # regular expression
    labels: Mapping[str, str] = field(default_factory=dict)
    order: int = ORDER


def trees(config: Config) -> dict[str, Tree]:
    """Return all of them, by name; `ConfigError`."""
    return {name: parse(name, body) for name, body in config.trees.items()}


def parse(name: str, body: Mapping[str, Any]) -> Tree:
    """Return one entry of `trees` in the configuration; `ConfigError`."""
    where = f"trees: {name}"
    try:
        check_name(name)
    except InvalidName as error:
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from error
    for key in body:
        if key not in _KEYS:
            raise ConfigError(
                f"{where}: unknown key {key!r}", hint=f"Known keys: {', '.join(_KEYS)}."
            )
    given = [way for way in _WAYS if body.get(way)]
    if len(given) != 1 and given != ["pid_file", "command"]:
        raise ConfigError(
            f"{where} needs one of {', '.join(_WAYS)}",
            hint="Only pid_file may have a command next to it.",
        )
    for way in given:
        if not isinstance(body[way], str):
            raise ConfigError(f"{where}: {way} must be text, not {body[way]!r}")
    if body.get("pid_file") and not os.path.isabs(body["pid_file"]):
        raise ConfigError(f"{where}: pid_file must be an absolute path, not {body['pid_file']!r}")
    try:
        re.compile(body.get("command") or "")
    except re.error as error:
        raise ConfigError(f"{where}: command is no regular expression: {error}") from error
    labels, order = body.get("labels", {}), body.get("order", ORDER)
    if not isinstance(labels, dict) or not all(
        isinstance(k, str) and isinstance(v, str) for k, v in labels.items()
    ):
        raise ConfigError(f"{where}: labels must be a mapping of text, not {labels!r}")
    if not isinstance(order, int) or isinstance(order, bool):
        raise ConfigError(f"{where}: order must be a whole number, not {order!r}")
    return Tree(name, **{way: body[way] for way in given}, labels=labels, order=order)


def find(config: Config, name: str) -> ProcessIdentity | None:
    """Return the root of the configured tree called `name`, None if none is; errors as of
    `resolve_target`.
    """
    if name not in config.trees:
        return None
    return root_of(parse(name, config.trees[name]))


def root_of(tree: Tree) -> ProcessIdentity:
    """Return the tree's root now.

    Raises `NotFound` or `NoSuchProcess` if it does not run, `UsageError` if it is ambiguous.
    """
    if tree.unit or tree.cgroup:
        text = f"unit:{tree.unit}" if tree.unit else f"cgroup:{tree.cgroup}"
    elif tree.pid_file:
        text = str(_of_pid_file(tree))
    else:
        text = str(_of_command(tree))
    return resolve_target(text, lambda _: None, lambda _: None).root


def _of_pid_file(tree: Tree) -> int:
    try:
        words = Path(tree.pid_file).read_text(errors="replace").split()
    except FileNotFoundError:
        raise NotFound(f"tree {tree.name!r}: there is no PID file {tree.pid_file}") from None
    except OSError as error:
        raise UsageError(
            f"tree {tree.name!r}: {tree.pid_file} cannot be read: {error.strerror}"
        ) from error
    if not words or not re.fullmatch("[0-9]{1,10}", words[0]) or int(words[0]) >= 1 << 31:
        raise UsageError(f"tree {tree.name!r}: {tree.pid_file} does not begin with a PID")
    pid = int(words[0])
    if not os.path.exists(f"/proc/{pid}"):
        raise NoSuchProcess(
            f"tree {tree.name!r}: {tree.pid_file} names PID {pid}, which does not exist"
        )
    if tree.command and not re.search(tree.command, command_line(pid)):
        raise NoSuchProcess(
            f"tree {tree.name!r}: {tree.pid_file} names PID {pid}, whose command does not match"
        )
    return pid


def _of_command(tree: Tree) -> int:
    lines = {int(name): command_line(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    lines = {pid: line for pid, line in lines.items() if line}
    roots = matching(tree.command, lines, _parents(lines), os.getpid())
    if not roots:
        raise NoSuchProcess(f"tree {tree.name!r}: no process has a command like {tree.command!r}")
    if len(roots) > 1:
        found = ", ".join(f"{pid} ({lines[pid][:60]})" for pid in roots)
        raise UsageError(
            f"tree {tree.name!r}: several have a command like {tree.command!r}: {found}",
            hint="Make it say more.",
        )
    return roots[0]


def matching(
    pattern: str, lines: Mapping[int, str], parents: Mapping[int, int], myself: int
) -> list[int]:
    """Return the PIDs whose command line matches and none of whose ancestors' does.

    Left out are `myself`, its ancestors (a shell that was given criuctl's command line), and others
    with `myself`'s command line.
    """
    above, pid = {myself}, myself
    while (pid := parents.get(pid, 0)) and pid not in above:
        above.add(pid)
    found = {
        pid
        for pid, line in lines.items()
        if pid not in above and line != lines.get(myself) and re.search(pattern, line)
    }

    def inside(pid: int) -> bool:
        seen = {pid}
        while (pid := parents.get(pid, 0)) and pid not in seen:
            if pid in found:
                return True
            seen.add(pid)
        return False

    return sorted(pid for pid in found if not inside(pid))


def command_line(pid: int) -> str:
    """Return the words of a process's command line with a space between each; empty for a kernel
    thread and an ended process.
    """
    try:
        return os.fsdecode(read_bytes(pid, "cmdline").rstrip(b"\0").replace(b"\0", b" "))
    except (CriuctlError, OSError):
        return ""


def _parents(lines: Mapping[int, str]) -> dict[int, int]:
    found = {}
    for pid in lines:
        with suppress(CriuctlError):
            found[pid] = int(read_bytes(pid, "stat").rpartition(b")")[2].split()[1])
    return found
