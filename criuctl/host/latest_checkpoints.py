"""The last checkpoint that this host knows of each session, so that no restore goes back in time
unnoticed.

A user who can write to a store can remove its newest checkpoint; and a session that was dumped into
one store may have an older checkpoint in another.  In both cases ``restore NAME`` would find an
older state without noticing.  So a host notes what it stored or restored last: one small file per
name in ``state_dir/latest``.  It outlives the session (`kill`), and goes with the session's last
checkpoint (`rm`, `prune`) or with `criuctl forget`.

- A dump notes its checkpoint as soon as the manifest is durable, an import what it brought; a
  restore notes what it restored, older or not: that was decided.  Copies (``--as``), trials and
  migrations note nothing: what they carry is in no store, or is no session's newest.
- What this host itself removes is no loss: the newest of the rest is noted in its place.
- Of two checkpoints the one with the higher incarnation is newer, because each restore adds one.
  Within one incarnation the session was on one host, so its clock decides, and within one store the
  number.
- A host that never saw the session, a standby that takes over, or one that lost its state folder
  knows nothing and asks nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert
from msgspec.structs import asdict

from ..checkpoint.manifest import Manifest
from ..checkpoint.repository import Repository
from ..checkpoint.summary import CheckpointSummary
from ..config import Config
from ..report import Reporter
from .registry import check_name, write_record


class Latest(Struct, frozen=True):
    """One checkpoint, and the session that it is of."""

    name: str
    session: str  # the session's id
    checkpoint: str
    number: int
    incarnation: int
    created: str  # RFC 3339, by the clock of the host that made it
    store: str  # URL

    @property
    def ref(self) -> str:
        """Return the name that a user gives it."""
        return f"{self.name}@{self.number}"

    @classmethod
    def of(cls, found: Manifest | CheckpointSummary, store: str) -> Latest:
        """Return it from a manifest, or a manifest's summary."""
        name, session = (
            (found.session.name, found.session.id)
            if isinstance(found, Manifest)
            else (found.session, found.session_id)
        )
        return cls(name, session, found.id, found.number, found.incarnation, found.created, store)

    @property
    def label(self) -> str:
        """Return its description for a message."""
        return (
            f"{self.name}@{self.number} ({self.checkpoint[:12]}, of {self.created}) in {self.store}"
        )

    def newer_than(self, other: Latest) -> bool:
        """Return whether this checkpoint of the same session was made later."""
        if self.checkpoint == other.checkpoint:
            return False
        if self.incarnation != other.incarnation:
            return self.incarnation > other.incarnation
        if self.store == other.store:
            return self.number > other.number
        return (moment(self.created) or 0) > (moment(other.created) or 0)


def moment(text: str) -> float | None:
    """Return an RFC 3339 time as UNIX seconds, None if it is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def known(config: Config, name: str) -> Latest | None:
    """Return what this host knows of this name; None for nothing, or nothing that it can read."""
    try:
        with open(_folder(config) / f"{check_name(name)}.json", "rb") as file:
            found = convert(json.loads(file.read(1 << 16)), Latest)
            return found if found.name == name else None
    except (OSError, ValueError, ValidationError, RecursionError):
        return None


def note(config: Config, latest: Latest, reporter: Reporter) -> None:
    """Note it; a failure is a warning, because the operation itself is done."""
    try:
        write_record(_folder(config), check_name(latest.name), asdict(latest))
    except OSError as error:
        reporter.warning(
            f"that {latest.name}@{latest.number} is the newest checkpoint could not be noted: "
            f"{error.filename}: {error.strerror}",
            "A later restore on this host cannot detect that it finds an older one.",
        )


def forget(config: Config, name: str) -> None:
    """Remove what is noted of this name; a missing file is no error."""
    (_folder(config) / f"{check_name(name)}.json").unlink(missing_ok=True)


def removed(
    config: Config, repository: Repository, gone: Sequence[CheckpointSummary], reporter: Reporter
) -> None:
    """Note, if this host has removed the noted checkpoint, the newest one that is left."""
    ids = {summary.id for summary in gone}
    for name in sorted({summary.session for summary in gone if summary.session}):
        was = known(config, name)
        if was is None or was.checkpoint not in ids or was.store != repository.store.url:
            continue
        left = [
            Latest.of(s, was.store) for s in repository.list(name) if s.session_id == was.session
        ]
        if left:
            note(config, left[-1], reporter)
        else:
            forget(config, name)


def described(
    config: Config, name: str, session: str, checkpoint: str | None, now: float
) -> dict[str, Any] | None:
    """Return the session's last checkpoint in a store, else `checkpoint`, as ``status --json`` has
    it; unknown values are null.
    """
    found = known(config, name)
    if found is not None and found.session == session:
        made = moment(found.created)
        age = round(now - made, 3) if made is not None else None
        return {"id": found.checkpoint, "number": found.number, "age_s": age, "store": found.store}
    return {"id": checkpoint, "number": None, "age_s": None, "store": None} if checkpoint else None


def _folder(config: Config) -> Path:
    return Path(config.state_dir) / "latest"
