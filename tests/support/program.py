"""Running criuctl as a user does: a process of its own, with its own streams and exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .confinement import folders

ROOT = Path(__file__).resolve().parents[2]
CRIUCTL = (sys.executable, "-m", "criuctl")


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without anything that configures criuctl, click or rich, but for folders
    that are not the host's.
    """
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "LC_ALL", "TMPDIR")}
    return {
        **kept,
        **folders(),
        "PYTHONPATH": str(ROOT),
        "HOME": "/proc/nonexistent",
        "PYTHONDONTWRITEBYTECODE": "1",
        **more,
    }


def run_program(
    command: tuple[str, ...], *args: str, env: dict[str, str] | None = None, **streams: Any
) -> Any:
    """Run `command` with `args` and a clean environment to its end; a CompletedProcess with text
    streams.
    """
    if "stdout" not in streams and "stderr" not in streams:
        streams |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(
        [*command, *args],
        env=clean_environment(**(env or {})),
        text=True,
        timeout=60,
        check=False,
        **{"stdin": subprocess.DEVNULL, **streams},
    )


def start_program(
    command: tuple[str, ...], *args: str, env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start it with pipes at all three streams."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*command, *args],
        env=clean_environment(**(env or {})),
        text=True,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
    )
