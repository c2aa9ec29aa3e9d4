"""The audit log of a session, as its holder has written it to the disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config import Config
from ..session import names
from ..session.sessions import state_of
from .registry import SessionRecord

NAME = "audit.jsonl"


def entries(path: Path, since: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the entries above sequence `since`, oldest first; lines that are not JSON are skipped.
    `OSError`.
    """
    with path.open("rb") as file:
        for line in file:
            with suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and entry.get("sequence", 0) > since:
                    yield entry


def killed_by_operator(config: Config, record: SessionRecord) -> bool:
    """Return whether an operator has asked the holder to end this life of the session."""
    state = state_of(config, record.name)
    folder = (
        Path(state["log"]).parent
        if state is not None
        else names.state_folder(config.state_dir, record.name)
    )
    with suppress(OSError):
        return any(
            e.get("what") == "kill" and e.get("incarnation") == record.incarnation
            for e in entries(folder / NAME)
        )
    return False
