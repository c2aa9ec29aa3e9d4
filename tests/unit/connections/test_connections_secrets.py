"""References to secrets: what is found, what is refused, and that nothing of a secret gets into an
error.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from criuctl.connections import secrets
from criuctl.connections.secrets import SecretUnavailable, resolve
from criuctl.errors import ConfigError


def written(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_where_they_are_found(tmp_path: Path) -> None:
    assert resolve({}) is None
    assert resolve({"env": "DB"}, environ={"DB": "from environment"}) == "from environment"
    assert resolve({"file": str(written(tmp_path, "first line\nsecond\n"))}) == "first line"
    assert resolve({"command": ["sh", "-c", "echo from a command"]}) == "from a command"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_file_that_others_may_read(tmp_path: Path, mode: int) -> None:
    with pytest.raises(SecretUnavailable, match="may be read by others") as caught:
        resolve({"file": str(written(tmp_path, "hidden-word", mode))})
    assert "chmod 0600" in caught.value.hint


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "missing", tmp_path, tmp_path / "pipe", written(tmp_path, "\n")):
        with pytest.raises(SecretUnavailable):
            resolve({"file": str(path)})


def test_a_file_of_another_user(tmp_path: Path) -> None:
    path = written(tmp_path, "hidden-word")
    os.chown(path, 12345, 12345)
    with pytest.raises(SecretUnavailable, match="uid 12345"):
        resolve({"file": str(path)})


@pytest.mark.parametrize(
    "argv",
    [
        ["sh", "-c", "echo hidden-word; echo hidden-word >&2; exit 3"],
        ["sh", "-c", ": hidden-word"],
        ["sh", "-c", "printf '\\377hidden-word'"],
        ["no-such-program-at-all", "hidden-word"],
        ["/etc/passwd", "hidden-word"],
    ],
)
def test_no_error_repeats_what_a_command_said(argv: list[str]) -> None:
    with pytest.raises(SecretUnavailable) as caught:
        resolve({"command": argv})
    assert "hidden-word" not in str(caught.value) + caught.value.hint + str(caught.value.to_dict())
    assert caught.value.__cause__ is None


def test_a_command_that_hangs() -> None:
    began = time.monotonic()
    with pytest.raises(SecretUnavailable, match="not done in time"):
        resolve({"command": ["sleep", "60"]}, timeout=0.2)
    assert time.monotonic() - began < 20


def test_a_command_is_run_once_for_many(tmp_path: Path) -> None:
    argv = ["sh", "-c", f"echo x >> {tmp_path}/runs; echo many"]
    assert {resolve({"command": argv}) for _ in range(5)} == {"many"}
    assert (tmp_path / "runs").read_text() == "x\n"


def test_a_variable_that_is_not_set() -> None:
    with pytest.raises(SecretUnavailable, match="NO_SUCH"):
        resolve({"env": "NO_SUCH"}, environ={})


@pytest.mark.parametrize(
    "reference",
    [
        {"env": ""},
        {"env": 3},
        {"file": ["a"]},
        {"command": "pass show"},
        {"command": []},
        {"env": "A", "file": "b"},
    ],
)
def test_what_is_no_reference(reference: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        secrets.check(reference, "config.yaml: rule 1")


def test_a_password_in_place_of_a_reference_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        secrets.check({"password": "hidden-word"}, "config.yaml: rule 1")
    assert "hidden-word" not in str(caught.value) + caught.value.hint


def test_a_variable_that_holds_no_text_is_reported() -> None:
    with pytest.raises(SecretUnavailable, match="variable DB does not hold UTF-8"):
        resolve({"env": "DB"}, environ={"DB": "latin \udce9"})
