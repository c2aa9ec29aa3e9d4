"""The audit log: appended, numbered through, one session's, and honest about a full disk."""

from __future__ import annotations

import os
from pathlib import Path

from criuctl.session.holder.audit_log import AuditLog

WHO = {"operator": "op-1", "kind": "human", "name": "eve"}


def test_the_sequence_goes_on_in_the_next_holder_of_the_session(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog.opened(path, "aa11", 1)
    assert log.write("input", WHO, 1, bytes=3) == 2
    log.close()
    # dumped after the first entry, and went on a while
    again = AuditLog.opened(path, "aa11", 2, sequence=1)
    assert again.write("input", WHO, 2, bytes=4) == 4
    assert [entry["sequence"] for entry in again.entries(0, 10)] == [1, 2, 3, 4]
    assert [entry["what"] for entry in again.entries(2, 1)] == ["opened"]
    again.close()


def test_another_session_of_the_name_begins_another_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    AuditLog.opened(path, "aa11", 1).close()
    log = AuditLog.opened(path, "bb22", 1)
    assert [entry["session"] for entry in log.entries(0, 10)] == ["bb22"]
    assert "aa11" in (tmp_path / "audit-aa11.jsonl").read_text()
    log.close()


def test_a_foreign_file_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"session": "../../etc/passwd", "sequence": 1}\n')
    AuditLog.opened(path, "bb22", 1).close()
    assert sorted(os.listdir(tmp_path)) == ["audit-unknown.jsonl", "audit.jsonl"]


def test_what_a_full_disk_swallowed_is_counted(tmp_path: Path) -> None:
    log = AuditLog.opened(tmp_path / "audit.jsonl", "aa11", 1)
    kept, full = os.dup(log._fd), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._fd)
    log.write("input", WHO, 1)
    log.write("input", WHO, 1)
    os.dup2(kept, log._fd)
    log.write("resize", WHO, 1)
    assert log.entries(1, 10)[0] | {"time": 0} == {
        "sequence": 4,
        "time": 0,
        "incarnation": 1,
        **WHO,
        "what": "resize",
        "lost_before": 2,
    }
    for fd in (kept, full):
        os.close(fd)
    log.close()


def test_two_sessions_take_turns_with_a_name_and_each_keeps_its_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for session, incarnation in (("aa11", 1), ("bb22", 1), ("aa11", 2), ("bb22", 2)):
        log = AuditLog.opened(path, session, incarnation)
        log.write("input", WHO, incarnation, bytes=incarnation)
        log.close()
    last = AuditLog(path)
    assert [(entry["sequence"], entry["incarnation"]) for entry in last.entries(0, 10)] == [
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 2),
    ]
    last.close()
    assert (tmp_path / "audit-aa11.jsonl").read_text().count("\n") == 4


def test_a_torn_last_line_is_no_other_session(tmp_path: Path) -> None:
    """After a power cut, or where the disk was full when it was written."""
    path = tmp_path / "audit.jsonl"
    AuditLog.opened(path, "aa11", 1).close()
    with path.open("a") as file:
        file.write('{"sequence":2,"ti')
    again = AuditLog.opened(path, "aa11", 1)
    again.write("input", WHO, 1)
    assert [entry["sequence"] for entry in again.entries(0, 10)] == [1, 2, 3]
    again.close()
    assert os.listdir(tmp_path) == ["audit.jsonl"]


def test_unknown_audit_logs_do_not_displace_each_other(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for text in ("first\n", "second\n"):
        path.write_text(text)
        AuditLog.opened(path, "aa11", 1).close()
    assert sorted(file.read_text() for file in tmp_path.glob("audit-unknown*")) == [
        "first\n",
        "second\n",
    ]
