"""A session's past: its audit log, and its output as a recording; with and without its holder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import NotFound, SessionGone
from ..host.audit_log import NAME, entries
from ..session import names
from ..session.holder.output_log import read_file
from ..session.holder.timeline import OWNER, records
from ..session.screen.asciicast import cast
from ..session.sessions import state_of
from .sessions import connect


def audit(config: Config, name: str, since: int = 0) -> list[dict[str, Any]]:
    """Return the entries of the audit log of the session of this name, oldest first, above sequence
    `since`.
    """
    try:
        with connect(config, name, role="observe") as session:
            path = Path(session.hello["status"]["audit"])
    except SessionGone:
        if state_of(config, name) is None:
            raise
        path = names.state_folder(config.state_dir, name) / NAME
    try:
        return list(entries(path, since))
    except OSError as error:
        raise NotFound(
            f"the audit log of session {name!r} cannot be read: {error.strerror}"
        ) from error


def recording(config: Config, name: str) -> list[str]:
    """Yield the lines of an asciicast of all output that is kept of the session."""
    status, base, data = kept_output(config, name)
    folder = names.state_folder(config.state_dir, name)
    known = list(records(folder / "timeline"))
    if known and known[0][2] == OWNER:
        del known[0]
    else:  # it may begin with output of an earlier session of this name
        known = [record for record in known if record[0] >= status["created"] - 1]
    return list(cast(status, data, base, known))


def kept_output(config: Config, name: str) -> tuple[dict[str, Any], int, bytes]:
    """Return the session's status, the offset of the oldest byte of its output that is kept, and
    all output from there on.
    """
    try:
        with connect(config, name, role="observe") as session:
            status = session.hello["status"]
            output = session.read("start", status["offset"])
            return status, output.offset, output.data
    except SessionGone as error:
        return left_output(config, name, error)


def left_output(config: Config, name: str, gone: SessionGone) -> tuple[dict[str, Any], int, bytes]:
    """Return the same for a session whose holder does not answer; raise `gone`, the reason, if
    nothing is kept.
    """
    state = state_of(config, name)
    if state is None:
        raise gone
    try:
        return state, *read_file(Path(state["log"]))
    except (OSError, ValueError) as damaged:
        raise NotFound(f"the output of session {name!r} is not kept any more: {damaged}") from gone
