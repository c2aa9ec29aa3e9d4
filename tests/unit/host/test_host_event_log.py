"""The event log: many writers that are killed, torn lines, full files, and who follows."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from msgspec.structs import replace

from criuctl.config import Config
from criuctl.errors import NotFound
from criuctl.host.journal import event_sinks, events
from criuctl.host.journal.event_log import KEPT, EventLog
from criuctl.report import Finding, Reporter

PATIENCE = 60.0
FORK = multiprocessing.get_context("fork")


def _until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.005)


def _numbers(log: EventLog) -> list[int]:
    return [event["seq"] for event in log.read()]


def _fill(log: EventLog, count: int, **facts: Any) -> None:
    for _ in range(count):
        log.append([{"operation": "x", "exit_code": 0, **facts}])


# -- writing
# --------------------------------------------------------------------------------------------


def _write_for_ever(folder: Path, name: str, acknowledged: int) -> None:
    log = EventLog(folder, limit=20_000)
    for count in range(1 << 30):
        (event,) = log.append([{"operation": name, "count": count, "exit_code": 0}])
        # All lines are as long, and none is in two pages of the file: it is written whole or not at
        # all.
        os.write(acknowledged, json.dumps([event["seq"], name, count]).encode().ljust(63) + b"\n")


def test_many_writers_that_are_killed(tmp_path: Path) -> None:
    """Numbers have no gap and no duplicate, and every event that a writer got a number for is in
    the log.
    """
    acknowledgements = tmp_path / "acknowledgements"
    with acknowledgements.open("ab", buffering=0) as file:

        def start(name: str) -> Any:
            writer = FORK.Process(
                target=_write_for_ever, args=(tmp_path / "state", name, file.fileno()), daemon=True
            )
            writer.start()
            return writer

        log = EventLog(tmp_path / "state", limit=20_000)
        writers = [start(f"writer-{i}") for i in range(4)]
        try:
            for killed in range(24):
                reached = log.newest()
                _until(lambda reached=reached: log.newest() >= reached + 10, "events go on")  # type: ignore[misc]
                os.kill(writers[killed % 4].pid, signal.SIGKILL)
                writers[killed % 4].join(PATIENCE)
                writers[killed % 4] = start(f"another-{killed}")
        finally:
            for writer in writers:
                writer.kill()
                writer.join(PATIENCE)
    found = {event["seq"]: (event["operation"], event["count"]) for event in log.read()}
    first, last = min(found), max(found)  # the oldest may be gone, in files that were full
    assert list(found) == list(range(first, last + 1)) and last >= 240
    acknowledged = [json.loads(line) for line in acknowledgements.read_text().splitlines()]
    assert len({seq for seq, _name, _count in acknowledged}) == len(acknowledged) >= 200
    kept = [(seq, name, count) for seq, name, count in acknowledged if seq >= first]
    assert [(seq, *found[seq]) for seq, _name, _count in kept] == kept
    assert (
        sum(count for codes in log.tally().operations.values() for count in codes.values()) == last
    )
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "state").iterdir()} == {0o600}


def test_a_torn_line_is_none(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    _fill(log, 3)
    whole = log.path.read_bytes()
    begin = whole[:-1].rfind(b"\n") + 1
    for end in {begin + 1, begin + 5, (begin + len(whole)) // 2, len(whole) - 1}:
        log.path.write_bytes(whole[:end])
        assert _numbers(log) == [1, 2] and log.newest() == 2, "it is not seen"
        assert [e["seq"] for e in log.append([{"operation": "next"}])] == [3], (
            "its number was not given to anybody"
        )
        assert [(e["seq"], e["operation"]) for e in log.read()] == [(1, "x"), (2, "x"), (3, "next")]
    log.path.write_bytes(b"")
    _fill(log, 1)
    assert _numbers(log) == [1]


def test_lines_of_zeros_after_a_power_cut_do_not_restart_the_numbers(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    _fill(log, 2)
    with log.path.open("ab") as file:
        file.write(b"\0" * 200_000 + b"\n")
    _fill(log, 1)
    assert _numbers(log) == [1, 2, 3]


def test_a_full_disk_drops_the_event_and_leaves_no_piece_of_it(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    _fill(log, 2)
    size = log.path.stat().st_size

    def write() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, size + 10))
        reporter = Reporter()
        config = Config(state_dir=str(tmp_path))
        assert _operation(config, reporter=reporter) == "done", "the operation is not concerned"
        warning = reporter.warnings[-1]
        assert "not in the event log" in warning and "File too large" in warning
        os._exit(42)

    writer = FORK.Process(target=write)
    writer.start()
    writer.join(PATIENCE)
    assert writer.exitcode == 42
    assert log.path.stat().st_size == size
    _fill(log, 1)
    assert _numbers(log) == [1, 2, 3]


# -- full files
# -----------------------------------------------------------------------------------------


def test_full_files_go_and_numbers_and_sums_go_on(tmp_path: Path) -> None:
    log = EventLog(tmp_path, limit=300)
    _fill(log, 60, seconds=0.5)
    numbers = _numbers(log)
    assert numbers == list(range(numbers[0], 61)) and numbers[0] > 1, "the oldest are gone"
    full = sorted(path.name for path in tmp_path.glob("events-*.jsonl"))
    assert len(full) == KEPT and int(full[0][7:27]) == numbers[0]
    assert [e["seq"] for e in log.read(57)] == [58, 59, 60]
    tally = log.tally()
    assert (tally.seq, tally.operations, tally.seconds) == (60, {"x": {"0": 60}}, {"x": 30.0})
    # Cut off in the middle of a change of files, when the sums were written: nothing is counted
    # twice.
    (tmp_path / "events.tally.json").write_text(json.dumps(tally.to_dict()))
    _fill(log, 1)
    assert log.tally().operations == {"x": {"0": 61}}
    for path in tmp_path.glob("events-*.jsonl"):
        path.unlink()
    log.path.unlink()  # as a clean-up would: numbers go on from the sums
    assert log.tally().seq == log.newest() > 0
    _fill(log, 1)
    assert _numbers(log) == [log.tally().seq]


def test_who_follows_misses_nothing_when_files_change(tmp_path: Path) -> None:
    log = EventLog(tmp_path, limit=2000)
    _fill(log, 5)
    seen: list[int] = []

    def follow() -> None:
        for event in EventLog(tmp_path).follow(3):
            if event is not None:
                seen.append(event["seq"])
                if event["seq"] == 100:
                    return

    follower = Thread(target=follow, daemon=True)
    follower.start()
    _until(lambda: seen == [4, 5], "it begins after 3")
    with log.path.open("ab") as file:
        file.write(b'{"seq":6,"operation":"to')  # a writer is killed here
    _fill(log, 95)
    follower.join(PATIENCE)
    assert seen == list(range(4, 101))
    assert len(list(tmp_path.glob("events-*.jsonl"))) >= 2, "files did change"


# -- what becomes an event
# --------------------------------------------------------------------------------


@events.recorded(
    lambda arguments: "" if arguments.get("dry_run") else "operate",
    lambda _: [{"session": "web"}],
    about=events.target,
)
def _operation(
    config: Config,
    target: str = "web",
    *,
    reporter: Reporter,
    error: BaseException | None = None,
    dry_run: bool = False,
) -> str:
    reporter.finding(Finding("warning", "odd-thing", "something is odd"))
    if error is not None:
        raise error
    return "done"


def test_an_operation_s_end_is_an_event(tmp_path: Path) -> None:
    config = Config(state_dir=str(tmp_path / "state"))
    _operation(config, reporter=Reporter(), dry_run=True)
    assert not (tmp_path / "state").exists(), "nothing was changed"
    _operation(config, reporter=Reporter())
    interrupt = KeyboardInterrupt()
    interrupt.number = signal.SIGTERM  # type: ignore[attr-defined]  # as the program's own has
    secret = "hunter2 is the password"
    for error in (NotFound(secret), interrupt, ZeroDivisionError(secret)):
        with pytest.raises(type(error)):
            _operation(config, "4711", reporter=Reporter(), error=error)
    found = list(EventLog(config.state_dir).read())
    assert [(e["outcome"], e["exit_code"], e.get("error")) for e in found] == [
        ("done", 0, None),
        ("failed", 3, "not-found"),
        ("interrupted", 143, "interrupted"),
        ("failed", 1, "bug"),
    ]
    assert {e["operation"] for e in found} == {"operate"}
    assert [e.get("session") for e in found] == ["web", None, None, None] and found[1][
        "pid"
    ] == 4711
    assert all(e["warning_codes"] == ["odd-thing"] for e in found)
    assert "hunter2" not in (tmp_path / "state" / "events.jsonl").read_text()


# -- elsewhere
# ------------------------------------------------------------------------------------------


def _fields(datagram: bytes) -> Iterator[tuple[str, str]]:
    """What the journal reads in a datagram: ``NAME=value`` lines, or a name, a length, and as many
    bytes.
    """
    while datagram:
        line, _, rest = datagram.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            (length,) = struct.unpack_from("<Q", rest)
            value, rest = rest[8 : 8 + length], rest[8 + length :]
            assert rest[:1] == b"\n"
            rest = rest[1:]
        yield name.decode(), value.decode()
        datagram = rest


def test_events_go_to_the_journal_and_else_to_syslog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, syslog = tmp_path / "journal", tmp_path / "log"
    monkeypatch.setattr(event_sinks, "JOURNAL", journal)
    monkeypatch.setattr(event_sinks, "SYSLOG", syslog)
    config = Config(state_dir=str(tmp_path / "state"), events="journald")
    failed = {
        "session": "web",
        "exit_code": 5,
        "error": "dump-failed",
        "odd": "two\nlines",
        "bytes": {"new": 7},
    }
    assert str(syslog) in events.record(config, "dump", [failed]), (
        "no server listens, which is reported"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(journal))
        server.settimeout(PATIENCE)
        assert events.record(config, "dump", [failed]) == ""
        fields = dict(_fields(server.recv(1 << 16)))
    assert fields["PRIORITY"] == "3" and fields["SYSLOG_IDENTIFIER"] == "criuctl"
    assert fields["MESSAGE"] == "dump web: failed with 5 (dump-failed)"
    assert (fields["CRIUCTL_SESSION"], fields["CRIUCTL_SEQ"], fields["CRIUCTL_ODD"]) == (
        "web",
        "2",
        "two\nlines",
    )
    assert fields["CRIUCTL_BYTES"] == '{"new":7}'
    journal.unlink()
    for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
        syslog.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, kind) as server:
            server.bind(str(syslog))
            server.settimeout(PATIENCE)
            if kind == socket.SOCK_STREAM:
                server.listen()
            assert events.record(replace(config, events="syslog"), "gc", [{}]) == ""
            line = (
                (server if kind == socket.SOCK_DGRAM else server.accept()[0]).recv(1 << 16).decode()
            )
        head, _, body = line.rstrip("\0").partition("{")
        assert head == f"<30>criuctl[{os.getpid()}]: gc: done in 0.0 s "
        assert json.loads("{" + body)["operation"] == "gc"
