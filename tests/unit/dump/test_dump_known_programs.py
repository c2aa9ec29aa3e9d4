"""The remedy of a known program in place of the general one, and one line for what has one
cause.
"""

from __future__ import annotations

import re

import pytest

from criuctl.cli.commands.check import findings_lines
from criuctl.dump.checks.known_programs import KNOWN_PROGRAMS, remedied
from criuctl.report import Finding, summarised


def error(code: str, pid: int | None, text: str = "text", hint: str = "general") -> Finding:
    return Finding("error", code, text, hint, pid)


@pytest.mark.parametrize(
    ("code", "line", "said"),
    [
        ("nested-namespace", ["/usr/lib/firefox-esr/firefox-esr"], "MOZ_DISABLE_CONTENT_SANDBOX=1"),
        (
            "path-hidden",
            ["/opt/firefox/firefox-bin", "/usr/bin/bash"],
            "MOZ_DISABLE_UTILITY_SANDBOX=1",
        ),
        ("nested-namespace", ["/usr/lib/chromium/chromium"], "--no-sandbox"),
        ("nested-namespace", ["/usr/bin/bwrap", "/usr/bin/bwrap"], "--as-pid-1 --new-session"),
        (
            "session-outside-pid-namespace",
            ["/bin/sleep", "/usr/bin/bwrap"],
            "--as-pid-1 --new-session",
        ),
        ("nested-namespace", ["/usr/bin/conmon"], "podman container checkpoint"),
        ("proc-mount", ["/bin/sleep", "/usr/bin/firejail"], "No way is known"),
        ("io-uring", ["/usr/bin/node"], "UV_USE_IO_URING=0"),
        ("io-uring", ["/usr/sbin/mariadbd"], "--innodb-use-native-aio=OFF"),
        ("sysv-shm", ["/usr/lib/postgresql/15/bin/postgres"], "PrivateIPC=yes"),
        # Already started as the remedy says: the general one is right.
        ("nested-namespace", ["/bin/sleep", "/usr/bin/bwrap"], "general"),
        # What a known program has started is not the program, and its other errors are not known.
        ("nested-namespace", ["/usr/bin/sleep", "/usr/lib/chromium/chromium"], "general"),
        ("traced", ["/usr/lib/firefox-esr/firefox-esr"], "general"),
        ("io-uring", ["/usr/bin/python3"], "general"),
        ("io-uring", [""], "general"),
        ("io-uring", [], "general"),
    ],
)
def test_the_remedy_is_that_of_the_program(code: str, line: list[str], said: str) -> None:
    (found,) = remedied([error(code, 7)], {7: line})
    assert said in found.hint
    assert bool(found.program) == (said != "general")
    assert (found.level, found.code, found.text, found.pid) == ("error", code, "text", 7)


def test_warnings_and_what_is_about_no_process_stay_as_they_are() -> None:
    findings = [Finding("warning", "io-uring", "text", "general", 7), error("io-uring", None)]
    assert remedied(findings, {7: ["/usr/bin/node"]}) == findings


def test_a_row_is_reached_by_its_names_and_codes_alone() -> None:
    """No row hides another one, and none takes the place of a remedy that passes by itself."""
    for known in KNOWN_PROGRAMS:
        for code in known.codes:
            for name in known.executables:
                (found,) = remedied([error(code, 1)], {1: [f"/x/{name}"]})
                assert (found.program, found.hint) == (known.name, known.hint)
        assert not known.hint.startswith("It passes")


def test_one_cause_is_one_line_with_a_count_and_some_of_the_places() -> None:
    users = [
        error("foreign-user", pid, f"{pid} (a b) runs as user 101", "Give it")
        for pid in range(10, 21)
    ]
    rings = [
        Finding("error", "io-uring", "an io_uring is open", "Do without.", 9, fd)
        for fd in (4, 5, 6)
    ]
    single = Finding("error", "traced", "9 (gdb) is traced", "End it.", 9)
    lines = findings_lines(f.to_dict() for f in (*users, single, *rings))
    assert lines == [
        "error    PID 10: 10 (a b) runs as user 101; and 10 more like it: "
        "PID 11, PID 12, PID 13, PID 14 and 6 more",
        "         Give it",
        "error    PID 9: 9 (gdb) is traced",
        "         End it.",
        "error    PID 9 fd 4: an io_uring is open; and 2 more like it: fd 5 and fd 6",
        "         Do without.",
    ]  # fmt: skip


def test_what_differs_in_more_than_its_process_stays_apart() -> None:
    apart = [
        error("file-refuse", 5, "/var/a1 has grown"),
        error("file-refuse", 5, "/var/a2 has grown"),
        error("foreign-user", 5, "5 (x) runs as user 101"),
        error("foreign-user", 6, "6 (x) runs as user 102"),
        Finding("warning", "file-refuse", "/var/a1 has grown", "general", 5),
    ]
    assert summarised(apart) == apart


def test_many_that_differ_in_files_and_sizes_are_one_line_with_some_of_the_files() -> None:
    found = [
        Finding("warning", "file-kept", f"/var/log/{n}.log: is {n} KiB longer", "Look.", 5, n)
        for n in range(1, 13)
    ]
    (finding,) = summarised(found)
    assert finding.text == (
        "/var/log/1.log: is 1 KiB longer; and 11 more like it: /var/log/2.log, /var/log/3.log, "
        "/var/log/4.log, /var/log/5.log and 7 more"
    )
    assert summarised(found[:3]) == found[:3]
    peers = [error("hangup", 5, f"the connection to 10.0.0.{n}:5432 is closed") for n in range(5)]
    (finding,) = summarised(peers)
    assert finding.text.endswith(
        "4 more like it: 10.0.0.1:5432, 10.0.0.2:5432, 10.0.0.3:5432 and 10.0.0.4:5432"
    )
    other = Finding("warning", "file-kept", "/x: is gone", "Look.", 5, 3)
    assert summarised([*found, other])[1] == other


def test_all_that_a_known_program_s_remedy_ends_has_one_cause() -> None:
    found = [
        error("nested-namespace", 5, "5 (x) is in another net namespace", "Name PID 5."),
        error("path-hidden", 5, "/proc/77/fdinfo leads elsewhere"),
        error("path-hidden", 6, "/proc/78/fdinfo leads elsewhere"),
    ]
    (finding,) = summarised(remedied(found, {pid: ["/x/firefox"] for pid in (5, 6)}))
    assert re.fullmatch(r"5 \(x\) is in .*; and 2 more like it: PID 6", finding.text)
    assert len(summarised(found)) == 2
    (bare,) = summarised([error("x", None)] * 3)
    assert bare.text == "text; and 2 more like it"
