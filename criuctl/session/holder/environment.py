"""Variables of the session that its clients may bring up to date: where an agent, a display is.

A program keeps the environment with which it was started.  So what a client brings by
``update-environment`` reaches what can still take it:

- commands that are started next to the terminal (`new_commands`);
- shells with hooks, at their next prompt: they read the file ``environment`` in the folder that the
  session sees as CRIUCTL_SESSION_DIR, a line with a number that changes, then ``NAME=VALUE``, or
  ``NAME`` for a variable that is no longer set;
- every program that was started with SSH_AUTH_SOCK: it names the symbolic link ``ssh-agent`` in
  that folder, and the link is changed.

Only variables of a list are taken, which the host's configuration gives (`update_environment`): a
client could otherwise have a shell load its library.  The holder never follows the link.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import CriuctlError
from ...proc.procfs import read_raw
from .. import names
from .audit_log import AuditWriter
from .connection import Connection
from .operators import Operator, Refused
from .processes import Tree
from .request_values import Message, Operations
from .session_files import SessionFiles

_MOST, _LONGEST = 64, 4096  # variables in one request, characters of a value


class SessionEnvironment:
    """The variables that clients have brought to one session."""

    def __init__(self, files: SessionFiles, tree: Tree, audit: AuditWriter) -> None:
        self._files, self._tree, self._audit = files, tree, audit
        self.allowed: tuple[str, ...] = ()  # set when the holder starts
        self._values: dict[str, str | None] = {}  # None: not set
        self._changes = 0
        self.operations: Operations = {"update-environment": ("write", self._update)}

    def applied(self, env: dict[str, str]) -> dict[str, str]:
        """Return the environment of a new command, from that of another program of the session."""
        shown = {**self._values, **self._shown(env.get(names.SESSION_DIR, ""))}
        kept = {name: value for name, value in env.items() if name not in shown}
        return kept | {name: value for name, value in shown.items() if value is not None}

    def _update(self, connection: Connection, by: Operator, message: Message) -> Message:
        given = message.get("variables")
        if not isinstance(given, dict) or len(given) > _MOST:
            raise Refused("bad-request", f"'variables' must be an object of {_MOST} at most")
        taken = {name: value for name, value in given.items() if name in self.allowed}
        for name, value in taken.items():
            if value is not None and not _usable(name, value):
                raise Refused("bad-request", f"{name}: no text that a variable could have")
        self._values |= taken
        self._changes += 1
        self._write()
        self._audit.record("update-environment", by, variables=sorted(taken))
        return {"taken": sorted(taken), "refused": sorted(given.keys() - taken.keys())}

    def _write(self) -> None:
        """Change the link, and the file for shells; a full disk must not end a session."""
        folder = self._files.run_folder / "inside"
        if not folder.is_dir():
            return
        with suppress(OSError):
            if names.AGENT_SOCKET in self._values:
                link(folder, self._values[names.AGENT_SOCKET])
            shown = {**self._values, **self._shown(self._session_dir())}
            lines = [f"{os.getpid()}-{self._changes}"]
            lines += [name if value is None else f"{name}={value}" for name, value in shown.items()]
            temporary = folder / ".environment"
            temporary.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(temporary, flags, 0o600), "w", errors="surrogateescape") as file:
                file.write("\n".join(lines) + "\n")
            temporary.replace(folder / "environment")

    def _shown(self, folder: str) -> dict[str, str | None]:
        """Return SSH_AUTH_SOCK as programs are given it: the link, which can still be changed."""
        if self._values.get(names.AGENT_SOCKET) is None:
            return {}
        path = agent_link(folder)
        return {names.AGENT_SOCKET: path} if path else {}

    def _session_dir(self) -> str:
        """Return the folder CRIUCTL_SESSION_DIR, as the session's first process was given it."""
        root = self._tree.root
        with suppress(OSError, CriuctlError):
            data = read_raw(f"/proc/{root.pid}/environ") if root is not None else b""
            for entry in data.split(b"\0"):
                name, _, value = os.fsdecode(entry).partition("=")
                if name == names.SESSION_DIR:
                    return value
        return ""

    # -- re-exec ----------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return all of it, for the next program of this holder."""
        return {"environment": [list(self.allowed), self._values, self._changes]}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `to_state` returned; an older holder returned nothing."""
        if "environment" in state:
            allowed, self._values, self._changes = state["environment"]
            self.allowed = tuple(allowed)


def agent_link(folder: str) -> str:
    """Return the path of the link in a session's folder; "" if a socket's path is not so long."""
    path = f"{folder}/{names.AGENT_LINK}"
    return path if folder and len(os.fsencode(path)) < names.LONGEST_SOCKET else ""


def link(folder: Path, target: str | None) -> None:
    """Have the link in `folder` lead to `target`, or remove it; `OSError`."""
    path, temporary = folder / names.AGENT_LINK, folder / f".{names.AGENT_LINK}"
    if target is None:
        path.unlink(missing_ok=True)
        return
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(path)


def _usable(name: str, value: object) -> bool:
    fits = isinstance(value, str) and len(value) <= _LONGEST and value.isprintable()
    return fits and (name != names.AGENT_SOCKET or str(value).startswith("/"))
