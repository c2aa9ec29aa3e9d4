"""Plain technical English: phrases that the code and its manual do without."""

from __future__ import annotations

import re
from pathlib import Path

PROJECT = Path(__file__).parents[2]

# A program is "it", and says, reports or shows: see CONTRIBUTING.md.
FORBIDDEN = re.compile(
    r"\b(somebody|whoever|anew|is told of|was told of|becomes of|who is told|of which is none)\b",
    re.IGNORECASE,
)
# The value of an internal state, not a word that people read.
ALLOWED = re.compile(r'"anew"|# anew:')


def texts() -> list[Path]:
    """Every file of the package and of the documentation that people read."""
    package = [p for kind in ("*.py", "*.md") for p in (PROJECT / "criuctl").rglob(kind)]
    return [*package, *(PROJECT / name for name in ("README.md", "CONTRIBUTING.md"))]


def test_no_forbidden_phrase() -> None:
    found = []
    for path in texts():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if FORBIDDEN.search(ALLOWED.sub("", line)):
                found.append(f"{path.relative_to(PROJECT)}:{number}: {line.strip()}")
    assert found == []


def test_the_search_finds_what_it_looks_for() -> None:
    assert len(texts()) > 500
    assert FORBIDDEN.search("Somebody else has it") and FORBIDDEN.search("what becomes of it")
