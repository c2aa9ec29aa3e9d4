"""The manual's pages and the runbooks, as Markdown files.

A page of ``criuctl/manual/`` explains a subject; a runbook of ``criuctl/cli/runbooks/`` is what to
do when something has gone wrong at a site, as sequences of commands that the tests run.
``criuctl help NAME`` shows one, `criuctl.cli.manual` makes a manual page of it.

Both use a small part of Markdown, which `blocks` parses: a title, headings, paragraphs, lists, and
fenced lines. In a runbook, the tests run the lines fenced as ``sh``, in this order; those fenced as
``text`` need something that a test does not have: another host, a person, a full disk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ..quoting import quoted

_RUNBOOKS = Path(__file__).with_name("runbooks")
_PAGES = Path(__file__).parents[1] / "manual"
_LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
# pages about a file, which `man` keeps in section 5 under the name of the file
_FILES = {"configuration": "config"}


def runbooks() -> list[str]:
    """Return the names of the runbooks."""
    return _names(_RUNBOOKS)


def pages() -> list[str]:
    """Return the names of the manual's pages."""
    return _names(_PAGES)


def names() -> list[str]:
    """Return the names of all pages and runbooks, the manual's pages first."""
    return [*pages(), *runbooks()]


def section(name: str) -> int:
    """Return the section of the manual in which `man` finds a page."""
    return 5 if name in _FILES else 7


def man_name(name: str) -> str:
    """Return the name under which `man` finds a page, after the program's."""
    return _FILES.get(name, name)


def text(name: str) -> str:
    """Return a page as it was written."""
    folder = _RUNBOOKS if name in runbooks() else _PAGES
    return (folder / f"{name}.md").read_text(encoding="utf-8")


def title(name: str) -> str:
    """Return a page's title."""
    return text(name).partition("\n")[0].lstrip("# ")


def summary(name: str) -> str:
    """Return the title for use after a name: without a capital letter, except in abbreviations."""
    words = title(name)
    first = words.split()[0]
    if len(first) > 1 and first.isupper():
        return words
    return f"{words[:1].lower()}{words[1:]}"


def body(name: str) -> str:
    """Return a page without its title."""
    return text(name).partition("\n")[2]


def blocks(written: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the parts: ``lines`` (verbatim), ``item`` (of a list) and ``text`` (paragraphs, and
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
        numbered = not fenced and line[:1].isdigit() and line[1:3] == ". "
        if not fenced and found and (not line or item or numbered):
            yield kind, found
            kind, found = "text", []
        if item:
            kind, line = "item", line[2:]
        if line or fenced:
            found.append(line if fenced else line.strip())


def items(name: str, heading: str) -> list[tuple[str, str]]:
    """Return the list of one section of a page as pairs of what is explained and the rest, for
    items of the form ```NAME`, `OTHER`: text``.
    """
    found: list[tuple[str, str]] = []
    within = False
    for block, lines in blocks(body(name)):
        if block == "text" and lines[0].startswith("## "):
            within = lines[0] == f"## {heading}"
        elif within and block == "item":
            term, _, rest = " ".join(lines).partition(": ")
            found.append((term.replace("`", ""), _sentence(rest)))
    return found


def _sentence(written: str) -> str:
    words = with_links(written, lambda page: f"`criuctl help {quoted(page)}`")
    return words[:1].upper() + words[1:]


def links(written: str) -> list[str]:
    """Return the targets of the links, as written."""
    return [target for _text, target in _LINK.findall(written)]


def with_links(written: str, show: Callable[[str], str]) -> str:
    """Return text with the targets of links in parentheses.

    `show` returns how a reader finds another page of the manual; a file of the checkout is shown by
    its path.
    """

    def replaced(match: re.Match[str]) -> str:
        words, target = match.groups()
        if "/" not in target:
            return f"{words} ({show(target.removesuffix('.md'))})"
        path = os.path.normpath(f"criuctl/manual/{target}")
        return path if path.endswith(words) else f"{words} ({path})"

    return _LINK.sub(replaced, written)


def _names(folder: Path) -> list[str]:
    return sorted(
        file.name.removesuffix(".md") for file in folder.iterdir() if file.name.endswith(".md")
    )
