"""What criuctl prints about connections."""

from __future__ import annotations

from typing import Any

from criuctl.cli.outcomes import connection_lines


def connection(fd: int = 3, **changes: Any) -> dict[str, Any]:
    made = {
        "pid": 7,
        "fd": fd,
        "local": f"10.0.0.1:{40000 + fd}",
        "peer": "10.0.0.9:80",
        "outcome": "kept",
    }
    return (
        made | {"application": "", "reason": "", "hint": "", "attempts": 0, "details": {}} | changes
    )


def test_one_of_each() -> None:
    failed = connection(
        4,
        outcome="failed",
        application="tcp",
        attempts=9,
        reason="Connection refused\x1b[2J",
        hint="Start it.",
    )
    noted = connection(
        5,
        outcome="reconnected",
        application="redis",
        attempts=1,
        details={"warnings": ["notes are lost"]},
    )
    odd = connection(
        6, outcome="reconnected", application="hook", details={"warnings": "whatever a hook says"}
    )
    assert connection_lines([connection(), failed, noted, odd], "outcome") == [
        "PID 7 fd 3: 10.0.0.1:40003 -> 10.0.0.9:80 kept",
        "PID 7 fd 4: 10.0.0.1:40004 -> 10.0.0.9:80 failed (tcp) after 9 tries: Connection "
        "refused\\x1b[2J",
        "  hint: Start it.",
        "PID 7 fd 5: 10.0.0.1:40005 -> 10.0.0.9:80 reconnected (redis)",
        "  warning: notes are lost",
        "PID 7 fd 6: 10.0.0.1:40006 -> 10.0.0.9:80 reconnected (hook)",
    ]


def test_many_that_are_alike() -> None:
    """They are one line; those with another outcome than requested are another line."""
    lines = connection_lines(
        [connection(fd) for fd in range(3, 503)]
        + [connection(900, outcome="hangup", reason="TLS")],
        "outcome",
    )
    assert lines == [
        "500 connections of PIDs 7 -> 10.0.0.9:80 kept",
        "PID 7 fd 900: 10.0.0.1:40900 -> 10.0.0.9:80 hangup: TLS",
    ]
