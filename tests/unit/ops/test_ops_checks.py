"""What the checks find out beside the tree: here, how the CRIU in use was built."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from criuctl.config import Config
from criuctl.ops.checks.files import _saves_bpf_maps


@pytest.mark.parametrize(
    ("program", "saves"),
    [
        (b"\x7fELF...\0libnl-3.so.200\0libc.so.6\0bpfmap_file_entry\0", False),
        (b"\x7fELF...\0libnl-3.so.200\0libbpf.so.1\0libc.so.6\0", True),
        (b'#!/bin/sh\nexec /elsewhere/criu "$@"\n', True),  # who knows: CRIU answers itself
    ],
)
def test_bpf_maps_are_refused_when_criu_was_built_without_them(program: bytes, saves: bool, tmp_path: Path) -> None:
    criu = tmp_path / "criu"
    criu.write_bytes(program)
    criu.chmod(stat.S_IRWXU)
    assert _saves_bpf_maps(Config(criu=str(criu))) == saves


def test_no_criu_is_another_finding(tmp_path: Path) -> None:
    assert _saves_bpf_maps(Config(criu=str(tmp_path / "none")))
