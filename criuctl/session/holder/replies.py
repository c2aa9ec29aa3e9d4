"""Error answers to requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .connection import Connection
from .master import Chunk
from .operators import Refused


def refuse(connection: Connection, request: int, refused: Refused) -> None:
    """Answer a request with an error."""
    error: dict[str, Any] = {"code": refused.code, "message": refused.message}
    if refused.hint:
        error["hint"] = refused.hint
    if refused.details:
        error["details"] = refused.details
    connection.send({"id": request, "error": error})


def refuse_dropped(connections: Mapping[int, Connection], chunks: Iterable[Chunk]) -> None:
    """Answer the clients of queued input that will never be written."""
    for chunk in chunks:
        connection = connections.get(chunk.connection)
        if connection is not None and not chunk.answered:
            refused = Refused("busy", "the input was dropped before the terminal took it")
            refuse(connection, chunk.request, refused)
