"""Search for a client's regular expression, for a limited time, in another process.

A pattern can be made that takes for ever on a text that does not match.  Python's `re` holds the
interpreter meanwhile: all clients of the server would wait.
"""

from __future__ import annotations

import json
import sys
from typing import NamedTuple

from ..errors import TimedOut, UsageError
from ..proc import command


class Found(NamedTuple):
    """A match, as `re.Match`: its text, and those of its groups."""

    text: str
    parts: tuple[str | None, ...]

    def groups(self) -> tuple[str | None, ...]:
        """Return the texts of the groups."""
        return self.parts


_LIMIT = 3.0  # seconds for one search
# It ends by itself, too: this process may end before it.
_PROGRAM = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (4, 4))
pattern, text = json.load(sys.stdin)
found = re.compile(pattern, re.MULTILINE).search(text)
print(json.dumps(None if found is None else [found[0], found.groups()]))
"""


def search(pattern: str, text: str) -> Found | None:
    """Return the first match; `UsageError` if the search takes too long."""
    argv = [sys.executable, "-I", "-S", "-c", _PROGRAM]
    try:
        done = command.run(argv, timeout=_LIMIT, input=json.dumps([pattern, text]).encode())
    except TimedOut as error:
        raise UsageError(
            f"the search for {pattern!r} takes longer than {_LIMIT:g} s",
            hint="A simpler pattern: no repetition inside of a repetition.",
        ) from error
    found = json.loads(done.stdout)
    return None if found is None else Found(found[0], tuple(found[1]))
