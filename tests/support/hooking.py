"""Hooks for tests: a folder as an operator configures it, with executables that are one line of sh
or a Python program.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


class HookFolder:
    """One folder of ``hook_dirs``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def file(self, phase: str, name: str, text: str, *, mode: int = 0o755) -> Path:
        """A file of this folder as it is."""
        path = self.path / phase / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    def sh(self, phase: str, name: str, script: str) -> Path:
        """An executable sh program."""
        return self.file(phase, name, f"#!/bin/sh\n{script}\n")

    def python(self, phase: str, name: str, program: str) -> Path:
        """An executable Python program, started as quickly as Python starts."""
        return self.file(phase, name, f"#!{sys.executable} -IS\n{program}\n")

    def noting(self, phase: str, name: str = "note", *, more: str = "") -> Path:
        """A hook that notes its request (see `requests`) and then does `more`."""
        return self.sh(
            phase, name, f"{{ cat; echo; }} >> {self.path}/requests-{phase}-{name}\n{more}"
        )

    def requests(self, phase: str, name: str = "note") -> list[dict[str, Any]]:
        """The requests that hook got, one for each time it ran."""
        noted = self.path / f"requests-{phase}-{name}"
        return (
            [json.loads(line) for line in noted.read_text().splitlines()] if noted.exists() else []
        )
