"""Words in commands that people copy out of a message and paste into a shell.

A path, a name or a key in such a command may have been chosen by another person, who would like to
see ``; rm -rf ~`` pasted.  Each value inside of a command in a message goes through `quoted`; a
unit test looks at every message for that.

Text that is only shown goes through `printable`, or `harmless` if it has several lines: a terminal,
or a language model, that reads it gets no control character and no invisible one.
"""

from __future__ import annotations

import shlex


def quoted(value: object) -> str:
    r"""Return `value` as one word of a shell's command line; control characters are written as
    ``$'\x1b'``.
    """
    text = str(value)
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_escaped, text)) + "'"


def _escaped(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in character.encode(errors="surrogateescape"))


def printable(value: object) -> str:
    """Return `value` as text in which control characters and undecodable bytes are escapes
    (``\x1b``).
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text
    )


def harmless(text: str) -> str:
    """Return `text` of several lines without control sequences: `printable`, but line ends and tabs
    are kept.
    """
    if all(line.isprintable() for line in text.split("\n")):
        return text
    return "".join(c if c in "\n\t" else printable(c) for c in text)
