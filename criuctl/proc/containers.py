"""Which container a process is in, by the names that runtimes give to control groups.

A name of a control group proves nothing, because root of the host may give any: it only chooses the
words of an explanation.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .procfs import read_text

_ID = r"([0-9a-f]{64})"
_LONG, _SHORT = 64, 12  # digits of an id, and how many of them engines print and take
# Of the engines that Kubernetes uses the id is the same; the first match decides.
_GROUPS = tuple(
    (engine, re.compile(pattern, re.MULTILINE))
    for engine, pattern in (
        ("kubernetes", rf"/kubepods[^\n]*[/-]{_ID}(?:\.scope)?(?:/|$)"),
        ("kubernetes", rf"/(?:cri-containerd|crio)-{_ID}\.scope"),
        ("podman", rf"/libpod-{_ID}(?:\.scope)?(?:/|$)"),
        ("docker", rf"/docker[/-]{_ID}(?:\.scope)?(?:/|$)"),
        ("lxc", r"/lxc(?:\.payload)?[./]([\w.-]{1,64})(?:/|$)"),
        ("nspawn", r"/(?:systemd-nspawn@([\w.-]{1,64})\.service|machine-[^/\n]{1,64}\.scope)"),
    )
)


class Container(NamedTuple):
    """The engine that made a container, and its id or name; "" if its group does not say it."""

    engine: str  # docker, podman, kubernetes, lxc or nspawn
    id: str


def container_of(pid: int) -> Container | None:
    """Return the container that a process is in; None if no name of a control group says one.

    `NoSuchProcess`.
    """
    return container_in(read_text(pid, "cgroup"))


def container_in(groups: str) -> Container | None:
    """Return the container named in the text of ``/proc/PID/cgroup``."""
    for engine, pattern in _GROUPS:
        if match := pattern.search(groups):
            name = match[1] or ""
            return Container(engine, name[:_SHORT] if len(name) == _LONG else name)
    return None
