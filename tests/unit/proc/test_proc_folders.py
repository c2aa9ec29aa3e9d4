"""Folders of criuctl's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from criuctl.proc.folders import make_private


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_no_other_user_may_write_there_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "var" / "lib" / "state"
    before = os.umask(umask)
    try:
        make_private(folder)
        make_private(folder)
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [
        0o700,
        0o755 & ~umask,
    ]
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        make_private(tmp_path / "file" / "below")
