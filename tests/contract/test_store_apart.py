"""The process that speaks to a store for another one: its fate, and that of calls, when either dies
or is interrupted.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.keeper import wait_until
from support.places import ApartStore

from criuctl import errors
from criuctl.config import Config
from criuctl.errors import CriuctlError, ObjectMissing, StoreError, StoreUnreachable, UsageError
from criuctl.proc import early_process
from criuctl.store import Store, coming, open_store
from criuctl.store.boto3_process import ProcessStore, _Failure
from criuctl.store.local import LocalStore

pytestmark = pytest.mark.contract


@pytest.fixture
def given(tmp_path: Path) -> Iterator[ApartStore]:
    """An empty one."""
    store = ApartStore(str(tmp_path / "store"), Config())
    store.create()
    yield store
    store.close()
    assert not Path(f"/proc/{store.aside.pid}").exists()


def test_memory_of_the_store_is_not_copied(given: ApartStore, tmp_path: Path) -> None:
    """What was put is read where it lies when the process reads it: also where it was changed after
    a put had begun.
    """
    own, other = given.memory(3 << 20), memoryview(bytearray(os.urandom(100)))
    own[:] = os.urandom(own.nbytes)
    given.put("both", [own, other, own[5:70_000], b"bytes"])
    content = b"".join([own, other, own[5:70_000], b"bytes"])
    assert LocalStore(str(tmp_path / "store")).get("both") == content
    for target in (given.memory(1 << 20), memoryview(bytearray(1 << 20))):
        given.read_into("both", 1000, target)
        assert target == content[1000 : 1000 + target.nbytes]
    shared = given.aside.shared.place(own[5:70_000])  # what is sent of it in place of the content
    assert shared is not None and shared.stop - shared.start == 69_995


def test_more_memory_than_both_have_is_ordinary(given: ApartStore) -> None:
    large = given.memory(1 << 30)
    assert given.aside.shared.place(large[:4096]) is None
    large[:4096] = os.urandom(4096)
    given.put("o", large[:4096])
    assert given.get("o") == large[:4096]


def test_an_unfinished_listing_gives_its_connection_back(
    given: ApartStore,
) -> None:
    for number in range(3):
        given.put(f"o{number}", b"")
    for _ in range(100):  # more than there are connections
        assert next(iter(given.list())).name == "o0"
    assert [info.name for info in given.list()] == ["o0", "o1", "o2"]


def test_a_listing_of_many(given: ApartStore, tmp_path: Path) -> None:
    for number in range(2500):
        (tmp_path / "store" / f"o{number:04}").touch()
    assert [info.name for info in given.list()] == [f"o{number:04}" for number in range(2500)]


def test_it_does_not_hear_what_a_terminal_sends(given: ApartStore) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(given.aside.pid, number)
    given.put("o", b"x")
    assert given.get("o") == b"x"


def test_killed_it_is_a_store_that_cannot_be_reached(given: ApartStore) -> None:
    os.kill(given.aside.pid, signal.SIGKILL)
    for _ in range(50):  # more than there are connections
        with pytest.raises(StoreUnreachable, match="has ended"):
            given.get("o")


def stop(store: ApartStore) -> None:
    """Have its process stand still."""
    os.kill(store.aside.pid, signal.SIGSTOP)
    stat = Path(f"/proc/{store.aside.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", 20, "it stands still")


def asked(store: Store, times: int) -> tuple[list[threading.Thread], list[BaseException]]:
    """So many threads that ask for an object, and what they caught."""
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            store.get("o")
        except BaseException as error:
            caught.append(error)

    threads = [threading.Thread(target=ask) for _ in range(times)]
    for thread in threads:
        thread.start()
    return threads, caught


def test_calls_fail_at_once_when_it_is_killed(given: ApartStore) -> None:
    stop(given)
    threads, caught = asked(given, 40)  # some of them wait for a connection
    time.sleep(0.2)
    assert not caught
    os.kill(given.aside.pid, signal.SIGKILL)
    for thread in threads:
        thread.join(20)
    assert len(caught) == 40 and all(isinstance(error, StoreUnreachable) for error in caught)


def test_closed_while_it_does_not_answer(given: ApartStore) -> None:
    stop(given)
    threads, caught = asked(given, 40)
    time.sleep(0.2)
    given.close()
    for thread in threads:
        thread.join(20)
    assert len(caught) == 40 and all(isinstance(error, StoreUnreachable) for error in caught)
    with pytest.raises(StoreUnreachable):
        given.get("o")


def test_a_call_that_is_interrupted_leaves_the_others_alone(given: ApartStore) -> None:
    given.put("o", b"x")

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(5):
            stop(given)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                given.get("o")
            os.kill(given.aside.pid, signal.SIGCONT)
            assert given.get("o") == b"x"
    finally:
        signal.signal(signal.SIGALRM, before)


def test_it_ends_with_the_one_that_has_forked_it_off(tmp_path: Path) -> None:
    """It is killed, so nothing closes its descriptors, and another process that it has forked has
    copies of all.
    """
    program = (
        "import os, signal, sys\n"
        "from criuctl.proc.early_process import EarlyProcess\n"
        "aside = EarlyProcess('criuctl.store.boto3_process')\n"
        "if os.fork() == 0:\n"
        "    signal.pause()\n"
        "print(aside.pid, flush=True)\n"
        "signal.pause()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        pidfd = os.pidfd_open(pid)
        child.kill()
        assert select.select([pidfd], [], [], 20)[0]
        os.close(pidfd)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_it_holds_nothing_of_what_the_caller_prints_to(tmp_path: Path) -> None:
    program = (
        "from criuctl.proc.early_process import EarlyProcess\naside = "
        "EarlyProcess('criuctl.store.boto3_process')\nprint(aside.pid, flush=True)\ninput()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdin is not None
    try:
        streams = Path(f"/proc/{int(child.stdout.readline())}/fd")
        wait_until(
            lambda: {os.readlink(streams / str(n)) for n in range(3)} == {os.devnull},
            20,
            "it has streams of its own",
        )
    finally:
        child.stdin.close()
        child.wait()


def test_an_error_at_opening_is_raised_in_the_caller(tmp_path: Path) -> None:
    store = ApartStore("ftp://host/store", Config())
    try:
        for _ in range(2):
            with pytest.raises(UsageError, match="ftp"):
                store.get("o")
    finally:
        store.close()


def test_errors_arrive_as_what_they_are(given: ApartStore) -> None:
    with pytest.raises(ObjectMissing) as caught:
        given.get("packs/aa/bb")
    assert caught.value.details == {"object": "packs/aa/bb"}
    for cls in vars(errors).values():
        if (
            isinstance(cls, type)
            and issubclass(cls, CriuctlError)
            and cls.__init__ is CriuctlError.__init__
        ):
            sent = cls("what happened", hint="what to do", object="o")
            got = pickle.loads(pickle.dumps(sent))  # noqa: S301
            assert (type(got), got.to_dict(), str(got)) == (cls, sent.to_dict(), "what happened")


class Odd(Exception):
    """It takes more than it says to `Exception`, so it cannot be made again."""

    def __init__(self, what: str, other: int) -> None:
        super().__init__(what)
        self.other = other, threading.Lock()


def test_errors_that_cannot_be_rebuilt_are_sent_as_text() -> None:
    try:
        try:
            raise ValueError("cause")
        except ValueError as cause:
            raise Odd("odd", 5) from cause
    except Odd as error:
        sent = pickle.loads(pickle.dumps(_Failure.of(error)))  # noqa: S301
    received = sent.again()
    assert (type(received), str(received)) == (StoreError, "Odd: odd")
    assert (type(received.__cause__).__name__, str(received.__cause__)) == ("ValueError", "cause")
    assert "test_store_apart.py" in "".join(traceback.format_exception(received))


def test_a_process_without_room_for_threads_answers_all_the_same(tmp_path: Path) -> None:
    program = (
        "import sys, threading\n"
        'def refuse(self): raise RuntimeError("can\'t start new thread")\n'
        "start, threading.Thread.start = threading.Thread.start, refuse\n"
        "from criuctl.config import Config\n"
        "from criuctl.proc.early_process import EarlyProcess\n"
        "from criuctl.store.boto3_process import ProcessStore\n"
        "aside = EarlyProcess('criuctl.store.boto3_process')\nthreading.Thread.start = start\n"
        "store = ProcessStore(sys.argv[1], Config(), aside)\nstore.create()\n"
        "def put(n): store.put(f'o{n}', b'x')\n"
        "threads = [threading.Thread(target=put, args=(n,)) for n in range(40)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print(len(list(store.list())))\nstore.close()\naside.reap()\n"
    )
    argv = [sys.executable, "-c", program, str(tmp_path / "store")]
    assert (
        subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
        == "40\n"
    )


def test_what_it_starts_hears_signals(given: ApartStore) -> None:
    """A program that finds credentials is ended by ^C as it ever was: nothing ignored is
    inherited.
    """
    given.put("o", b"")  # it is up
    status = Path(f"/proc/{given.aside.pid}/status").read_text()
    ignored = int(re.search(r"^SigIgn:\s*([0-9a-f]+)", status, re.MULTILINE)[1], 16)  # type: ignore[index]
    assert not any(
        ignored >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    )


def test_where_there_is_no_room_for_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(os, "fork", Mock(side_effect=BlockingIOError(errno.EAGAIN, "no room")))
    before = os.listdir("/proc/self/fd")
    url, config = "s3://bucket/prefix", Config()
    early_process.begin("criuctl.store.boto3_process")
    with coming(url, config), open_store(url, config) as store:
        assert type(store).__name__ == "S3Store"
    early_process.end_waiting()
    assert os.listdir("/proc/self/fd") == before


def test_an_early_process_that_was_not_used_is_not_waited_for() -> None:
    early_process.begin("criuctl.store.boto3_process")
    (waiting,) = early_process._waiting.values()
    os.kill(waiting.pid, signal.SIGSTOP)
    began = time.monotonic()
    early_process.end_waiting()
    assert not Path(f"/proc/{waiting.pid}").exists()
    assert time.monotonic() - began < 1


def test_a_store_that_was_announced_is_handed_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    url, config = "s3://bucket/prefix", Config()
    with coming(url, config):
        first, second = open_store(url, config), open_store(url, config)
    assert [type(first) is ProcessStore, type(second) is ProcessStore] == [True, False]
    first.close()
    with coming(url, config):  # and it was not asked for
        pid = open_store.__globals__["_opened_early"][url]._process.pid
    assert not Path(f"/proc/{pid}").exists()
    with coming("s3://", config), pytest.raises(UsageError):
        open_store("s3://", config)


def test_a_process_that_stands_still_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ApartStore(str(tmp_path / "store"), Config())
    store.create()  # on a busy machine it may take its time to load
    monkeypatch.setattr(store, "_patience", 3.0)
    os.kill(store.aside.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(StoreUnreachable, match="does not answer"):
            store.put("o", b"content")
        assert 3 <= time.monotonic() - began < 120
    finally:
        os.kill(store.aside.pid, signal.SIGCONT)
        store.close()
