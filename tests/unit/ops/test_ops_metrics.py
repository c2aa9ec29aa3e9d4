"""Metrics: what figures become, read by the parser that Prometheus's own client has, and a store
that does not answer.
"""

from __future__ import annotations

import os
import threading
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from criuctl.checkpoint.summary import CheckpointSummary
from criuctl.config import Config
from criuctl.errors import Conflict, UsageError
from criuctl.host.journal.tally import Tally
from criuctl.ops import inspect, metrics
from criuctl.ops.metrics import Figures, Looker, Server, families, look, text, write

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def _parsed(exposition: str) -> Samples:
    """Sample name and labels -> value; every family has help and a type, and no sample comes
    twice.
    """
    found: Samples = {}
    for family in text_string_to_metric_families(exposition):
        assert family.documentation and family.type in ("gauge", "counter"), family.name
        assert family.name.startswith("criuctl_")
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name
            found[key] = sample.value
    return found


def _of(figures: Figures) -> Samples:
    return _parsed(text(list(families(figures))))


def _summary(session: str, number: int, created: str, **sizes: int) -> CheckpointSummary:
    return CheckpointSummary(
        f"{number:032x}", session, "ab" * 16, number, 1, created, "alpha", bytes=sizes
    )


def _tally(events: Sequence[dict[str, object]]) -> Tally:
    tally = Tally()
    for number, event in enumerate(events, 1):
        tally.add({"seq": number, "time": "2026-01-01T00:00:00Z", "seconds": 0.5, **event})
    return tally


def test_figures_become_metrics() -> None:
    tally = _tally(
        [
            {
                "operation": "snapshot",
                "session": "web",
                "exit_code": 0,
                "frozen_ms": 45.5,
                "total_ms": 1500,
                "bytes": {"stored": 7},
            },
            {"operation": "snapshot", "session": "web", "exit_code": 5},
            {
                "operation": "restore",
                "session": "web",
                "exit_code": 11,
                "connections": {"kept": 2, "failed": 1},
            },
            {"operation": "gc", "exit_code": 0, "freed_bytes": 99, "time": "1970-01-01T00:01:00Z"},
        ]
    )
    checkpoints = [
        _summary("web", 1, "1970-01-01T00:00:10.000Z", stored=5, memory=50),
        _summary("web", 2, "1970-01-01T00:00:20.000Z", stored=6, new=8, memory=60),
        _summary('we"ird', 1, "1970-01-01T00:00:05.000Z"),
    ]
    found = _of(
        Figures(
            80.0, {"web": "running", "db": "paused"}, {"web": 3}, tally, checkpoints, unreadable=1
        )
    )
    web = (("session", "web"),)
    expected: Samples = {
        ("criuctl_sessions", (("state", "running"),)): 1,
        ("criuctl_sessions", (("state", "lost"),)): 0,
        ("criuctl_session_lease_epoch", web): 3,
        ("criuctl_session_checkpoints", web): 2,
        ("criuctl_session_checkpoints", (("session", 'we"ird'),)): 1,
        ("criuctl_session_stored_bytes", web): 11,
        ("criuctl_session_last_checkpoint_timestamp_seconds", web): 20,
        ("criuctl_session_last_checkpoint_age_seconds", web): 60,
        ("criuctl_session_last_checkpoint_new_bytes", web): 8,
        ("criuctl_session_last_frozen_seconds", web): 0.0455,
        ("criuctl_session_last_dump_seconds", web): 1.5,
        ("criuctl_operations_total", (("exit_code", "0"), ("operation", "snapshot"))): 1,
        ("criuctl_operations_total", (("exit_code", "5"), ("operation", "snapshot"))): 1,
        ("criuctl_operation_seconds_total", (("operation", "snapshot"),)): 1,
        ("criuctl_operation_last_success_timestamp_seconds", (("operation", "gc"),)): 60,
        ("criuctl_restored_connections_total", (("outcome", "kept"),)): 2,
        ("criuctl_freed_bytes_total", ()): 99,
        ("criuctl_stored_bytes_total", ()): 7,
        ("criuctl_events_last_sequence", ()): 4,
        ("criuctl_store_up", ()): 1,
        ("criuctl_store_checkpoints", ()): 3,
        ("criuctl_store_unreadable_checkpoints", ()): 1,
    }
    assert {key: found.get(key) for key in expected} == expected
    # Without the store an alert on the age goes on, by what this host knows.
    dark = _of(Figures(1767225700.0, {"web": "running"}, {}, tally))
    assert dark["criuctl_store_up", ()] == 0
    assert dark["criuctl_session_last_checkpoint_age_seconds", web] == 100
    assert dark["criuctl_operations_total", (("exit_code", "5"), ("operation", "snapshot"))] == 1
    assert _of(Figures(0.0))["criuctl_event_log_up", ()] == 0


