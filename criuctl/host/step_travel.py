"""How a session's steps travel: into a checkpoint, out of it, and out of the store's replica.

A checkpoint has a copy of the journal, one JSON object a line, as of the freeze. A restore hands
that copy on to the holder that gets the tree, together with what the store has; the holder joins
both with its own journal, if this host has one, and sets nothing back. A copy of a session
(``restore --as``) is another session: it gets the steps of the checkpoint only, and new keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..checkpoint.chunks import StreamRef
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.terminal_records import HolderRecord
from ..checkpoint.writer import CheckpointWriter
from ..errors import Damaged

if TYPE_CHECKING:
    from ..session.client.session import Session

QUIET_SECONDS = 2.0  # that a dump waits for steps of the kind once
_STREAM = "steps"
_BATCH = 256 << 10  # bytes of one request


class StepCopy:
    """The steps of the session that is dumped."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[str, dict[str, Any]] = {}
        self._sequence = 0

    def read(self) -> None:
        """Read what has changed since the last call."""
        while True:
            answer = self._session.request("step-list", since=self._sequence)
            for step in answer["steps"]:
                self._sequence = max(self._sequence, step["sequence"])
                self._known[step["id"]] = step
            if not answer["more"]:
                return

    def store(self, writer: CheckpointWriter) -> StreamRef | None:
        """Add them to the checkpoint; return their stream, None if there are none."""
        if not self._known:
            return None
        for step in self._known.values():
            line = json.dumps(step, separators=(",", ":")).encode() + b"\n"
            writer.add_bytes(_STREAM, line)
        return writer.stream(_STREAM)


def hand_on(
    session: Session,
    held: HolderRecord | None,
    reader: CheckpointReader,
    stored: Iterable[dict[str, Any]],
    *,
    supervised: bool,
) -> None:
    """Give the holder the steps of the checkpoint, and those that are `stored` besides.

    `supervised`: they wait for the store from the first moment on; else they do not, although
    their last life may have been supervised.
    """
    if held is not None and held.steps is not None:
        for batch in _batches(_lines(reader, held.steps)):
            session.request("step-merge", steps=batch, checkpoint=True)
    for batch in _batches(stored):
        session.request("step-merge", steps=batch)
    session.request("step-merge", steps=[], replicated=supervised)


def _lines(reader: CheckpointReader, ref: StreamRef) -> Iterable[dict[str, Any]]:
    from ..steps.journal import MAX_BYTES  # the journal itself may not be larger

    data = b""
    for chunk in reader.chunks(ref):
        data += chunk
        if len(data) > MAX_BYTES:
            raise Damaged("the checkpoint has more steps than a session may have")
    for line in data.splitlines():
        try:
            step = json.loads(line)
        except (ValueError, RecursionError):
            step = None
        if not isinstance(step, dict):
            raise Damaged("the checkpoint's steps are damaged")
        yield step


def _batches(steps: Iterable[dict[str, Any]]) -> Iterable[list[dict[str, Any]]]:
    """Yield lists that fit into one request each."""
    batch, size = list[dict[str, Any]](), 0
    for step in steps:
        batch.append(step)
        size += len(json.dumps(step))
        if size > _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
