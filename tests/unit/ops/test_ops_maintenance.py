"""Several things at once, and maintenance: what is chosen, in which order, what has become of it,
and how often it is tried.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.keeper import wait_until
from support.program import CRIUCTL, run_program

from criuctl.cli.main import main
from criuctl.config import Config
from criuctl.dump.subject import session_for
from criuctl.errors import ConfigError, Conflict, Damaged, NotFound, RestoreFailed, UsageError
from criuctl.host import configured_trees
from criuctl.host import maintenance as record_file
from criuctl.host.maintenance import Item, Record
from criuctl.host.registry import Registry, SessionRecord, boot_id, exclusive
from criuctl.host.target import Target
from criuctl.ops import maintenance, recovery
from criuctl.ops.scheduling import batch, boot_unit, subjects, timers
from criuctl.ops.scheduling.subjects import Subject
from criuctl.ops.snapshot import lock_of
from criuctl.proc import forked
from criuctl.proc.tree import ProcessIdentity
from criuctl.report import Reporter


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        store=str(tmp_path / "store"),
        state_dir=str(tmp_path / "state"),
        run_dir=str(tmp_path / "run"),
    )


# -- processes of our own making
# ------------------------------------------------------------------------


def _fails() -> dict[str, Any]:
    raise Conflict("taken", hint="Wait.", host="there")


def _breaks() -> dict[str, Any]:
    raise ZeroDivisionError


def _dies() -> dict[str, Any]:
    os.kill(os.getpid(), 9)
    raise AssertionError


def test_each_has_a_process_and_an_outcome_of_its_own() -> None:
    def tells(reporter: Reporter) -> dict[str, Any]:
        reporter.warning("odd")
        return {"pid": os.getpid(), "warnings": reporter.warnings}

    work: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("fails", _fails),
        ("breaks", _breaks),
        ("dies", _dies),
    ]
    pieces: list[tuple[str, batch.Work]] = [
        (key, lambda _reporter, one=one: one())  # type: ignore[misc]
        for key, one in work
    ]
    reporter = Reporter()
    found = {
        o.key: o
        for o in batch.each(
            [*pieces, ("tells", tells)], reporter=reporter, jobs=3, broken=RestoreFailed
        )
    }
    assert found["tells"].answer is not None
    assert found["tells"].answer["pid"] != os.getpid()
    assert found["tells"].answer["warnings"] == ["odd"]
    assert reporter.warnings == []  # those of one are not another's
    errors = {key: o.error for key, o in found.items() if o.error is not None}
    assert isinstance(errors["fails"], Conflict)
    assert (errors["fails"].hint, errors["fails"].details) == ("Wait.", {"host": "there"})
    assert (errors["breaks"].code, errors["breaks"].exit_code) == ("bug", 1)
    assert (type(errors["dies"]), errors["dies"].exit_code) == (RestoreFailed, 6)


def test_at_the_deadline_all_that_is_left_is_late(tmp_path: Path) -> None:
    def slow() -> dict[str, Any]:
        try:
            (tmp_path / "begun").touch()
            time.sleep(60)
        finally:
            (tmp_path / "cleaned").touch()
        return {}

    ended = list(
        forked.run_all([("slow", slow), ("never", slow)], at_once=1, until=time.monotonic() + 0.5)
    )
    assert [(one.key, one.answer, one.late) for one in ended] == [
        ("slow", None, True),
        ("never", None, True),
    ]
    assert (tmp_path / "cleaned").exists() or not (tmp_path / "begun").exists()


def test_who_lets_go_of_it_leaves_nothing_running(tmp_path: Path) -> None:
    def endless() -> dict[str, Any]:
        (tmp_path / f"{os.getpid()}").touch()
        time.sleep(60)
        return {}

    def quick() -> dict[str, Any]:
        wait_until(lambda: any(tmp_path.iterdir()), 60, "the other one runs")
        return {}

    running = forked.run_all([("endless", endless), ("quick", quick)], at_once=2)
    assert next(running).key == "quick"
    running.close()  # type: ignore[attr-defined]  # it is a generator
    (begun,) = tmp_path.iterdir()
    assert not os.path.exists(f"/proc/{begun.name}")


def test_locks_of_long_names_are_distinct(config: Config) -> None:
    one, two = (f"schedule/{'deep/' * 40}{name}" for name in ("one", "two"))
    both = exclusive(config, one, "busy"), exclusive(config, two, "busy")
    with both[0], both[1], pytest.raises(Conflict) as raised, exclusive(config, one, "busy"):
        pass
    assert f"PID {os.getpid()}" in raised.value.hint


def test_a_lock_is_waited_for(config: Config) -> None:
    lock, busy = maintenance.lock_of(config)
    with (
        exclusive(config, lock, busy),
        pytest.raises(Conflict, match="another criuctl"),
        batch.alone(config, lock, busy),
    ):
        pass
    held = exclusive(config, lock, busy)
    held.__enter__()
    with pytest.MonkeyPatch.context() as patch:
        waiting = SimpleNamespace(
            monotonic=time.monotonic, sleep=lambda _seconds: held.__exit__(None, None, None)
        )
        patch.setattr("criuctl.ops.scheduling.batch.time", waiting)
        patch.setattr("criuctl.proc.locks._TRIES", 1)
        with batch.alone(config, lock, busy, wait=60):
            pass


def test_the_same_snapshots_do_not_overlap(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("store", "state_dir", "run_dir"):
        monkeypatch.setenv(f"CRIUCTL_{name.upper()}", getattr(config, name))
    monkeypatch.setenv("CRIUCTL_HOOK_DIRS", config.state_dir)
    with exclusive(config, lock_of(config, ["two", "one"], []), "busy"):
        assert main(["--json", "snapshot", "one", "two"]) == 9
        assert "being taken already" in json.loads(capsys.readouterr().out)["error"]["message"]
        assert main(["--json", "snapshot", "one"]) == 3  # that is another one
    assert (
        main(
            [
                "--json",
                "snapshot",
                "one",
                "two",
                "--wait",
                "1s",
                "--jitter",
                "0",
                "--deadline",
                "1h",
            ]
        )
        == 3
    )
    output = capsys.readouterr().out.partition("\n]\n")[2]  # of the other one
    assert sorted(outcome["target"] for outcome in json.loads(output)) == ["one", "two"]


# -- what it is about
# ------------------------------------------------------------------------------------


@given(st.lists(st.integers(-5, 99), max_size=12), st.booleans())
def test_groups_of_the_same_order(orders: list[int], ending: bool) -> None:
    found = subjects.ranks(
        [Subject(f"s{n}", order=order) for n, order in enumerate(orders)], ending=ending
    )
    assert [one.order for group in found for one in group] == sorted(orders, reverse=ending)
    assert all(len({one.order for one in group}) == 1 for group in found)
    assert len(found) == len(set(orders))


@pytest.mark.parametrize(
    ("labels", "order"),
    [({}, 50), ({"order": "7"}, 7), ({"order": "-1"}, -1), ({"order": "soon"}, 50)],
)
def test_the_order_of_a_session_is_a_label(labels: dict[str, str], order: int) -> None:
    assert subjects.order_of(labels) == order


@given(
    st.dictionaries(
        st.integers(2, 30),
        st.tuples(st.integers(1, 30), st.sampled_from(["x", "web", "web worker", "ours"])),
    )
)
def test_a_command_names_the_topmost_that_match(table: dict[int, tuple[int, str]]) -> None:
    lines = {pid: line for pid, (_, line) in table.items()} | {1: "init", 31: "ours"}
    parents = {pid: parent for pid, (parent, _) in table.items()} | {31: 1}
    roots = configured_trees.matching("web|ours", lines, parents, 31)
    assert 31 not in roots
    for pid in roots:
        assert "web" in lines[pid]
    # each that matches is below one that was found, or is one, or is in a loop of parents
    for pid, line in lines.items():
        above, seen = pid, set()
        while "web" in line and above not in roots and above in parents and above not in seen:
            seen.add(above)
            above = parents[above]
        assert "web" not in line or above in roots or above in seen


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("a/b", {"unit": "x"}, "cannot be a session's name"),
        ("web", {}, "needs one of"),
        ("web", {"unit": "x", "command": "y"}, "needs one of"),
        ("web", {"unit": "x", "port": 1}, "unknown key 'port'"),
        ("web", {"unit": 7}, "must be text"),
        ("web", {"command": "("}, "no regular expression"),
        ("web", {"unit": "x", "labels": {"a": 1}}, "mapping of text"),
        ("web", {"unit": "x", "order": "first"}, "whole number"),
        ("web", {"pid_file": "run/web.pid"}, "absolute path"),
    ],
)
def test_a_tree_that_makes_no_sense(name: str, body: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        configured_trees.parse(name, body)


def test_a_tree_by_its_pid_file(tmp_path: Path, config: Config) -> None:
    file, mine = tmp_path / "pid", str(os.getpid())
    table: dict[str, dict[str, Any]] = {
        "db": {"pid_file": str(file), "labels": {"a": "b"}, "order": 3}
    }
    config = config.with_options(trees=table)
    assert Registry(config).lookup("nobody") is None
    with pytest.raises(NotFound, match="no PID file"):
        Registry(config).lookup("db")
    assert subjects.running(config) == []  # so it is left out, and named it is an error
    for text in ("", "x", "0x1", "99999999999", "9" * 5000):
        file.write_text(text)
        with pytest.raises(UsageError, match="does not begin with a PID"):
            configured_trees.find(config, "db")
    file.write_text(f"{mine}\nmore\n")
    table["db"]["command"] = "no such command"
    with pytest.raises(NotFound, match="does not match"):
        configured_trees.find(config, "db")
    assert [(s.name, s.order) for s in subjects.chosen(config, ["db", "x", "db"])] == [
        ("db", 3),
        ("x", 50),
    ]


def test_a_tree_has_one_name(tmp_path: Path, config: Config) -> None:
    """Neither another tree of the configuration nor a session with a holder is reported under
    another name, and none is dumped under one.
    """
    process = subprocess.Popen(["sleep", "1000"])
    try:
        root = ProcessIdentity.of(process.pid)
        (tmp_path / "pid").write_text(f"{root.pid}\n")
        table = {
            name: {"pid_file": str(tmp_path / "pid"), "labels": {"is": name}}
            for name in ("web", "again")
        }
        config = config.with_options(trees=table)
        found = {subject.name: subject for subject in subjects.running(config)}
        assert (found["web"].root, found["web"].error) == (root, None)
        assert "'again' is tree 'web'" in str(found["again"].error)
        Registry(config).put(
            SessionRecord("old", pid=root.pid, start_time=root.start_time, boot_id=boot_id())
        )
        assert sorted(subject.name for subject in subjects.running(config)) == ["again", "web"]
        plain = config.with_options(trees={})
        for name in ("zebra", "new"):
            Registry(config).put(
                SessionRecord(name, pid=root.pid, start_time=root.start_time, boot_id=boot_id())
            )
            assert [subject.name for subject in subjects.running(plain)] == [name]
            assert session_for(Registry(plain), Target(root), None).name == name
            assert sorted(subject.name for subject in subjects.running(config)) == ["again", "web"]
        me = ProcessIdentity.of(os.getpid())
        state = {
            "session": "live",
            "id": "1",
            "state": "running",
            "incarnation": 1,
            "boot_id": boot_id(),
            "labels": {},
        }
        state |= {
            "pid": root.pid,
            "start_time": root.start_time,
            "holder": {"pid": me.pid, "start_time": me.start_time},
        }
        state |= {"exit_code": None, "since": 0.0, "command": ["sleep"]}
        folder = tmp_path / "run" / "holders" / "live"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps(state))
        found = {subject.name: subject for subject in subjects.running(config)}
        assert (found["live"].root, found["live"].error) == (root, None)
        assert {name: type(found[name].error) for name in table} == dict.fromkeys(table, Conflict)
        with pytest.raises(Conflict, match="is session 'live'"):
            session_for(Registry(config), Target(root), "web")
        assert session_for(Registry(config), Target(root), "live").id == "1"
        assert [subject.name for subject in subjects.running(plain)] == ["live"]
    finally:
        process.kill()
        process.wait()


# -- what was written down
# ---------------------------------------------------------------------------------


def _noted(config: Config, items: list[Item], **values: Any) -> Record:
    record = Record(items=items, **values)
    record_file.write(config, record)
    return record


def test_what_is_no_process_any_more_is_gone(config: Config) -> None:
    """A configured tree that meant several, or a session, failed; it stays so while it is found at
    all.
    """
    config = config.with_options(trees={"web": {"pid_file": "/nowhere"}, "odd": {"unit": "a/b"}})
    items = [
        Item(name, 50, tree=True, state="failed", error=UsageError("several").to_dict())
        for name in ("web", "odd")
    ]
    record = _noted(config, items)
    maintenance.settle(config, record)
    assert [(item.session, item.state) for item in record.items] == [
        ("web", "gone"),
        ("odd", "failed"),
    ]


def test_the_door(config: Config) -> None:
    record_file.check_open(config)
    record = _noted(config, [Item("web", 50, root=(1, 2))], reason="a new kernel")
    assert record_file.read(config) == record
    with pytest.raises(Conflict, match="a new kernel") as caught:
        record_file.check_open(config)
    assert "maintenance end" in caught.value.hint
    _noted(config, [], phase="over")
    record_file.check_open(config)
    (Path(config.state_dir) / "maintenance.json").write_text("{")
    with pytest.raises(Damaged):
        record_file.check_open(config)
    record_file.forget(config)
    record_file.check_open(config)


@pytest.mark.parametrize(
    ("known", "boot", "root", "state"),
    [
        (None, "", True, "waiting"),  # a tree that was not dumped, and runs
        (None, "", False, "gone"),
        ({"state": "running", "checkpoint": "old"}, "", False, "gone"),  # it ended of itself
        # criuctl was killed, and did not see it
        ({"state": "checkpointed", "checkpoint": "new"}, "", False, "stored"),
        # the host went down before its turn
        ({"state": "running", "checkpoint": "old"}, "another", False, "failed"),
        # after its snapshot; that PID belongs to another process
        ({"state": "running", "checkpoint": "new"}, "another", True, "stored"),
        # before its second snapshot
        ({"state": "running", "checkpoint": "old", "reason": "kept"}, "another", False, "stored"),
    ],
)
def test_what_has_become_of_it(
    config: Config, known: dict[str, str] | None, boot: str, root: bool, state: str
) -> None:
    if known is not None:
        facts: dict[str, Any] = {"store": "/s", "boot_id": boot or boot_id(), "pid": 1 << 30}
        Registry(config).put(SessionRecord("web", **(facts | known)))
    me = ProcessIdentity.of(os.getpid())
    kept = "kept" if known is not None and "reason" in known else ""
    item = Item(
        "web", 50, before="old", checkpoint=kept, root=(me.pid, me.start_time if root else 0)
    )
    record = _noted(config, [item], **({"boot_id": boot} if boot else {}))
    maintenance.settle(config, record)
    assert (item.state, item.checkpoint) == (state, kept or ("new" if state == "stored" else ""))
    if state == "failed":
        error = maintenance.failure(item)
        assert error is not None
        assert (error.exit_code, "criuctl restore old" in error.hint) == (5, True)


@pytest.mark.parametrize(
    ("known", "state"),
    [
        (None, "gone"),  # it was killed
        ({}, "back"),  # by its newest checkpoint
        ({"state": "checkpointed"}, "gone"),  # an operator has dumped it, and it stays so
        ({"boot_id": "", "pid": 1 << 30}, "gone"),  # it ended of itself, the host was not rebooted
        ({"incarnation": 3}, "gone"),  # the same, before the reboot
    ],
)
def test_what_lived_on_is_brought_back_as_it_was_last(
    config: Config, monkeypatch: pytest.MonkeyPatch, known: dict[str, Any] | None, state: str
) -> None:
    if known is not None:
        values: dict[str, Any] = {
            "boot_id": "another",
            "store": "/t",
            "checkpoint": "newest",
            "id": "i",
            **known,
        }
        Registry(config).put(
            SessionRecord("web", **(values | {"boot_id": values["boot_id"] or boot_id()}))
        )
    folder = Path(config.state_dir) / "holders" / "web"
    folder.mkdir(parents=True)
    (folder / "ended.json").write_text(json.dumps({"id": "i", "incarnation": 3}))
    _noted(
        config,
        [Item("web", 50, state="stored", checkpoint="older", store="/s")],
        how="snapshot",
        phase="stored",
    )
    restored: list[tuple[str, str]] = []

    def restore(_config: Config, item: Item) -> batch.Work:
        restored.append((item.store, item.checkpoint))
        return lambda _reporter: {"pid": 7, "degraded": False}

    monkeypatch.setattr(recovery, "_restore", restore)
    (outcome,) = recovery.recover(config, every=False, jobs=1, reporter=Reporter())
    assert (outcome.state, outcome.pid) == (state, 7 if state == "back" else None)
    assert restored == ([("/t", "newest")] if state == "back" else [])
    assert record_file.read(config) is None


def test_three_tries_over_all_calls(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is counted before it is made; a call that was killed in the middle of one has made
    one.
    """
    item = Item("web", 50, state="stored", checkpoint="c" * 32, store="/s", tries=1, ended=True)
    _noted(config, [item], phase="stored")
    seen: list[int] = []

    def restore(_config: Config, item: Item) -> batch.Work:
        def work(_reporter: Reporter) -> dict[str, Any]:
            written = record_file.read(config)
            assert written is not None
            raise RestoreFailed(f"no {written.items[0].tries}")

        return work

    def noted(reporter: Reporter, name: str, **facts: Any) -> None:
        written = record_file.read(config)
        if name == "noted" and written is not None and written.items[0].error is not None:
            seen.append(int(written.items[0].error["message"].split()[1]))

    monkeypatch.setattr(recovery, "_restore", restore)
    monkeypatch.setattr(Reporter, "step", noted)
    for tries in ([2, 3], []):
        seen.clear()
        (outcome,) = recovery.end(config, jobs=2, pause=0, reporter=Reporter())
        assert (outcome.state, outcome.tries, seen) == ("given-up", 3, tries)
        assert outcome.to_dict()["findings"][0]["text"] == "no 3"
        record_file.check_open(config)
    assert [i.state for i in recovery.end(config, jobs=1, abandon=True, reporter=Reporter())] == [
        "given-up"
    ]
    with pytest.raises(NotFound):
        list(recovery.end(config, jobs=1, reporter=Reporter()))


