"""A *feeder*: a process that brings the memory of a moved session that already runs.

A session that has moved runs before all of its memory is in place.  It must not depend on the
criuctl that received it: its old home is gone, and an older state of it would repeat what it has
sent already.  So that criuctl starts a feeder, early, while the memory is still being sent.  The
feeder opens the store, and what arrives in it, as far as there is room in the host's memory
(`criuctl.checkpoint.opened_chunks`).  For the restore it serves the pages (`criuctl.criu.lazy`).
Until the tree is about to run the feeder ends with its criuctl, and the tree with it; from then on
it is independent, and ends when every page is there.  If it fails or is killed, the tree is ended,
as with any lazy restore, and its checkpoint remains.

The two talk over a SOCK_SEQPACKET pair, in JSON: first the configuration of the store, ``pack`` for
each that has arrived, then ``load`` (with the folder of the images), ``listen``, ``watch`` and
``run``, the last three answered by the same word; ``done`` when every page is there.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import struct
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ..checkpoint.manifest import Manifest
from ..checkpoint.opened_chunks import Gathered
from ..checkpoint.packs import pack_of
from ..checkpoint.repository import Repository
from ..config import Config
from ..criu.lazy import LazyPages
from ..errors import CriuctlError, RestoreFailed, TimedOut
from ..proc import command
from ..proc.procfs import available_memory
from ..proc.tree import ProcessIdentity
from ..report import Reporter
from ..store import open_store
from . import materialise

_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from criuctl.restore.page_feeder import main; "
    "sys.exit(main())"
)
# the part of the configuration that it needs
_STORE = ("store", "key_dir", "cache_dir", "workers", "uploads")
_PATIENCE = 30.0  # seconds for an answer, and for its end
_NICE = -15  # processes of the tree wait for its pages
_MESSAGE = 1 << 16  # bytes
# bytes of memory that are left to the host, in addition to what the tree will need
_SPARE = 512 << 20


class Feeder:
    """A feeder that was started; `close` it."""

    def __init__(self, config: Config, memory: int) -> None:
        """`config`: with the store that will hold the checkpoint; `memory`: bytes of memory of its
        tree.
        """
        self._socket, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A feeder that hangs, and does not read, is noticed when its answer does not come.
        self._socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", math.ceil(_PATIENCE), 0)
        )
        try:
            with other_end:
                words = [str(Path(__file__).parents[2]), str(other_end.fileno())]
                self._child = command.spawn(
                    [sys.executable, "-I", "-c", _PROGRAM, *words],
                    pass_fds=[other_end.fileno()],
                    new_session=True,
                )
        except BaseException:
            self._socket.close()
            raise
        self._alone = False  # the tree runs, and needs it
        self.send({key: getattr(config, key) for key in _STORE} | {"memory": memory})

    def arrived(self, name: str, size: int) -> None:
        """Report that this object of the store has arrived; returns at once.

        An object that it misses is read when it is needed.
        """
        if pack_of(name) is not None:
            with suppress(OSError):
                self._socket.send(
                    json.dumps({"pack": name, "size": size}).encode(), socket.MSG_DONTWAIT
                )

    def load(self, manifest: Manifest, folder: int) -> None:
        """Have it look up the pages of this checkpoint, whose images are in `folder`; returns at
        once.
        """
        self.send({"load": manifest.id}, folder)

    def pages(self) -> FedPages:
        """Have it serve them for a restore."""
        self.send({"listen": True})
        return FedPages(self)

    def send(self, what: dict[str, Any], *fds: int) -> None:
        """Send a message; if the feeder has ended, that is noticed when its answer does not
        come.
        """
        with suppress(OSError):
            socket.send_fds(self._socket, [json.dumps(what).encode()], fds)

    def expect(self, word: str, timeout: float | None = _PATIENCE) -> None:
        """Wait for this answer; raises what went wrong there."""
        self._socket.settimeout(timeout)
        try:
            said = json.loads(self._socket.recv(_MESSAGE) or b"{}")
        except (TimeoutError, ConnectionError):
            said = {}
        if said.get("said") != word:
            why = said.get("error") or "the process that brings it has ended"
            raise RestoreFailed(f"memory cannot follow: {why}", hint="Restore without --lazy.")

    def leave_alone(self) -> None:
        """Note that the tree is about to run: from now on the feeder does not end with criuctl."""
        self.send({"run": True})
        self.expect("run")
        self._alone = True

    def close(self, *, failed: bool = False) -> None:
        """Close the connection; the feeder ends unless the tree runs and nothing has `failed`.

        May be called again.
        """
        self._socket.close()
        if failed and self._alone:
            self._child.kill()  # ends the tree
        if failed or not self._alone:
            self._alone = False
            try:
                self._child.wait(_PATIENCE)
            except TimedOut:
                self._child.kill()
                self._child.wait()
        self._child.close()


class FedPages:
    """The pages of a feeder, during one restore; has the interface of `LazyPages`."""

    def __init__(self, feeder: Feeder) -> None:
        self._feeder = feeder

    def __enter__(self) -> FedPages:
        """Wait until it listens for CRIU."""
        try:
            self._feeder.expect("listen")
        except BaseException:
            self._feeder.close(failed=True)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._feeder.close(failed=True)

    def watch(self, root: ProcessIdentity) -> None:
        """Start what ends the tree if the feeder ends too early; `watched` waits for that."""
        self._feeder.send({"watch": [root.pid, root.start_time]})

    def watched(self) -> None:
        """Wait until the tree does not outlive the feeder; to be called before it runs."""
        self._feeder.expect("watch")

    def about_to_run(self) -> None:
        """Note that from here on both outlive criuctl."""
        self._feeder.leave_alone()

    def finish(self) -> None:
        """Wait until every page has arrived; raises what went wrong: the tree must not go on
        then.
        """
        self._feeder.expect("done", timeout=None)


class _Left(Exception):
    """The criuctl that has started this process is gone."""


def main() -> int:
    """Run the feeder's program."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[2])) as channel:
        try:
            with ExitStack() as stack:
                _feed(channel, stack)
        except _Left:
            return 1
        except (CriuctlError, OSError) as error:
            _send(channel, {"error": getattr(error, "message", "") or str(error)})
            return 1
    return 0


