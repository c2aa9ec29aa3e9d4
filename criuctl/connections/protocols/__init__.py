"""The application protocols that criuctl can bring back to life on a socket; `base` is what one
must offer.
"""

from __future__ import annotations

from importlib import import_module

from .base import ApplicationProtocol

BUILT_IN = ("postgresql", "redis", "journal", "tcp")


def find(name: str) -> ApplicationProtocol | None:
    """The protocol of that name, imported when it is first asked for; None for a name that only a
    hook may know.
    """
    if name not in BUILT_IN:
        return None
    protocol: ApplicationProtocol = import_module(f".{name}", __package__).PROTOCOL
    return protocol
