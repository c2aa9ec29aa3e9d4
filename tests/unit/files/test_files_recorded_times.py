"""Files whose times no 64-bit number of nanoseconds can hold, as a tmpfs and btrfs have them."""

from __future__ import annotations

import os

import pytest

from criuctl.checkpoint.file_records import FileRecord
from criuctl.files import contents
from criuctl.ops.moving import needs
from criuctl.ops.moving.needs_format import NeededFile


@pytest.mark.parametrize(
    "seconds", [-62_135_596_800, -1, 0, 9_300_000_000, 32_503_680_000, 1 << 40]
)
def test_a_file_of_any_time_can_be_recorded(seconds: int) -> None:
    fd = os.memfd_create("old")
    try:
        os.utime(fd, (seconds, seconds))
        status = os.fstat(fd)
        record = contents.base_record("/srv/a", "read", status)
        assert FileRecord.from_dict(record.to_dict()) == record
        os.utime(fd, ns=(record.mtime_ns, record.mtime_ns))
        needed = needs._needed("/srv/a", "read", status)
        assert NeededFile.from_dict(needed.to_dict()) == needed
        if 0 <= seconds < 9_000_000_000:
            assert record.mtime_ns == needed.mtime_ns == seconds * 10**9
    finally:
        os.close(fd)
