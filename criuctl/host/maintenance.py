"""The record of a host's maintenance, ``STATE_DIR/maintenance.json``: what was stored, and what is
to come back.

It is written durably before and after each thing that it describes (`criuctl.ops.maintenance`).
While it is active, no session may begin here (`check_open`).
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field, to_builtins

from ..config import Config
from ..errors import Conflict, Damaged
from ..report import utc_text
from .identity import host_name
from .registry import boot_id, write_record

How = Literal["dump", "snapshot", "lost"]
_FILE = "maintenance"


class Item(Struct):
    """One session or configured tree."""

    session: str
    order: int
    tree: bool = False
    # waiting | stored | failed (to be stored) | gone (of itself) | moved (to another host) | back
    # | given-up (to be brought back)
    state: str = "waiting"
    store: str = ""
    checkpoint: str = ""
    ended: bool = False  # by the dump; else it ran on
    before: str = ""  # the newest checkpoint when it was noted
    root: tuple[int, int] = (0, 0)  # PID and start time, in the record's boot
    tries: int = 0  # the command that brings it back
    pid: int | None = None  # once it is back
    error: dict[str, Any] | None = None  # of the last try, to store it or to bring it back
    degraded: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of ``maintenance``, with `findings` for what went wrong."""
        kept = ("session", "tree", "order", "state", "checkpoint", "store", "tries", "pid")
        body = {key: getattr(self, key) for key in kept}
        found = (
            []
            if self.error is None
            else [{"level": "error", "text": self.error["message"], **_only(self.error)}]
        )
        return body | {"findings": found} | ({"error": self.error} if self.error else {})


def _only(error: dict[str, Any]) -> dict[str, Any]:
    return {key: error.get(key) for key in ("code", "hint", "pid", "fd")}


class Record(Struct):
    """The contents of the file."""

    how: How = "dump"
    reason: str = ""
    phase: str = "storing"
    since: float = field(default_factory=time.time)
    boot_id: str = field(default_factory=boot_id)
    items: list[Item] = field(default_factory=list)

    @property
    def shut(self) -> bool:
        """Return whether new sessions are refused."""
        return self.phase != "over"

    def of(self, session: str) -> Item | None:
        """Return the item of this session."""
        return next((item for item in self.items if item.session == session), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of ``maintenance status``."""
        body = {
            "maintenance": self.shut,
            "phase": self.phase,
            "how": self.how,
            "reason": self.reason,
        }
        return body | {
            "since": utc_text(self.since),
            "sessions": [item.to_dict() for item in self.items],
        }


def read(config: Config) -> Record | None:
    """Return the record, None if there is none; `Damaged`."""
    path = Path(config.state_dir) / f"{_FILE}.json"
    try:
        loaded = json.loads(path.read_text())
        items = [
            Item(**_known(Item, {**item, "root": tuple(item["root"])})) for item in loaded["items"]
        ]
        return Record(**{**_known(Record, loaded), "items": items})
    except FileNotFoundError:
        return None
    except PermissionError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(
            f"{path} cannot be understood: {error}",
            hint="Remove it when you know which sessions are to be restored by hand.",
        ) from error


def _known(kind: type[Struct], body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key in kind.__struct_fields__}


def write(config: Config, record: Record) -> None:
    """Write it, durably."""
    write_record(Path(config.state_dir), _FILE, to_builtins(record))


def forget(config: Config) -> None:
    """Remove it; a missing file is no error."""
    (Path(config.state_dir) / f"{_FILE}.json").unlink(missing_ok=True)


def check_open(config: Config) -> None:
    """Raise `Conflict` while new sessions are refused: for `run`, `restore` and `receive`."""
    if not os.path.exists(Path(config.state_dir) / f"{_FILE}.json"):
        return
    record = read(config)
    if record is not None and record.shut:
        why = f" ({record.reason})" if record.reason else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.since))
        raise Conflict(
            f"{host_name(config)} is in maintenance since {since}{why}: no session may begin there",
            hint=(
                "`criuctl maintenance end` brings back what it had ended, and lets new ones in; "
                "`criuctl maintenance status`."
            ),
        )
