"""Libraries that only some commands need: extras of the Python package."""

from __future__ import annotations

import importlib
import sys

from ..errors import PlatformError
from ..quoting import quoted


def need(extra: str, library: str) -> None:
    """Import `library`, which comes with the package's `extra`; raise `PlatformError` if it cannot
    be imported, with the command that installs it.
    """
    try:
        importlib.import_module(library)
    except ImportError as error:
        python = quoted(sys.executable)
        package = quoted(f".[{extra}]")
        raise PlatformError(
            f"this command needs the Python package {library} ({error})",
            hint=f"Run in a clone of criuctl: `{python} -m pip install {package}`.",
        ) from error
