"""The program behind `worker`: it waits, warm, and forks for each operation.

``python -m criuctl.sdk.worker_process FD``. On FD, a SOCK_SEQPACKET socket, each packet brings a
descriptor. From that a request is read, one line of JSON: operation, config, arguments,
environment, cwd, umask. The answer is one line as well, how the operation's process has ended
(`proc.forked.Ended`). An end of file on the descriptor, instead of waiting for the answer,
interrupts the operation; it cleans up, and is answered all the same. When FD ends, all operations
are interrupted, and this program ends after the last of them.

This program has one thread, and no import is left to the operations, so that they start within
milliseconds.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec

from ..config import Config
from ..criu import schema
from ..dump import story as dumping
from ..dump.job import DumpRequest
from ..errors import CommandFailed, NotFound, PlatformError, UsageError
from ..ops import fork as forking
from ..ops import group_fork, group_restore, group_snapshot, new_session
from ..ops import migrate as migrating
from ..ops.fork import ForkRequest
from ..ops.group_fork import GroupForkRequest
from ..ops.moving.delivery import MoveOptions
from ..ops.scheduling import batch
from ..proc import forked
from ..report import Reporter
from ..restore import story as restoring
from ..restore.outcome import RestoreResult
from ..restore.request import RestoreRequest
from ..store import coming
from ..transport.frames import encode_error

T = TypeVar("T")

# What the operations import inside their functions; test_sdk_worker looks for more.
_LAZY = (
    "blake3",
    "calendar",
    "criuctl.proc.sessionchild",
    "criuctl.session.holder.master",
    "criuctl.session.launch.daemon",
    "criuctl.session.launch.spawn",
    "criuctl.session.screen.shell_marks",
    "criuctl.store.local",
    "cryptography.exceptions",
    "cryptography.hazmat.primitives.ciphers.aead",
    "encodings.ascii",
    "encodings.raw_unicode_escape",
    "encodings.unicode_escape",
    "zstandard",
)
_S3 = "criuctl.store.s3"  # a quarter of a second, for those that need it


def run(config: Config, _reporter: Reporter, argv: list[str], options: Any) -> dict[str, Any]:
    """Start a session."""
    options["env"] = dict(os.environ) | options["env"]
    options["size"] = tuple(options["size"])
    return new_session.run(config, argv, **options).to_dict()


def dump(config: Config, reporter: Reporter, target: str, request: Any) -> dict[str, Any]:
    """Dump a session."""
    asked = _request(request, DumpRequest)
    result = dumping.dump(config, target, request=asked, reporter=reporter)
    manifest = result.manifest
    facts = {"labels": dict(manifest.labels), "created": manifest.created}
    return {**result.to_dict(), **facts, "degraded": result.degraded}


def restore(config: Config, reporter: Reporter, ref: str, request: Any) -> dict[str, Any]:
    """Restore a checkpoint."""
    asked = _request(request, RestoreRequest)
    result = restoring.restore(config, ref, request=asked, reporter=reporter)
    assert isinstance(result, RestoreResult)
    return {**result.to_dict(), "degraded": result.degraded}


def fork(config: Config, reporter: Reporter, ref: str, request: Any) -> dict[str, Any]:
    """Make copies of a session."""
    asked = _request(request, ForkRequest)
    result = forking.fork(config, ref, request=asked, reporter=reporter)
    restored = {one.session: one.restored for one in result.forks}
    body = result.to_dict()
    body["forks"] = [{**one, "restored": restored[one["session"]]} for one in body["forks"]]
    return {**body, "degraded": result.degraded}


def migrate(
    config: Config, reporter: Reporter, target: str, host: str, options: Any
) -> dict[str, Any]:
    """Move a session to another host."""
    wanted = _request(options, MoveOptions)
    result = migrating.migrate(config, target, host, wanted, reporter=reporter)
    return {**result.to_dict(), "degraded": result.degraded}


def group_dump(config: Config, reporter: Reporter, group: str, request: Any) -> dict[str, Any]:
    """Dump all sessions of a group."""
    asked = _request(request, DumpRequest)
    return group_snapshot.snapshot_group(config, group, request=asked, reporter=reporter).to_dict()


def restore_group(config: Config, reporter: Reporter, ref: str, request: Any) -> dict[str, Any]:
    """Restore all sessions of a group."""
    asked = _request(request, RestoreRequest)
    return group_restore.restore_group(config, ref, request=asked, reporter=reporter).to_dict()


def fork_group(config: Config, reporter: Reporter, ref: str, request: Any) -> dict[str, Any]:
    """Make copies of all sessions of a group."""
    asked = _request(request, GroupForkRequest)
    return group_fork.fork_group(config, ref, request=asked, reporter=reporter).to_dict()


_OPERATIONS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "run": run,
    "dump": dump,
    "restore": restore,
    "fork": fork,
    "migrate": migrate,
    "group-dump": group_dump,
    "group-restore": restore_group,
    "group-fork": fork_group,
}


class _Server:
    """The operations under way."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._running: list[forked.Process] = []
        self._asking: dict[forked.Process, socket.socket] = {}
        self._interrupted: set[forked.Process] = set()
        self._open = True  # more requests may come

    def serve(self) -> None:
        """Serve until the control socket has ended, and all operations have."""
        while self._open or self._running:
            poller = select.poll()
            if self._open:
                poller.register(self._control, select.POLLIN)
            for process in self._running:
                poller.register(process.pidfd, select.POLLIN)
            for process, asking in self._asking.items():
                if process not in self._interrupted:
                    poller.register(asking, select.POLLIN)
            ready = {fd for fd, _ in poller.poll()}
            if self._open and self._control.fileno() in ready:
                self._take()
            for process in list(self._running):
                if process.pidfd in ready:
                    self._answer(process)
                elif self._asking[process].fileno() in ready:  # nothing but its end comes there
                    self._interrupted.add(process)
                    process.stop()

    def _take(self) -> None:
        """Take a request and start it; at the end of the control socket, stop all."""
        data, fds, _, _ = socket.recv_fds(self._control, 16, 1)
        if not data:
            self._open = False
            for process in self._running:
                process.stop()
        if not fds:  # or too many descriptors are open: the caller finds the other end closed
            return
        asking = socket.socket(fileno=fds[0])
        os.set_inheritable(asking.fileno(), False)
        with asking.makefile("rb") as file:
            line = file.readline()
        if not line.endswith(b"\n"):  # its sender was interrupted
            asking.close()
            return
        request = json.loads(line)
        if request["config"]["store"][:3].lower() == "s3:":
            with suppress(Exception):  # met again, and reported, when the store is opened
                importlib.import_module(_S3)
        try:
            forked.start(request["operation"], self._work(request), self._running)
        except OSError as error:
            refused = CommandFailed(f"a process could not be started: {error.strerror}")
            _send(asking, forked.Ended("", {"error": encode_error(refused)}))
        else:
            self._asking[self._running[-1]] = asking

    def _work(self, request: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        config = msgspec.convert(request["config"], Config)
        operation = _OPERATIONS[request["operation"]]

        def work(reporter: Reporter) -> dict[str, Any]:
            for one in (self._control, *self._asking.values()):
                one.close()  # `asking` ends with this process, should the server be killed
            os.environ.clear()
            os.environ.update(request["environment"])
            os.umask(request["umask"])
            _enter(request["cwd"])
            with coming(config.store, config):
                return operation(config, reporter, **request["arguments"])

        return batch.piece(work, Reporter())

    def _answer(self, process: forked.Process) -> None:
        self._running.remove(process)
        self._interrupted.discard(process)
        _send(self._asking.pop(process), process.end())


def _send(asking: socket.socket, ended: forked.Ended) -> None:
    """Answer a request, and close its socket."""
    body = asdict(ended)
    del body["key"]
    with asking, suppress(OSError):  # the caller has ended
        asking.sendall(json.dumps(body).encode() + b"\n")


def _request(given: Any, kind: type[T]) -> T:
    """Return an operation's request from its JSON; `UsageError`."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"an argument is of the wrong kind: {error}") from error


def _enter(folder: str | None) -> None:
    """Go to the caller's current folder, or to none if that is gone."""
    try:
        os.chdir(folder or "/")
    except OSError as error:
        raise NotFound(f"the current folder {folder}: {error.strerror}") from error


def load() -> None:
    """Import what the operations would import."""
    for name in _LAZY:
        importlib.import_module(name)
    with suppress(PlatformError):  # no pycriu: each operation reports it
        schema.load()


def main() -> None:
    """Load what the operations need, and serve."""
    # A program that ignores or blocks signals passes that on.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    load()
    gc.set_threshold(200_000, 50, 50)  # as the command line: operations are short
    gc.collect()
    gc.freeze()  # the operations' processes share these pages
    _Server(socket.socket(fileno=int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
