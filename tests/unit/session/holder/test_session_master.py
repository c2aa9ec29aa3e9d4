"""The master of a real terminal, read into the log: every byte, every mode, wherever the ring is
cut.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest

from criuctl.session.holder.event_loop import Loop
from criuctl.session.holder.master import Master
from criuctl.session.holder.output_log import OutputLog
from criuctl.session.screen.modes import Modes

PAGE = 4096
PROJECT = Path(__file__).parents[4]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[tuple[Master, int]]:
    """A master without a reader yet and with a small log, and its slave side, raw."""
    loop = Loop()
    master = Master(
        loop, OutputLog(tmp_path / "output", 64 * PAGE, ring=8 * PAGE, base=1001), Modes()
    )
    fd, slave = os.openpty()
    tty.setraw(slave)
    master.open(fd)
    yield master, slave
    os.close(slave)
    master.close()
    master.log.close()
    loop.close()


def test_output_of_many_rings_is_in_the_log_with_its_modes(terminal: tuple[Master, int]) -> None:
    """Text without escapes is not looked at; an escape is found wherever it lies, and where two
    reads cut it.
    """
    master, slave = terminal
    plain = bytes(range(32, 127)) * 300
    written = 0
    for before in (0, 1, 5000, 8 * PAGE - 4, 100_003):
        text = (
            (plain * (before // len(plain) + 1))[:before]
            + b"\x1b[?2004h\x1b]2;after %d\x07" % before
            + plain
            + b"\x1b[?20"
        )
        _print(master, slave, text)
        assert (master.modes.bracketed_paste, master.modes.title) == (True, f"after {before}")
        _print(master, slave, b"04l")
        assert not master.modes.bracketed_paste
        written += len(text) + 3
        assert master.log.end == 1001 + written
        assert master.log.read(master.log.end - 3 - len(text), master.log.end) == text + b"04l"


def _print(master: Master, slave: int, text: bytes) -> None:
    """A program prints `text`, and all of it is read."""
    end = master.log.end + len(text)
    writer = threading.Thread(target=_write, args=(slave, text))
    writer.start()
    while master.log.end < end:
        assert select.select([master.fd], [], [], 30)[0], "the output did not come"
        master.drain()
    writer.join()


def _write(fd: int, text: bytes) -> None:
    while text:
        text = text[os.write(fd, text) :]


def test_what_a_holder_imports_stays_small() -> None:
    """There is a holder for every session: libraries that cost megabytes are for others."""
    modules = (
        "launch.fresh_start",
        "holder.requests",
        "holder.checkpointing",
        "launch.spawn",
        "launch.reexec",
    )
    program = f"import sys; sys.path.insert(0, {str(PROJECT)!r})\n"
    program += (
        "".join(f"import criuctl.session.{module}\n" for module in modules) + "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "criuctl" in loaded
    assert not loaded & {
        "hashlib",
        "_hashlib",
        "shutil",
        "bz2",
        "lzma",
        "asyncio",
        "yaml",
        "click",
        "wcwidth",
        "pycriu",
        "logging",
    }
