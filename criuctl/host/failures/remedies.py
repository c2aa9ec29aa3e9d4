"""CRIU's error messages with their meaning and remedy: tables, tried from top to bottom."""

from __future__ import annotations

from .dump_remedies import DUMP, FLEETING
from .remedy import Remedy
from .restore_remedies import RESTORE

__all__ = ["FLEETING", "REMEDIES", "Remedy"]

REMEDIES: tuple[Remedy, ...] = DUMP + RESTORE
