"""Slurm's own commands, with the caller's place of its configuration and nothing else of theirs."""

from __future__ import annotations

import os

from ...errors import CommandFailed, PlatformError, TimedOut
from ...proc import command

_TIMEOUT = 20.0  # seconds


def ask(*argv: str, check: bool = True) -> str:
    """Return what one of Slurm's commands prints; `PlatformError` if it fails or is not there."""
    kept = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    try:
        done = command.run(argv, timeout=_TIMEOUT, env={"LC_ALL": "C"} | kept, check=check)
    except (CommandFailed, TimedOut) as error:
        raise PlatformError(f"Slurm does not answer: {error.message}") from error
    return done.stdout.decode(errors="replace")
