"""The judgement of vagrant/migrate-demo: what its observer must not let pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

OBSERVER = Path(__file__).resolve().parents[2] / "vagrant/lib/observer.py"

MOVED = [
    "10.0 alpha life=a count=1 lines=0 last=",
    "10.1 alpha life=a count=3 lines=1 last=two words",
    "14.1 beta life=a count=4 lines=1",
]


def judge(tmp_path: Path, answers: list[str], *expected: str) -> tuple[int, str]:
    """Its exit code, and what it says."""
    log = tmp_path / "log"
    log.write_text("".join(f"{line}\n" for line in answers))
    ended = subprocess.run(
        [sys.executable, "-I", "-S", OBSERVER, "judge", log, *expected],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stdout


def test_one_move(tmp_path: Path) -> None:
    code, said = judge(tmp_path, MOVED, "alpha", "beta")
    assert code == 0, said
    assert "2 of alpha, 1 of beta" in said
    assert "4.0 s" in said


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        # the other one runs, too
        ("14.2 alpha life=a count=5 lines=1 last=x", "it should have lived on"),
        ("14.2 beta life=a count=3 lines=1 last=x", "went back from 4 to 3"),
        ("14.2 beta life=b count=5 lines=1 last=x", "several lives: life=a life=b"),
    ],
)
def test_what_must_not_be(tmp_path: Path, more: str, fault: str) -> None:
    code, said = judge(tmp_path, [*MOVED, more], "alpha", "beta")
    assert code == 1
    assert fault in said


def test_who_never_answered(tmp_path: Path) -> None:
    assert judge(tmp_path, MOVED[:2], "alpha", "beta")[0] == 1
    assert judge(tmp_path, [], "alpha", "beta")[0] == 1
