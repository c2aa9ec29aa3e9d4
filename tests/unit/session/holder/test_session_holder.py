"""What a holder does when no test from outside can be in time: a client dies while it is answered,
a PID comes again.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from criuctl.proc.tree import ProcessIdentity
from criuctl.session.holder import cgroup, helper_processes
from criuctl.session.holder.audit_log import AuditLog
from criuctl.session.holder.connection import Connection
from criuctl.session.holder.holder import Holder
from criuctl.session.holder.output_log import OutputLog
from criuctl.session.holder.session_files import SessionFiles
from criuctl.session.holder.session_state import Identity
from criuctl.session.holder.waits import Wait
from criuctl.session.screen.modes import Modes


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Holder]:
    monkeypatch.setattr(cgroup, "create", lambda _name: None)
    log, audit = OutputLog(tmp_path / "output"), AuditLog(tmp_path / "audit.jsonl")
    identity = Identity("s", "0" * 32)
    made = Holder(identity, SessionFiles(tmp_path, tmp_path, log, audit, identity.id), Modes())
    made.session.state = "running"
    yield made
    for connection in made.clients.all():
        connection.close("the test ends")
    made.loop.close()
    log.close()
    audit.close()


def client(holder: Holder) -> tuple[Connection, socket.socket]:
    ours, theirs = socket.socketpair()
    return holder.clients.add(ours, 0), theirs


def test_a_client_that_is_gone_with_several_waits_keeps_no_answer_from_others(
    holder: Holder,
) -> None:
    gone, theirs = client(holder)
    other, listening = client(holder)
    holder.waits.waiting = [Wait(gone, 1, "exit"), Wait(gone, 2, "exit"), Wait(other, 3, "exit")]
    theirs.close()
    holder.finish("exited", 0, None)
    assert not holder.waits.waiting and holder.clients.all() == [other]
    with listening:
        assert b'"id":3' in listening.recv(4096)
    # it does not stay for ever
    assert [timer for timer in holder.loop._timers if not timer.cancelled]


def test_a_helper_with_the_pid_of_an_earlier_root_is_a_helper(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    holder.session.state, holder.tree.root = "checkpointed", ProcessIdentity(4711, 1)
    monkeypatch.setattr(helper_processes, "start", lambda *_arguments: 4711)
    holder.helpers.start(["true"], {}, ended.append)
    assert holder.tree.helpers == {4711}
    holder.on_reaped(4711, 0)
    assert ended == [0] and not holder.tree.helpers and holder.session.state == "checkpointed"


def test_a_holder_without_descriptors_does_not_spin(
    holder: Holder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clients = holder.clients
    clients.listen(holder.files.socket)
    assert clients.listener is not None
    listener, real = clients.listener, clients.add
    calls: list[int] = []
    scarce = [True]

    def accept() -> tuple[socket.socket, object]:
        calls.append(1)
        if scarce:
            raise OSError(errno.EMFILE, "Too many open files")
        return listener.accept()

    def end() -> None:
        holder.loop.running = False

    def taken(sock: socket.socket, pid: int) -> Connection:
        end()
        return real(sock, pid)

    monkeypatch.setattr(clients, "listener", SimpleNamespace(fileno=listener.fileno, accept=accept))
    monkeypatch.setattr(clients, "add", taken)
    holder.loop.after(0.3, scarce.clear)
    holder.loop.after(5, end)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "socket"))
        holder.loop.run()
    assert clients.connections and len(calls) < 10
    listener.close()


def test_a_query_that_cannot_be_looked_into_is_given_up(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scarce(_name: str, _flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", scarce)
    holder.modes.asked = [(5, "6n")]
    holder.queries._look()
    assert holder.queries._cursors == {5: None}


@pytest.mark.parametrize("size", [1, 7, 1023, 32767, 32768, 100_000])
def test_the_reported_command_is_bounded_however_its_words_fall(holder: Holder, size: int) -> None:
    holder.session.identity.command = ["x" * size] * (200_000 // size)
    command = holder.report.status()["command"]
    assert sum(map(len, command)) <= (32 << 10) + 3 and command[-1].endswith("...")
    holder.session.identity.command = ["sh", "-c", "exit"]
    assert holder.report.status()["command"] == ["sh", "-c", "exit"]
