"""Programs that ask their terminal and wait: the holder answers where no terminal does, and only
there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import Criuctl
from support.holding import TIMEOUT, Holders, until
from support.keeper import wait_until
from support.travel import Desk, Travel

pytestmark = pytest.mark.integration

# Prints what it is asked to (in Python's notation), and what it reads then, up to the end that it
# is given.
ASKER = r"""
import os, tty
tty.setraw(0)
os.write(1, b"ready\r\n")
def line():
    read = b""
    while not read.endswith(b"\r"): read += os.read(0, 1)
    return read[:-1].decode()
while True:
    end, text = line().split(" ", 1)
    os.write(1, text.encode().decode("unicode_escape").encode())
    answer = b""
    while not answer.endswith(end.encode()): answer += os.read(0, 1)
    os.write(1, ("<%r>" % answer).encode())
"""
COMMAND = ("python3", "-I", "-S", "-c", ASKER)


@pytest.fixture
def travel(criuctl: Criuctl, holders: Holders) -> Iterator[Travel]:
    travel = Travel(criuctl, holders)
    yield travel
    travel.close()


def test_the_holder_answers_where_no_terminal_is_attached(holders: Holders) -> None:
    """In order, with the cursor of each query's place, and as input of no operator."""
    holders.start(*COMMAND)
    agent = holders.connect(kind="agent")
    watcher = holders.connect(operator="watcher", role="observe")
    watcher.attach("start")
    until(watcher, lambda data: b"ready\r\n" in data)
    agent.send(rb"2c abc\x1b[6n\r\n\r\nd\x1b[?6n\x1b[5n\x1b[>c\x1b[c" + b"\r")
    shown = until(watcher, lambda data: data.endswith(b">"))[1]
    assert shown.endswith(rb"<b'\x1b[2;4R\x1b[?4;2R\x1b[0n\x1b[>0;0;0c\x1b[?1;2c'>")
    agent.lease_yield()
    typed = [entry for entry in agent.audit() if entry["what"] == "input"]
    assert [entry["name"] for entry in typed] == ["tester"]
    status = agent.status()
    assert (status["lease"], status["modes"]["asked"]) == (None, [])


def test_a_terminal_that_is_attached_answers_alone(holders: Holders) -> None:
    """It does as long as its user has the lease; another client that types is no terminal."""
    holders.start(*COMMAND)
    human = holders.connect(kind="human", operator="me")
    human.attach("start", write=True, size=(24, 80), answers=True)
    until(human, lambda data: b"ready\r\n" in data)
    human.send(rb"R \x1b[6n" + b"\r")
    until(human, lambda data: data.endswith(b"\x1b[6n"))
    human.send(b"\x1b[9;9R")
    assert until(human, lambda data: data.endswith(b">"))[1] == rb"<b'\x1b[9;9R'>"
    agent = holders.connect(kind="agent", operator="it")
    human.lease_grant(agent.operator)
    agent.send(rb"R \x1b[6n" + b"\r")
    until(human, lambda data: data.endswith(rb"R'>"))
    assert human.read(0).data.endswith(rb"<b'\x1b[2;15R'>")


def test_queries_wait_for_the_end_of_a_dump(holders: Holders, tmp_path: Path) -> None:
    """While input is held back the answer is as well."""
    go = tmp_path / "go"
    program = f"""
import os, time, tty
tty.setraw(0)
while not os.path.exists({str(go)!r}): time.sleep(0.01)
os.write(1, b"abc\\x1b[6n")
os.write(1, repr(os.read(0, 100)).encode() + b">")
"""
    holders.start("python3", "-I", "-S", "-c", program)
    client = holders.connect()
    client.request("checkpoint-prepare")
    client.request("checkpoint-begin")
    go.touch()
    client.wait_output(3)
    wait_until(lambda: client.status()["modes"]["asked"] == [[7, "6n"]], TIMEOUT, "the query waits")
    client.request("checkpoint-abort")
    client.wait_match(">")
    assert client.read().data == rb"abc" + b"\x1b[6n" + rb"b'\x1b[1;4R'>"


ON_AND_ON = """
import os, tty
tty.setraw(0)
count = 0
while True:
    os.write(1, b"\\r%d\\x1b[6n" % count)
    answer = b""
    while not answer.endswith(b"R"): answer += os.read(0, 1)
    assert answer == b"\\x1b[1;%dR" % (len(str(count)) + 1), answer
    count += 1
"""


def test_a_query_under_way_in_a_dump_is_answered_after_the_restore(travel: Travel) -> None:
    """By the holder that it had and by another one's: it asks all the time, and every answer comes
    once.
    """
    desk = travel.start("python3", "-I", "-S", "-c", ON_AND_ON)
    desk.expect("\r2\x1b")
    travel.away()
    count = int(counts(desk)[-1])
    travel.back()
    goes_on(desk, count)
    travel.away()
    count = int(counts(desk)[-1])
    copy = travel.desk(travel.back("s", "--as", "copy")["session"])
    goes_on(copy, count)
    count = int(counts(copy)[-1])
    copy.client.reexec()
    goes_on(copy, count)


def counts(desk: Desk) -> list[str]:
    return re.findall(r"\r(\d+)\x1b\[6n", desk.log())


def goes_on(desk: Desk, count: int) -> None:
    wait_until(lambda: int(counts(desk)[-1]) > count + 2, TIMEOUT, f"it asks again after {count}")
    assert counts(desk) == [str(number) for number in range(len(counts(desk)))]
