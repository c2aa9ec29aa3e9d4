"""criuctl keeps live executions alive: checkpoint, store, move and restore Linux process trees.

`Session`, `AsyncSession`, `Group`, `Checkpoint` and `CriuctlError` are the Python API
(`criuctl.sdk`); `criuctl help python-api` describes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import CriuctlError
    from .sdk import AsyncSession, Checkpoint, Group, Session

__version__ = "0.1.0"

__all__ = ["AsyncSession", "Checkpoint", "CriuctlError", "Group", "Session", "__version__"]


def __getattr__(name: str) -> Any:
    """Import a name of the API when it is first asked for: the command line starts without it."""
    if name in ("AsyncSession", "Checkpoint", "Group", "Session"):
        from . import sdk

        return getattr(sdk, name)
    if name == "CriuctlError":
        from .errors import CriuctlError

        return CriuctlError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
