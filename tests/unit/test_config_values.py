"""Values of the configuration that make no sense: refused where they stand, before anything is
done.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from criuctl.config import MAX_FREEZE, Config, load
from criuctl.dump.freeze_limit import allowed
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
    for line in (
        "compression: -7",
        "compression: 19",
        "workers: 0",
        "run_dir: ''",
        "run_dir: /dev/shm/x",
        "criu_timeout: 0",
    ):
        file = tmp_path / "config.yaml"
        file.write_text(line + "\n")
        assert load(str(file), {}).store == Config().store


@pytest.mark.parametrize(
    "text", ["host_id: 2026-02-30\n", "retention: {web: {keep_within: 2026-13-01}}\n"]
)
def test_an_invalid_date_is_reported_as_an_error_of_the_file(tmp_path: Path, text: str) -> None:
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


@pytest.mark.parametrize(
    "variable",
    [{"HOME": ""}, {"HOME": "home"}, {"HOME": "/proc/nonexistent", "XDG_CONFIG_HOME": ".config"}],
)
def test_the_current_folder_configures_nothing(
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


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("30", {"snapshot": 30.0, "dump": 30.0, "migrate": 30.0}),
        ("{snapshot: 5, dump: 0}", {"snapshot": 5.0, "dump": 0.0}),
        ("0", {"snapshot": 0.0, "dump": 0.0, "migrate": 0.0}),
    ],
)
def test_max_freeze_is_one_number_or_by_operation(
    tmp_path: Path, text: str, found: dict[str, float]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"max_freeze: {text}\n")
    config = load(str(file), {})
    assert config.max_freeze == found
    assert load(None, {"CRIUCTL_MAX_FREEZE": text, "HOME": str(tmp_path)}).max_freeze == found
    assert [allowed(config, None, kind) for kind in MAX_FREEZE] == [
        {**MAX_FREEZE, **found}[kind] for kind in MAX_FREEZE
    ]
    assert allowed(config, 7.0, "dump") == 7.0


@pytest.mark.parametrize(
    "text", ["-1", "soon", "{restore: 5}", "{dump: soon}", "[1]", "yes", ".nan", "{dump: 9e9}"]
)
def test_a_max_freeze_that_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"max_freeze: {text}\n")
    with pytest.raises(ConfigError, match=f"{file}: max_freeze must be "):
        load(str(file), {})


@pytest.mark.parametrize(
    ("text", "found"),
    [("true", True), ("yes", True), ("1", True), ("false", False), ("off", False)],
)
def test_verify_writes_is_yes_or_no(tmp_path: Path, text: str, found: bool) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"verify_writes: {text}\n")
    assert load(str(file), {}).verify_writes is found
    assert load(None, {"CRIUCTL_VERIFY_WRITES": text, "HOME": str(tmp_path)}).verify_writes is found
    file.write_text("verify_writes: perhaps\n")
    with pytest.raises(ConfigError, match="verify_writes must be bool"):
        load(str(file), {})
