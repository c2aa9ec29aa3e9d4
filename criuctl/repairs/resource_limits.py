"""Resource limits and the OOM score, which only CAP_SYS_RESOURCE may raise.

Without that capability CRIU leaves them as they are for criuctl and says nothing: they are
reported.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ..criu.images import read
from ..errors import NoSuchProcess
from ..proc.limits import CAP_SYS_RESOURCE, effective_capabilities
from ..proc.procfs import read_text
from .base import Repair, RestoredTree

_LIMITS = {getattr(resource, name): name for name in dir(resource) if name.startswith("RLIMIT_")}


class ResourceLimits(Repair):
    """setrlimit(2) and oom_score_adj."""

    loses = "CRIU 4.2 silently leaves limits that it may not raise (CAP_SYS_RESOURCE)."

    def mend(self, tree: RestoredTree) -> None:
        """Warn of limits that are not what they were, one line for processes that are alike."""
        if effective_capabilities() >> CAP_SYS_RESOURCE & 1:
            return
        found: dict[str, list[str]] = {}
        for inner in tree.images.pids():
            core = read(tree.images.folder, f"core-{inner}.img", "CORE")[0]
            if inner in tree.pids and core.HasField("tc"):
                with suppress(OSError, NoSuchProcess):  # it has ended: nothing to report
                    if lowered := ", ".join(_lowered(tree.pids[inner], core.tc)):
                        found.setdefault(lowered, []).append(str(inner))
        for lowered, pids in found.items():
            tree.reporter.warning(
                f"PID {', '.join(pids)}: {lowered}: not restored",
                "Raising that needs CAP_SYS_RESOURCE, which criuctl lacks; start criuctl itself "
                "with such limits.",
            )


def _lowered(pid: int, saved: Any) -> Iterator[str]:
    for number, limit in enumerate(saved.rlimits.rlimits):
        before = [-1 if value >= 1 << 63 else value for value in (limit.cur, limit.max)]
        after = list(resource.prlimit(pid, number))
        if after != before:
            name = _LIMITS.get(number, f"limit {number}")
            yield f"{name} is {_pair(after)}, it was {_pair(before)}"
    score = int(read_text(pid, "oom_score_adj"))
    if saved.HasField("oom_score_adj") and score != saved.oom_score_adj:
        yield f"oom_score_adj is {score}, it was {saved.oom_score_adj}"


def _pair(values: list[int]) -> str:
    return "/".join("unlimited" if value == -1 else str(value) for value in values)
