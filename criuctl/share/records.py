"""What this host knows of its shares: a folder for each, with the keeper's account of itself.

``RUN_DIR/shares/ID`` has mode 0700. `state.json` has no key and no secret. A share that has ended
stays in the list for a day, with the reason.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from ..errors import NotFound
from ..host import rights
from ..proc.folders import make_private
from ..proc.ownership import check_own
from ..proc.tree import ProcessIdentity
from ..report import utc_text
from ..session.names import DEFAULT_RUN_DIR

if TYPE_CHECKING:
    from ..config import Config

_ID = re.compile("[0-9a-f]{8}")
_KEPT = 24 * 3600.0  # seconds that one that has ended stays in the list
_ENDS = 5.0  # seconds for a keeper to end by itself
LOST, REVOKED = "its process was killed", "revoked"


class Share(Struct):
    """One share, as its keeper wrote it last; times are seconds since 1970."""

    id: str
    session: str
    session_id: str
    role: str
    via: str  # the relay, as ssh:// address
    host: str  # the relay, as guests reach it
    made: float
    expires: float
    port: int = 0
    pid: int = 0  # of the keeper, with the time of its start
    start_time: int = 0
    tunnel: str = "connecting"  # or up
    trouble: str = ""  # why the tunnel does not stand
    guest: str = "none"  # or here, away
    ended: float = 0.0
    why: str = ""  # it has ended

    @property
    def operator(self) -> str:
        """The name under which the session's log has the guest."""
        return f"share-{self.id}"

    @property
    def keeper(self) -> ProcessIdentity:
        """The keeper's process."""
        return ProcessIdentity(self.pid, self.start_time)

    def to_dict(self) -> dict[str, Any]:
        """Return it for people and ``--json``."""
        return {
            "id": self.id,
            "session": self.session,
            "role": self.role,
            "via": self.via,
            "address": f"{self.host}:{self.port}",
            "made": utc_text(self.made),
            "expires": utc_text(self.expires),
            "state": "ended" if self.ended else self.tunnel,
            "trouble": self.trouble,
            "guest": self.guest,
            "operator": self.operator,
            "ended": utc_text(self.ended) if self.ended else None,
            "why": self.why,
        }


def folder_of(config: Config, share: str) -> Path:
    """Return the folder of a share."""
    return Path(config.run_dir or DEFAULT_RUN_DIR) / "shares" / share


def make(config: Config, share: Share) -> Path:
    """Make the folder of a new share, with its first account."""
    folder = folder_of(config, share.id)
    make_private(folder)
    write(folder, share)
    return folder


def write(folder: Path, share: Share) -> None:
    """Replace the account."""
    new = folder / "state.new"
    with suppress(FileNotFoundError):
        new.unlink()
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(msgspec.json.encode(share))
    new.replace(folder / "state.json")


def read(folder: Path) -> Share | None:
    """Return the account in a folder; None if there is none that can be read."""
    try:
        share = msgspec.json.decode((folder / "state.json").read_bytes(), type=Share)
    except (OSError, ValueError):
        return None
    if not share.ended and share.pid and not share.keeper.alive():
        with suppress(OSError):
            share.ended = (folder / "state.json").stat().st_mtime
        share.ended, share.why, share.guest = share.ended or time.time(), LOST, "none"
    return share


def all_shares(config: Config) -> list[Share]:
    """Return the shares, the oldest first; those that ended long ago are forgotten."""
    above = folder_of(config, "")
    check_own(above)
    try:
        names = [name for name in os.listdir(above) if _ID.fullmatch(name)]
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        share = read(above / name)
        if share is None:
            continue
        if share.ended and time.time() - share.ended > _KEPT:
            shutil.rmtree(above / name, ignore_errors=True)
        else:
            found.append(share)
    return sorted(found, key=lambda share: share.made)


def find(config: Config, share: str) -> Share:
    """Return one share; `NotFound`."""
    for known in all_shares(config):
        if known.id == share:
            return known
    raise NotFound("there is no such share on this host", hint="`criuctl share list` shows them.")


def revoke(config: Config, identifier: str) -> Share:
    """End a share and its connections; return its last account when its keeper has ended.

    `NotFound`. One that has ended already stays as it is.
    """
    share = find(config, identifier)
    if share.ended:
        return share
    rights.check(config, "share revoke", share.session)
    try:
        pidfd = os.pidfd_open(share.pid)
    except OSError:
        return find(config, identifier)
    try:
        deadline, number = time.monotonic() + _ENDS, signal.SIGTERM
        while share.keeper.alive():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)
            time.sleep(0.05)
            if time.monotonic() > deadline:
                number = signal.SIGKILL  # its connections end with it
    finally:
        os.close(pidfd)
    ended = find(config, identifier)
    if ended.why == LOST:
        ended.why = REVOKED
        write(folder_of(config, identifier), ended)
    return ended
