"""The laboratory itself: another user's program is dumped and comes back as that user's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.laboratory import USER, Laboratory
from support.oracle import status_of

pytestmark = pytest.mark.integration


def test_another_user_s_program_comes_back(lab: Laboratory) -> None:
    """Its user, its open file and what it answers are what they were."""
    lab.as_user("echo written > file")
    pid = lab.start((lab.folder / "file", os.O_RDWR))
    assert status_of(f"/proc/{pid}/status")["Uid"].split() == [str(USER)] * 4
    report = lab.dump(pid)
    assert lab.processes() == []
    restored = lab.restore(report["checkpoint"])["pid"]
    assert status_of(f"/proc/{restored}/status")["Uid"].split() == [str(USER)] * 4
    assert str(lab.folder / "file") in lab.descriptors(restored).values()
    assert lab.ask(restored, "os.getuid(), os.read(opened[0], 100)") == "(1001, b'written\\n')"
    assert Path(f"/proc/{restored}").stat().st_uid == USER