def test_a_closed_standard_output_stops_no_maintenance_half_way(config: Config) -> None:
    error = RestoreFailed("no").to_dict()
    items = [
        Item(name, 50, state="given-up", checkpoint="c" * 32, tries=3, error=error)
        for name in ("a", "b")
    ]
    _noted(config, items, phase="returning")
    read, write = os.pipe()
    os.close(read)
    try:
        done = run_program(
            CRIUCTL,
            "maintenance",
            "end",
            "--json",
            env={"CRIUCTL_STATE_DIR": config.state_dir},
            stdout=write,
            stderr=subprocess.PIPE,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
    record = record_file.read(config)
    assert record is not None
    assert (record.phase, len(record.items)) == ("over", 2)


def test_what_was_cut_off_each_time_is_given_up(config: Config) -> None:
    _noted(
        config,
        [Item("web", 50, state="stored", checkpoint="c" * 32, store="/s", tries=3, ended=True)],
        phase="returning",
    )
    (outcome,) = recovery.recover(config, every=False, jobs=1, reporter=Reporter())
    error = maintenance.failure(outcome)
    assert error is not None
    assert (outcome.state, error.exit_code, "cut off" in error.message) == ("given-up", 6, True)


def test_what_this_host_has_lost(config: Config) -> None:
    registry = Registry(config)
    lives = {
        "lost": {},
        "here": {"boot_id": boot_id()},
        "never": {"checkpoint": ""},
        "stored": {"state": "checkpointed"},
    }
    for name, more in (
        lives | {"ended": {"incarnation": 3}, "restarted": {"incarnation": 4}}
    ).items():
        facts: dict[str, Any] = {"id": "i", "boot_id": "another", "checkpoint": "c"}
        registry.put(SessionRecord(name, **(facts | more)))
    for name in ("ended", "restarted"):
        folder = Path(config.state_dir) / "holders" / name
        folder.mkdir(parents=True)
        (folder / "ended.json").write_text(json.dumps({"id": "i", "incarnation": 3}))
    assert [known.name for known in recovery.lost(config)] == ["lost", "restarted"]


# -- at the boot
# --------------------------------------------------------------------------------------------


def test_a_boot_has_it_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    control = (
        sys.executable,
        "-S",
        "-c",
        f"import sys; open({str(log)!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10))",
    )
    places = timers.Places(tmp_path / "booted", tmp_path / "units", tmp_path / "cron.d", control)
    monkeypatch.setattr(boot_unit, "PLACES", places)
    monkeypatch.setenv("CRIUCTL_STATE_DIR", f"{tmp_path}/100% state")

    def call(*words: str, code: int = 0) -> dict[str, Any]:
        assert main(["--json", "recover", *words]) == code, capsys.readouterr()
        body: dict[str, Any] = json.loads(capsys.readouterr().out)
        return body

    assert call("--install", code=13)["error"]["code"] == "platform"
    places.cron.mkdir()
    (path,) = map(Path, call("--install", "--all", "--store", "s3://bucket/x")["files"])
    line = path.read_text().splitlines()[-1]
    assert line.startswith("@reboot root CRIUCTL_STATE_DIR=")
    assert line.endswith("--store s3://bucket/x recover --retry-after 30s --all --quiet")
    assert "100\\% state" in line
    assert call("--install", code=9)["error"]["code"] == "conflict"
    assert call("--remove")["removed"] == [str(path)]
    assert call("--remove", code=3)["error"]["code"] == "not-found"
    places.booted.mkdir()
    (path,) = map(Path, call("--install")["files"])
    unit = path.read_text().splitlines()
    assert {"Type=oneshot", "KillMode=process", "WantedBy=multi-user.target"} <= set(unit)
    assert f'Environment="CRIUCTL_STATE_DIR={tmp_path}/100%% state"' in unit
    assert log.read_text().splitlines() == [
        "daemon-reload",
        "enable --quiet criuctl-recover.service",
    ]
    call("--remove")
    assert [*places.units.iterdir(), *places.cron.iterdir()] == []
