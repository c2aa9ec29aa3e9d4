"""Plain technical English: phrases that the code and its manual do without."""

from __future__ import annotations

import re
from pathlib import Path

PROJECT = Path(__file__).parents[2]

# A program is "it", and says, reports or shows: see CONTRIBUTING.md.
FORBIDDEN = re.compile(
    r"\b(anew|becomes of|beside|came to nothing|lest|likewise|nobody|of which|somebody|tells"
    r"|thereof|told|untold|whoever|whom|wish|wishes)\b",
    re.IGNORECASE,
)
# Words that are no prose: a verdict and an option of rules, a table of the local cache, the origin
# of a CRIU binary, the name of an interpreter.
ALLOWED = re.compile(r'"beside"|``beside``|"told"|(FROM|INTO|TABLE) told|\|wish\|')

DOCUMENTS = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "scripts/README.md",
    "vagrant/README.md",
)


def texts() -> list[Path]:
    """Every file of the package and of the documentation that people read."""
    kinds = ("*.py", "*.md", "*.js", "*.html")
    package = [p for kind in kinds for p in (PROJECT / "criuctl").rglob(kind)]
    package = [p for p in package if "vendor" not in p.parts]
    formats = [path for kind in ("*.md", "*.json") for path in (PROJECT / "images").glob(kind)]
    folders = [*formats, *(PROJECT / "hooks").rglob("*.md")]
    return [*package, *folders, *(PROJECT / name for name in DOCUMENTS)]


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