def test_sessions_with_figures_of_their_own_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "SESSIONS", 10)
    many = [_summary(f"s{n}", 1, f"2026-01-01T00:00:{n:02}.000Z", stored=1) for n in range(50)]
    found = _of(Figures(0.0, {"idle": "exited"}, {}, Tally(), many))
    named = {value for _name, labels in found for label, value in labels if label == "session"}
    assert named == {f"s{n}" for n in range(40, 50)}, "those with the newest checkpoints"
    assert found["criuctl_sessions_left_out", ()] == 41
    assert found["criuctl_store_checkpoints", ()] == 50


def test_a_store_that_hangs_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    begun, answer = threading.Event(), threading.Event()

    def hang(_config: Config) -> inspect.Listing:
        asked.append(1)
        begun.set()
        answer.wait(60)
        return inspect.Listing([], [])

    monkeypatch.setattr(metrics, "list_checkpoints", hang)
    monkeypatch.setattr(metrics, "_FRESH", 0.0)
    looker = Looker(Config(state_dir=str(tmp_path)), patience=0.05)
    try:
        for _ in range(3):
            assert _of(looker.gather())["criuctl_store_up", ()] == 0
            # the thread that asks may come later than who waits for it gives up
            assert begun.wait(60)
        assert len(asked) == 1
    finally:
        answer.set()


def test_metrics_are_served_and_written(tmp_path: Path) -> None:
    config = Config(
        store=str(tmp_path / "none"),
        state_dir=str(tmp_path / "state"),
        cache_dir=str(tmp_path / "cache"),
    )
    server = Server(config, "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(server.url, timeout=60) as response:
            assert response.headers["Content-Type"].startswith("text/plain")
            assert _parsed(response.read().decode())["criuctl_store_up", ()] == 0
        with pytest.raises(Conflict):
            Server(config, "127.0.0.1", server.port)
        with pytest.raises(UsageError):
            Server(config, "192.0.2.1", 0)
    finally:
        server.close()
    path = tmp_path / "criuctl.prom"
    path.write_text("old")
    write(look(config), path)
    assert "criuctl_build_info" in path.read_text() and path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.glob("criuctl.prom*")) == [path]
    os.mkfifo(tmp_path / "like-dev-null")
    with pytest.raises(UsageError, match="no regular file"):
        write(look(config), tmp_path / "like-dev-null")
    assert (tmp_path / "like-dev-null").is_fifo()
    assert not (tmp_path / "state").exists(), "who looks writes nothing"


def test_a_folder_of_another_user_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of the folder can replace the file by a link at any moment."""
    secret, file = tmp_path / "secret", tmp_path / "their.prom"
    secret.touch(0o600)
    for name, real in (("rename", os.rename), ("replace", os.replace)):

        def swapped(old: str, new: str, really: Callable[[str, str], None] = real) -> None:
            really(old, new)
            assert Path(new).stat().st_mode & 0o777 == 0o644
            Path(new).unlink()
            Path(new).symlink_to(secret)

        monkeypatch.setattr(os, name, swapped)
    before = os.umask(0o077)
    try:
        write(list(families(Figures(1.0))), file)
    finally:
        os.umask(before)
    assert secret.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "their.prom"]
