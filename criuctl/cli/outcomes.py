"""The outcomes of connections as lines for people: of a dump, a plan and a restore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .text import printable

_ALIKE = 5  # similar connections that are printed one by one


def connection_lines(connections: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """Return one line for each connection; many similar ones are merged into one line."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for c in connections:
        warnings = c.get("details", {}).get("warnings")
        # a hook may return any text
        more = [f"warning: {text}" for text in warnings] if isinstance(warnings, list) else []
        more += [f"hint: {c['hint']}"] if c.get("hint") else []
        groups.setdefault((c["peer"], c[key], c["application"], c["reason"], *more), []).append(c)
    lines = []
    for (peer, word, application, reason, *more), alike in groups.items():
        first = alike[0]
        source = f"PID {first['pid']} fd {first['fd']}: {printable(first['local'] or '(no name)')}"
        if len(alike) > _ALIKE:
            source = (
                f"{len(alike)} connections of PIDs "
                f"{', '.join(str(p) for p in sorted({c['pid'] for c in alike})[:4])}"
            )
        how = f" ({printable(application)})" if application else ""
        tries = max(c.get("attempts", 0) for c in alike)
        how += f" after {tries} tries" if word == "failed" and tries > 1 else ""
        why = f": {printable(reason)}" if reason else ""
        line = f" -> {printable(peer or '(no name)')} {printable(word)}{how}{why}"
        lines += (
            [source + line]
            if len(alike) > _ALIKE
            else [
                f"PID {c['pid']} fd {c['fd']}: {printable(c['local'] or '(no name)')}{line}"
                for c in alike
            ]
        )
        lines += [f"  {printable(text)}" for text in more]
    return lines
