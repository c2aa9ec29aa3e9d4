"""The existing hooks: built in, shipped with criuctl, and executables in the configured folders.

An executable is in ``FOLDER/PHASE/``. Hooks of one phase run in the order of their file names,
whatever folder they are in. A file in a later folder replaces one of the same name (those that ship
come first); an empty or not executable file removes it. Hidden files and left-overs of editors or
package managers are not hooks.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from ..config import Config
from ..errors import ConfigError
from .contract import PHASES, RECONNECT
from .trust import objection

Origin = Literal["built-in", "shipped", "configured"]
_LEFTOVERS = (
    "~",
    ".bak",
    ".orig",
    ".rej",
    ".swp",
    ".dpkg-dist",
    ".dpkg-new",
    ".dpkg-old",
    ".rpmnew",
    ".rpmsave",
)


class Hook(Struct, frozen=True):
    """One hook of one phase."""

    phase: str
    name: str
    origin: Origin
    path: str = ""  # of the executable; "" if built in
    refused: str = ""  # why it may not be run
    hint: str = ""
    about: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of ``hooks list``."""
        body: dict[str, Any] = {"phase": self.phase, "name": self.name, "origin": self.origin}
        more = {"path": self.path, "refused": self.refused, "hint": self.hint, "about": self.about}
        return body | {key: value for key, value in more.items() if value}


# Steps that criuctl itself does at these moments; they come before the executables of their phase
# and cannot be masked.
BUILT_IN = (
    Hook("frozen", "connections", "built-in", about="records every connection of the tree"),
    Hook(
        "frozen", "terminals", "built-in", about="records what the terminals' line disciplines hold"
    ),
    Hook(
        RECONNECT, "postgresql", "built-in", about="logs in again and sets the session up as it was"
    ),
    Hook(
        RECONNECT,
        "redis",
        "built-in",
        about="authenticates again and restores the connection's state",
    ),
    Hook(
        RECONNECT,
        "journal",
        "built-in",
        about="names the service to systemd's journal again",
    ),
    Hook(RECONNECT, "tcp", "built-in", about="connects, optionally with a preamble"),
)


def shipped_folder() -> str:
    """Return the folder of the hooks that ship: inside the installed package, or in the
    checkout.
    """
    installed = Path(__file__).parent / "shipped"
    return str(installed if installed.is_dir() else Path(__file__).parents[2] / "hooks")


def _executables(top: str, phase: str, origin: Origin) -> Iterator[tuple[str, Hook | None]]:
    """Return the files of one folder by name: a hook, or None for a file that masks."""
    folder = os.path.join(top, phase)
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise ConfigError(
            f"the hooks in {folder} cannot be read: {error.strerror}",
            hint="Run criuctl as its owner, or change hook_dirs.",
        ) from error
    for name in names:
        if name.startswith(".") or name.endswith(_LEFTOVERS):
            continue
        path = os.path.join(folder, name)
        try:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                continue
            found = objection(path, top)
        except OSError as error:
            yield (
                name,
                Hook(
                    phase,
                    name,
                    origin,
                    path,
                    refused=f"{path} cannot be read: {error.strerror}",
                    hint=f"Remove {path}.",
                ),
            )
            continue
        if found is not None:
            # Also where it would only mask: a user who can write here must not switch off a hook
            # either.
            yield name, Hook(phase, name, origin, path, refused=found[0], hint=found[1])
        elif status.st_size == 0 or not status.st_mode & 0o111:
            yield name, None
        else:
            yield name, Hook(phase, name, origin, path)


def executables(config: Config, phase: str) -> list[Hook]:
    """Return the executables of `phase` in the order in which they run."""
    found: dict[str, Hook | None] = dict(_executables(shipped_folder(), phase, "shipped"))
    for top in config.hook_dirs:
        found.update(_executables(top, phase, "configured"))
    return [hook for name, hook in sorted(found.items()) if hook is not None]


def all_hooks(config: Config, phase: str | None = None) -> list[Hook]:
    """Return every hook, built in or not, by phase and in order."""
    names = PHASES if phase is None else [phase]
    return [
        h
        for name in names
        for h in (*(b for b in BUILT_IN if b.phase == name), *executables(config, name))
    ]
