"""A manifest that would have the host's folders covered by others, in the namespace of its tree."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from criuctl.checkpoint.manifest import Manifest
from criuctl.checkpoint.terminal_records import HolderRecord
from criuctl.errors import CriuctlError, Damaged, PreflightRefused
from criuctl.restore.relocation import Moves


def moves(workspace: Path | str, *shown: Path | str) -> Moves:
    holder = HolderRecord(workspace=str(workspace), shown=tuple(map(str, shown)))
    return Moves.of(cast("Manifest", SimpleNamespace(holder=holder)), None)


def test_only_the_workspace_of_its_original_is_covered(tmp_path: Path) -> None:
    """Its name, in the same folder, and a folder of the same user: a program with set-user-ID
    would read what an attacker has put there.
    """
    place, own = tmp_path / "work", tmp_path / "work.copy"
    place.mkdir()
    own.mkdir()
    assert moves(own, place).shown == ((str(own), str(place)),)
    for point in ("/etc", tmp_path, own / "inside", own, f"{tmp_path}/wor", "/", ""):
        with pytest.raises(Damaged):
            moves(own, point)
    with pytest.raises(Damaged):
        moves(f"{place}.x/../../etc", place)
    os.chown(own, 1234, 1234)
    with pytest.raises(PreflightRefused):
        moves(own, place)
    own.rmdir()
    own.symlink_to(place)
    with pytest.raises(CriuctlError):
        moves(own, place)
