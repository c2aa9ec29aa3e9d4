"""Manual pages for `man`: the text of ``--help`` in roff, for every command, topic and runbook.

The same code writes both: `criuctl.cli.pages` passes the parts of a page to a formatter, and
`RoffFormatter` writes them with the macros of man(7). A command's page is
``criuctl-store-init.1``, a topic's or a runbook's ``criuctl-store-lost.7``; the page about the
configuration is ``criuctl-config.5``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from .. import __version__
from . import topics
from .man_formatter import BOLD, ManFormatter
from .pages import LazyGroup, PageContext

_OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
_COMMAND = re.compile(r"(`[^`\n]+`)")
# characters that roff would replace by typographic ones
_ESCAPES = {"\\": "\\e", "'": "\\(aq", "`": "\\(ga", "~": "\\(ti", "^": "\\(ha"}


def page_name(path: str) -> str:
    """Return the name of a page for `man`, such as ``criuctl-store-init``."""
    return path.replace(" ", "-")


def _plain(text: str) -> str:
    """Return text with everything escaped that roff would take for an instruction."""
    text = "".join(_ESCAPES.get(letter, letter) for letter in text)
    return f"\\&{text}" if text.startswith(".") else text


def _literal(text: str) -> str:
    """Return text to be typed: its hyphens can be copied from the page."""
    return _plain(text).replace("-", "\\-")


def inline(text: str) -> str:
    """Return running text, in which `this` is text to be typed."""
    parts = _COMMAND.split(text)
    for n, part in enumerate(parts):
        if n % 2:
            parts[n] = f"\\fB{_literal(part[1:-1])}\\fR"
        else:
            parts[n] = _OPTION.sub(
                lambda match: match[0].replace("-", "\\-"),
                _plain(part) if n == 0 else part.replace("\\", "\\e"),
            )
    return "".join(parts)


def _markdown(text: str) -> str:
    """Return running text of a page, with its links."""
    shown = topics.with_links(
        text, lambda name: f"criuctl-{topics.man_name(name)}({topics.section(name)})"
    )
    return BOLD.sub(r"\\fB\1\\fR", inline(shown))


class RoffFormatter(ManFormatter):
    """A formatter that writes a page's parts with the macros of man(7)."""

    _section = ""

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self._section = name
        self.buffer.append(f".SH {name.upper()}\n")
        yield

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        self.buffer.append(f"\\fB{_literal(prog)}\\fR {_literal(args)}\n")

    def write_text(self, text: str) -> None:
        if self._section == "Name":
            path, _, summary = text.partition(" - ")
            self.buffer.append(f"{_literal(page_name(path))} \\- {inline(summary)}\n")
            return
        if self._section == "See also":
            names = [f"\\fB{_literal(page_name(name))}\\fR(1)" for name in text.split(", ")]
            self.buffer.append(",\n".join(names) + "\n")
            return
        for paragraph in text.split("\n\n"):
            if paragraph.startswith("\b"):  # click's mark for lines that are not rewrapped
                self.write_lines(paragraph.lstrip("\b\n").splitlines())
            else:
                self._paragraph(inline(" ".join(paragraph.split())))

    def _paragraph(self, *lines: str) -> None:
        if not (self.buffer and self.buffer[-1].startswith(".SH ")):
            self.buffer.append(".PP\n")
        self.buffer.extend(f"{line}\n" for line in lines)

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        for term, text in rows:
            self.buffer.append(
                f".TP\n\\fB{_literal(term.strip())}\\fR\n{inline(' '.join(text.split()))}\n"
            )

    def write_example(self, what: str, lines: Sequence[str]) -> None:
        """Write a few command lines, and their purpose."""
        self._paragraph(inline(what))
        self.write_lines(lines)

    def write_lines(self, lines: Sequence[str]) -> None:
        """Write lines to be typed, unchanged."""
        self._paragraph(".RS 4", ".nf", *map(_literal, lines), ".fi", ".RE")

    def write_paragraph(self) -> None:
        """Do nothing: paragraphs begin where they are written."""

    def write_heading(self, heading: str) -> None:
        """Write a heading of a page in Markdown."""
        self.buffer.append(f".SH {_plain(heading.upper())}\n")

    def write_subheading(self, words: str) -> None:
        self.buffer.append(f".SS {_plain(words)}\n")

    def write_prose(self, text: str) -> None:
        self._paragraph(_markdown(text))

    def write_item(self, text: str) -> None:
        self.buffer.append(f".IP \\(bu 2\n{_markdown(text)}\n")


class RoffContext(PageContext):
    """A context whose help is a manual page."""

    formatter_class = RoffFormatter


def _title(name: str, section: int) -> str:
    return f'.TH {_literal(name.upper())} {section} "" "criuctl {__version__}" "criuctl"\n'


def command_pages(root: click.Command, program: str) -> Iterator[tuple[str, str]]:
    """Yield file name and text of the page of every command, `root` first."""
    todo = [RoffContext(root, info_name=program, help_option_names=["-h", "--help"])]
    while todo:
        ctx = todo.pop(0)
        name = page_name(ctx.command_path)
        yield f"{name}.1", _title(name, 1) + ctx.command.get_help(ctx) + "\n"
        for word in ctx.command.list_commands(ctx) if isinstance(ctx.command, LazyGroup) else ():
            found = (
                ctx.command.get_command(ctx, word) if isinstance(ctx.command, LazyGroup) else None
            )
            if found is not None:
                todo.append(RoffContext(found, info_name=word, parent=ctx))


def topic_pages(program: str) -> Iterator[tuple[str, str]]:
    """Yield file name and text of the page of every topic and every runbook."""
    for topic in topics.names():
        name, section = f"{program}-{topics.man_name(topic)}", topics.section(topic)
        formatter = RoffFormatter()
        with formatter.section("Name"):
            formatter.write_text(f"{name} - {topics.summary(topic)}")
        formatter.write_markdown(topics.body(topic))
        yield f"{name}.{section}", _title(name, section) + formatter.getvalue()
        if (other := f"{program}-{topic}") != name:  # its name as a topic
            yield f"{other}.{section}", f".so man{section}/{name}.{section}\n"


def write_pages(root: click.Command, program: str, folder: Path) -> list[Path]:
    """Write all pages below `folder`, to ``man1``, ``man5`` and ``man7``, and remove those of an
    earlier version.
    """
    pages = [*command_pages(root, program), *topic_pages(program)]
    made = []
    for section in ("1", "5", "7"):
        place = folder / f"man{section}"
        place.mkdir(parents=True, exist_ok=True)
        names = {name for name, _ in pages if name.endswith(f".{section}")}
        for old in [*place.glob(f"{program}.{section}"), *place.glob(f"{program}-*.{section}")]:
            if old.name not in names:
                old.unlink()
        for name, text in pages:
            if name in names:
                (place / name).write_text(text)
                made.append(place / name)
    return made
