"""One module per command; each is imported when its command is invoked, never before."""

from __future__ import annotations
