"""The example of a line protocol that can be taken up again, with the hook that does it:
hooks/examples.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers.common import Daemon, accepts, free_ports
from support.command import Criuctl, Home
from support.zoo import Zoo

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "hooks" / "examples"


class Feed:
    """The example's server, and a thread that adds lines to it: the numbers from 1 on, each with a
    tail of its own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_ports(1)[0]
        self.added = 0
        self.random = random.Random(7)
        self.start()

    def start(self) -> None:
        argv = [
            sys.executable,
            str(EXAMPLES / "lines" / "server"),
            str(self.folder / "lines.txt"),
            str(self.port),
        ]
        self.daemon = Daemon("lines", argv, self.folder / "lines.log")
        self.daemon.wait_until(lambda: accepts(self.port))

    def add(self, count: int) -> None:
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=120) as connection,
            connection.makefile("rb") as answers,
        ):
            for _ in range(count):
                number = self.added + 1
                connection.sendall(b"ADD %s\n" % self.line(number).encode())
                assert answers.readline() == b"OK %d\n" % number
                self.added = number

    def line(self, number: int) -> str:
        """Some are long, so that a freeze finds them half read."""
        return f"{number} " + "x" * (random.Random(number).choice((0, 10, 1000, 200_000)))

    def wanted(self) -> str:
        return "".join(self.line(number) + "\n" for number in range(1, self.added + 1))


@pytest.fixture
def feed(home: Home) -> Iterator[Feed]:
    made = Feed(home.path)
    yield made
    made.daemon.stop()


@pytest.fixture
def config(home: Home, feed: Feed) -> Path:
    """The hook where hooks are looked for, and the rule that names it."""
    folder = home.path / "hooks" / "reconnect"
    folder.mkdir(parents=True, mode=0o755)
    shutil.copy(EXAMPLES / "reconnect" / "lines", folder)
    config = home.path / "config.yaml"
    rule = f"{{match: {{port: {feed.port}}}, policy: reconnect, application: lines, deadline: 60}}"
    config.write_text(f"hook_dirs: [{folder.parent}]\nconnection_rules:\n  - {rule}\n")
    return config


def test_the_reader_misses_nothing_and_gets_nothing_twice(
    feed: Feed, config: Path, zoo: Zoo, criuctl: Criuctl
) -> None:
    """Dumped in the middle of lines, three times; lines are added while it is away; the server is
    ended once, killed once.
    """
    output = feed.folder / "output.txt"
    command = [
        sys.executable,
        "-S",
        str(EXAMPLES / "lines" / "client"),
        str(output),
        "127.0.0.1",
        str(feed.port),
    ]
    animal = zoo.launch(command, name="client", quiet=False, ready=False)
    for meanwhile in (None, Daemon.stop, Daemon.kill):
        adding = threading.Thread(target=feed.add, args=(60,))
        adding.start()
        _until(lambda: output.exists() and output.stat().st_size > 0)
        report = criuctl("dump", animal.pid, "--config", config, "--with-files", output)
        adding.join()
        if meanwhile is not None:
            meanwhile(feed.daemon)
            feed.start()
            feed.add(5)
        answer = criuctl("restore", report["checkpoint"], "--config", config)
        (connection,) = answer["connections"]
        assert connection["outcome"] == "reconnected", connection
        assert 0 < connection["details"]["resumed_after"] <= feed.added
        animal = zoo.adopt(answer["pid"], animal)
        _until(lambda: output.read_text() == feed.wanted())
    assert animal.alive()


def descriptor(pid: int) -> int:
    """The client's socket."""
    folder = Path(f"/proc/{pid}/fd")
    return next(
        int(link.name) for link in folder.iterdir() if os.readlink(link).startswith("socket:")
    )


def test_the_hook_tells_what_it_cannot_do(
    feed: Feed, config: Path, zoo: Zoo, criuctl: Criuctl
) -> None:
    """No server: tried again until the deadline, then hung up and reported; the reader sees the end
    of its feed and ends.
    """
    output = feed.folder / "output.txt"
    command = [
        sys.executable,
        "-S",
        str(EXAMPLES / "lines" / "client"),
        str(output),
        "127.0.0.1",
        str(feed.port),
    ]
    animal = zoo.launch(command, name="client", quiet=False, ready=False)
    feed.add(1)
    _until(lambda: output.exists() and output.read_text() == feed.wanted())
    tried = criuctl(
        "hooks",
        "run",
        "reconnect",
        "lines",
        "--target",
        animal.pid,
        "--fd",
        descriptor(animal.pid),
        "--config",
        config,
    )
    assert tried["results"][0]["data"] == {"resumed_after": 1}
    report = criuctl("dump", animal.pid, "--config", config)
    feed.daemon.stop()
    config.write_text(config.read_text().replace("deadline: 60", "deadline: 5"))
    answer = criuctl("restore", report["checkpoint"], "--config", config, check=False)
    (connection,) = answer["connections"]
    assert connection["outcome"] == "failed"
    assert "hung up" in connection["reason"]
    # refused connections are tried again, until the last try has no time left
    assert connection["attempts"] > 1
    _until(lambda: "the feed has ended" in animal.output())


def _until(ready: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)
