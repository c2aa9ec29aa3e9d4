"""Routes in CRIU's images, without the states of their devices."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from criuctl.criu import netimages
from criuctl.criu.images import ImageSet
from criuctl.errors import Damaged

_MAGIC = struct.pack("=I", 0x45311224)
_DEAD, _LINKDOWN, _ONLINK = 1, 16, 4


def _route(flags: int, hop_flags: int) -> bytes:
    """A route with one attribute of its own and one hop."""
    hop = struct.pack("=HBBi", 8, hop_flags, 0, 3)
    attributes = struct.pack("=HHI", 8, 15, 254) + struct.pack("=HH", 4 + len(hop), 9) + hop
    body = struct.pack("=BBBBBBBBI", 2, 24, 0, 0, 254, 2, 253, 1, flags) + attributes
    return struct.pack("=IHHII", 16 + len(body), 24, 0, 0, 0) + body


def _forget(folder: Path) -> None:
    images = os.open(folder, os.O_RDONLY)
    try:
        netimages.forget_states(ImageSet(images))
    finally:
        os.close(images)


def test_the_states_go_and_the_rest_stays(tmp_path: Path) -> None:
    (tmp_path / "route-9.img").write_bytes(
        _MAGIC + _route(_DEAD | _LINKDOWN, _LINKDOWN | _ONLINK) * 2
    )
    (tmp_path / "route6-9.img").write_bytes(_MAGIC + _route(_ONLINK, 0))
    _forget(tmp_path)
    assert (tmp_path / "route-9.img").read_bytes() == _MAGIC + _route(0, _ONLINK) * 2
    assert (tmp_path / "route6-9.img").read_bytes() == _MAGIC + _route(_ONLINK, 0)


@pytest.mark.parametrize("data", [b"none", _MAGIC + b"\xff" * 40, _MAGIC + _route(0, 0)[:-4]])
def test_what_is_none_is_damaged(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "route-9.img").write_bytes(data)
    with pytest.raises(Damaged):
        _forget(tmp_path)
