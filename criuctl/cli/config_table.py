"""The table of the configuration's keys: meaning, default and example of each.

The table is the manual's page about the configuration (``manual/configuration.md``): ``criuctl
config explain``, the sample file and the page for `man` are all made of it, and a test compares it
with `criuctl.config.Config`. An item of the page is::

    - `KEY`: MEANING. Default: `VALUE`. Example: `KEY: VALUE`
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from .. import config
from ..quoting import quoted
from . import topics

PAGE = "configuration"
_ITEM = re.compile(r"`(\w+)`: (.*) Default: `(.*?)`\. Example: `(.*)`")
_WIDTH = 78
_HEAD = """\
Configuration of criuctl: every key with its default. Remove the # before a
key to set it. `criuctl config check FILE` names the line of each fault, and
`criuctl config show` what is in force. See also criuctl-config(5).
criuctl reads /etc/criuctl/config.yaml, then ~/.config/criuctl/config.yaml."""


class Key(NamedTuple):
    """One key; `default` and `example` are YAML, the example with the key."""

    name: str
    section: str
    meaning: str
    default: str
    example: str

    @property
    def kind(self) -> str:
        """The kind of value that it takes."""
        return config.kind_of(self.name)

    @property
    def variable(self) -> str:
        """The name of the variable that sets it."""
        return config.variable_of(self.name)

    def to_dict(self) -> dict[str, Any]:
        """Return one JSON object."""
        return {
            "key": self.name,
            "section": self.section,
            "type": self.kind,
            "default": self.default,
            "meaning": self.meaning,
            "example": self.example,
            "variable": self.variable,
        }


@cache
def table() -> dict[str, Key]:
    """Return the keys by name, in the page's order."""
    return {key.name: key for key in _read()}


def _read() -> Iterator[Key]:
    section = ""
    for block, lines in topics.blocks(topics.text(PAGE)):
        text = " ".join(lines)
        if block == "text" and text.startswith("## "):
            section = text.removeprefix("## ")
        elif block == "item" and (item := _ITEM.fullmatch(text)):
            name, meaning, default, example = item.groups()
            yield Key(name, section, _without_links(meaning), default, example)


def _without_links(text: str) -> str:
    return topics.with_links(text, lambda page: f"`criuctl help {quoted(page)}`")


def sample() -> str:
    """Return a configuration file that sets nothing: each key with its default is commented out."""
    parts = ["\n".join(f"# {line}" for line in _HEAD.splitlines())]
    section = ""
    for key in table().values():
        if key.section != section:
            section = key.section
            parts.append(f"# -- {section} {'-' * (_WIDTH - len(section) - 6)}")
        parts.append(
            f"{_comment(key.meaning)}\n{_comment(f'Example: {key.example}')}\n"
            f"{_comment(f'{key.name}: {key.default}', '#')}"
        )
    return "\n\n".join(parts) + "\n"


def _comment(text: str, sign: str = "# ") -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=sign,
        subsequent_indent=sign if sign.endswith(" ") else f"{sign}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