def _feed(channel: socket.socket, stack: ExitStack) -> None:
    settings = _receive(channel)
    size = int(settings.pop("memory"))
    config = Config(**settings)
    store = open_store(config.store, config)
    stack.callback(store.close)
    repository = stack.enter_context(Repository.open(store, config))
    reader = repository.reader(Reporter())
    gathered = Gathered(reader, lambda more: available_memory() >= size + more + _SPARE)
    stack.callback(gathered.close)
    fds: list[int] = []
    while "pack" in (message := _receive(channel, fds)):
        gathered.take(message["pack"], message["size"])
    with suppress(OSError):
        os.nice(_NICE)  # this thread, and those that it starts
    manifest = repository.manifest(message["load"])
    for fd in fds:
        stack.callback(os.close, fd)
    (folder,) = fds
    memory = materialise.lazy_memory(manifest, reader, gathered)
    _receive(channel)
    with LazyPages(folder, memory) as pages:
        _send(channel, {"said": "listen"})
        pages.watch(ProcessIdentity(*_receive(channel)["watch"]))
        pages.watched()
        _send(channel, {"said": "watch"})
        _receive(channel)
        _send(channel, {"said": "run"})
        pages.finish()
    _send(channel, {"said": "done"})


def _receive(channel: socket.socket, fds: list[int] | None = None) -> dict[str, Any]:
    """Return the next message; descriptors that come with it are added to `fds`."""
    data, got, _, _ = socket.recv_fds(channel, _MESSAGE, 1)
    if fds is not None:
        fds += got
    if not data:
        raise _Left
    return dict(json.loads(data))


def _send(channel: socket.socket, what: dict[str, Any]) -> None:
    with suppress(OSError):  # no reader is left
        channel.sendall(json.dumps(what).encode())


__all__ = ["FedPages", "Feeder", "main"]
