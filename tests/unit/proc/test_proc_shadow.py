"""A shadow of this host: changes stay inside it, and end with it."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from criuctl.errors import TimedOut
from criuctl.proc import shadow


def test_what_is_done_in_there_is_done_in_there_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("here")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    listener.listen()
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)

    def work() -> dict[str, Any]:
        read_only = shadow.enter()
        shadow.empty(str(tmp_path / "full"))
        before = (tmp_path / "file").read_text()
        (tmp_path / "file").write_text("in there")
        (tmp_path / "new").touch()
        (tmp_path / "socket").rename(tmp_path / "moved")
        os.link(tmp_path / "file", tmp_path / "linked")
        one = os.path.samefile(tmp_path / "file", tmp_path / "linked")
        with socket.socket(socket.AF_UNIX) as caller:
            refused = caller.connect_ex(str(tmp_path / "moved"))
        try:
            os.close(os.open(tmp_path / "fifo", os.O_WRONLY | os.O_NONBLOCK))
            heard = True
        except OSError:
            heard = False
        names = sorted(os.listdir(tmp_path / "full"))
        socket.sethostname("another")
        os.kill(1, signal.SIGTERM)  # which is not this host's
        facts = {
            "one": one,
            "refused": bool(refused),
            "heard": heard,
            "names": names,
            "pids": os.listdir("/proc"),
        }
        return {**facts, "before": before, "read_only": str(tmp_path) in read_only}

    host = socket.gethostname()
    facts = shadow.run(work, timeout=60)
    assert {name for name in facts.pop("pids") if name.isdigit()} == {"1", "2"}
    assert facts == {
        "one": True,
        "refused": True,
        "heard": False,
        "names": [],
        "before": "here",
        "read_only": False,
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "file", "full", "socket"]
    assert ((tmp_path / "file").read_text(), socket.gethostname()) == ("here", host)
    assert (tmp_path / "full" / "file").exists()
    os.close(reader)
    listener.close()


def test_it_ends_in_time_and_tells_of_bugs() -> None:
    read, write = os.pipe()

    def work() -> dict[str, Any]:
        os.write(write, b"x")
        signal.pause()
        return {}

    with pytest.raises(TimedOut):
        shadow.run(work, timeout=0.5)
    os.close(write)
    os.set_blocking(read, False)
    assert os.read(read, 9) in (b"x", b"")
    assert os.read(read, 9) == b""  # no process has the other end any more
    os.close(read)
    assert "ZeroDivisionError" in shadow.run(lambda: {"never": 1 // 0}, timeout=60)["bug"]
