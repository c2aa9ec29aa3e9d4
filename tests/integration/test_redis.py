"""Unmodified Redis clients through a dump and a restore with ``--connections reconnect``: no push
is lost, none is done twice.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle as repeat_all
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from servers.redis import RedisServer, redis_server
from support.command import Criuctl, Home
from support.pauses import paused
from support.zoo import Animal, Zoo

pytestmark = pytest.mark.integration

# list -> database
LISTS = {"single": 1, "resp3": 0, "unix": 0, "pool0": 2, "pool1": 2, "epoll": 0, "child": 0}
PACKAGES = {"PYTHONPATH": next(path for path in sys.path if path.endswith("site-packages"))}


@pytest.fixture
def server(home: Home, criuctl: Criuctl) -> Iterator[RedisServer]:
    """A server with a user, and a configuration of criuctl that knows it."""
    with redis_server("user app on >first ~* +@all") as server:
        secret = home.path / "secret"
        secret.write_text("first\n")
        secret.chmod(0o600)
        config = home.path / "config.yaml"
        config.write_text(
            "connection_rules:\n"
            f"  - {{match: {{protocol: redis}}, policy: reconnect, secret: {{file: {secret}}}, "
            f"options: {{user: app}}}}\n"
        )
        yield server


class Cycle:
    """Dumps and restores with the configuration of the test."""

    def __init__(self, criuctl: Criuctl, zoo: Zoo, config: Path) -> None:
        self.criuctl, self.zoo, self.config = criuctl, zoo, config

    def __call__(
        self, animal: Animal, meanwhile: Callable[[], object] = lambda: None, *options: str
    ) -> Animal:
        report = self.criuctl("dump", animal.pid, "--config", self.config, *options)
        meanwhile()
        answer = self.criuctl("restore", report["checkpoint"], "--config", self.config)
        restored = self.zoo.adopt(answer["pid"], animal)
        restored.answer = answer
        return restored


@pytest.fixture
def cycle(criuctl: Criuctl, zoo: Zoo, home: Home) -> Cycle:
    return Cycle(criuctl, zoo, home.path / "config.yaml")


def outcomes(animal: Animal) -> set[str]:
    return {f"{c['outcome']} {c['reason']}".strip() for c in animal.answer["connections"]}


def launch(zoo: Zoo, server: RedisServer, mode: str) -> Animal:
    env = {**PACKAGES, "REDIS_SECRET": "first"}
    animal = zoo.launch("cache.py", mode, str(server.port), server.path, quiet=False, env=env)
    animal.ask()
    # the child's comes when it may
    _until(lambda: all((animal.folder / f"acknowledged-{name}").exists() for name in LISTS))
    return animal


def contents(server: RedisServer, password: str = "first") -> dict[str, list[int]]:
    """What the server holds of each list."""
    found = {}
    for name, db in LISTS.items():
        with server.client(db=db, username="app", password=password) as client:
            found[name] = [int(number) for number in client.lrange(name, 0, -1)]
    return found


def test_clients_at_rest_go_on(server: RedisServer, zoo: Zoo, cycle: Cycle, home: Home) -> None:
    """RESP2, RESP3 with a user, a pool, a forked child, a unix socket, asyncio; then with server
    and password changed meanwhile.

    Every connection is back before the program runs: no client ever sees an error.
    """
    animal = launch(zoo, server, "quiet")
    restored = cycle(animal)
    assert outcomes(restored) == {"reconnected"}
    assert len(restored.answer["connections"]) == len(LISTS)
    restored.ask()

    def other_server() -> None:
        server.stop()
        server.extra = ["user app on >second ~* +@all"]
        (home.path / "secret").write_text("second\n")
        server.start()

    again = cycle(restored, other_server)
    assert outcomes(again) == {"reconnected"}
    answer = again.ask()
    assert set(answer["lost"].values()) | {answer["child_lost"]} == {0}
    pushed = {**answer["last"], "child": answer["child"]}
    assert contents(server, "second") == {
        name: list(range(1, last + 1)) for name, last in pushed.items()
    }
    info = answer["infos"]
    assert (info["single"]["name"], info["single"]["db"], info["single"]["resp"]) == (
        "single",
        1,
        "2",
    )
    assert (info["resp3"]["user"], info["resp3"]["resp"]) == ("app", "3")
    assert (info["pool0"]["name"], info["epoll"]["name"]) == ("pool", "epoll")


def test_a_server_that_is_away_for_a_while(
    server: RedisServer, zoo: Zoo, cycle: Cycle, criuctl: Criuctl
) -> None:
    """The restore waits, and the tree does not run, until the server is back."""
    animal = launch(zoo, server, "quiet")
    report = criuctl("dump", animal.pid, "--config", cycle.config)
    server.stop()
    with paused(
        criuctl, "connections", "restore", report["checkpoint"], "--config", cycle.config
    ) as held:
        held.go_on()
        restoring = held.command
        # which try to connect
        _until(lambda: len(os.listdir(f"/proc/{restoring.process.pid}/task")) > 1)
        with pytest.raises(TimeoutError):
            restoring.process.wait(2)
        server.start()
        assert restoring.process.wait(120) == 0
    restored = zoo.adopt(restoring.json()["pid"], animal)
    restored.answer = restoring.json()
    assert outcomes(restored) == {"reconnected"}
    assert max(c["attempts"] for c in restored.answer["connections"]) > 1
    assert set(restored.ask()["lost"].values()) == {0}


def test_under_load(server: RedisServer, zoo: Zoo, cycle: Cycle, home: Home) -> None:
    """Whatever each connection was about, no push is lost and none is done twice; what was not idle
    is hung up and reported.
    """

    def settle() -> None:
        """What was under way is done with: a client that looks for its last number can rely on what
        it finds.
        """
        with server.client(username="app", password="first") as client:
            _until(lambda: len(client.client_list()) == 1)

    def restart() -> None:
        settle()
        server.stop()
        server.start()

    def crash() -> None:
        settle()
        server.kill()
        server.start()

    animal = launch(zoo, server, "busy")
    seen: list[str] = []
    cycles = int(os.environ.get("CRIUCTL_TEST_CYCLES", "4"))
    for meanwhile in islice(repeat_all((settle, restart, crash)), cycles):
        _advance(animal)
        animal = cycle(animal, meanwhile)
        seen += [c["outcome"] for c in animal.answer["connections"]]
    assert set(seen) <= {"reconnected", "hangup"}
    assert seen.count("reconnected") >= len(seen) / 4
    _advance(animal)
    animal.end()
    last = acknowledged(animal)
    for name, numbers in contents(server).items():
        assert numbers == list(range(1, len(numbers) + 1)), name
        # the last one may have been done and not acknowledged
        assert len(numbers) - last[name] in (0, 1), name


def acknowledged(animal: Animal) -> dict[str, int]:
    """The last number of each list whose push was answered; each has been answered once."""
    found = {}
    for name in LISTS:
        # the last may be half written
        whole, _, _ = (animal.folder / f"acknowledged-{name}").read_text().rpartition("\n")
        numbers = [int(line) for line in whole.splitlines()]
        assert numbers == list(range(1, len(numbers) + 1)), name
        found[name] = len(numbers)
    return found


def _advance(animal: Animal) -> None:
    """Wait until some more pushes were acknowledged on each connection."""
    before = acknowledged(animal)
    _until(lambda: all(acknowledged(animal)[name] > last + 3 for name, last in before.items()))


def test_redis_cli_goes_on(server: RedisServer, zoo: Zoo, cycle: Cycle) -> None:
    command = [
        "redis-cli",
        "-3",
        "-p",
        str(server.port),
        "-n",
        "3",
        "-r",
        "-1",
        "-i",
        "0.5",
        "INCR",
        "n",
    ]
    animal = zoo.launch(command, quiet=False, ready=False)

    def printed() -> list[int]:
        return [int(line) for line in animal.output().split()]

    _until(lambda: len(printed()) > 2)
    # at rest, as it is between two of its questions
    restored = cycle(animal, lambda: None, "--drain", "60")
    assert outcomes(restored) == {"reconnected"}
    count = len(printed())
    _until(lambda: len(printed()) > count + 2)
    numbers = printed()
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_subscriber_is_hung_up(
    server: RedisServer, zoo: Zoo, cycle: Cycle, criuctl: Criuctl
) -> None:
    animal = zoo.launch(
        ["redis-cli", "-p", str(server.port), "SUBSCRIBE", "news"], quiet=False, ready=False
    )
    with server.client() as other:
        _until(lambda: other.pubsub_numsub("news")[0][1] == 1)
    report = criuctl("dump", animal.pid, "--config", cycle.config)
    # and redis-cli ends
    (connection,) = criuctl("restore", report["checkpoint"], "--config", cycle.config)[
        "connections"
    ]
    assert (connection["outcome"], connection["reason"]) == ("hangup", "it has subscriptions")


def _until(ready: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)
