"""criuctl keeps live executions alive: checkpoint, store, move and restore Linux process trees.

``criuctl.Session`` is the Python API to sessions under a holder (see
`criuctl.session.client.session`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session.client.session import Session

__version__ = "0.1.0"

__all__ = ["Session", "__version__"]


def __getattr__(name: str) -> Any:
    """`Session`, imported when first asked for: the command line must start without it."""
    if name == "Session":
        from .session.client.session import Session

        return Session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
