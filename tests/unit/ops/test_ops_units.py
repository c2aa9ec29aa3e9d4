"""The systemd units that ship, as they are installed: `criuctl unit`.  Real ones run in
integration/session_commands/test_commands_units.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from criuctl.cli.main import main
from criuctl.ops.scheduling import timers, units

Call = Callable[..., Any]
ALL = [
    "criuctl-recover",
    "criuctl-slurm",
    "criuctl-spot",
    "criuctl-supervise@",
    "criuctl-ui",
    "criuctl-ui-read-only",
]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> timers.Places:
    """A host where systemd runs, which records its commands."""
    control = tmp_path / "systemctl"
    control.write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/log\n'
        f"case $1 in is-active) exit 3;; enable) [ ! -e {tmp_path}/broken ] || "
        "{ echo 'Unit is masked' >&2; exit 1; };; esac\n"
    )
    control.chmod(0o755)
    places = timers.Places(
        tmp_path / "booted", tmp_path / "units", tmp_path / "cron.d", (str(control),)
    )
    places.booted.mkdir()
    monkeypatch.setattr(units, "PLACES", places)
    monkeypatch.setattr(units, "PACKAGED", tmp_path / "packaged")
    monkeypatch.setenv("CRIUCTL_STATE_DIR", f"{tmp_path}/100% state")
    return places


@pytest.fixture
def call(places: timers.Places, capsys: pytest.CaptureFixture[str]) -> Call:
    """``call("install", "ui")``: the JSON of `criuctl unit`."""

    def call(*words: str, code: int = 0, before: tuple[str, ...] = ()) -> Any:
        assert main([*before, "--json", "unit", *words]) == code, capsys.readouterr()
        return json.loads(capsys.readouterr().out)

    return call


def _log(places: timers.Places) -> list[str]:
    log = places.booted.parent / "log"
    return log.read_text().splitlines() if log.exists() else []


def test_they_are_written_once_and_removed(call: Call, places: timers.Places) -> None:
    written = call("install")["written"]
    assert written == [str(places.units / f"{name}.service") for name in ALL]
    assert _log(places) == ["daemon-reload"]
    assert call("install") == {"written": [], "started": []}
    assert _log(places) == ["daemon-reload"], "nothing has changed"
    assert [(one["name"], one["current"]) for one in call("list")] == [
        (name, True) for name in units.NAMES
    ]
    assert call("remove", *units.NAMES)["removed"] == written
    assert [*places.units.iterdir()] == []
    assert call("remove", "ui", code=3)["error"]["code"] == "not-found"


def test_they_start_this_criuctl_with_its_store_and_configuration(
    call: Call, places: timers.Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a $b.yaml").touch()
    call("install", "ui", before=("--store", "folder", "--config", "a $b.yaml"))
    text = (places.units / "criuctl-ui.service").read_text()
    program = f'"{sys.executable}" "-m" "criuctl"'
    options = f'"--config" "{tmp_path}/a $$b.yaml" "--store" "{tmp_path}/folder"'
    assert f" ui {program} {options} ui $UI_OPTIONS\n" in text
    assert f'Environment="CRIUCTL_STATE_DIR={tmp_path}/100%% state"\n' in text


def test_another_file_of_that_name_is_replaced_only_on_request(
    call: Call, places: timers.Places
) -> None:
    places.units.mkdir()
    theirs = places.units / "criuctl-ui.service"
    theirs.write_text("[Unit]\n")
    assert "--replace" in call("install", code=9)["error"]["hint"]
    assert [*places.units.iterdir()] == [theirs], "nothing is half done"
    (row,) = [one for one in call("list") if one["name"] == "ui"]
    assert row["current"] is False
    assert call("install", "ui", "--replace")["written"] == [str(theirs)]
    assert theirs.read_text() != "[Unit]\n"


def test_an_instance_is_enabled_and_let_go_alone(call: Call, places: timers.Places) -> None:
    assert call("install", "supervise", "--now", code=2)["error"]["hint"]
    assert call("install", "supervise@web", "--now")["started"] == ["criuctl-supervise@web.service"]
    assert _log(places)[-1] == "enable --quiet --now criuctl-supervise@web.service"
    wants = places.units / "multi-user.target.wants"
    wants.mkdir()
    for name in ("web", "db"):
        (wants / f"criuctl-supervise@{name}.service").symlink_to("../criuctl-supervise@.service")
    assert call("remove", "supervise@web") == {"removed": []}
    assert _log(places)[-1] == "disable --quiet --now criuctl-supervise@web.service"
    call("remove", "supervise")
    assert not [*places.units.rglob("criuctl-supervise@*")]


def test_those_of_a_package_are_used_and_stay(
    call: Call, places: timers.Places, tmp_path: Path
) -> None:
    call("install")
    (tmp_path / "units").rename(tmp_path / "packaged")
    assert call("install", "ui", "--now") == {"written": [], "started": ["criuctl-ui.service"]}
    (row,) = [one for one in call("list") if one["name"] == "ui"]
    assert (row["file"], row["current"]) == (f"{tmp_path}/packaged/criuctl-ui.service", True)
    assert call("remove", "ui") == {"removed": []}
    assert _log(places)[-1] == "disable --quiet --now criuctl-ui.service"
    assert Path(row["file"]).exists()


def test_what_systemd_says_is_passed_on(call: Call, places: timers.Places, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    error = call("install", "ui", "--now", code=13)["error"]
    assert "Unit is masked" in error["message"]
    assert (places.units / "criuctl-ui.service").exists() and "stay" in error["hint"]


@pytest.mark.parametrize("name", ["nosuch", "ui@web", "supervise@a b", "supervise@../x"])
def test_names_of_units(call: Call, name: str) -> None:
    call("install", name, code=2)


def test_without_systemd_nothing_is_written(call: Call, places: timers.Places) -> None:
    places.booted.rmdir()
    assert call("install", code=13)["error"]["code"] == "platform"
    assert not places.units.exists()


@pytest.mark.parametrize("name", units.NAMES)
def test_systemd_understands_them(name: str, tmp_path: Path) -> None:
    """`systemd-analyze verify` also reports keys that systemd would ignore."""
    assert shutil.which("systemd-analyze"), "systemd is not installed: scripts/setup --dev"
    unit = units.Unit(name)
    file = tmp_path / unit.file
    file.write_text(unit.text([sys.executable, "-m", "criuctl"], {"A": "1"}, ["--all"]))
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    file.write_text(file.read_text().replace("[Service]\n", "[Service]\nNoSuchKey=1\n"))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "NoSuchKey" in done.stderr, "the test can fail"
