"""The totals of a host's events: the counters of `metrics`, which must not fall when old events are
removed.

A `Tally` is a fold over events in the order of their numbers: `add` counts each event once, even if
it gets the event again (it remembers the last number).  It stays small: operations and exit codes
are few, and of sessions only the `SESSIONS` that were dumped last are remembered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

SESSIONS = 1000


class Tally(Struct):
    """Sums over all events up to number `seq`."""

    seq: int = 0
    # operation -> exit code -> count
    operations: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # operation -> seconds in all
    connections: dict[str, int] = field(default_factory=dict)  # outcome after a restore -> count
    stored: int = 0  # bytes that dumps added to stores
    freed: int = 0  # bytes that collections gave back
    succeeded: dict[str, str] = field(default_factory=dict)  # operation -> time of its last success
    # session -> its last dump: time, frozen_ms, total_ms, bytes
    dumps: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, event: Mapping[str, Any]) -> None:
        """Count one more event."""
        if event["seq"] <= self.seq:
            return
        self.seq = event["seq"]
        operation, code = str(event.get("operation", "")), int(event.get("exit_code", 0))
        counts = self.operations.setdefault(operation, {})
        counts[str(code)] = counts.get(str(code), 0) + 1
        self.seconds[operation] = round(
            self.seconds.get(operation, 0.0) + float(event.get("seconds", 0.0)), 3
        )
        if code not in (0, 11):
            return
        self.succeeded[operation] = str(event.get("time", ""))
        self.freed += int(event.get("freed_bytes", 0))
        if operation in ("restore", "receive"):
            for outcome, count in event.get("connections", {}).items():
                self.connections[outcome] = self.connections.get(outcome, 0) + int(count)
        if operation in ("dump", "snapshot", "migrate") and event.get("session"):
            self.stored += int(event.get("bytes", {}).get("stored", 0))
            kept = {
                key: event[key]
                for key in ("time", "frozen_ms", "total_ms", "bytes")
                if key in event
            }
            self.dumps.pop(event["session"], None)
            self.dumps[event["session"]] = kept
            while len(self.dumps) > SESSIONS:
                del self.dumps[next(iter(self.dumps))]

    def to_dict(self) -> dict[str, Any]:
        """Return its JSON object."""
        return asdict(self)

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Tally:
        """Return the tally from the object of `to_dict`."""
        return cls(**{name: body[name] for name in cls.__struct_fields__ if name in body})
