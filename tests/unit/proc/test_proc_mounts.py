"""mountinfo: every line that the kernel may write is parsed, and no other module parses it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import criuctl
from criuctl.proc.mounts import Mount, parse, read_mounts
from criuctl.proc.procfs import text_lines


@pytest.mark.parametrize(
    ("line", "mount"),
    [
        (
            "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 shared:7 - ext3 /dev/root "
            "rw,errors=continue",
            Mount(
                36,
                os.makedev(98, 0),
                "/mnt1",
                "/mnt2",
                frozenset({"rw", "noatime"}),
                "ext3",
                "/dev/root",
                ("rw", "errors=continue"),
                35,
            ),
        ),
        # no optional field, and a mount whose source is ""
        (
            "72 27 0:62 / /a rw - tmpfs  rw",
            Mount(72, os.makedev(0, 62), "/", "/a", frozenset({"rw"}), "tmpfs", "", ("rw",), 27),
        ),
        (
            r"1 2 0:3 / /with\040space\011tab\134octal\012line ro - fuse.x a\040- rw",
            Mount(
                1,
                3,
                "/",
                "/with space\ttab\\octal\nline",
                frozenset({"ro"}),
                "fuse.x",
                "a -",
                ("rw",),
                2,
            ),
        ),
        (
            "1 2 0:3 / /a\udcff\u2028\x0b rw - tmpfs - rw",
            Mount(1, 3, "/", "/a\udcff\u2028\x0b", frozenset({"rw"}), "tmpfs", "-", ("rw",), 2),
        ),
    ],
)
def test_a_line(line: str, mount: Mount) -> None:
    assert parse(line) == mount


def test_lines_end_where_the_kernel_ends_them() -> None:
    assert text_lines("a\x0bb\u2028c\x1cd\x85\ne\n") == ["a\x0bb\u2028c\x1cd\x85", "e"]
    assert text_lines("") == []


def test_what_is_mounted_here() -> None:
    here = read_mounts()
    assert {mount.point for mount in here} >= {"/", "/proc"}
    assert next(mount.kind for mount in here if mount.point == "/proc") == "proc"
    assert (
        next(mount.device for mount in reversed(here) if mount.point == "/proc")
        == os.stat("/proc").st_dev
    )
    assert read_mounts(os.getpid()) == here


def test_no_other_module_parses_it() -> None:
    """Nine other parsers had not handled the same lines."""
    package = Path(criuctl.__file__).parent
    readers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if 'mountinfo"' in path.read_text()
    }
    assert readers == {"proc/mounts.py"}
