"""Steps under fire: process, holder, criuctl and host are killed at random moments, and a payment
server, which recognises no key, is asked for each charge exactly once.

CRIUCTL_STEP_KILLS is the number of kills, 12 by default; CRIUCTL_STEP_SEED repeats a run.
"""

from __future__ import annotations

import os
import random
import signal
import socketserver
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from support import oracle
from support.homes import Homes
from support.keeper import wait_until
from support.operating import Operators
from support.stepping import run_program, steps_of
from support.supervising import PATIENCE, Supervised

pytestmark = [pytest.mark.integration, pytest.mark.crash, pytest.mark.slow]

KILLS = int(os.environ.get("CRIUCTL_STEP_KILLS") or 12)
SEED = int(os.environ.get("CRIUCTL_STEP_SEED") or time.time())
OPTIONS = ("--every", "0.5s", "--lease", "3s", "--backoff", "0.01s", "--stable-after", "0.01s")

PROGRAM = """
import socket
# The two hosts of this test have run folders of their own; real ones have the same.
folders = [f"{folder}/session" for folder in sys.argv[2:]]
inside._session_folder = lambda: next(f for f in folders if os.path.exists(f + "/session.json"))
def ask(*words):
    with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=10) as sock:
        sock.sendall(" ".join(words).encode() + b"\\n")
        answer = sock.makefile().readline()
    if not answer:
        raise OSError("no answer")
    return answer.strip()
number = 0
while True:
    try:
        with inside.step(f"charge-{number}", verify=lambda key: ask("charged", key) == "yes") as s:
            if not s.done:
                s.result = ask("charge", s.key, str(number))
    except OSError as error:
        say("again", number, error)
        time.sleep(0.01)
        continue
    number += 1
    time.sleep(0.005)
"""


class Bank(socketserver.ThreadingTCPServer):
    """Charges whatever it is asked to: it counts per key, and answers a while later."""

    daemon_threads = allow_reuse_address = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Teller)
        self.charges: Counter[str] = Counter()
        self.numbers: dict[str, int] = {}
        self.lock = threading.Lock()


class Teller(socketserver.StreamRequestHandler):
    """Serves one request."""

    server: Bank

    def handle(self) -> None:
        words = self.rfile.readline().decode().split()
        if len(words) < 2:
            return
        bank, answer = self.server, b"yes\n"
        with bank.lock:
            if words[0] == "charge":
                bank.charges[words[1]] += 1
                bank.numbers[words[1]] = int(words[2])
            elif not bank.charges[words[1]]:
                answer = b"no\n"
        time.sleep(random.uniform(0, 0.01))
        try:
            self.wfile.write(answer)
        except OSError:
            return  # its client is gone


@pytest.fixture
def bank() -> Iterator[Bank]:
    with Bank() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Fleet:
    """A home and its standby."""

    def __init__(self, homes: Homes) -> None:
        self.hosts: dict[str, Operators] = {name: homes(name) for name in ("a", "b")}
        for host in self.hosts.values():
            host.extra["CRIUCTL_CONNECTIONS"] = "hangup"
        self.watches = dict[str, Supervised]()

    @property
    def home(self) -> str:
        """The host where it lives: a slow machine may have let a lease run out without a kill."""
        roles = {}
        for name, watch in self.watches.items():
            told = watch.events("home", "standby", "recovered", "fenced")
            roles[name] = told[-1]["event"] if told else ""
        return next((name for name, role in roles.items() if role in ("home", "recovered")), "a")

    def supervise(self, name: str, *options: str) -> None:
        """Begin to supervise on a host."""
        started = self.hosts[name].start("supervise", "web", *OPTIONS, *options)
        self.watches[name] = Supervised(started)

    def status(self) -> dict[str, int]:
        """PID and holder at home; nothing while it is being restored."""
        found = self.hosts[self.home]("status", "web", check=False)
        return {key: found[key] for key in ("pid", "holder_pid") if found.get(key)}

    def kill(self, what: str) -> None:
        """Kill a part of the home, or all of it."""
        home = self.home
        other = "b" if home == "a" else "a"
        watch, known, before = self.watches[home], self.status(), self.recovered(other)
        if what in ("criuctl", "host"):
            watch.command.process.kill(signal.SIGKILL)
            watch.command.process.wait(PATIENCE)
        if what in ("holder", "host") and "holder_pid" in known:
            _kill(known["holder_pid"])
        if what in ("process", "host") and "pid" in known:
            for pid in oracle.tree(known["pid"]):
                _kill(pid)
        if what == "criuctl":
            self.supervise(home)
        elif what == "host":
            self.watches[other].wait("recovered", before + 1)
            self.supervise(home, "--standby")

    def goes_on(self, bank: Bank, count: int) -> None:
        """Wait for so many charges more."""
        before = len(bank.numbers)
        try:
            wait_until(lambda: len(bank.numbers) > before + count, PATIENCE, "charges go on")
        except TimeoutError as error:
            home = self.hosts[self.home]
            known = home("status", "web", check=False), home("capture", "web", check=False)
            output = [watch.command.output()[-3000:] for watch in self.watches.values()]
            raise AssertionError(f"seed {SEED}: {known}\n" + "\n".join(output)) from error

    def recovered(self, name: str) -> int:
        """How often a host has brought the session back."""
        return len(self.watches[name].events("recovered"))


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def test_no_charge_is_made_twice_and_none_is_lost(homes: Homes, bank: Bank) -> None:
    dice, fleet = random.Random(SEED), Fleet(homes)
    print(f"seed {SEED}", file=sys.stderr)
    folders = [str(host.home.run) for host in fleet.hosts.values()]
    run_program(fleet.hosts["a"], "web", PROGRAM, str(bank.server_address[1]), *folders)
    fleet.supervise("a")
    fleet.watches["a"].wait("snapshot")
    fleet.supervise("b", "--standby")
    fleet.watches["b"].wait("standby")
    kinds = ["process", "holder", "criuctl", "host"]
    for number in range(KILLS):
        fleet.goes_on(bank, 3)
        time.sleep(dice.uniform(0, 0.7))
        fleet.kill(kinds[number % 4] if number < 8 else dice.choice(kinds))
    fleet.goes_on(bank, 10)
    home = fleet.home
    steps = steps_of(fleet.hosts[home], "web")
    with bank.lock:
        charges, numbers = dict(bank.charges), sorted(bank.numbers.values())
    assert set(charges.values()) == {1}, f"charged more than once, seed {SEED}"
    assert numbers == list(range(len(numbers))), f"a charge was lost, seed {SEED}"
    done = {step["key"] for step in steps.values() if step["state"] == "done"}
    assert done <= {*charges}, "what is done has been charged"
    assert len(charges.keys() - done) <= 20, "and is known, but for the last moments"
    for name, watch in fleet.watches.items():
        if name != home:
            watch.stop()
    fleet.watches[home].stop()
