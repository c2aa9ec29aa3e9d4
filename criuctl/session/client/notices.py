"""Lines about the session that an attached user is shown."""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import UTC, datetime
from typing import Any

from ...quoting import quoted
from . import keys


def checkpointed_text(name: str, checkpoint: object, detach_key: str) -> str:
    """Return the notice that the tree is in a store, and what the user can do."""
    key = f"; {keys.spoken(detach_key)} leaves" if detach_key else ""
    return (
        f"{name} is checkpointed ({str(checkpoint or '')[:12]}); it goes on here when it is "
        f"restored on this host{key}"
    )


def leaving_text(name: str, detach_key: str) -> str:
    """Return the notice that names the detach key."""
    return f"{keys.spoken(detach_key)} leaves {name} running"


def restored_text(name: str, incarnation: int, restored: dict[str, Any]) -> str:
    """Return the banner: which incarnation, from which host, how old, what was dropped."""
    text = f"{name}: restored, incarnation {incarnation}"
    if restored.get("host"):
        text += f", from {restored['host']}"
    if restored.get("created"):
        text += f", as it was {restored['created']}{_age(str(restored['created']))}"
    dropped = restored.get("dropped") or []
    if dropped:
        text += f"; dropped: {', '.join(map(str, dropped))}"
    return text


def _age(created: str) -> str:
    try:
        seconds = int((datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds())
    except (ValueError, TypeError):
        return ""
    for span, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 2 * span or span == 1:
            return f" ({seconds // span} {unit} ago)"
    return ""


def still_text(name: str, how: str, by: object) -> str:
    """Return the notice that the session is `how` (paused or halted), by the operator `by`."""
    who = by.get("name") if isinstance(by, dict) else None
    return (
        f"{name} was {how}{f' by {who}' if who else ''}; `criuctl resume {quoted(name)}` lets it "
        "go on"
    )


def say(text: str) -> None:
    """Write one line about the attachment itself to standard error."""
    with contextlib.suppress(OSError):
        sys.stderr.flush()
        os.write(2, f"[{harmless(text)}]\n".encode(errors="replace"))


def harmless(text: str) -> str:
    """Return `text` without control sequences: names of hosts and operators may hold some."""
    return "".join(c if c.isprintable() else "?" for c in text)
