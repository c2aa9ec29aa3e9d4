"""Runbooks: what to do when something has gone wrong at a site, as sequences of commands that were
tried.

They are Markdown files in ``runbooks/``, as people read them: ``criuctl help store-lost`` prints
one, `criuctl.cli.manual` makes a manual page of it.  Lines fenced as ``sh`` are run by the tests,
in this order; those fenced as ``text`` need what a test has not: another host, a person, a disk
that is full.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def names() -> list[str]:
    """The runbooks there are."""
    return sorted(
        file.name.removesuffix(".md") for file in _folder().iterdir() if file.name.endswith(".md")
    )


def text(name: str) -> str:
    """One of them, as it was written."""
    return (_folder() / f"{name}.md").read_text(encoding="utf-8")


def summary(name: str) -> str:
    """Its title."""
    return text(name).partition("\n")[0].lstrip("# ")


def blocks(written: str) -> Iterator[tuple[str, list[str]]]:
    """Its parts: ``lines`` (to be typed), ``item`` (of a list) and ``text`` (paragraphs, and
    headings with their #).
    """
    found: list[str] = []
    kind, fenced = "text", False
    for line in [*written.splitlines(), ""]:
        if line.startswith("```"):
            if found:
                yield kind, found
            fenced, found = not fenced, []
            kind = "lines" if fenced else "text"
            continue
        item = not fenced and line.startswith("- ")
        if not fenced and found and (not line or item):
            yield kind, found
            kind, found = "text", []
        if item:
            kind, line = "item", line[2:]
        if line or fenced:
            found.append(line if fenced else line.strip())


def _folder() -> Path:
    return Path(__file__).with_name("runbooks")
