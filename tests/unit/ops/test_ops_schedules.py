"""Schedules: what is written for systemd and for cron, what cron can express, and the commands, in
folders of the test.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from support.keeper import wait_until

from criuctl.cli.main import main
from criuctl.config import Config
from criuctl.errors import UsageError
from criuctl.host.journal.event_log import EventLog
from criuctl.host.registry import boot_id, exclusive, write_record
from criuctl.ops import schedule_run, schedules, snapshot
from criuctl.ops.scheduling import batch, calendars, timers
from criuctl.proc.tree import ProcessIdentity


@pytest.mark.parametrize(
    ("calendar", "fields"),
    [
        ("hourly", "0 * * * *"),
        ("Daily", "0 0 * * *"),
        ("weekly", "0 0 * * 1"),
        ("quarterly", "0 0 1 1,4,7,10 *"),
        ("03:30", "30 3 * * *"),
        ("*:0/15", "0,15,30,45 * * * *"),
        ("Mon..Fri 8..10,12:05:00", "5 8,9,10,12 * * 1,2,3,4,5"),
        ("Sat..Mon 04:00", "0 4 * * 0,1,6"),
        ("*-*-01 4:00", "0 4 1 * *"),
        ("02-29", "0 0 29 2 *"),
        ("Sunday", "0 0 * * 0"),
    ],
)
def test_calendars_that_cron_knows(calendar: str, fields: str) -> None:
    assert str(calendars.cron_time(calendar)) == fields


@pytest.mark.parametrize(
    "calendar",
    [
        "",
        "2027-*-* 4:00",
        "*:*:30",
        "4:00 UTC",
        "Mon *-*-01 4:00",
        "25:00",
        "*:60",
        "*:5..1",
        "*:0/0",
        "*-*~1",
        "Foo 4:00",
        "tomorrow",
        "02-30 4:00",
    ],
)
def test_what_cron_does_not_know_is_refused(calendar: str) -> None:
    with pytest.raises(UsageError, match="cannot be said to cron") as caught:
        calendars.cron_time(calendar)
    assert caught.value.hint


def test_periods_for_cron() -> None:
    wanted = {
        60: "* * * * *",
        900: "0,15,30,45 * * * *",
        3600: "0 * * * *",
        6 * 3600: "0 0,6,12,18 * * *",
        86400: "0 0 * * *",
    }
    assert {seconds: str(calendars.cron_every(seconds)) for seconds in wanted} == wanted
    for seconds in (61, 420, 5 * 3600, 2 * 86400):
        with pytest.raises(UsageError, match="cannot be said to cron"):
            calendars.cron_every(seconds)


def test_when_cron_is_next() -> None:
    now = datetime(2027, 2, 28, 23, 59, 30)  # noqa: DTZ001  # local time, as cron has it
    assert calendars.cron_time("*:*").after(now) == datetime(2027, 3, 1, 0, 0)  # noqa: DTZ001
    assert calendars.cron_time("02-29 4:05").after(now) == datetime(2028, 2, 29, 4, 5)  # noqa: DTZ001


FAKE = """\
import json, pathlib, sys
log = pathlib.Path(sys.argv[1])
log.open("a").write(" ".join(sys.argv[2:]) + "\\n")
if "list-timers" in sys.argv:
    print(json.dumps([{"unit": "criuctl-schedule-web.timer", "next": 1800000000000000}]))
if "show" in sys.argv and (log.parent / "runs").exists():
    print("activating")
