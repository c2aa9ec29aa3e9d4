"""Commands without the packages that only they need."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("mcp", "mcp"),
        ("acp", "acp"),
        ("ui", "aiohttp"),
        ("metrics", "prometheus_client"),
        ("share work --via ssh://relay", "asyncssh"),
    ],
)
def test_without_its_package_it_says_what_to_install(
    tmp_path: Path, criuctl: Run, command: str, package: str
) -> None:
    missing = tmp_path / package
    missing.mkdir()
    (missing / "__init__.py").write_text("raise ImportError('it is not here')")
    project = Path(__file__).parents[3]
    done = criuctl(*command.split(), "--json", env={"PYTHONPATH": f"{tmp_path}:{project}"})
    assert done.returncode == 13
    error = json.loads(done.stdout)["error"]
    assert (
        "it is not here" in error["message"]
        and f"pip install '.[{command.partition(' ')[0]}]'" in error["hint"]
    )
