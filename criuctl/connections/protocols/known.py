"""The protocol of a name: one that ships (a module with `PROTOCOL`), otherwise a hook of
that name.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, cast

from ...config import Config
from . import BUILT_IN
from .base import ApplicationProtocol
from .external import External


def find(config: Config, name: str, facts: Mapping[str, Any] | None = None) -> ApplicationProtocol:
    """Return the protocol `name`. Whether a hook of that name exists is checked when it is run,
    with `facts`.
    """
    if name in BUILT_IN:
        return cast(
            "ApplicationProtocol", importlib.import_module(f"{__package__}.{name}").PROTOCOL
        )
    return External(config, name, facts or {})
