"""The application protocols that criuctl can set up again on a socket; `base` defines the
interface.
"""

from __future__ import annotations

from importlib import import_module

from .base import ApplicationProtocol

BUILT_IN = ("postgresql", "redis", "journal", "tcp")


def find(name: str) -> ApplicationProtocol | None:
    """Return the protocol of that name, imported on first use; None for a name that only a hook may
    know.
    """
    if name not in BUILT_IN:
        return None
    protocol: ApplicationProtocol = import_module(f".{name}", __package__).PROTOCOL
    return protocol
