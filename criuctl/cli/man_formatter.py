"""The format of manual pages in a terminal.

`criuctl.cli.pages` passes it the parts of a command's help, ``criuctl help TOPIC`` the Markdown of
a page or a runbook. `criuctl.cli.manual` derives from it the formatter that writes roff.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

_HEADING = re.compile(r"(#+) +(.*)")
BOLD = re.compile(r"\*\*(.+?)\*\*")


class ManFormatter(click.HelpFormatter):
    """A formatter with the headings of a manual page: upper case, no colon, text indented by
    two.
    """

    def write_heading(self, heading: str) -> None:
        self.write(f"{'':>{self.current_indent}}{heading.upper()}\n")

    def write_example(self, what: str, lines: Sequence[str]) -> None:
        """Write a few command lines, not wrapped, and their purpose."""
        self.write_text(what)
        self.write_lines(lines)

    def write_lines(self, lines: Sequence[str]) -> None:
        """Write lines to be typed, unchanged."""
        for line in lines:
            self.write(f"{'':>{self.current_indent + 4}}{line}".rstrip() + "\n")

    def write_subheading(self, words: str) -> None:
        """Write a heading inside a section."""
        self.write(f"{'':>{self.current_indent}}{words}\n")

    def write_prose(self, text: str) -> None:
        """Write a paragraph of a page in Markdown."""
        self.write_text(self._plain(text))

    def write_item(self, text: str) -> None:
        """Write an item of a list."""
        margin = " " * self.current_indent
        self.write(click.wrap_text(self._plain(text), self.width, f"{margin}- ", f"{margin}  "))
        self.write("\n")

    def write_markdown(self, text: str) -> None:
        """Write the headings, paragraphs, lists and fenced lines of a page or a runbook."""
        from . import topics

        before = ""
        for block, lines in topics.blocks(text):
            heading = _HEADING.fullmatch(lines[0]) if block == "text" else None
            if block != "item" or before != "item":
                self.write_paragraph()
            if heading:
                self._write_title(len(heading[1]), heading[2])
            elif block == "lines":
                self.write_lines(lines)
            elif block == "item":
                self.write_item(" ".join(lines))
            else:
                self.write_prose(" ".join(lines))
            before = block

    def _write_title(self, depth: int, words: str) -> None:
        if depth > 2:
            self.write_subheading(words)
            return
        self.dedent()
        self.write_heading(words)
        self.indent()

    @staticmethod
    def _plain(text: str) -> str:
        from . import topics

        return topics.with_links(BOLD.sub(r"\1", text), lambda name: f"criuctl help {name}")
