"""Credentials in addresses, and how they are taken out of text.

An address may hold a user and a password (``https://user:secret@host``) or a signature in its
query.  criuctl repeats addresses in errors, warnings, logs and reports: those that it was given,
and those inside of other libraries' messages.  `redacted` takes the credentials out of such a text.
It is applied where text leaves: by `CriuctlError`, by `Reporter`, by whatever is written to
standard error.

Taken out are: of http and https addresses all before the last ``@`` and the query; of any other
address the password.  People write passwords unencoded, so the rules allow characters there that no
URL may have, and rather take too much.
"""

from __future__ import annotations

import re

STRUCK = "***"
_HTTP_USER = re.compile(r"\b(https?://)\S*@", re.IGNORECASE)
_HTTP_QUERY = re.compile(r"\b(https?://[^\s\"'`<>?#]*)\?[^\s\"'`<>]+", re.IGNORECASE)
_PASSWORD = re.compile(r"\b(?!https?:|file:///)([a-z][a-z0-9+.-]*://[^\s:@]*):\S*@", re.IGNORECASE)
_WHOLE_HTTP_USER = re.compile(r"\A(\s*https?://).*@", re.IGNORECASE | re.DOTALL)
_WHOLE_PASSWORD = re.compile(
    r"\A(\s*(?!https?:|file:///)[a-z][a-z0-9+.-]*://[^:@]*):.*@", re.IGNORECASE | re.DOTALL
)


def redacted(text: str) -> str:
    """Return `text` without the credentials of the addresses in it."""
    if "://" not in text:
        return text
    text = _HTTP_USER.sub(rf"\g<1>{STRUCK}@", text)
    text = _HTTP_QUERY.sub(rf"\g<1>?{STRUCK}", text)
    return _PASSWORD.sub(rf"\g<1>:{STRUCK}@", text)


def redacted_value(text: str) -> str:
    """Return a value that may be an address, and nothing else, without its credentials, which may
    have blanks.
    """
    text = _WHOLE_HTTP_USER.sub(rf"\g<1>{STRUCK}@", text)
    return redacted(_WHOLE_PASSWORD.sub(rf"\g<1>:{STRUCK}@", text))


def has_credentials(text: str) -> bool:
    """Return whether `redacted` would change it."""
    return redacted(text) != text