sys.exit("enable" in sys.argv and (log.parent / "broken").exists())
"""


class Site:
    """A host with either of the back ends, and criuctl on it."""

    def __init__(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.path, self._capsys = path, capsys
        (path / "fake").write_text(FAKE)
        (path / "cron.d").mkdir()
        self.units, self.cron, self.log = path / "units", path / "cron.d", path / "log"
        fake = (sys.executable, "-S", str(path / "fake"), str(self.log))
        monkeypatch.setattr(
            schedules, "PLACES", timers.Places(path / "booted", self.units, self.cron, fake)
        )
        for name in ("STORE", "STATE_DIR", "CACHE_DIR", "KEY_DIR", "RUN_DIR", "HOOK_DIRS"):
            monkeypatch.setenv(f"CRIUCTL_{name}", str(path / name.lower()))

    def boot(self) -> None:
        (self.path / "booted").mkdir()
        self.units.mkdir()

    def __call__(self, *args: str, code: int = 0) -> Any:
        assert main(["--json", "schedule", *args]) == code, self._capsys.readouterr()
        return json.loads(self._capsys.readouterr().out)

    def table(self) -> str:
        """The list as a person sees it."""
        assert main(["schedule", "list"]) == 0
        return self._capsys.readouterr().out

    def files(self) -> list[str]:
        folders = (self.units, self.cron, self.path / "state_dir" / "schedules")
        return sorted(
            path.name for folder in folders for path in folder.glob("**/*") if path.is_file()
        )


@pytest.fixture
def site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Site:
    return Site(tmp_path, monkeypatch, capsys)


def test_a_run_that_outlives_its_schedule_keeps_its_settings(site: Site) -> None:
    site.boot()
    site("add", "web", "web", "--every", "1h")
    service = (site.units / "criuctl-schedule-web.service").read_text().splitlines()
    (site.path / "runs").touch()
    site("remove", "web")
    kept = site.path / "booted" / "criuctl-schedule-web.service"
    assert site.files() == []
    lines = kept.read_text().splitlines()
    unit = lines.index("[Unit]")
    assert lines.pop(unit + 1) == "CollectMode=inactive-or-failed"
    assert lines == [*service, f'ExecStopPost=rm -f "{kept}"']


def test_another_one_s_damage_makes_no_failure_of_one_that_was_made(site: Site) -> None:
    site.boot()
    site("add", "other", "web", "--every", "1h")
    (site.path / "state_dir/schedules/other.json").write_text("{")
    assert site("add", "web", "web", "--every", "1h")["name"] == "web"
    assert "criuctl-schedule-web.timer" in site.files()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"backend": "cron"}',
        '{"backend": "cron", "every": "1h", "all": true}',
        '{"backend": "cron", "labels": 3}',
    ],
)
def test_a_damaged_definition_hides_no_other_one(
    site: Site, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    for name in ("other", "web"):
        site("add", name, "web", "--every", "1h")
    (site.path / "state_dir/schedules/other.json").write_text(text)
    assert [row["name"] for row in site("list", code=11)] == ["web"]
    assert main(["schedule", "list"]) == 11
    assert "schedules/other.json" in capsys.readouterr().err
    assert site("run", "other", code=2)["error"]["hint"].startswith("Remove the schedule")
    site("remove", "other")
    assert [row["name"] for row in site("list")] == ["web"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"process": 1}',
        '{"began": "x", "ended": null, "result": "running", "process": [1]}',
    ],
)
def test_what_cannot_be_read_of_the_last_run_hides_no_schedule(site: Site, text: str) -> None:
    site("add", "web", "--all", "--every", "1h")
    (site.path / "state_dir/schedules/web.last.json").write_text(text)
    (row,) = site("list")
    assert row["last"] is None
    assert "web" in site.table()


def test_the_store_is_the_same_one_from_everywhere(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(site.path / "home"))
    monkeypatch.chdir(site.path)
    given = ("~/trees", "trees", "file:///srv/trees", "s3://bucket/trees")
    stores = [
        site("add", f"s{n}", "--all", "--every", "1h", "--store", url)["store"]
        for n, url in enumerate(given)
    ]
    assert stores == [f"{site.path}/home/trees", f"{site.path}/trees", *given[2:]]


def test_a_systemd_timer(site: Site) -> None:
    site.boot()
    made = site(
        "add",
        "web",
        "web",
        "db",
        "--at",
        "Mon..Fri 08:30",
        "--jitter",
        "5m",
        "--deadline",
        "30m",
        "--keep-last",
        "3",
    )
    assert made["next"] == "2027-01-15T08:00:00Z"
    assert (made["backend"], made["sessions"], made["keep"], made["last"]) == (
        "systemd",
        ["web", "db"],
        {"keep_last": 3},
        None,
    )
    service, timer = (Path(path).read_text().splitlines() for path in made["files"])
    assert {
        "OnCalendar=Mon..Fri 08:30",
        "Persistent=true",
        "RandomizedDelaySec=300s",
        "WantedBy=timers.target",
    } <= set(timer)
    assert {
        "Type=oneshot",
        "TimeoutStartSec=2100s",
        f'Environment="CRIUCTL_STATE_DIR={site.path}/state_dir"',
    } <= set(service)
    (start,) = [line for line in service if line.startswith("ExecStart=")]
    assert shlex.split(start)[-3:] == ["schedule", "run", "web"]
    assert "enable --quiet --now criuctl-schedule-web.timer" in site.log.read_text()
    assert site("add", "web", "--all", "--every", "1h", code=9)["error"]["code"] == "conflict"
    assert site("list") == [made]
    site("remove", "web")
    assert site.files() == []
    assert site.log.read_text().splitlines()[-4].startswith("disable --quiet --now")
    assert site("remove", "web", code=3)["error"]["code"] == "not-found"


def test_a_period_for_systemd_counts_from_the_timer_s_start(site: Site) -> None:
    site.boot()
    made = site("add", "web", "--label", "tier=prod", "--every", "90m")
    timer = Path(made["files"][1]).read_text().splitlines()
    assert {"OnActiveSec=5400s", "OnUnitActiveSec=5400s"} <= set(timer)
    assert "Persistent=true" not in timer


def test_a_long_period_is_written_as_systemd_reads_numbers(site: Site) -> None:
    site.boot()
    timer = (
        Path(site("add", "web", "--all", "--every", "30d0.5s", "--jitter", "15d")["files"][1])
        .read_text()
        .splitlines()
    )
    assert {
        "OnActiveSec=2592000.5s",
        "OnUnitActiveSec=2592000.5s",
        "RandomizedDelaySec=1296000s",
    } <= set(timer)


def test_nothing_is_left_where_systemctl_cannot_be_asked(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.boot()
    places = replace(schedules.PLACES, systemctl=(str(site.path / "nosuch"),))
    monkeypatch.setattr(schedules, "PLACES", places)
    assert (
        "no such program"
        in site("add", "web", "--all", "--every", "1h", code=13)["error"]["message"]
    )
    assert site.files() == []


def test_nothing_is_left_of_a_timer_that_systemd_does_not_take(site: Site) -> None:
    site.boot()
    (site.path / "broken").touch()
    assert (
        "systemd does not take the timer"
        in site("add", "web", "--all", "--every", "1h", code=13)["error"]["message"]
    )
    assert site.files() == []


def test_a_crontab(site: Site) -> None:
    config = site.path / "100% mine.yaml"
    config.write_text("{}\n")
    made = site("add", "web", "--all", "--every", "15m", "--jitter", "1m", "--config", str(config))
    (path,) = map(Path, made["files"])
    assert (path.name, path.stat().st_mode & 0o7777) == ("criuctl-schedule-web", 0o644)
    *settings, line = path.read_text().splitlines()
    assert settings[1:] == [
        "SHELL=/bin/sh",
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    ]
    fields, _, command = line.partition(" root ")
    assert fields == "0,15,30,45 * * * *"
    words = shlex.split(command.replace("\\%", "%"))
    assert "%" not in command.replace("\\%", "")
    assert words[0] == f"CRIUCTL_STATE_DIR={site.path}/state_dir"
    assert words[-7:] == ["--config", str(config), "schedule", "run", "web", "--quiet", "--delay"]
    assert made["next"] is not None
    path.unlink()
    assert site("list")[0]["missing"] == [str(path)]
    site("remove", "web")
    assert site.files() == []


def test_files_of_others_are_left_alone(site: Site) -> None:
    (site.cron / "criuctl-schedule-web").write_text("mine\n")
    assert (
        "is there already"
        in site("add", "web", "--all", "--every", "1h", code=9)["error"]["message"]
    )
    site("remove", "web", code=3)
    assert site.files() == ["criuctl-schedule-web"]


@pytest.mark.parametrize(
    "words",
    [
        ["a.b", "--all", "--every", "1h"],
        ["../a", "--all", "--every", "1h"],
        ["a", "--every", "1h"],
        ["a", "web", "--all", "--every", "1h"],
        ["a", "--all"],
        ["a", "--all", "--every", "1h", "--at", "daily"],
        ["a", "--all", "--every", "5s"],
        ["a", "--all", "--every", "1h", "--jitter", "1h"],
        ["a", "--all", "--every", "7m"],
        ["a", "--all", "--at", "2027-01-01"],
        ["a", "--all", "--every", "1h", "--keep-within", "soon"],
        ["a", "w/eb", "--every", "1h"],
    ],
)
def test_what_makes_no_sense_is_refused(site: Site, words: list[str]) -> None:
    assert site("add", *words, code=2)["error"]["exit_code"] == 2
    assert site.files() == []


def test_a_host_with_neither(site: Site) -> None:
    site.cron.rmdir()
    assert site("add", "web", "--all", "--every", "1h", code=13)["error"]["code"] == "platform"


def test_a_run_tells_each_session_and_is_remembered(site: Site) -> None:
    site("add", "web", "one", "two", "--every", "1h", "--keep-last", "2")
    done = site("run", "web", code=3)
    assert sorted((s["target"], s["error"]["exit_code"]) for s in done["snapshots"]) == [
        ("one", 3),
        ("two", 3),
    ]
    assert (done["pruned"], done["exit_code"]) == (0, 3)
    (row,) = site("list")
    assert (row["last"]["result"], row["last"]["exit_code"], len(row["last"]["failed"])) == (
        "failed",
        3,
        2,
    )
    site("add", "all", "--all", "--at", "daily")
    assert site("run", "all")["snapshots"] == []
    assert site("list")[0]["last"]["result"] == "ok"
    site("run", "nosuch", code=3)
    site("remove", "all")
    site("remove", "all", code=3)
    events = [
        event
        for event in EventLog(site.path / "state_dir").read()
        if event["operation"].startswith("schedule-")
    ]
    assert [(e["operation"], e["schedule"], e["exit_code"], e.get("states")) for e in events] == [
        ("schedule-add", "web", 0, None),
        ("schedule-run", "web", 3, {"failed": 2}),
        ("schedule-add", "all", 0, None),
        ("schedule-run", "all", 0, None),
        ("schedule-remove", "all", 0, None),
        ("schedule-remove", "all", 3, None),
    ]


def test_a_run_that_cannot_be_recorded_is_reported_all_the_same(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site("add", "web", "one", "--every", "1h")
    site("add", "all", "--all", "--every", "1h")

    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(schedule_run, "write_record", full)
    done = site("run", "all", code=11)
    assert done["warnings"] == [
        "how this run ended is not in `criuctl schedule list`: No space left on device"
    ]
    assert [one["target"] for one in site("run", "web", code=3)["snapshots"]] == ["one"]


@pytest.mark.parametrize("target", ["", "\u00b2", "9" * 5000, "\udcff"])
def test_a_target_that_is_no_number_is_no_pid(
    site: Site, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    assert main(["--json", "snapshot", target]) == 2
    assert json.loads(capsys.readouterr().out)[0]["error"]["code"] == "invalid-name"


def test_a_run_goes_on_when_stdout_is_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def closed_at_first(text: str) -> None:
        said.append(text)
        if len(said) == 1:
            raise BrokenPipeError

    amounts = {"memory": 1, "stored": 1}
    stored = {
        "checkpoint": "c" * 32,
        "processes": 1,
        "bytes": amounts,
        "frozen_ms": 1.0,
        "total_ms": 1.0,
    }

    def dump(_config: object, target: str, **_more: object) -> SimpleNamespace:
        return SimpleNamespace(to_dict=lambda: {**stored, "session": target}, degraded=False)

    monkeypatch.setattr(snapshot, "dump", dump)
    monkeypatch.setattr("criuctl.cli.commands.snapshot.write_result", closed_at_first)
    # it is the test's own
    monkeypatch.setattr("criuctl.cli.descriptions.discard", lambda _descriptor: None)
    site("add", "web", "one", "two", "--every", "1h")
    assert main(["schedule", "run", "web"]) == 141
    assert len(said) == 3
    (row,) = site("list")
    assert (row["last"]["result"], row["last"]["stored"]) == ("ok", 2)


def test_a_second_run_at_the_same_time_is_a_conflict(site: Site) -> None:
    site("add", "web", "--all", "--every", "1h")
    with exclusive(
        Config(run_dir=str(site.path / "run_dir")), f"schedule/web/{site.path}/state_dir", "busy"
    ):
        assert "runs already" in site("run", "web", code=9)["error"]["message"]
    assert site("list")[0]["last"] is None


def test_a_run_that_was_killed_is_listed_as_killed(site: Site) -> None:
    """A killed run cannot record how it ended: the list says so, and does not show the result of
    the run before.
    """
    site("add", "web", "--all", "--every", "1h")
    site("run", "web")
    before = schedule_run.Ran("web", "2026-01-02T03:04:05+00:00").beginning()
    # another process has its PID by now
    ended = ProcessIdentity(before["process"][1], before["process"][2] + 1)
    for process, result in (
        (before["process"], "running"),
        ([boot_id(), ended.pid, ended.start_time], "killed"),
    ):
        write_record(
            site.path / "state_dir" / "schedules", "web.last", before | {"process": process}
        )
        (row,) = site("list")
        assert row["last"] == {
            "began": "2026-01-02T03:04:05+00:00",
            "ended": None,
            "result": result,
            "exit_code": None,
            "stored": 0,
            "pruned": None,
            "failed": [],
        }
        assert f"{result}, began " in site.table()
    site("run", "web")
    assert site("list")[0]["last"]["result"] == "ok"


class _OnceUnderWay:
    """A deadline that passes as soon as the file is there, and what made it is under way."""

    def __init__(self, path: Path) -> None:
        self._path, self._begun = path, False

    def __sub__(self, _now: float) -> float:
        if not self._begun:
            self._begun = True
            return 0.001
        wait_until(self._path.exists, 60, "it is under way")
        return 0.0


def test_at_the_deadline_what_is_under_way_is_interrupted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    import select

    begun, cleaned = site.path / "begun", site.path / "cleaned"

    def endless(_config: object, target: str, **_more: object) -> None:
        try:
            begun.touch()
            select.select([], [], [], 120)
            raise AssertionError("it was not interrupted")
        finally:
            cleaned.write_text(target)  # in a process of its own

    def ends_at(deadline: float) -> _OnceUnderWay:
        assert deadline == 1800
        return _OnceUnderWay(begun)

    taking: Callable[..., None] = endless
    monkeypatch.setattr(snapshot, "dump", taking)
    monkeypatch.setattr(batch, "ends_at", ends_at)
    site("add", "web", "one", "two", "--every", "1h", "--deadline", "30m", "--jobs", "1")
    done = site("run", "web", code=12)
    assert [(s["target"], s["error"]["code"]) for s in done["snapshots"]] == [
        ("one", "timed-out"),
        ("two", "timed-out"),
    ]
    assert cleaned.read_text() == "one"
    assert site("list")[0]["last"]["exit_code"] == 12
