"""Values of the configuration that make no sense: refused where they stand, before anything is done."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from criuctl.config import Config, load
from criuctl.errors import ConfigError


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("compression", "99"),
        ("workers", "-3"),
        ("criu_timeout", "-1"),
        ("criu_timeout", "4294967296"),
        ("s3_timeout", ".nan"),
        ("s3_timeout", ".inf"),
        ("hook_timeout_frozen", "3000000"),
        ("link_timeout", "1e9"),
        ("state_dir", "state"),
        ("state_dir", "~/state"),
        ("run_dir", "run"),
        ("key_dir", "''"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, key: str, value: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"{key}: {value}\n")
    with pytest.raises(ConfigError, match=f"{file}: {key} must be "):
        load(str(file), {})


def test_all_defaults_and_the_ends_of_ranges_are_taken(tmp_path: Path) -> None:
    for line in ("compression: -7", "compression: 19", "workers: 0", "run_dir: ''", "run_dir: /dev/shm/x", "criu_timeout: 0"):
        file = tmp_path / "config.yaml"
        file.write_text(line + "\n")
        assert load(str(file), {}).store == Config().store


@pytest.mark.parametrize("text", ["host_id: 2026-02-30\n", "retention: {web: {keep_within: 2026-13-01}}\n"])
def test_a_day_that_there_is_not_is_told_as_what_is_wrong_with_the_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"{file} is not valid YAML: "):
        load(str(file), {})
    with pytest.raises(ConfigError, match="CRIUCTL_RETENTION is not valid YAML: "):
        load(None, {"CRIUCTL_RETENTION": text, "HOME": str(tmp_path)})


def test_a_number_beyond_all_ranges_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"s3_timeout: 1{'0' * 400}\n")
    with pytest.raises(ConfigError, match=f"{file}: s3_timeout must be float"):
        load(str(file), {})


@pytest.mark.parametrize("variable", [{"HOME": ""}, {"HOME": "home"}, {"HOME": "/nonexistent", "XDG_CONFIG_HOME": ".config"}])
def test_whoever_made_the_folder_that_we_are_in_configures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: dict[str, str]
) -> None:
    for folder in (".config", "home/.config"):
        (tmp_path / folder / "criuctl").mkdir(parents=True)
        (tmp_path / folder / "criuctl" / "config.yaml").write_text("hook_dirs: [/evil]\n")
    monkeypatch.chdir(tmp_path)
    assert load(None, variable).hook_dirs == Config().hook_dirs


def test_a_configuration_that_is_no_regular_file(tmp_path: Path) -> None:
    """/dev/null is an empty one, and a shell gives a pipe for ``<(...)``."""
    nowhere = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert load("/dev/null", nowhere).files == Config().files
    end, other = os.pipe()
    os.write(other, b"files: carry\n")
    os.close(other)
    try:
        assert load(f"/proc/self/fd/{end}", nowhere).files == "carry"
    finally:
        os.close(end)
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError):
            load(str(path), nowhere)
