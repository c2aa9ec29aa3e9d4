"""What became of connections, or will, in lines for people: a dump's, a plan's and a restore's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .text import printable

_ALIKE = 5  # connections that are told one by one, if all is the same with them


def connection_lines(told: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """One line for each connection; many that are alike in all that counts become one."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for c in told:
        warnings = c.get("details", {}).get("warnings")
        # a hook may say anything
        more = [f"warning: {text}" for text in warnings] if isinstance(warnings, list) else []
        more += [f"hint: {c['hint']}"] if c.get("hint") else []
        groups.setdefault((c["peer"], c[key], c["application"], c["reason"], *more), []).append(c)
    lines = []
    for (peer, word, application, reason, *more), alike in groups.items():
        first = alike[0]
        who = f"PID {first['pid']} fd {first['fd']}: {printable(first['local'] or '(no name)')}"
        if len(alike) > _ALIKE:
            who = (
                f"{len(alike)} connections of PIDs "
                f"{', '.join(str(p) for p in sorted({c['pid'] for c in alike})[:4])}"
            )
        how = f" ({printable(application)})" if application else ""
        tries = max(c.get("attempts", 0) for c in alike)
        how += f" after {tries} tries" if word == "failed" and tries > 1 else ""
        why = f": {printable(reason)}" if reason else ""
        line = f" -> {printable(peer or '(no name)')} {printable(word)}{how}{why}"
        lines += (
            [who + line]
            if len(alike) > _ALIKE
            else [
                f"PID {c['pid']} fd {c['fd']}: {printable(c['local'] or '(no name)')}{line}"
                for c in alike
            ]
        )
        lines += [f"  {printable(text)}" for text in more]
    return lines
