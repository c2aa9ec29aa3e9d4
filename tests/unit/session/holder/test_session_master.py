"""The master of a real terminal, read into the log: every byte, every mode, wherever the ring is
cut.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from criuctl.session.holder.event_loop import Loop
from criuctl.session.holder.master import Chunk, Master
from criuctl.session.holder.output_log import OutputLog
from criuctl.session.holder.signal_keys import LONGEST
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


def _signals(slave: int, quit_key: bytes = b"\x1c") -> None:
    """Let the terminal signal for keys, and remove nothing from the input for it."""
    modes = termios.tcgetattr(slave)
    modes[3] |= termios.ISIG | termios.NOFLSH
    modes[6][termios.VQUIT] = quit_key
    termios.tcsetattr(slave, termios.TCSANOW, modes)


def _run_until(loop: Loop, condition: Callable[[], bool]) -> None:
    """Run the loop until `condition` holds."""

    def look() -> None:
        loop.running = not condition()
        loop.after(0.005, look)

    loop.after(0, look)
    loop.run()


def test_input_behind_a_key_that_signals_waits_for_the_program(
    terminal: tuple[Master, int],
) -> None:
    master, slave = terminal
    loop = master._loop
    _signals(slave, quit_key=b"q")
    asked, ready = 0, False

    def look() -> bool:
        nonlocal asked
        asked += 1
        return ready

    master.signal_keys.ready = look
    master.put(Chunk(b"a\x03b\x03", {}, "human"))
    master.put(Chunk(b"qc", {}, "agent"))
    assert os.read(slave, 100) == b"a" and master.unread
    _run_until(loop, lambda: asked > 2)
    assert not master.unread_by_programs and master.queued == 4
    ready = True
    # the second key makes what is behind it wait again, until another look
    _run_until(loop, lambda: not master.queue)
    assert _read_until(slave, b"bc") and master.queued == 0
    # a key does not wait for the one before it
    ready = False
    for _ in range(3):
        master.put(Chunk(b"\x03", {}, "human"))
    master.put(Chunk(b"", {}, "human"))
    assert [chunk.data for chunk in master.queue] == [b""]


def test_input_behind_a_key_that_signals_does_not_wait_for_ever(
    terminal: tuple[Master, int],
) -> None:
    master, slave = terminal
    _signals(slave)
    master.signal_keys.ready = lambda: False
    began = time.monotonic()
    master.put(Chunk(b"\x1ab", {}, "human"))
    _run_until(master._loop, lambda: not master.queue)
    assert time.monotonic() - began >= LONGEST and _read_until(slave, b"b")
    tty.setraw(slave)  # there it is a key as any other
    master.put(Chunk(b"\x03c", {}, "human"))
    assert not master.queue and _read_until(slave, b"\x03c")


def _read_until(slave: int, end: bytes) -> bool:
    """Read the input of a raw terminal until it ends with `end`."""
    text = b""
    while not text.endswith(end):
        text += os.read(slave, 100)
    return text == end


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
