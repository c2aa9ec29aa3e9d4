"""The parts of CRIU's log that are read back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from criuctl.criu import driver
from criuctl.criu.options import LOG_NAME, DumpOptions
from criuctl.criu.rpc import CriuGone, CriuRefused

RUN = "01234567-89ab-cdef-0123-456789abcdef"


@pytest.mark.parametrize("lines", [3, 400_000])
def test_the_beginning_and_the_end_of_a_log(lines: int, tmp_path: Path) -> None:
    """The run is named at its beginning, the failure at its end, however many processes it
    lists.
    """
    with (tmp_path / LOG_NAME).open("w") as log:
        log.write(f"(00.000001) CRIU run id = {RUN}\n")
        log.writelines(
            f"(00.{n:06}) 0x7f{n:010x}-0x7f{n:010x} (4K) prot 0x3 flags 0x22\n"
            for n in range(lines)
        )
        log.write("(09.000000) Error (criu/files.c:1): the reason\n")
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        read = driver.read_log(folder)
        assert driver.run_id(folder) == RUN
    finally:
        os.close(folder)
    assert read.endswith("the reason\n")
    assert len(read) < 17 << 20
    assert ("left out" in read) == (lines > 3)


class Silent:
    """In the place of a CRIU that says no, or nothing at all."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    @contextmanager
    def swrk(self, **_how: object) -> Iterator[Silent]:
        yield self

    def ask(self, _kind: str, _options: object) -> None:
        pass

    def answer(self, _notify: object) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "undone"), [(CriuRefused("no"), True), (CriuGone("killed"), False)]
)
def test_who_has_undone_what_it_began(error: Exception, undone: bool, tmp_path: Path) -> None:
    """Only CRIU's own word says so."""
    folder = os.open(tmp_path, os.O_RDONLY)
    criu: Any = Silent(error)
    sink: Any = None
    steps: Any = None
    try:
        with pytest.raises(driver.CriuFailed) as failed:
            driver.Dumper(criu, folder).dump(DumpOptions(pid=1), sink, steps)
        assert failed.value.undone == undone
        driver.empty(folder)
        assert os.listdir(folder) == []
    finally:
        os.close(folder)
