"""Names of sessions, and where a session's holder keeps its files.

The socket and the state file are in ``RUN_DIR/holders/NAME``, which is gone after a boot, as is the
holder; the output log, the audit log and the
journal of steps in ``STATE_DIR/holders/NAME``.  Both folders have mode
0700: output may show secrets.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import InvalidName

DEFAULT_RUN_DIR = "/run/criuctl"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ENDED = "ended.json"  # in the state folder: which incarnation has ended by itself
STEPS = "steps"  # in the state folder the journal; in the folder that the tree sees the socket
# In the state folder, the folder of a session's files until the session stands.
BEGINNING = ".beginning"
SESSION_DIR = "CRIUCTL_SESSION_DIR"  # the variable that names the folder that the tree sees
# The variable that names the socket of the user's ssh agent, and in that folder a link to it.
AGENT_SOCKET, AGENT_LINK = "SSH_AUTH_SOCK", "ssh-agent"
LONGEST_SOCKET = 108  # bytes of a socket's path, with the NUL at its end
_LOOK = 0.02  # seconds between two tries to connect
_MAX_SOCKET_PATH = 100  # of the 107 bytes that the kernel takes


def check_name(name: str) -> str:
    """Return the name if a session may have it; `InvalidName`.

    It is 1 to 64 of ``A-Za-z0-9._-``, begins with a letter or digit, and is not all digits.
    """
    if _NAME.fullmatch(name) is None or name.isdigit():
        raise InvalidName(
            f"{name!r} cannot be a session's name",
            hint=(
                "Use 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit, "
                "and not digits alone."
            ),
        )
    return name


def valid_name(name: str) -> bool:
    """Return whether `check_name` accepts it."""
    return _NAME.fullmatch(name) is not None and not name.isdigit()


def run_folder(run_dir: str, name: str) -> Path:
    """Return the folder of the socket and the state file.

    `run_dir` is as in the configuration, "" for the default.
    """
    return Path(run_dir or DEFAULT_RUN_DIR) / "holders" / check_name(name)


def state_folder(state_dir: str, name: str) -> Path:
    """Return the folder of the output log and the audit log."""
    return Path(state_dir) / "holders" / check_name(name)


def clear(folder: Path) -> None:
    """Remove a folder of files, if there is one; `OSError`."""
    if folder.is_dir() and not folder.is_symlink():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """Yield an address of the unix socket at `path`, short enough for the kernel."""
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def connect(path: Path, timeout: float | None = None) -> socket.socket:
    """Return a stream socket connected to the unix socket at `path`.

    `OSError`; `BlockingIOError` if the listener's queue stays full for `timeout` seconds.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    deadline = time.monotonic() + (timeout or 0.0)
    try:
        sock.settimeout(timeout)
        with socket_address(path) as address:
            while True:
                try:
                    sock.connect(address)
                    break
                except BlockingIOError:  # the queue is full, and the kernel does not report room
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(_LOOK)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock
