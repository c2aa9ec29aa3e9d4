"""Words in commands that people copy out of a message and paste into a shell.

A path, a name or a key in such a command may have been chosen by another person, who would like to
see ``; rm -rf ~`` pasted.  Each value inside of a command in a message goes through `quoted`; a
unit test looks at every message for that.
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
