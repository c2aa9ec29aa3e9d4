"""What a holder does when no test from outside can be in time: a client dies while it is answered, a PID comes again."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from criuctl.proc.tree import ProcessIdentity
from criuctl.session.holder import cgroup
from criuctl.session.holder.audit_log import AuditLog
from criuctl.session.holder.connection import Connection, Wait
from criuctl.session.holder.holder import Holder, Identity
from criuctl.session.holder.output_log import OutputLog
from criuctl.session.screen.modes import Modes


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Holder]:
    monkeypatch.setattr(cgroup, "create", lambda _name: None)
    log, audit = OutputLog(tmp_path / "output"), AuditLog(tmp_path / "audit.jsonl")
    made = Holder(Identity("s", "0" * 32), tmp_path, tmp_path, log, Modes(), audit)
    made.state = "running"
    yield made
    for connection in list(made.connections.values()):
        connection.close("the test ends")
    made.loop.close()
    log.close()
    audit.close()


def client(holder: Holder) -> tuple[Connection, socket.socket]:
    ours, theirs = socket.socketpair()
    return holder.add_connection(ours, 0), theirs


def test_a_client_that_is_gone_with_several_waits_keeps_no_answer_from_others(holder: Holder) -> None:
    gone, theirs = client(holder)
    other, listening = client(holder)
    holder.waits = [Wait(gone, 1, "exit"), Wait(gone, 2, "exit"), Wait(other, 3, "exit")]
    theirs.close()
    holder.finish("exited", 0, None)
    assert not holder.waits and list(holder.connections.values()) == [other]
    with listening:
        assert b'"id":3' in listening.recv(4096)
    assert [timer for timer in holder.loop._timers if not timer.cancelled]  # it does not stay for ever


def test_a_helper_with_the_pid_of_an_earlier_root_is_a_helper(holder: Holder) -> None:
    ended: list[int] = []
    holder.state, holder.tree.root = "checkpointed", ProcessIdentity(4711, 1)
    holder.helpers[4711] = ended.append
    holder.tree.helpers.add(4711)
    holder.on_reaped(4711, 0)
    assert ended == [0] and not holder.helpers and not holder.tree.helpers


def test_a_holder_without_descriptors_does_not_spin(holder: Holder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    holder.listen()
    assert holder.listener is not None
    listener, real = holder.listener, holder.add_connection
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

    monkeypatch.setattr(holder, "listener", SimpleNamespace(fileno=listener.fileno, accept=accept))
    monkeypatch.setattr(holder, "add_connection", taken)
    holder.loop.after(0.3, scarce.clear)
    holder.loop.after(5, end)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "socket"))
        holder.loop.run()
    assert holder.connections and len(calls) < 10
    listener.close()


def test_a_query_that_cannot_be_looked_into_is_given_up(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(_name: str, _flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", scarce)
    holder.modes.asked = [(5, "6n")]
    holder.queries._look()
    assert holder.queries._cursors == {5: None}


@pytest.mark.parametrize("size", [1, 7, 1023, 32767, 32768, 100_000])
def test_what_is_told_of_a_command_is_bounded_however_its_words_fall(holder: Holder, size: int) -> None:
    holder.identity.command = ["x" * size] * (200_000 // size)
    told = holder.status()["command"]
    assert sum(map(len, told)) <= (32 << 10) + 3 and told[-1].endswith("...")
    holder.identity.command = ["sh", "-c", "exit"]
    assert holder.status()["command"] == ["sh", "-c", "exit"]
