"""The connections of a live tree and what a dump would make of them: looked at, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from ..checkpoint.manifest import ConnectionRecord
from ..config import Config
from ..connections.survey import Survey
from ..report import Reporter
from .target import Target


def connections(config: Config, target: Target, *, reporter: Reporter, wish: str | None = None) -> list[ConnectionRecord]:
    """Every record that a dump with this policy would begin with; PIDs are this host's."""
    survey = Survey(config, reporter, wish=wish)
    return [replace(c.record, pid=c.held.pid, holders=c.held.holders) for c in survey.look(target.root.pid)]
